"""sbatch slurm/pretrain.sh on a real Slurm over two nodes: cancelled, a node lost, a rank killed, sweeps, refusals."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.slurm.jobs import CPU, ROOT, STEPS, TWO_NODES


def test_a_failed_node_leads_to_a_requeue_and_a_finished_run(jobs):
    job = jobs.submit(*jobs.arguments("run", **{"save-every": 10}), **CPU)
    jobs.until_step(job, "run", 11)
    nodes = jobs.cluster.run("scontrol", "show", "hostnames", jobs.cluster.job(job)["NodeList"]).stdout.split()
    assert len(nodes) == 2
    lost = nodes[1]
    jobs.cluster.run("scontrol", "update", f"nodename={lost}", "state=down", "reason=test")
    try:
        seen = jobs.ended(job, "COMPLETED")
        used = jobs.cluster.run("scontrol", "show", "hostnames", seen["NodeList"]).stdout.split()
    finally:
        jobs.cluster.run("scontrol", "update", f"nodename={lost}", "state=resume")
    assert seen["Restarts"] == "1"
    assert lost not in used
    assert "resumed at step" in jobs.log(job)
    assert [m["step"] for m in jobs.metrics("run")] == list(range(1, STEPS + 1))


def test_scancel_ends_everything_and_brings_nothing_back(jobs):
    """The ranks save when they are told to end, as before a requeue: the script must not requeue then."""
    job = jobs.submit(*jobs.arguments("run", samples=16 * 10_000), **CPU)
    jobs.until_step(job, "run", 2)
    assert jobs.cluster.leftovers(job)
    jobs.cluster.run("scancel", job)
    seen = jobs.ended(job, "CANCELLED")
    jobs.cluster.until("all processes have ended", lambda: not jobs.cluster.leftovers(job))
    assert seen["Restarts"] == "0"
    assert "stopped by SIGTERM" in jobs.log(job)
    assert "ended by Slurm" in jobs.log(job)
    assert jobs.cluster.job(job)["JobState"] == "CANCELLED"


def test_a_sweep_gives_each_array_task_its_line(jobs):
    sweep = jobs.folder / "sweep.txt"
    lines = [f"--optimizer.lr={lr} --out='{jobs.folder}/run {lr}'" for lr in ("1e-3", "2e-3")]
    sweep.write_text("# learning rates\n\n" + "\n".join(lines) + "\n--optimizer.lr=1\n--out=x --wandb it's\n")
    common = jobs.arguments("unused", samples=32)
    where = ("--array=1-5", f"--output={jobs.folder}/%a.out", "--nodes=1", *TWO_NODES[1:])
    job = jobs.submit(f"--sweep={sweep}", *common, sbatch=where, **CPU)
    jobs.cluster.until("the array's end", lambda: not jobs.cluster.run("squeue", "-h", "-j", job).stdout)
    rates = [{m["lr"] for m in jobs.metrics(f"run {lr}")} for lr in ("1e-3", "2e-3")]
    assert max(rates[1]) == pytest.approx(2 * max(rates[0]))
    assert not (jobs.folder / "unused").exists()
    assert "error: Line 3 of" in jobs.log("3")
    assert "names no --out" in jobs.log("3")
    assert "has an open quote" in jobs.log("4")
    assert "has no line 5" in jobs.log("5")


@pytest.mark.parametrize(("limit", "warned"), [("4:00", True), ("5:01", False), ("UNLIMITED", False)])
def test_a_time_limit_within_the_margin_is_warned_of(limit, warned, tmp_path):
    """Not refused: sbatch's --signal, which the job is not told, may have kept less."""
    (tmp_path / "squeue").write_text(f"#!/bin/sh\necho {limit}\n")
    (tmp_path / "squeue").chmod(0o755)
    script = tmp_path / "job.sh"
    script.write_text("#SBATCH --signal=B:USR1@300\nsource slurm/common.sh\nwarn_without_time_to_save\necho goes on\n")
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "1"}
    done = subprocess.run(["bash", script], cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "goes on\n")
    assert (f"the time limit {limit} is not longer than the 300 s" in done.stderr) == warned
