"""Read pictures of results from their shards, local files or parts of files on web servers.

The address of a shard is the one given to `tools.embed`, with the name of a shard listed there. For pictures only http
and https are used, and no command (`pipe:`) is run.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from probemb.data.failures import BadShard
from probemb.data.remote.sources import WEB, FetchPolicy, Remote, fetch_range, is_remote
from probemb.data.shards.samples import MAX_IMAGE_BYTES

MAX_REMOTE_BYTES = 32 << 20
POLICY = FetchPolicy(attempts=1, timeout=10.0)


def read_picture(shard: str, offset: int, size: int) -> bytes:
    """Bytes of an image in a local or remote shard. Raises LookupError: it is not available."""
    return fetch_member(Remote(shard), offset, size) if is_remote(shard) else read_member(Path(shard), offset, size)


def fetch_member(shard: Remote, offset: int, size: int) -> bytes:
    """Bytes of an image in a shard on a web server. Raises LookupError."""
    if shard.scheme not in WEB:
        raise LookupError(f"its shard is not a file here and not on a web server ({shard.scheme}:)")
    if offset < 0 or not 0 < size <= MAX_REMOTE_BYTES:
        raise LookupError(f"the index states {size:,} bytes at {offset:,}")
    try:
        return fetch_range(shard, offset, size, POLICY)
    except BadShard as error:
        raise LookupError(f"its shard {str(error).removeprefix(f'{shard}: ')}") from None


def read_member(shard: Path, offset: int, size: int) -> bytes:
    """Bytes of an image in a local shard. Raises LookupError."""
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
