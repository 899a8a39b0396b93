"""Fixtures of this folder; `scenes` has 16 images for training and 8 for validation, three captions each."""

import pytest

from tests.disks import small_disk
from tests.world import captioned, names, pictures, run_folder, shards
from tools.make_scenes import Plan, make

__all__ = ["captioned", "names", "pictures", "run_folder", "shards", "small_disk"]


@pytest.fixture(scope="session")
def scenes(tmp_path_factory):
    out = tmp_path_factory.mktemp("scenes") / "world"
    make(Plan(train=16, val=8, classes_images=0, size=32, shard_size=16, captions=3), out, workers=1)
    return out
