"""Arguments of the runs of a job array, and the file for sbatch; test_preemption.py has the jobs."""

import pytest

from probemb.errors import UserError
from slurm.rank import METHODS, argument_lists, arguments_here
from slurm.submit import main

GPUS = ("--nodes", "4", "--gpus-per-node", "8")


def test_the_dry_run_prints_the_file_for_sbatch_and_submits_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("SUBMITIT_PREEMPT_SIGNAL", "USR1")
    monkeypatch.chdir(tmp_path)
    more = ("--partition", "gpu", "--time", "1-12:00:00", "--sbatch", "exclusive", "reservation=course")
    assert main(("pretrain", *GPUS, *more, "--dry-run", "--", "--config", "x.yaml")) == 0
    lines = capsys.readouterr().out.splitlines()
    wanted = "nodes=4 gpus-per-node=8 ntasks-per-node=8 partition=gpu time=1-12:00:00 signal=USR2@300 requeue"
    for line in (*wanted.split(), "exclusive", "reservation=course"):
        assert f"#SBATCH --{line}" in lines
    assert any(line.startswith("srun ") and "--cpus-per-task=8" in line for line in lines)
    assert main(("embed", "--gpus-per-node=1", "--parts=16", "--dry-run", "--", "--out=x")) == 0
    assert "#SBATCH --array=0-15%16" in capsys.readouterr().out.splitlines()
    assert main(("uncertainty", "--gpus-per-node=1", "--dry-run", "--", "--model=x")) == 0
    assert not any(tmp_path.iterdir())


def test_methods_and_sweeps_become_an_array_of_argument_lists(tmp_path, monkeypatch):
    given = ["--data.path", "x", "--out=runs/a", "--out", "runs/b"]
    assert argument_lists(given, methods="vse, pcme,vse") == [
        [*given, "--method", "vse", "--out", "runs/b/vse"],
        [*given, "--method", "pcme", "--out", "runs/b/pcme"],
    ]
    sweep = tmp_path / "sweep.txt"
    sweep.write_text("# two runs\n\n--optimizer.lr 1e-3 --out 'runs/lr 1'\n--method=vse --out=runs/2\n")
    lines = [["--optimizer.lr", "1e-3", "--out", "runs/lr 1"], ["--method=vse", "--out=runs/2"]]
    assert argument_lists(given, sweep=str(sweep)) == [[*given, *line] for line in lines]
    assert argument_lists(given) == [given]

    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    always = ["--resume", "--engine.threads=1"]
    assert arguments_here("pretrain.run", ["--sweep", str(sweep), *given]) == [*always, *given, *lines[1]]
    last = ["--method", METHODS.split()[1], "--out", f"runs/b/{METHODS.split()[1]}"]
    assert arguments_here("finetune.run", given) == [*always, *given, *last]
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    with pytest.raises(UserError, match="has no line 3"):
        arguments_here("pretrain.run", [f"--sweep={sweep}"])
    sweep.write_text("--out a\n--out a\n")
    with pytest.raises(UserError, match="has no --out of its own"):
        argument_lists([], sweep=str(sweep))
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "4")
    with pytest.raises(UserError, match="The array counts from 1 to 1 in 4 tasks"):
        arguments_here("tools.download", ["cc3m"])
    monkeypatch.setenv("SLURM_ARRAY_TASK_MAX", "4")
    assert arguments_here("tools.download", ["cc3m"]) == ["cc3m", "--processes=1", "--part=3/4"]
