"""python -m slurm.submit: what it refuses, and the file for sbatch; test_preemption.py has its jobs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from probemb.cli.command import run_command
from probemb.errors import UserError
from slurm.submit import main, seconds
from slurm.sweep import argument_lists
from tests.slurm.jobs import ROOT

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
    "no stage": ([], "No stage was named.", "pretrain --nodes 4"),
    "another stage": (["pretain", *GPUS], "There is no stage pretain. Did you mean 'pretrain'?", "zeroshot"),
    "another option": (
        ["pretrain", *GPUS, "--node", "4"],
        "There is no option --node. Did you mean '--nodes'?",
        "--help",
    ),
    "no nodes": (["pretrain", *GPUS, "--nodes", "0"], "--nodes is 0.", "from 1 on"),
    "no GPUs": (["pretrain", "--nodes", "4"], "The job asks for no GPUs.", "--cpu"),
    "GPUs and none": (["pretrain", *GPUS, "--cpu"], "exclude each other", "Leave one"),
    "tasks share GPUs": (["pretrain", *GPUS, "--tasks-per-node", "4"], "4 tasks are to share 8 GPUs", "Leave"),
    "no time": (["pretrain", *GPUS, "--time", "soon"], "--time soon is not a time.", "24:00:00"),
    "no time to save": (["pretrain", *GPUS, "--time", "5"], "--time 5 is not longer than the 300 s", "--margin"),
    "zero-shot on many": (["zeroshot", *GPUS], "The stage zeroshot runs in one process", "--nodes 1"),
    "retrieval on many": (["retrieval", *GPUS], "The stage retrieval runs in one process", "--nodes 1"),
    "localisation on many": (["localisation", *GPUS], "The stage localisation runs in one process", "--nodes 1"),
    "methods of another stage": (
        ["pretrain", *GPUS, "--methods", "vse"],
        "The stage pretrain has no methods.",
        "Leave",
    ),
    "an unknown method": (
        ["finetune", *GPUS, "--methods", "pcmepp,vsee"],
        "There is no method 'vsee'. Did you mean 'vse'?",
        "pcmepp",
    ),
    "methods without a folder": (["finetune", *GPUS, "--methods", "vse"], "need --out after `--`", "its own folder"),
    "methods and a method": (
        ["finetune", *GPUS, "--methods", "vse", "--", "--method=daa"],
        "exclude each other",
        "Leave one",
    ),
    "methods and a sweep": (["finetune", *GPUS, "--methods", "vse", "--sweep", "x"], "exclude each other", "lines"),
    "parts of another stage": (["pretrain", *GPUS, "--parts", "4"], "The stage pretrain has no parts.", "embed"),
    "no parts": (["embed", *GPUS, "--parts", "0"], "--parts is 0.", "1 to 1,000"),
    "parts and a part": (["embed", *GPUS, "--parts", "4", "--", "--part=1/2"], "exclude each other", "Leave one"),
    "parts and a sweep": (["embed", *GPUS, "--parts", "4", "--sweep", "x"], "--parts excludes --methods", "Leave"),
    "no such sweep": (["finetune", *GPUS, "--sweep", "x"], "The list of a sweep, x, cannot be read", "text file"),
    "many nodes here": (["pretrain", *GPUS, "--local"], "--local has one machine, not 4.", "Leave --nodes out"),
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
    for line in (
        "nodes=4",
        "gpus-per-node=8",
        "ntasks-per-node=8",
        "partition=gpu",
        "time=2160",
        "signal=USR2@300",
        "open-mode=append",
        "requeue",
        "exclusive",
        "reservation=course",
    ):
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


def test_the_dry_run_of_several_methods_is_an_array(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ("finetune", "--gpus-per-node=1", "--methods=pcmepp,vse,daa", "--parallel=2", "--dry-run", "--", "--out=x")
    assert ends(*words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "#SBATCH --array=0-2%2" in lines
    assert "#SBATCH --job-name=finetune" in lines


def test_without_slurm_a_stage_that_fails_fails_the_command(here):
    process, local = here(ranks=2, **{"model.name": "ViT-Mikro-32"})
    assert process.wait(timeout=120) == 1
    said = (local.folder / "output").read_text()
    assert "ViT-Mikro-32" in said
    assert "rank 0, 1 failed" in said


@pytest.mark.parametrize("more", [(), ("--sweep", "sweep.txt")])
@pytest.mark.parametrize("folder_is_there", [False, True])
def test_a_job_that_slurm_refuses_leaves_nothing(cluster, tmp_path, more, folder_is_there):
    (tmp_path / "sweep.txt").write_text("--out=a\n--out=b\n")
    if folder_is_there:
        (tmp_path / "jobs").mkdir()
        (tmp_path / "jobs" / "7_0_log.out").write_text("of an earlier job")
    before = sorted(tmp_path.rglob("*"))
    own = ("--cpu", "--time=30", "--cpus-per-task=1", "--partition=nowhere", "--folder", str(tmp_path / "jobs"))
    done = subprocess.run(
        [sys.executable, "-m", "slurm.submit", "pretrain", *own, *more, "--", "--data.train=x"],
        cwd=tmp_path, env={**cluster.env, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "Slurm refused the job: " in done.stderr
    assert "invalid partition specified: nowhere" in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_slurm_is_not_needed_for_help():
    environ = {**os.environ, "PATH": str(Path(shutil.which("env")).parent), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "slurm.submit", "--help"], cwd=ROOT, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "--gpus_per_node" in done.stdout
