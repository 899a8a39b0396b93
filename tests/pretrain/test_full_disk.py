"""Disks that fill up and run folders that are deleted during a run: real file systems, real ranks."""

import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.forked import Job
from tests.jobs import refused

pytestmark = pytest.mark.chaos


def test_a_disk_without_room_for_a_checkpoint_is_refused_at_the_start(options, small_disk, tmp_path):
    disk = small_disk(10 << 20)
    refused(Job({**options, "out": disk / "run"}, ranks=1, output=tmp_path / "log"), "has 10.5 MB free", "Make room")
    assert not (disk / "run").exists()


def test_a_disk_that_fills_up_stops_all_ranks_and_the_checkpoint_before_is_whole(options, small_disk, tmp_path):
    """1.7 M parameters: 21 MB a checkpoint, 7 MB the model; the second checkpoint does not fit any more."""
    disk = small_disk(45 << 20)
    options = {**options, "out": disk / "run", "save-every": 3}
    refused(Job(options, ranks=2, output=tmp_path / "log"), "step-6 could not be written", "No space left", "Make room")
    assert [p.name for p in (disk / "run" / "checkpoints").iterdir()] == ["step-3"]
    subprocess.run(["mount", "-o", "remount,size=200m", str(disk)], check=True)
    on = Job({**options, "stop-at-step": 9}, "--resume", ranks=2, output=tmp_path / "on")
    assert on.wait() == [0, 0], on.text()
    assert "resumed at step 3" in on.text()


def fill(disk: Path) -> Path:
    """A file that takes all room that is left."""
    ballast = disk / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue
    return ballast


def test_logging_does_not_decide_what_becomes_of_a_run_on_a_full_disk(options, small_disk, tmp_path):
    """The disk, with stdout on it too, is full for some dozens of steps, and the run saves when there is room again."""
    disk = small_disk(60 << 20)
    options = {**options, "out": disk / "run", "log-samples": "true"}
    job = Job(options, ranks=2, output=disk / "log", prepare=_counting(tmp_path))
    job.until("step     3/")
    ballast = fill(disk)
    steps = _steps(tmp_path)
    while _steps(tmp_path) < steps + 30:
        assert not job.poll(), job.text()
        time.sleep(0.02)
    ballast.unlink()
    job.signal(15)
    assert job.wait() == [85, 85], job.text()
    assert "Traceback" not in job.text()
    for name in ("metrics.jsonl", "samples/rank-0.jsonl", "samples/rank-1.jsonl"):
        lines = [json.loads(line) for line in (disk / "run" / name).read_text().splitlines()]  # all of them whole
        assert lines[0]["step"] == 1
    (saved,) = (disk / "run" / "checkpoints").iterdir()
    assert int(saved.name.removeprefix("step-")) >= steps + 30


def _counting(folder: Path):
    """Prepares rank 0 to count its steps outside of the full disk."""

    def prepare(rank):
        import pretrain.folder

        seen = pretrain.folder.RunFolder.seen

        def count(self, step, keys):
            if rank == 0:
                (folder / "steps").write_text(str(step))
            seen(self, step, keys)

        pretrain.folder.RunFolder.seen = count

    return prepare


def _steps(folder: Path) -> int:
    return int((folder / "steps").read_text() or 0)


def test_a_log_that_cannot_be_written_is_told_once_and_a_checkpoint_ends_the_run(options, small_disk, tmp_path):
    disk = small_disk(40 << 20)
    job = Job({**options, "out": disk / "run", "save-every": 50}, ranks=2, output=tmp_path / "log")
    job.until("step     3/")
    fill(disk)
    job.until("step    50/")
    began = time.monotonic()
    refused(job, "step-50 could not be written", "No space left", "Make room")
    assert time.monotonic() - began < 30
    assert job.text().count("cannot be written (No space left on device); the run continues") == 1
    assert "step    50/" in job.text()
    assert not list((disk / "run" / "checkpoints").iterdir())


def test_a_deleted_run_folder_ends_all_ranks_and_is_not_made_anew(options, tmp_path):
    for how, more in (("removed", {"save-every": 20}), ("moved", {"save-every": 0})):
        run = tmp_path / how
        job = Job({**options, "out": run, **more}, ranks=2, output=tmp_path / f"{how}.log")
        job.until("step     3/")
        if how == "moved":
            run.rename(tmp_path / "elsewhere")
        while run.exists():
            shutil.rmtree(run, ignore_errors=True)
        refused(job, "The run folder is gone")
        assert not run.exists()
