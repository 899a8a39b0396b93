"""The pictures of results, read from their shards: a file here, or a part of one on a web server.

The address of a shard is the one that a person gave to `tools.embed`, with the name of a shard that is listed there. No
command (`pipe:`) is run for a picture, and nothing but http and https is asked.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from probemb.data.failures import BadShard
from probemb.data.remote.sources import WEB, FetchPolicy, Remote, fetch_range, is_remote
from probemb.data.shards.samples import MAX_IMAGE_BYTES

MAX_REMOTE_BYTES = 32 << 20
HOW = FetchPolicy(attempts=1, timeout=10.0)


def read_picture(shard: str, offset: int, size: int) -> bytes:
    """Bytes of an image in a shard, wherever that lies. Raises LookupError: it is not at hand."""
    return fetch_member(Remote(shard), offset, size) if is_remote(shard) else read_member(Path(shard), offset, size)


def fetch_member(shard: Remote, offset: int, size: int) -> bytes:
    """Bytes of an image in a shard on a web server. Raises LookupError."""
    if shard.scheme not in WEB:
        raise LookupError(f"its shard is not a file here and not on a web server ({shard.scheme}:)")
    if offset < 0 or not 0 < size <= MAX_REMOTE_BYTES:
        raise LookupError(f"the index states {size:,} bytes at {offset:,}")
    try:
        return fetch_range(shard, offset, size, HOW)
    except BadShard as error:
        raise LookupError(f"its shard {str(error).removeprefix(f'{shard}: ')}") from None


def read_member(shard: Path, offset: int, size: int) -> bytes:
    """Bytes of an image in a shard. Raises LookupError."""
    if offset < 0 or not 0 < size <= MAX_IMAGE_BYTES:
        raise LookupError(f"the index states {size:,} bytes at {offset:,}")
    try:
        fd = os.open(shard, os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise LookupError(f"the shard cannot be opened ({getattr(error, 'strerror', None) or error})") from None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise LookupError("the shard is no file")
        data = os.pread(fd, size, offset)
    except OSError as error:
        raise LookupError(f"the shard cannot be read ({error.strerror})") from None
    finally:
        os.close(fd)
    if len(data) != size:
        raise LookupError("the shard has become shorter")
    return data
