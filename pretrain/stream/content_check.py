"""Comparison of shards with the hashes in their index, in the background."""

import hashlib
import os
import queue
import threading
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from probemb.data.remote.sources import Remote
from probemb.data.shards.index import Shard
from probemb.errors import UserError

_CHUNK = 1 << 20


class ContentCheck:
    """One thread that reads each requested shard once; shards whose index has no hash are left out."""

    def __init__(self):
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._seen: set[Path | Remote] = set()
        self._wrong: Shard | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def request(self, shard: Shard, file: BinaryIO) -> None:
        """Check an open shard, unless it was requested before; `file` may be closed meanwhile."""
        if shard.sha256 is None or shard.path in self._seen or self._closed:
            return
        self._seen.add(shard.path)
        self._queue.put((shard, os.dup(file.fileno())))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True, name="check-content")
            self._thread.start()

    def raise_difference(self) -> None:
        """Raises UserError if a shard differs from its index."""
        if self._wrong:
            raise UserError(
                f"{self._wrong.path} has other content than when it was indexed (another SHA-256).",
                "Fetch it again, or bring the index up to date with `python -m tools.shards index`.",
            )

    def close(self) -> None:
        """Check no further shard."""
        self._closed = True
        self._queue.put(None)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            shard, fd = item
            try:
                with suppress(OSError):  # its samples cannot be read either, which is counted
                    if not self._closed and open_sha256(fd) != shard.sha256:
                        self._wrong = self._wrong or shard
            finally:
                os.close(fd)


def open_sha256(fd: int) -> str:
    """The SHA-256 of an open file, whose position is unchanged."""
    digest, offset = hashlib.sha256(), 0
    while chunk := os.pread(fd, _CHUNK, offset):
        digest.update(chunk)
        offset += len(chunk)
    return digest.hexdigest()
