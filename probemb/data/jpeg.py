"""Detect damaged entropy data of JPEGs while Pillow decodes them.

libjpeg only warns when the coded data ends before the image or the image before the coded data, as nearly every change
of a few bytes makes it do, and Pillow drops its warnings. Here the decoder gets the file in two pieces: one that cannot
be enough for the last row of blocks, and one that must be. That tells the same, and nothing is decoded twice.
"""

from __future__ import annotations

from typing import NamedTuple

from probemb.data.failures import BadSample

_HELD_BACK = 8  # bytes; libjpeg reads so many ahead and does not count them as surplus either
_READ_AHEAD = bytes(16)  # in place of the end marker, at which libjpeg would make up what is missing
_END = b"\xff\xd9"
_SCAN, _BASELINE = 0xDA, (0xC0, 0xC1)


class Scan(NamedTuple):
    """The coded data of an image's only scan: offsets of its first byte and of the one after the last."""

    start: int
    end: int


def find_scan(data: bytes) -> Scan | None:
    """The scan of a sequential Huffman-coded JPEG with one scan; None for others, such as progressive ones."""
    position, components = 2, None
    while position + 4 <= len(data) and data[position] == 0xFF:
        kind = data[position + 1]
        if kind == 0xFF:  # fill
            position += 1
            continue
        following = position + 2 + int.from_bytes(data[position + 2 : position + 4], "big")
        if kind in _BASELINE and position + 9 < len(data):
            components = data[position + 9]
        if kind == _SCAN:
            end = data.find(_END, following)  # any other marker before it stops libjpeg, which `check` notices
            if data[position + 4] != components or end < 0:
                return None
            while data[end - 1] == 0xFF:  # fill
                end -= 1
            return Scan(following, end)
        position = following
    return None


class ScanFeed:
    """A file for Pillow's JPEG decoder, which must read it exactly twice.

    `read` raises BadSample when the decoder has used up all coded data and wants more; `check` when it wanted less.
    """

    def __init__(self, data: bytes, scan: Scan):
        cut = max(scan.start, scan.end - _HELD_BACK)
        self._pieces = [data[cut : scan.end] + _READ_AHEAD, data[:cut]]

    def read(self, _: int) -> bytes:
        if not self._pieces:
            raise BadSample("the image is corrupt: its data ends too early")
        return self._pieces.pop()

    def seek(self, *_) -> int:
        return 0

    def tell(self) -> int:
        return 0

    def close(self) -> None:
        pass

    def check(self) -> None:
        """Raises BadSample if the decoder did not need the last of the data."""
        if self._pieces:
            raise BadSample("the image is corrupt: it ends before its data does")
