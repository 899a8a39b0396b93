"""Told to stop, saved, requeued, resumed and finished like an undisturbed run, in all three ways to start one."""

import subprocess
import sys

from tests.slurm.jobs import CPU, ROOT, STEPS, TWO_NODES, assert_same_run


def test_preempted_requeued_finished_and_equal_to_an_undisturbed_run(jobs):
    """USR1 to the batch script is what --signal=B:USR1@300 sends before the time limit."""
    whole = jobs.submit(*jobs.arguments("whole"), **CPU)
    job = jobs.submit(*jobs.arguments("cut"), **CPU)
    jobs.until_step(job, "cut", 3)
    jobs.cluster.run("scancel", "--batch", "--signal=USR1", job)
    seen = jobs.ended(job, "COMPLETED")
    assert seen["Restarts"] == "1"
    first, second = jobs.log(job).split("start 2, on ")
    assert "asked to stop: back into the queue" in first
    assert "resumed at step" in second

    log = jobs.log(whole) if jobs.ended(whole, "COMPLETED") else ""
    assert jobs.cluster.job(whole)["Restarts"] == "0"
    assert "2 ranks, meeting at node" in log
    assert "engine  2 x cpu" in log
    assert_same_run(jobs, "cut", "whole")


def test_a_signal_that_comes_before_the_ranks_listen_is_not_lost_and_kills_nobody(jobs):
    """The ranks are still importing then; a process that has no handler for USR1 dies of it."""
    endless = jobs.arguments("run", samples=16 * 10_000)
    job = jobs.submit(*endless, sbatch=("--nodes=1", *TWO_NODES[1:]), **CPU)
    jobs.cluster.until("the ranks are started", lambda: "1 ranks, meeting at" in jobs.log(job), job)
    jobs.cluster.run("scancel", "--batch", "--signal=USR1", job)
    jobs.cluster.until("the requeue", lambda: jobs.cluster.job(job)["Restarts"] == "1", job)
    assert "stopped by SIGUSR1" in jobs.log(job)
    assert "asked to stop: back into the queue" in jobs.log(job)


def test_a_job_on_two_nodes_is_preempted_requeued_and_finished(jobs):
    """USR2 to the tasks is what Slurm sends before the time limit."""
    folder = jobs.folder / "submitit"
    words = ("--nodes=2", "--cpu", "--cpus-per-task=1", "--time=30", f"--folder={folder}")
    argv = [sys.executable, "-m", "slurm.submit", "pretrain", *words, "--", *jobs.arguments("run")]
    environ = {**jobs.cluster.env, **jobs.env}
    done = subprocess.run(argv, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    job = done.stdout.split()[1].rstrip(":")
    jobs.submitted.append(job)
    log = folder / f"{job}_0_log.out"
    assert f"log {log}" in done.stdout
    try:
        jobs.until_step(job, "run", 3)
        jobs.cluster.run("scancel", "--signal=USR2", job)
        seen = jobs.ended(job, "COMPLETED")
    finally:
        print(log.read_text() if log.is_file() else "no log", file=sys.stderr)
    assert seen["Restarts"] == "1"
    assert "2 nodes, 2 ranks on CPUs" in done.stdout
    assert "resumed at step" in log.read_text()
    assert "engine  2 x cpu" in log.read_text()
    assert [m["step"] for m in jobs.metrics("run")] == list(range(1, STEPS + 1))
