"""Finetuning in which nothing moves, whose disk fills up, or whose folder is deleted: real signals and file systems."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.finetune.runs import Job
from tests.jobs import refused

pytestmark = pytest.mark.chaos


@pytest.fixture
def options(scenes, tmp_path):
    return {
        "method": "vse",
        "data.path": scenes,
        "data.validation": "null",
        "epochs": 10**4,
        "optimizer.decay-epochs": 0,
        "optimizer.freeze-epochs": 0,
        "swa-epochs": 0,
        "out": tmp_path / "run",
    }


def children(pid: int) -> list[int]:
    return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_finetuning_names_a_stopped_data_worker_and_ends(options, tmp_path):
    job = Job({**options, "data.workers": 1, "engine.timeout": 0.1}, ranks=1, output=tmp_path / "log")
    job.until("step     2/")
    (worker,) = children(job.pids[0])
    os.kill(worker, signal.SIGSTOP)
    refused(
        job, "There was no progress for 0.1 minutes (engine.timeout): rank 0: waiting for data, data-worker-0 (pid "
    )
    assert f"(pid {worker}, stopped)" in job.text()
    stacks = (tmp_path / "run" / "stacks" / "rank-0.txt").read_text()
    assert "in _iterate" in stacks  # the main thread
    until = time.monotonic() + 30
    while Path(f"/proc/{worker}").exists():  # killed, and then reaped by init
        assert time.monotonic() < until
        time.sleep(0.05)


def test_finetuning_names_a_stopped_rank_and_ends(options, tmp_path):
    job = Job({**options, "engine.timeout": 0.1}, ranks=2, output=tmp_path / "log")
    job.until("step     2/")
    job.signal(signal.SIGSTOP, rank=1)
    until = time.monotonic() + 300
    while job.pids[0] not in job.codes and time.monotonic() < until:
        job.poll()
        time.sleep(0.05)
    code, text = job.codes.get(job.pids[0]), job.text()
    job.kill()
    assert code == 2, text
    assert "Traceback" not in text
    assert "(engine.timeout): " in text
    assert "rank 1: no sign of life" in text


def test_finetuning_on_a_disk_that_fills_up_stops_all_ranks_and_resumes(options, small_disk, tmp_path):
    """1.7 M parameters: 21 MB a checkpoint; the second checkpoint does not fit any more."""
    disk = small_disk(40 << 20)
    options = {**options, "out": disk / "run", "save-every": 2, "epochs": 2}
    refused(Job(options, ranks=2, output=tmp_path / "log"), "could not be written", "No space left", "Make room")
    (whole,) = (disk / "run" / "checkpoints").iterdir()
    assert whole.name == "step-2"
    subprocess.run(["mount", "-o", "remount,size=200m", str(disk)], check=True)
    on = Job(options, "--resume", ranks=2, output=tmp_path / "on")
    assert on.wait() == [0, 0], on.text()
    assert "resumed at step 2" in on.text()


def test_finetuning_ends_when_its_folder_is_deleted(options, tmp_path):
    job = Job({**options, "save-every": 0}, ranks=2, output=tmp_path / "log")
    job.until("step     4/")
    run = tmp_path / "run"
    while run.exists():
        shutil.rmtree(run, ignore_errors=True)
    refused(job, "The run folder is gone")
    assert not run.exists()
