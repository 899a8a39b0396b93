"""The files of the shards that are embedded: those on a web server are fetched ahead, and removed once read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from probemb.data.remote.cache import ShardCache, TemporaryCache
from probemb.data.remote.sources import Remote
from probemb.data.shards.prefetch import Prefetcher
from probemb.errors import UserError

if TYPE_CHECKING:
    from typing import BinaryIO

    from tools.embed.reading import ShardTask

PREFETCH = 3  # remote shards that are fetched while one is read
POLL_SECONDS = 0.05


class ShardFiles:
    """Local files of all shards: remote ones are prefetched, and removed after they were read.

    Args:
        limit: bytes that fetched shards may take together; at least those of the largest.
    """

    def __init__(self, tasks: Sequence[ShardTask], limit: int):
        self._tasks, self._limit = tasks, limit
        self._temporary_cache = TemporaryCache() if any(isinstance(task.path, Remote) for task in tasks) else None
        self._cache = self._temporary_cache and ShardCache(self._temporary_cache.folder, limit, option="--cache-gib")
        self._prefetcher = self._temporary_cache and Prefetcher(self._cache)
        self._requested = 0  # all shards before this one were requested
        self._room: dict[int, int] = {}  # bytes of fetched and requested shards
        self._open: dict[int, BinaryIO] = {}

    def take(self, number: int) -> bool:
        """Set the file of a task; False if it is not fetched yet, which may need that `give_back` makes room.

        Raises BadShard: it cannot be fetched; UserError: it cannot be stored.
        """
        task = self._tasks[number]
        if isinstance(task.path, Path):
            task.file = task.path
            return True
        self._request(number + 1 + PREFETCH)
        if number >= self._requested:
            return False
        try:
            file = self._prefetcher.take(task.shard, POLL_SECONDS)
        except OSError as error:
            raise UserError(
                f"A fetched shard cannot be kept in {self._temporary_cache.folder}: {error.strerror}.",
                "Free some space, or name another folder with TMPDIR.",
            ) from error
        if file is None:
            return False
        self._open[number] = file
        task.file, task.version = self._cache.path(task.path, task.shard.bytes), self._cache.versions.get(task.path)
        return True

    def _request(self, end: int) -> None:
        """Request the shards before `end` in order, as far as there is room."""
        for number in range(self._requested, min(end, len(self._tasks))):
            shard = self._tasks[number].shard
            if isinstance(shard.path, Remote):
                if sum(self._room.values()) + shard.bytes > self._limit:
                    return
                self._room[number] = shard.bytes
                self._prefetcher.request(shard, keep=True)
            self._requested = number + 1

    def give_back(self, number: int) -> None:
        """Remove a shard whose batches were all read."""
        if number in self._open:
            self._open.pop(number).close()
            self._cache.remove(self._tasks[number].path, self._tasks[number].shard.bytes)
        self._room.pop(number, None)

    def close(self) -> None:
        for number in list(self._open):
            self.give_back(number)
        if self._temporary_cache:
            self._prefetcher.close()
            self._temporary_cache.close()
