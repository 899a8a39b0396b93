"""The stream over the web and over commands: the same batches as from files, whatever the server does."""

import time

import pytest
import torch

from probemb.data.remote import FetchPolicy
from probemb.data.shards.index import read_index
from tests.pretrain.stream.test_stream import assert_same, make, read, take, write_corpus
from tests.webserver import serve
from tools.shards import main as shards_command

QUICK = FetchPolicy(attempts=4, timeout=3, backoff=0.01)


@pytest.fixture
def folder(tmp_path):
    """Eight shards of seven samples, 56 in all: 7 steps of 8."""
    write_corpus(tmp_path / "data", sizes=(7,) * 8)
    shards_command(["index", str(tmp_path / "data"), "--workers", "1"])
    return tmp_path / "data"


def scratch_folders(tmp_path) -> list:
    return list(tmp_path.glob("probemb-shards-*"))


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_the_same_batches_over_a_bad_connection(folder, tmp_path):
    expected = read(read_index(folder), steps=10)
    with serve(folder) as site:
        shards = read_index(site.address, QUICK)
        for i in range(8):
            site.troubles[f"{i:05d}.tar"] = [["cut"], [503], ["stall"], []][i % 4]
        with make(shards, workers=2, fetch=QUICK) as stream:
            first = take(stream, 1)
            assert len(scratch_folders(tmp_path)) == 1
            assert_same(first + take(stream, 9), expected)
            assert not stream.failures
        assert scratch_folders(tmp_path) == []
        assert {name for name, _ in site.requests} >= {f"{i:05d}.tar" for i in range(8)}


def test_a_shard_that_stays_unreachable_is_named_and_replaced(folder, caplog):
    with serve(folder) as site:
        shards = read_index(site.address, QUICK)
        site.troubles["00003.tar"] = [503] * 1000
        with make(shards, workers=2, failure_share=0.5, fetch=QUICK) as stream:
            batches = take(stream, 7)
        assert {batch.images.shape for batch in batches} == {(8, 3, 12, 12)}
        assert {name: failure.count for name, failure in stream.failures.items()} == {"00003.tar": 7}
        assert "/00003.tar: cannot be fetched (HTTP 503 " in stream.failures["00003.tar"].reason
        assert sum("00003.tar" in line for line in caplog.messages) == 1


class Enough(Exception):
    pass


@pytest.mark.parametrize("workers", [0, 2])
def test_waiting_for_a_silent_server_can_be_given_up(folder, workers):
    """And the position and the random numbers are those before the batch that never came."""
    expected = read(read_index(folder), steps=7)
    with serve(folder) as site:
        shards = read_index(site.address, QUICK)
        stream = make(shards, workers=workers, fetch=FetchPolicy(attempts=5, timeout=30))
        first = stream.order.rows(0, 0, 0, 1).shard[0]  # comes, and its sample sets the random numbers
        for shard in shards[:first] + shards[first + 1 :]:
            site.troubles[shard.name] = ["silence"] * 1000
        torch.manual_seed(3)
        before = torch.get_rng_state()
        called = []

        def give_up() -> None:
            called.append(time.monotonic())
            if len(called) == 2:
                raise Enough

        began = time.monotonic()
        with pytest.raises(Enough):
            stream.load(give_up)
        assert time.monotonic() - began < 4
        assert stream.samples_seen == 0
        assert torch.equal(torch.get_rng_state(), before)
        site.troubles.clear()
        with make(shards, workers=workers, fetch=QUICK) as stream:
            assert_same([stream.load(called.clear) for _ in range(7)], expected)
