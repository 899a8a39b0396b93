"""Disks that fill up and run folders that are deleted during a run: real file systems, real ranks."""

import shutil
import subprocess

import pytest

from tests.forked import Job
from tests.jobs import refused

pytestmark = pytest.mark.chaos


@pytest.fixture
def disk(tmp_path):
    """A file system of 45 MiB; only root may make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=45m", "tmpfs", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_fills_up_stops_all_ranks_and_the_checkpoint_before_is_whole(options, disk, tmp_path):
    """1.7 M parameters: 21 MB a checkpoint, 7 MB the model; the second checkpoint does not fit any more."""
    options = {**options, "out": disk / "run", "save-every": 3}
    refused(Job(options, ranks=2, output=tmp_path / "log"), "step-6 could not be written", "No space left", "Make room")
    assert [p.name for p in (disk / "run" / "checkpoints").iterdir()] == ["step-3"]
    subprocess.run(["mount", "-o", "remount,size=200m", str(disk)], check=True)
    on = Job({**options, "stop-at-step": 9}, "--resume", ranks=2, output=tmp_path / "on")
    assert on.wait() == [0, 0], on.text()
    assert "resumed at step 3" in on.text()


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
