"""Runs in which nothing moves: stopped data workers, and ranks that are gone; with real signals."""

import os
import signal
from pathlib import Path

import pytest

from tests.forked import Job

pytestmark = pytest.mark.chaos
HOST = os.uname().nodename


def children(pid: int) -> list[int]:
    return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def warn_early(rank):
    """Two seconds without a step are told, instead of a minute."""
    import probemb.runs.watchdog

    probemb.runs.watchdog.WARN_SECONDS = 2


def assert_clear(text: str) -> None:
    """An error in the project's words."""
    assert "Traceback" not in text
    assert "gloo" not in text
    assert text.count("\nerror: ") <= 1


def test_stopped_data_workers_are_named_and_end_the_run(options, tmp_path):
    options = {**options, "data.workers": 1, "engine.timeout": 0.1}
    job = Job(options, ranks=2, output=tmp_path / "log", prepare=warn_early)
    job.until("step     2/")
    workers = [worker for pid in job.pids for worker in children(pid)]
    assert len(workers) == 2
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    assert job.wait() == [2, 2], job.text()
    text = job.text()
    assert_clear(text)
    told = next(line for line in text.splitlines() if "| no step for " in line and ", stopped" in line)
    late = [
        f"rank {r}: waiting for data-worker-0 (pid {w}, stopped), which reads" in told for r, w in enumerate(workers)
    ]
    assert any(late)
    if not all(late):  # one rank may have had the batch in store that the other misses
        assert f"rank {late.index(False)}: waiting for the data of another rank" in told
    assert "There was no progress for 0.1 minutes (engine.timeout): " in text
    for rank in (0, 1):
        stacks = (tmp_path / "run" / "stacks" / f"rank-{rank}.txt").read_text()
        assert f"rank {rank}, step " in stacks
        assert "pretrain/trainer.py" in stacks  # the main thread
        assert "in _watch" in stacks
    assert not [worker for worker in workers if Path(f"/proc/{worker}").exists()]


def test_a_killed_rank_is_named_without_a_launcher(options, tmp_path):
    """The others' connections break."""
    job = Job({**options, "engine.timeout": 0.2}, ranks=2, output=tmp_path / "log")
    job.until("step     2/")
    job.signal(signal.SIGKILL, rank=1)
    assert job.wait() == [1, -signal.SIGKILL], job.text()
    assert_clear(job.text())
    assert "The connection to another rank broke in step " in job.text()
    assert "rank 1: no sign of life (stopped or killed, or its machine or network hangs) on " + HOST in job.text()
