"""The cache of fetched shards: bounded, shared by processes, and whole whoever is killed."""

import hashlib
import multiprocessing
import os
import random
import signal
import time
from contextlib import suppress

import pytest

from probemb.data.remote import FetchPolicy, Remote, ShardCache
from tests.webserver import serve

QUICK = FetchPolicy(attempts=3, timeout=5, backoff=0.01)
SIZE = 100_000
fork = multiprocessing.get_context("fork")


@pytest.fixture
def served(tmp_path):
    folder = tmp_path / "served"
    folder.mkdir()
    for i in range(8):
        (folder / f"{i}.tar").write_bytes(random.Random(i).randbytes(SIZE))
    with serve(folder) as site:
        yield site


def shard(site, i) -> Remote:
    return Remote(f"{site.address}/{i}.tar")


def digest(file) -> str:
    return hashlib.sha256(os.pread(file.fileno(), SIZE + 1, 0)).hexdigest()


def expected(i) -> str:
    return hashlib.sha256(random.Random(i).randbytes(SIZE)).hexdigest()


def names(folder) -> list[str]:
    return sorted(path.suffix for path in folder.iterdir())


def test_the_longest_unused_goes_first_and_its_readers_keep_it(served, tmp_path):
    cache = ShardCache(tmp_path / "cache", 3 * SIZE, QUICK)
    with cache.open(shard(served, 0), SIZE) as oldest:
        for i in 1, 2, 1, 3:  # now 0 and 2 are the longest unused
            cache.open(shard(served, i), SIZE).close()
        served.requests.clear()
        for i in 1, 2, 3:
            cache.open(shard(served, i), SIZE).close()
        assert served.requests == []
        assert digest(oldest) == expected(0)
    assert names(tmp_path / "cache").count(".tar") == 3


def _read_many(site, folder, seed, limit, queue) -> None:
    cache, order = ShardCache(folder, limit, QUICK), random.Random(seed)
    wrong, largest = 0, 0
    for _ in range(60):
        i = order.randrange(8)
        with cache.open(shard(site, i), SIZE) as file:
            wrong += digest(file) != expected(i)
            with suppress(FileNotFoundError):  # removed meanwhile
                largest = max(largest, sum(path.stat().st_size for path in folder.glob("*.tar")))
    queue.put((wrong, largest))


def test_many_processes_at_once(served, tmp_path):
    """Six processes, room for seven of eight shards: always evicting, never a wrong byte, never over the limit."""
    queue, limit = fork.SimpleQueue(), 7 * SIZE
    (tmp_path / "cache").mkdir()
    team = [fork.Process(target=_read_many, args=(served, tmp_path / "cache", s, limit, queue)) for s in range(6)]
    for process in team:
        process.start()
    results = [queue.get() for _ in team]
    for process in team:
        process.join()
    assert [wrong for wrong, _ in results] == [0] * 6
    assert max(largest for _, largest in results) <= limit
    assert len(served.requests) > 8  # there were evictions
    assert ".part" not in names(tmp_path / "cache")


def _open_one(site, folder, queue) -> None:
    with ShardCache(folder, 4 * SIZE, QUICK).open(shard(site, 0), SIZE) as file:
        queue.put(digest(file))


def test_a_fetcher_that_is_killed_leaves_a_usable_cache(served, tmp_path):
    folder = tmp_path / "cache"
    served.troubles["0.tar"] = ["stall"]
    process = fork.Process(target=_open_one, args=(served, folder, fork.SimpleQueue()))
    process.start()
    end = time.monotonic() + 20
    while not list(folder.glob("*.part")) and time.monotonic() < end:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert list(folder.glob("*.part"))
    cache = ShardCache(folder, SIZE, QUICK)  # room for one: the remains must go, or count for nothing
    cache.open(shard(served, 1), SIZE).close()
    with cache.open(shard(served, 0), SIZE) as file:
        assert digest(file) == expected(0)
    assert names(folder).count(".tar") == 1
    assert ".part" not in names(folder)


def test_the_temporary_folder_of_a_killed_process_goes(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("probemb.data.remote.YOUNG", -1)
    process = fork.Process(target=lambda: (ShardCache(None, SIZE), os.kill(os.getpid(), signal.SIGKILL)))
    process.start()
    process.join()
    (left,) = tmp_path.iterdir()
    mine = ShardCache(None, SIZE)
    ShardCache(None, SIZE).close()
    assert list(tmp_path.iterdir()) == [mine.folder] != [left]
    mine.close()
    assert not list(tmp_path.iterdir())
