"""Fetching in the background, where the fetches themselves go wrong."""

import os

import pytest

from probemb.data.remote.cache import CacheFull, ShardCache
from probemb.data.remote.sources import Remote
from probemb.data.shards.index import Shard
from probemb.data.shards.prefetch import Prefetcher
from tests.webserver import serve


def shards(count, site=None):
    address = site.address if site else "http://127.0.0.1:9"
    return [Shard(f"{i}.tar", Remote(f"{address}/{i}.tar"), 1, 100) for i in range(count)]


def test_what_is_taken_stays_until_then(tmp_path):
    folder = tmp_path / "site"
    folder.mkdir()
    for i in range(3):
        (folder / f"{i}.tar").write_bytes(bytes([i]) * 100)
    with serve(folder) as site:
        prefetcher = Prefetcher(ShardCache(tmp_path / "cache", 200), threads=1)
        wanted = shards(4, site)
        for shard in wanted:
            prefetcher.request(shard, keep=True)
        files = {i: prefetcher.take(wanted[i], 20) for i in (1, 0)}
        assert all(os.pread(file.fileno(), 200, 0) == bytes([i]) * 100 for i, file in files.items())
        with pytest.raises(CacheFull):  # those before it do not give way
            prefetcher.take(wanted[2], 20)
        prefetcher.close()
