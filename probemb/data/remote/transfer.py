"""One attempt to fetch a remote file: copying its bytes to a local file, and the reason for a failure."""

import errno
import time
from collections.abc import Callable
from typing import BinaryIO

from probemb.errors import UserError

CHUNK = 1 << 20
SLOWEST = 1024  # bytes per second over one time-out; slower servers would block a run


class TransferFailed(Exception):
    """A failed attempt; `wait`: seconds that the server asks to wait, or None if no attempt can succeed."""

    def __init__(self, reason: str, wait: float | None = 0.0, code: int | None = None):
        super().__init__(reason)
        self.wait, self.code = wait, code


def copy(read: Callable[[], bytes], file: BinaryIO, limit: int, timeout: float) -> None:
    """Append the chunks that `read` returns, until one is empty. Raises TransferFailed, UserError: the disk is full."""
    since, count = time.monotonic(), 0
    while data := read():
        if file.tell() + len(data) > limit:
            raise TransferFailed(f"it has more than the expected {limit:,} bytes", wait=None)
        _write(file, data)
        count += len(data)
        elapsed = time.monotonic() - since
        if elapsed >= timeout:
            if count < SLOWEST * elapsed:
                raise TransferFailed(f"only {count:,} bytes came in {elapsed:.0f} s")
            since, count = time.monotonic(), 0


def _write(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[file.write(view) :]
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise UserError(
            f"There is no space left for fetched shards: {error.strerror}.",
            "Free some space, lower data.cache_gib, or name another folder with data.cache (TMPDIR).",
        ) from None
