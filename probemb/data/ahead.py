"""Remote shards, brought into the cache in the background while the ones before them are read."""

import queue
import threading
import time
from collections.abc import Callable

from probemb.data.cache import ShardCache
from probemb.data.index import Shard
from probemb.data.sources import Remote
from probemb.data.tar import BadShard
from probemb.errors import UserError

_FRESH_SECONDS = 60.0  # how long the result of a fetch counts
_LOOK_AROUND_SECONDS = 0.5


class _Request:
    """A fetch in the background: when it ended, and why it failed."""

    def __init__(self):
        self.ended = threading.Event()
        self.at = 0.0
        self.failure: str | None = None


class FetchAhead:
    """Threads that bring shards into the cache before they are needed; started with the first request.

    They are daemons, so that a long fetch does not hold up the end of the program: what it leaves is a file without a
    lock, and the cache takes it for what it is.
    """

    def __init__(self, cache: ShardCache, threads: int = 4):
        self._cache, self._threads = cache, threads
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._requests: dict[Remote, _Request] = {}
        self._running = 0

    def request(self, shard: Shard) -> None:
        """Fetch it when its turn comes; a request that is known already, or has just failed, is not repeated."""
        known = self._requests.get(shard.path)
        if known and (not known.ended.is_set() or time.monotonic() - known.at < _FRESH_SECONDS):
            return
        self._requests[shard.path] = request = _Request()
        self._queue.put((shard, request))
        if self._running < self._threads:
            self._running += 1
            threading.Thread(target=self._work, daemon=True, name=f"fetch-{self._running}").start()

    def wait(self, shard: Shard, stop: Callable[[], bool] | None = None) -> bool:
        """Until a request for this shard has ended, or `stop` says so: then False.

        Raises BadShard if it has just failed.
        """
        request = self._requests.pop(shard.path, None)
        if request is None:
            return True
        while not request.ended.wait(_LOOK_AROUND_SECONDS if stop else None):
            if stop():
                return False
        if request.failure and time.monotonic() - request.at < _FRESH_SECONDS:
            raise BadShard(request.failure)
        return True

    def close(self) -> None:
        """Start no other fetch."""
        for _ in range(self._running):
            self._queue.put(None)
        self._running = 0

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            shard, request = item
            try:
                self._cache.open(shard.path, shard.bytes, wait=False).close()
            except BadShard as error:
                request.failure = str(error)
            except (UserError, OSError):  # no room: whoever needs the shard tries again, and says so
                pass
            finally:
                request.at = time.monotonic()
                request.ended.set()
