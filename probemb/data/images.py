"""Decode untrusted images."""

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from PIL import Image
from PIL.Image import Transpose

from probemb.data.failures import BadSample

IMAGE_FORMATS = ("JPEG", "PNG", "WEBP")
MAX_PIXELS = 64_000_000
MAX_ASPECT = 100  # after resizing the short side to a model's size, the long side is up to this many times longer
MAX_SCANS = 100  # of a JPEG; encoders write about ten, and each costs a pass over all pixels, however few bytes it has
MAX_MARKERS = 1000
ORIENTATION = 0x0112  # EXIF's tag
UPRIGHT, SIDEWAYS = 1, (5, 6, 7, 8)  # its values; width and height of the sideways ones are exchanged
_TURNS = (
    Transpose.FLIP_LEFT_RIGHT, Transpose.ROTATE_180, Transpose.FLIP_TOP_BOTTOM, Transpose.TRANSPOSE,
    Transpose.ROTATE_270, Transpose.TRANSVERSE, Transpose.ROTATE_90,
)  # fmt: skip
_SCAN, _END = 0xDA, 0xD9  # markers of a JPEG
_BARE = {0x00, 0x01, 0xFF, *range(0xD0, 0xD9)}  # without a segment: stuffing, fill and restarts among them
_BEFORE_SCANS = re.compile(rb"\xff.", re.DOTALL)
_AFTER_SCAN = re.compile(rb"\xff[^\x00\x01\xff\xd0-\xd8]", re.DOTALL)
# Width and height -> the smallest size needed, or None for full size.
Draft = Callable[[int, int], "tuple[int, int] | None"]


def decode_image(
    data: bytes, draft: int | Draft | None = None, max_pixels: int = MAX_PIXELS, *, exif: bool = False
) -> Image.Image:
    """Decode to RGB. Raises BadSample, but not for damage of which libjpeg only warns.

    Only PIL's JPEG, PNG and WebP decoders are tried, and the header's size is checked before decoding. Transparency is
    composited over white (as img2dataset does), 16-bit grey becomes 8-bit; of an animation the first frame is used.

    Args:
        draft: a JPEG may be decoded at 1/2, 1/4 or 1/8 of its size while both sides keep at least so many pixels.
        exif: turn the image as its EXIF orientation says, and let `draft` speak of the turned one; PIL, open_clip and
            the training of published weights do not.
    """
    with _opened(data, max_pixels) as image:
        orientation = _orientation(image) if exif else UPRIGHT
        order = -1 if orientation in SIDEWAYS else 1
        needed = draft(*image.size[::order]) if callable(draft) else draft and (draft, draft)
        if needed:
            image.draft(None, needed[::order])
        image.load()
        if exif and image.format == "PNG":  # EXIF may follow the pixels
            orientation = _orientation(image)
        image = _to_rgb(image)
        return image if orientation == UPRIGHT else image.transpose(_TURNS[orientation - 2])


def _markers(data: bytes) -> list[int]:
    """Markers of a JPEG's first picture, as libjpeg finds them, and Pillow before the first scan: byte by byte."""
    markers: list[int] = []
    position, pattern = 2, _BEFORE_SCANS
    while len(markers) <= MAX_MARKERS and _END not in markers[-1:] and (found := pattern.search(data, position)):
        markers.append(kind := found[0][1])
        position = found.end() - (kind == 0xFF)
        if kind not in _BARE:
            position += int.from_bytes(data[position : position + 2], "big")
        if kind == _SCAN:
            pattern = _AFTER_SCAN
    return markers


def _orientation(image: Image.Image) -> int:
    """EXIF's orientation of an opened image, 1 to 8; upright if it is missing, unknown or unreadable."""
    tags = Image.Exif()
    try:
        tags.load(image.info.get("exif"))
        found = tags.get(ORIENTATION)
    except Exception:  # damaged EXIF fails in many ways, and viewers show such an image as it is stored
        return UPRIGHT
    return found if found in range(1, 9) else UPRIGHT


@contextmanager
def _opened(data: bytes, max_pixels: int) -> Iterator[Image.Image]:
    if data[:2] == b"\xff\xd8" and ((markers := _markers(data)).count(_SCAN) > MAX_SCANS or len(markers) > MAX_MARKERS):
        raise BadSample(f"the image has more than {MAX_SCANS} scans or {MAX_MARKERS:,} markers")
    try:
        with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
            sides = width, height = image.size
            if width * height > max_pixels or max(sides) > MAX_ASPECT * min(sides):
                limits = f"more than {max_pixels:,}, or one side more than {MAX_ASPECT} times the other"
                raise BadSample(f"the image has {width} x {height} pixels: {limits}")
            yield image
    except BadSample:
        raise
    except Image.DecompressionBombError:
        raise BadSample(f"the image has more than {max_pixels:,} pixels") from None
    except Exception as error:  # hostile bytes fail in many ways and must not stop a run
        raise BadSample(f"the image cannot be decoded ({type(error).__name__})") from None


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I"):  # 16-bit grey; PIL's own conversion clips at 255
        pixels = np.asarray(image).clip(0, 65535).astype(np.uint32) >> 8
        return Image.fromarray(pixels.astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        colours = image.convert("RGBA")
        white = Image.new("RGBA", colours.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, colours).convert("RGB")
    return image.convert("RGB")
