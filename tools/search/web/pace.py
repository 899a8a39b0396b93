"""Take large forms apart one after the other, so that many uploads leave the processor to other requests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import BoundedSemaphore, Lock

from tools.search.decoding import QUERIES, Busy

LARGE = 64 << 10  # bytes of a form
GAP = 0.02  # seconds from one large form to the next


class Pace:
    """Turns of large forms: one at a time, GAP apart, and few that wait, as each occupies a thread of the server."""

    def __init__(self):
        self._turn, self._places, self._next = Lock(), BoundedSemaphore(QUERIES), 0.0

    @contextmanager
    def turn(self, size: int | None) -> Iterator[None]:
        """Wait for the turn of a form of so many bytes (None: not known). Raises Busy: too many wait."""
        if size is not None and size <= LARGE:
            yield
            return
        if not self._places.acquire(blocking=False):
            raise Busy
        try:
            with self._turn:
                time.sleep(max(0.0, self._next - time.monotonic()))
                try:
                    yield
                finally:
                    self._next = time.monotonic() + GAP
        finally:
            self._places.release()
