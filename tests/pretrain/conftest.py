"""A small run for tests that disturb it."""

import subprocess
from pathlib import Path

import pytest

from tools.make_scenes import Plan, make


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    out = tmp_path_factory.mktemp("scenes") / "world"
    make(Plan(train=64, val=16, classes_images=24, size=32, shard_size=32), out, workers=1)
    return out


@pytest.fixture
def options(world, tmp_path):
    return {
        "data.train": world / "train",
        "data.workers": 0,
        "model.name": "ViT-Micro-32",
        "batch-size": 16,
        "samples": 16 * 10**4,
        "optimizer.warmup_samples": 64,
        "log-every": 1,
        "save-every": 0,
        "engine.threads": 1,
        "out": tmp_path / "run",
    }


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
