"""Two nodes that differ: other clocks, a slow one, one that dies or is cut off while the other waits for it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.slurm.jobs import CPU, Jobs, assert_same_run

CLOCK = r"""
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *t) {
  int code = syscall(SYS_clock_gettime, clock, t);
  if (!code && clock == CLOCK_REALTIME) t->tv_sec += atol(getenv("SECONDS_AHEAD"));
  return code;
}
int gettimeofday(struct timeval *t, void *zone) {
  struct timespec s;
  clock_gettime(CLOCK_REALTIME, &s);
  t->tv_sec = s.tv_sec, t->tv_usec = s.tv_nsec / 1000;
  return 0;
}
time_t time(time_t *t) {
  struct timespec s;
  clock_gettime(CLOCK_REALTIME, &s);
  if (t) *t = s.tv_sec;
  return s.tv_sec;
}
"""


@contextmanager
def limping(pids: list[int], stopped: float = 0.2, running: float = 0.05) -> Iterator[None]:
    """Processes that stand still most of the time."""
    done = threading.Event()

    def send(number: int) -> None:
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                done.set()

    def limp() -> None:
        while not done.is_set():
            send(signal.SIGSTOP)
            done.wait(stopped)
            send(signal.SIGCONT)
            done.wait(running)
        send(signal.SIGCONT)

    thread = threading.Thread(target=limp)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def stand_still(jobs: Jobs, job: str, run: str, rank: int) -> list[int]:
    """Stop a rank in the middle of a run, so that the other one waits in a collective; returns its processes."""
    pids = jobs.trainers(job, rank)
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    jobs.until_waits(run, seconds=2)
    return pids


@pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler, which a clock of one's own takes")
def test_clocks_that_differ_by_hours_change_nothing(jobs):
    """Rank 1 is three hours ahead, after the requeue rank 0 is: time jumps for both, back for rank 1."""
    source, clock, python = (jobs.folder / name for name in ("clock.c", "clock.so", "python"))
    source.write_text(CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", clock, source], check=True)
    python.write_text(
        "#!/bin/sh\n"
        '[ "${SLURM_RESTART_COUNT:-0}" = 0 ] && ahead=1 || ahead=0\n'
        f'[ "$SLURM_PROCID" = "$ahead" ] || exec {sys.executable} "$@"\n'
        f'SECONDS_AHEAD=10800 LD_PRELOAD={clock} exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    whole = jobs.submit(*jobs.arguments("whole"), **CPU)
    job = jobs.submit(*jobs.arguments("cut"), **CPU, PROBEMB_PYTHON=str(python))
    jobs.until_step(job, "cut", 3)
    jobs.cluster.run("scancel", "--batch", "--signal=USR1", job)
    assert jobs.ended(job, "COMPLETED")["Restarts"] == "1"
    jobs.ended(whole, "COMPLETED")
    assert_same_run(jobs, "cut", "whole")
    lines = jobs.metrics("cut")
    resumed = int(jobs.log(job).split("resumed at step ")[1].split()[0])
    jump = lines[resumed]["time"] - lines[resumed - 1]["time"]
    assert 3 * 3600 <= jump < 3 * 3600 + 600  # the clocks were other ones indeed


def test_a_slow_node_slows_the_run_and_changes_nothing(jobs):
    whole = jobs.submit(*jobs.arguments("whole"), **CPU)
    job = jobs.submit(*jobs.arguments("slow"), **CPU)
    jobs.until_step(job, "slow", 2)
    with limping(jobs.trainers(job, rank=1)):
        jobs.ended(job, "COMPLETED")
    jobs.ended(whole, "COMPLETED")
    assert_same_run(jobs, "slow", "whole")


def test_a_rank_that_dies_while_the_other_waits_in_a_collective_ends_the_job(jobs):
    job = jobs.submit(*jobs.arguments("run", samples=16 * 10_000), **CPU)
    jobs.until_step(job, "run", 2)
    for pid in stand_still(jobs, job, "run", rank=1):
        os.kill(pid, signal.SIGKILL)
    assert jobs.ended(job, "FAILED")["Restarts"] == "0"
    assert "ended with code 137" in jobs.log(job)
    jobs.cluster.until("all processes have ended", lambda: not jobs.cluster.leftovers(job))


def test_a_node_that_hangs_is_named_and_ends_the_job(jobs):
    endless = jobs.arguments("run", samples=16 * 10_000, **{"engine.timeout": 0.25})
    job = jobs.submit(*endless, **CPU)
    jobs.until_step(job, "run", 2)
    pids = stand_still(jobs, job, "run", rank=1)
    jobs.cluster.until("the message", lambda: "There was no progress for 0.25 minutes" in jobs.log(job), job)
    for pid in pids:  # a stopped process ends with its node, or when it goes on
        os.kill(pid, signal.SIGCONT)
    seen = jobs.ended(job, "FAILED")
    assert (seen["Restarts"], seen["ExitCode"]) == ("0", "2:0")
    assert "rank 1: no sign of life on node" in jobs.log(job)


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_node_that_is_cut_off_in_a_collective_leads_to_a_requeue_and_a_finished_run(jobs, rank):
    """What still runs on the lost node keeps the folder's lock if it is rank 0; the new start waits for its end."""
    if not jobs.cluster.separate_networks:
        pytest.skip("no right to make networks here: the virtual nodes share one")
    options = {"save-every": 10, "engine.timeout": 1.5, "samples": 16 * 200}
    job = jobs.submit(*jobs.arguments("run", **options), **CPU)
    jobs.until_step(job, "run", 11)
    nodes = jobs.cluster.run("scontrol", "show", "hostnames", jobs.cluster.job(job)["NodeList"]).stdout.split()
    lost, there = nodes[rank], jobs.trainers(job, rank)
    assert there
    with jobs.cluster.cut_off(lost):
        jobs.until_waits("run", seconds=2)
        # Slurm finds out after SlurmdTimeout, 300 s by default.
        jobs.cluster.run("scontrol", "update", f"nodename={lost}", "state=down", "reason=test")
        seen = jobs.ended(job, "COMPLETED")
        jobs.cluster.until(
            "the end of what was cut off", lambda: not any(Path(f"/proc/{pid}").exists() for pid in there)
        )
    used = jobs.cluster.run("scontrol", "show", "hostnames", seen["NodeList"]).stdout.split()
    assert lost not in used
    assert seen["Restarts"] == "1"
    assert ("is in use" in jobs.log(job)) == (rank == 0)
    assert "resumed at step" in jobs.log(job)
    assert [m["step"] for m in jobs.metrics("run")] == list(range(1, 200 + 1))
