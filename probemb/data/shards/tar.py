"""Offsets and sizes of a tar's members, read from its headers alone (POSIX ustar, pax and GNU long names).

Python's tarfile keeps all members in memory, accepts a tar that was cut between two members, and lets a header state a
size beyond the end of the file. Here every number is checked before it is used.
"""

import io
import os
import re
import stat
from collections.abc import Iterator
from typing import NamedTuple

from probemb.data.failures import BadShard

BLOCK = 512
_CHUNK = 1 << 20  # a multiple of the block
MAX_EXTENSION_BYTES = 1 << 20  # a pax header or a long name; real ones have a few hundred bytes

_SKIPPED = {b"1": "hard link", b"2": "link", b"3": "device", b"4": "device", b"5": "folder", b"6": "fifo"}


class Member(NamedTuple):
    """A regular file in a tar: name, offset of its first byte, size in bytes."""

    name: str
    offset: int
    size: int


def walk_tar(file: str | os.PathLike | io.IOBase) -> Iterator[Member]:
    """Regular files of an uncompressed tar, in order. `file` is a path or an open file, whose position is unchanged.

    Folders, links and devices are skipped. Raises BadShard: not a tar, damaged or cut off (also between two members:
    the end marker is required), data after the end marker, sparse or unknown member types.
    """
    if isinstance(file, (str, os.PathLike)):
        try:
            fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for a writer
        except OSError as error:
            raise BadShard(f"{os.fspath(file)}: cannot be opened ({error.strerror})") from None
        try:
            yield from _walk(fd, os.fspath(file))
        finally:
            os.close(fd)
    else:
        yield from _walk(file.fileno(), str(getattr(file, "name", "tar")))


def salvage_tar(file: io.IOBase) -> Iterator[Member]:
    """The members of a damaged tar that can still be found: after damage the walk resumes at the next valid header."""
    fd = file.fileno()
    end, offset = os.fstat(fd).st_size, 0
    while offset < end:
        try:
            for member in _walk(fd, "tar", offset):
                yield member
                offset = _padded(member.offset + member.size)
            return
        except BadShard:
            offset = _next_header(fd, offset, end)


def _next_header(fd: int, offset: int, end: int) -> int:
    """Offset of the next valid header after the block at `offset`; `end` if there is none."""
    start = offset + BLOCK
    while start < end:
        chunk = os.pread(fd, _CHUNK, start)
        for place in range(0, len(chunk) - BLOCK + 1, BLOCK):
            if chunk[place + 257 : place + 262] == b"ustar" and _is_header(chunk[place : place + BLOCK]):
                return start + place
        start += _CHUNK
    return end


def _walk(fd: int, label: str, offset: int = 0) -> Iterator[Member]:
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode):
        raise BadShard(f"{label}: is not a regular file")
    end = about.st_size
    everywhere: dict[str, str] = {}  # pax records for all members from here on
    following: dict[str, str] = {}  # ... for the next member
    while True:
        header = os.pread(fd, BLOCK, offset)
        if len(header) < BLOCK:
            raise BadShard(f"{label}: {_why_it_ends(offset, end)}")
        if header.count(0) == BLOCK:
            if following:
                raise BadShard(f"{label}: ends after an extended header (byte {offset})")
            _check_end(fd, label, offset, end)
            return
        if not _is_header(header):
            raise BadShard(f"{label}: {_why_no_header(fd, offset)}")
        kind = header[156:157]
        size = _number(header[124:136])
        data = offset + BLOCK
        if kind in b"xgLK":
            payload = _extension(fd, label, offset, size, end)
            if kind == b"x":
                following.update(_pax_records(payload, label))
            elif kind == b"g":
                everywhere.update(_pax_records(payload, label))
            elif kind == b"L":
                following["path"] = _text(payload.split(b"\0", 1)[0])
            offset = _padded(data + size)
            continue
        records = {**everywhere, **following}
        following = {}
        if any(name.startswith("GNU.sparse.") for name in records):
            raise BadShard(f"{label}: holds a sparse file (byte {offset}), which is not supported")
        if "size" in records:
            size = int(records["size"]) if re.fullmatch("[0-9]{1,18}", records["size"]) else None
        if size is None or size < 0:
            raise BadShard(f"{label}: the header at byte {offset} states no valid size")
        name = records.get("path") or _header_name(header)
        if kind in _SKIPPED:
            # Writers disagree whether data follows a link with a size; a folder's size is only a hint.
            if size and kind != b"5":
                raise BadShard(f"{label}: a {_SKIPPED[kind]} at byte {offset} states a size")
            offset = data
            continue
        if kind not in (b"0", b"\0", b"7"):
            raise BadShard(f"{label}: member type {kind!r} at byte {offset} is not supported")
        if data + size > end:
            raise BadShard(f"{label}: cut off: the member at byte {offset} states more bytes than the file has")
        if not name.endswith("/"):  # a folder, in old tars
            yield Member(name, data, size)
        offset = _padded(data + size)


