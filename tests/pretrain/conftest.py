"""A small run for tests that disturb it."""

import pytest

from pretrain.config import Config
from pretrain.stream.order import Order
from probemb.data.shards.index import read_index
from tests.disks import small_disk
from tests.forked import pretraining
from tests.webserver import serve
from tools.make_scenes import Plan, make

__all__ = ["eight_shards", "options", "silent", "small_disk"]


@pytest.fixture(autouse=True, scope="session")
def _imported_once():
    """What forked ranks would else import each."""
    pretraining()


@pytest.fixture
def options(scenes, tmp_path):
    return {
        "data.train": scenes / "train",
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


@pytest.fixture(scope="session")
def eight_shards(tmp_path_factory):
    """Of eight samples each."""
    out = tmp_path_factory.mktemp("shards") / "world"
    make(Plan(train=64, val=0, classes_images=0, size=32, shard_size=8), out, workers=1)
    return out / "train"


@pytest.fixture
def silent(eight_shards, options, tmp_path):
    """A web server that will not send the shard which rank 1 of 2, and it alone, needs for the third step.

    `options` read from it, half a batch for each of two lanes.
    """
    sizes = [shard.samples for shard in read_index(eight_shards)]
    order = Order(sizes, batch_size=16, lanes=2, window=Config().data.window, seed=Config().seed)
    (needed,) = set(order.rows(0, 2, 8, 16).shard.tolist())
    assert all(needed not in order.rows(0, step, 0, 16).shard for step in range(2))
    with serve(eight_shards) as site:
        site.troubles[f"{needed:05d}.tar"] = ["silence"] * 1000
        options |= {"data.train": site.address, "data.lanes": 2, "data.cache": tmp_path / "cache"}
        yield site
