"""Offsets and sizes of a tar's members, from Python's tarfile, with a check of the end.

tarfile takes damage between two members for the end of the archive; training must not lose samples silently.
"""

import os
import stat
import tarfile
from collections.abc import Iterator
from contextlib import nullcontext
from typing import BinaryIO, NamedTuple

from probemb.data.failures import BadShard

BLOCK = tarfile.BLOCKSIZE
_CHUNK = 1 << 20


class Member(NamedTuple):
    """A regular file in a tar: name, offset of its first byte, size in bytes."""

    name: str
    offset: int
    size: int


def walk_tar(file: str | os.PathLike | BinaryIO, salvage: bool = False) -> Iterator[Member]:
    """Regular files of an uncompressed tar, in order; folders, links and devices are skipped.

    Raises BadShard: not a tar, damaged or cut off (also between two members), data after the end, sparse files. With
    `salvage` the walk resumes at the next valid header instead, and ends where nothing more is found.
    """
    label = os.fspath(file) if isinstance(file, (str, os.PathLike)) else str(getattr(file, "name", "tar"))
    try:
        if isinstance(file, (str, os.PathLike)):  # opening a pipe would wait for a writer
            opened = os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0)
        else:
            opened = nullcontext(file)
    except OSError as error:
        raise BadShard(f"{label}: cannot be opened ({error.strerror})") from None
    with opened as raw:
        about = os.fstat(raw.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise BadShard(f"{label}: is not a regular file")
        raw.seek(0)
        try:
            with tarfile.open(fileobj=raw, mode="r:", encoding="utf-8", ignore_zeros=salvage) as tar:
                while member := tar.next():
                    tar.members.clear()  # which would take a kilobyte a member
                    end = member.offset_data + member.size
                    if member.issparse() or member.size < 0 or end > about.st_size:
                        if salvage:
                            continue
                        raise BadShard(f"{label}: cut off or damaged: {member.size:,} bytes at {member.offset_data:,}")
                    if member.isreg():
                        yield Member(member.name, member.offset_data, member.size)
                if not salvage:
                    _check_end(raw.fileno(), label, tar.offset)
        except (BadShard, OSError):
            raise
        except Exception as error:  # hostile headers fail in many ways
            if not salvage:
                what = "the file is empty" if not about.st_size else f"not an uncompressed tar, or cut off ({error})"
                raise BadShard(f"{label}: {what}") from None


def _check_end(fd: int, label: str, marker: int) -> None:
    """Raises BadShard unless the archive ends at this offset, with zeros alone."""
    block = os.pread(fd, BLOCK, marker)
    if len(block) < BLOCK:
        raise BadShard(f"{label}: cut off at byte {marker + len(block):,}: the end of the archive is missing")
    if any(block):
        raise BadShard(f"{label}: damaged: there is no valid header at byte {marker:,}")
    while chunk := os.pread(fd, _CHUNK, marker):
        if chunk.count(0) != len(chunk):
            raise BadShard(
                f"{label}: damaged: data follows the end marker; a part was overwritten with zeros, or tars were joined"
            )
        marker += len(chunk)
