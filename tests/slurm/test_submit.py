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


REFUSALS = {
    "another stage": (["pretain", *GPUS], "There is no stage pretain. Did you mean 'pretrain'?", "zeroshot"),
    "another option": (
        ["pretrain", *GPUS, "--node", "4"],
        "There is no option --node. Did you mean '--nodes'?",
        "--help",
    ),
    "no GPUs": (["pretrain", "--nodes", "4"], "The job asks for no GPUs.", "--cpu"),
    "tasks share GPUs": (["pretrain", *GPUS, "--tasks-per-node", "4"], "4 tasks are to share 8 GPUs", "Leave"),
    "no time to save": (["pretrain", *GPUS, "--time", "5"], "--time 5 is not longer than the 300 s", "--margin"),
    "no Slurm": (["pretrain", *GPUS], "This machine has no sbatch.", "--local"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_run_is_refused_in_words(name, tmp_path, monkeypatch, capsys):
    words, what, remedy = REFUSALS[name]
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(tmp_path)
    assert ends(*words) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert what in said[0]
    assert remedy in said[1]
    assert not any(tmp_path.iterdir())


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
    for text, what in (
        ("--seed 1\n", "Line 1 of .* names no --out"),
        ("--out a\n--out a\n", "Line 2 of .* has the --out of another line"),
        ("--out 'a\n", "Line 1 of .* cannot be read"),
        ("# none\n", "has no line of arguments"),
    ):
        sweep.write_text(text)
        with pytest.raises(UserError, match=what):
            argument_lists("pretrain", [], sweep=str(sweep))


def test_parts_share_the_shards_of_an_embedding(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert argument_lists("embed", ["--out", "x"], parts=3) == [["--out", "x", "--part", f"{i}/3"] for i in (1, 2, 3)]
    assert ends("embed", "--gpus-per-node=1", "--parts=16", "--dry-run", "--", "--out=x") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "#SBATCH --array=0-15%16" in lines
    assert "#SBATCH --requeue" in lines


@pytest.mark.slow
def test_without_slurm_a_stage_that_fails_fails_the_command(here):
    process, local = here(ranks=2, **{"model.name": "ViT-Mikro-32"})
    assert process.wait(timeout=120) == 1
    said = (local.folder / "output").read_text()
    assert "ViT-Mikro-32" in said
    assert "rank 0, 1 failed" in said
