"""Fetching in the background, where the fetches themselves go wrong."""

import os

import pytest

from probemb.data.failures import BadShard
from probemb.data.remote.cache import CacheFull, ShardCache
from probemb.data.remote.sources import Remote
from probemb.data.shards.index import Shard
from probemb.data.shards.prefetch import FetchAhead
from tests.webserver import serve


class Broken(ShardCache):
    """Every fetch fails with an error that nobody expects."""

    def open(self, *_, **__):
        raise AttributeError("length")


def shards(count, site=None):
    address = site.address if site else "http://127.0.0.1:9"
    return [Shard(f"{i}.tar", Remote(f"{address}/{i}.tar"), 1, 100) for i in range(count)]


def test_no_error_leaves_a_request_without_an_answer(tmp_path):
    ahead = FetchAhead(Broken(tmp_path, 1 << 20), threads=2)
    wanted = shards(6)
    for shard in wanted:
        ahead.request(shard, keep=True)
    for shard in wanted:
        with pytest.raises(AttributeError):
            ahead.take(shard, 20)
    for shard in wanted:
        ahead.request(shard)
    for shard in wanted:
        ahead.wait(shard)  # whoever needs the shard finds out
    ahead.close()


def test_what_is_taken_stays_until_then(tmp_path):
    folder = tmp_path / "site"
    folder.mkdir()
    for i in range(3):
        (folder / f"{i}.tar").write_bytes(bytes([i]) * 100)
    with serve(folder) as site:
        ahead = FetchAhead(ShardCache(tmp_path / "cache", 200), threads=1)
        wanted = shards(4, site)
        for shard in wanted:
            ahead.request(shard, keep=True)
        files = {i: ahead.take(wanted[i], 20) for i in (1, 0)}
        assert all(os.pread(file.fileno(), 200, 0) == bytes([i]) * 100 for i, file in files.items())
        with pytest.raises(CacheFull):  # those before it do not give way
            ahead.take(wanted[2], 20)
        ahead.close()


def test_why_a_fetch_failed(tmp_path):
    (tmp_path / "site").mkdir()
    with serve(tmp_path / "site") as site:
        ahead = FetchAhead(ShardCache(tmp_path / "cache", 200))
        for keep in True, False:
            (shard,) = shards(1, site)
            ahead.request(shard, keep)
            with pytest.raises(BadShard, match="404"):
                assert ahead.take(shard, 20) if keep else ahead.wait(shard)


def test_nothing_is_fetched_after_the_end(tmp_path):
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "0.tar").write_bytes(bytes(100))
    with serve(folder) as site:
        site.troubles = {"0.tar": ["stall"]}
        ahead = FetchAhead(ShardCache(tmp_path / "cache", 1 << 20), threads=1)
        for shard in shards(4, site):
            ahead.request(shard)
        while not site.requests:
            pass
        ahead.close()
        site.ended.set()
        ahead.wait(shards(1, site)[0])
        assert [name for name, _ in site.requests if name != "0.tar"] == []
