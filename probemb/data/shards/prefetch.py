"""Prefetches remote shards into the cache while earlier ones are being read."""

import queue
import threading
import time

from probemb.data.failures import BadShard
from probemb.data.remote.cache import ShardCache
from probemb.data.remote.sources import Remote
from probemb.data.shards.index import Shard

_FRESH_SECONDS = 60.0  # how long the result of a fetch is valid


class _Request:
    """A background fetch: its end and its error."""

    def __init__(self):
        self.ended = threading.Event()
        self.at = 0.0
        self.error: Exception | None = None


class Prefetcher:
    """Threads that fetch shards into the cache before they are needed; started with the first request.

    They are daemons, so that a long fetch does not delay the end of the program; the cache cleans up after them.
    """

    def __init__(self, cache: ShardCache, threads: int = 4):
        self._cache, self._threads = cache, threads
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._requests: dict[Remote, _Request] = {}
        self._running = 0
        self._closed = False

    def request(self, shard: Shard) -> None:
        """Queue a fetch, unless the shard is already requested or has just failed."""
        known = self._requests.get(shard.path)
        if known and (not known.ended.is_set() or time.monotonic() - known.at < _FRESH_SECONDS):
            return
        self._requests[shard.path] = request = _Request()
        self._queue.put((shard, request))
        if self._running < self._threads:
            self._running += 1
            threading.Thread(target=self._work, daemon=True, name=f"fetch-{self._running}").start()

    def wait(self, shard: Shard) -> None:
        """Wait until the request for this shard has ended. Raises BadShard if it has just failed."""
        request = self._requests.pop(shard.path, None)
        if request is None:
            return
        request.ended.wait()
        # Other errors, such as a full disk, show up when the caller opens the shard itself.
        if isinstance(request.error, BadShard) and time.monotonic() - request.at < _FRESH_SECONDS:
            raise BadShard(str(request.error))

    def close(self) -> None:
        """Start no further fetch."""
        self._closed = True
        for _ in range(self._running):
            self._queue.put(None)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None and not self._closed:
            shard, request = item
            try:
                self._cache.open(shard.path, shard.bytes, wait=False).close()
            except Exception as error:  # the thread must survive to serve later requests
                request.error = error
            finally:
                request.at = time.monotonic()
                request.ended.set()
