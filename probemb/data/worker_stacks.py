"""Python stacks of worker processes, on request of their parent.

A worker that waits for a lock or a server cannot answer a message, but a signal makes `faulthandler` write its stacks
into a file that both have had open since the fork.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
from contextlib import suppress

SIGNAL = signal.SIGURG  # ignored by a process that does not listen
SECONDS_EACH, SECONDS = 0.5, 3.0  # the longest wait for one worker's stacks, and for those of all
_shared: int | None = None  # file descriptor, of the process _owner and those that it forks
_owner = 0


def share() -> None:
    """Open the file for the stacks of workers that this process forks from now on, unless it is open."""
    global _shared, _owner
    if _owner == os.getpid():
        return
    _owner = os.getpid()
    if hasattr(os, "memfd_create"):
        _shared = os.memfd_create("stacks of workers")  # in memory: there may be no room on the disk
    else:
        with tempfile.TemporaryFile() as file:
            _shared = os.dup(file.fileno())


def listen() -> None:
    """In a forked worker: answer the signal, if the parent has opened the file."""
    if _shared is not None:
        faulthandler.register(SIGNAL, file=_shared, all_threads=True)


def of_workers() -> str:
    """The stacks of all threads of every worker of `multiprocessing`; a stopped or spawned one gives no answer."""
    if _shared is None:
        return ""
    end, parts = time.monotonic() + SECONDS, []
    for worker in multiprocessing.active_children():
        if time.monotonic() > end:
            parts.append(f"{worker.name} (pid {worker.pid}):\nnot asked, as others gave no answer\n")
            continue
        before, until = _size(), min(time.monotonic() + SECONDS_EACH, end + SECONDS_EACH)
        with suppress(ProcessLookupError):
            os.kill(worker.pid, SIGNAL)
        _settle(before, until)
        text = os.pread(_shared, _size() - before, before).decode("utf-8", "replace").rstrip()
        parts.append(f"{worker.name} (pid {worker.pid}):\n{text or 'no answer'}\n")
    return "\n".join(parts)


def _size() -> int:
    assert _shared is not None
    return os.fstat(_shared).st_size


def _settle(before: int, until: float) -> None:
    """Wait until the file is longer than `before` and nothing was added for a moment."""
    size = before
    while time.monotonic() < until:
        time.sleep(0.02)
        size, last = _size(), size
        if size == last > before:
            return