def _is_header(header: bytes) -> bool:
    """True if the checksum fits."""
    return _number(header[148:156]) == sum(header) - sum(header[148:156]) + 8 * 32


def _check_end(fd: int, label: str, marker: int, end: int) -> None:
    """Raises BadShard if something other than zeros follows the end marker."""
    for start in range(marker, end, _CHUNK):
        chunk = os.pread(fd, min(_CHUNK, end - start), start)
        if chunk.count(0) != len(chunk):
            place = start + len(chunk) - len(chunk.lstrip(b"\0"))
            raise BadShard(
                f"{label}: damaged: data follows the end marker of byte {marker} (at byte {place}); "
                "a part was overwritten with zeros, or tars were joined"
            )


def _padded(offset: int) -> int:
    return -(-offset // BLOCK) * BLOCK


def _number(field: bytes) -> int | None:
    """A header's number: octal digits, or base 256 where the first bit is set. None if it is neither."""
    if field[0] & 0x80:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big") if field[0] == 0x80 else None
    digits = field.split(b"\0", 1)[0].strip(b" ")
    if not digits:
        return 0
    return int(digits, 8) if all(digit in b"01234567" for digit in digits) else None


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _header_name(header: bytes) -> str:
    name = _text(header[:100].split(b"\0", 1)[0])
    if header[257:263] == b"ustar\0":  # GNU's own magic uses the prefix field for other things
        prefix = _text(header[345:500].split(b"\0", 1)[0])
        if prefix:
            return f"{prefix}/{name}"
    return name


def _extension(fd: int, label: str, offset: int, size: int | None, end: int) -> bytes:
    if size is None or size > MAX_EXTENSION_BYTES or offset + BLOCK + size > end:
        raise BadShard(f"{label}: the extended header at byte {offset} states no valid size")
    return os.pread(fd, size, offset + BLOCK)


def _pax_records(payload: bytes, label: str) -> dict[str, str]:
    """Records `LENGTH KEY=VALUE\\n` of a pax header, LENGTH counting the whole record in bytes."""
    records, position = {}, 0
    payload = payload.rstrip(b"\0")
    while position < len(payload):
        digits, blank, _ = payload[position : position + 20].partition(b" ")
        length = int(digits) if blank and digits.isdigit() else 0
        record = payload[position : position + length]
        name, equals, value = record[len(digits) + 1 : -1].partition(b"=")
        if len(record) != length or record[-1:] != b"\n" or not equals:  # a length of 0 must not end in a loop
            raise BadShard(f"{label}: malformed pax header")
        records[_text(name)] = _text(value)
        position += length
    return records


def _why_it_ends(offset: int, end: int) -> str:
    if end == 0:
        return "the file is empty"
    if offset == 0:
        return "not a tar"
    return f"cut off at byte {min(offset, end)}: the end of the archive is missing"


def _why_no_header(fd: int, offset: int) -> str:
    start = os.pread(fd, 6, 0)
    if start[:2] == b"\x1f\x8b" or start[:4] == b"\x28\xb5\x2f\xfd" or start in (b"\xfd7zXZ\0",) or start[:3] == b"BZh":
        return "compressed; unpack it to a plain .tar, so that single samples can be read"
    return "not a tar" if offset == 0 else f"damaged: there is no valid header at byte {offset}"
