"""Real file systems that fill up."""

import subprocess
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path):
    """small_disk(bytes) -> a folder on a file system of that size; only root may make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = []

    def make_disk(size: int) -> Path:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
        made.append(folder)
        return folder

    yield make_disk
    for one in made:
        subprocess.run(["umount", "-l", str(one)], check=True)
