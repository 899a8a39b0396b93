"""python -m slurm.submit: what it refuses, and the file for sbatch; test_preemption.py has its jobs."""

from __future__ import annotations

import pytest

from probemb.cli.command import run_command
from probemb.errors import UserError
from slurm.submit import main, seconds
from slurm.sweep import argument_lists

GPUS = ("--nodes", "4", "--gpus-per-node", "8")


def ends(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: main(words))
    return ended.value.code


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 5400), ("10:30", 630), ("24:00:00", 86400), ("2-03", 183600), ("2-03:04", 183840), ("1-00:00:07", 86407)],
)
def test_times_as_slurm_writes_them(text, expected):
    assert seconds(text) == expected


def test_the_dry_run_prints_the_file_for_sbatch_and_submits_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("SUBMITIT_PREEMPT_SIGNAL", "USR1")
    monkeypatch.chdir(tmp_path)
    more = ("--partition", "gpu", "--time", "1-12:00:00", "--sbatch", '["exclusive", "reservation=course"]')
    assert ends("pretrain", *GPUS, *more, "--dry-run", "--", "--config", "x.yaml") == 0
    lines = capsys.readouterr().out.splitlines()
    wanted = (
        "nodes=4 gpus-per-node=8 ntasks-per-node=8 partition=gpu time=2160 signal=USR2@300 open-mode=append requeue"
    )
    for line in (*wanted.split(), "exclusive", "reservation=course"):
        assert f"#SBATCH --{line}" in lines
    assert any(line.startswith("srun ") and "--cpus-per-task=8" in line for line in lines)
    assert not any(tmp_path.iterdir())


def test_methods_and_sweeps_become_an_array_of_argument_lists(tmp_path):
    given = ["--data.path", "x", "--out=runs/a", "--out", "runs/b"]
    assert argument_lists("finetune", given, methods="vse, pcme,vse") == [
        [*given, "--method", "vse", "--out", "runs/b/vse"],
        [*given, "--method", "pcme", "--out", "runs/b/pcme"],
    ]
    sweep = tmp_path / "sweep.txt"
    sweep.write_text("# two runs\n\n--optimizer.lr 1e-3 --out 'runs/lr 1'\n--method=vse --out=runs/2\n")
    lines = [["--optimizer.lr", "1e-3", "--out", "runs/lr 1"], ["--method=vse", "--out=runs/2"]]
    assert argument_lists("pretrain", given, sweep=str(sweep)) == [[*given, *line] for line in lines]
    assert argument_lists("zeroshot", given) == [given]
    sweep.write_text("--out a\n--out a\n")
    with pytest.raises(UserError, match=r"Line 2 of .* has the --out of another line"):
        argument_lists("pretrain", [], sweep=str(sweep))


def test_parts_share_the_shards_of_an_embedding(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert argument_lists("embed", ["--out", "x"], parts=3) == [["--out", "x", "--part", f"{i}/3"] for i in (1, 2, 3)]
    assert ends("embed", "--gpus-per-node=1", "--parts=16", "--dry-run", "--", "--out=x") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "#SBATCH --array=0-15%16" in lines
    assert "#SBATCH --requeue" in lines
