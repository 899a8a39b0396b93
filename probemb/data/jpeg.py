"""Detect damaged entropy data of JPEGs while Pillow decodes them.

libjpeg only warns when a scan's coded data ends before the scan or the scan before its data, as most changes of a few
bytes make it do, and Pillow drops its warnings. Here the decoder gets the file in pieces that end shortly before and
after the end of each scan. A decoder inside a scan leaves the last bytes until there are enough of them to go on; one
that is done with a scan takes all bytes on its way to the next marker. That tells the same as the warnings, and nothing
is decoded twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from probemb.data.failures import BadSample

_HELD_BACK = 8  # bytes; libjpeg reads so many ahead and does not count them as surplus either
_READ_AHEAD = b"\xff\x00" * 8 + b"\0"  # ones, which are no code, in place of a marker that would end the scan
# After coded data: neither stuffing nor a restart. Without fill bytes, \xff+, it is found 24 times faster.
_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]", re.DOTALL)
_SCAN, _END, _HUFFMAN = 0xDA, 0xD9, (0xC0, 0xC1, 0xC2)
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # but for tables


def load_jpeg(image, data: bytes) -> None:
    """`image.load()` of an opened JPEG whose file is `data`. Raises BadSample and what Pillow raises."""
    scans = list(find_scans(data))
    if not scans:  # of another coding, or damaged before its first scan
        image.load()
        return
    decoder, fed = _Decoder(image), 0
    try:
        for start, end in scans:
            cut = max(start, end - _HELD_BACK)
            while 0xFF in data[max(start, cut - 2) : cut]:  # a stuffed byte stays whole
                cut -= 1
            if decoder.is_between_scans(data[fed:cut]):
                raise BadSample("the image is corrupt: it ends before its data does")
            if not decoder.is_between_scans(data[cut:end] + _READ_AHEAD):
                raise BadSample("the image is corrupt: its data ends too early")
            fed = end
        decoder.feed(data[fed:])
        decoder.finish()
    finally:
        decoder.close()


def find_scans(data: bytes) -> Iterator[tuple[int, int]]:
    """Offsets of the coded data of every scan (its first byte, the one after its last) of a Huffman-coded JPEG.

    Nothing for other codings; where the markers stop making sense, the scans end.
    """
    return ((start, end) for kind, start, end in _segments(data) if kind == _SCAN)


def is_complete(data: bytes) -> bool:
    """Whether a Huffman-coded JPEG has one frame, a marker after each scan, and its end after the last.

    Nothing is decoded.
    """
    segments = list(_segments(data))
    ends = [end for kind, _, end in segments if kind == _SCAN]
    frames = sum(kind in _FRAMES for kind, _, _ in segments)
    return bool(ends) and frames == 1 and data.find(bytes((0xFF, _END)), ends[-1]) >= 0


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Markers and what belongs to them, from offset to offset; of scans it is the coded data."""
    position, known = 2, False
    while position + 4 <= len(data) and data[position] == 0xFF:
        kind = data[position + 1]
        if kind == 0xFF:  # fill
            position += 1
            continue
        following = position + 2 + int.from_bytes(data[position + 2 : position + 4], "big")
        known |= kind in _HUFFMAN
        if kind == _END or (kind == _SCAN and not known):
            return
        if kind != _SCAN:
            yield kind, position, following
        else:
            marker = _MARKER.search(data, following)
            if marker is None:
                return
            end = marker.start()
            while data[end - 1] == 0xFF and end > following:  # fill
                end -= 1
            yield kind, following, end
            following = end
        position = following


class _Decoder:
    """Pillow's decoder of an opened image, fed by hand."""

    def __init__(self, image):
        from PIL import Image

        image.load_prepare()
        ((name, extents, _, arguments),) = image.tile
        self._image, self._left, self._ended = image, b"", False
        self._decoder = Image._getdecoder(image.mode, name, arguments, image.decoderconfig)
        self._decoder.setimage(image.im, extents)

    def feed(self, piece: bytes) -> int:
        """Decode as much as possible; returns the number of bytes that the decoder leaves for later."""
        if not self._ended:
            self._left += piece
            taken, error = self._decoder.decode(self._left)
            if error:
                raise OSError(f"Pillow's decoder ends with {error}")
            self._ended, self._left = taken < 0, self._left[max(taken, 0) :]
        return 0 if self._ended else len(self._left)

    def is_between_scans(self, piece: bytes) -> bool:
        """Feed a piece; whether the decoder is not inside a scan then.

        Inside of one it may have taken all bytes by chance, but not one more.
        """
        left = self.feed(piece[:-1])
        return self.feed(piece[-1:]) == left == 0

    def finish(self) -> None:
        """Leave the image as `image.load()` does."""
        if not self._ended:
            raise OSError("the image is truncated")
        self._image.tile = []
        self._image.load_end()

    def close(self) -> None:
        self._decoder.cleanup()
