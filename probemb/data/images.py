"""Decode untrusted images."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from probemb.data.failures import BadSample
from probemb.data.jpeg import is_complete, load_jpeg

if TYPE_CHECKING:
    from PIL import Image

IMAGE_FORMATS = ("JPEG", "PNG", "WEBP")
MAX_PIXELS = 64_000_000
MAX_ASPECT = 100  # after resizing the short side to a model's size, the long side is up to this many times longer
ORIENTATION = 0x0112  # EXIF's tag
UPRIGHT, SIDEWAYS = 1, (5, 6, 7, 8)  # its values; width and height of the sideways ones are exchanged
# Width and height -> the smallest size needed, or None for full size.
Draft = Callable[[int, int], "tuple[int, int] | None"]


def decode_image(
    data: bytes, draft: int | Draft | None = None, max_pixels: int = MAX_PIXELS, *, exif: bool = False
) -> Image.Image:
    """Decoded RGB image (a `PIL.Image` of W x H pixels).

    Only PIL's JPEG, PNG and WebP decoders are tried, and the header's size is checked before decoding. Transparency is
    composited over white (as img2dataset does), 16-bit grey becomes 8-bit, CMYK and palettes become RGB; only the first
    frame of an animation is used. Raises BadSample, also for a JPEG in which the coded data of a scan does not end
    with the scan, for which libjpeg only warns.

    Args:
        draft: a JPEG may be decoded at 1/2, 1/4 or 1/8 of its size while both sides keep at least so many pixels, which
            is several times faster for large photographs; images that are not reduced stay bit-identical.
        exif: turn and mirror the image as its EXIF orientation says, so that it is what browsers and viewers show;
            sizes, also those of `draft`, are those of the turned image. False gives the pixels as stored, as PIL,
            webdataset, open_clip and the training of published weights do.
    """
    with _opened(data, max_pixels) as image:
        orientation = _orientation(image) if exif else UPRIGHT
        order = -1 if orientation in SIDEWAYS else 1
        needed = draft(*image.size[::order]) if callable(draft) else draft and (draft, draft)
        if needed:
            image.draft(None, needed[::order])
        if image.format in ("JPEG", "MPO"):
            load_jpeg(image, data)
        else:
            image.load()
        if exif and image.format == "PNG":  # EXIF may follow the pixels
            orientation = _orientation(image)
        return _turned(_to_rgb(image), orientation)


def check_header(data: bytes, max_pixels: int = MAX_PIXELS) -> None:
    """Refuse what `decode_image` refuses by its header alone. Raises BadSample."""
    with _opened(data, max_pixels):
        pass


def size_of_plain_jpeg(data: bytes, *, exif: bool = False) -> tuple[int, int] | None:
    """Width and height of a JPEG that every decoder reads alike, by its header and markers; None for any other image.

    It has the colours YCbCr in Huffman coding, all its scans end with a marker, and with `exif` it is stored upright.
    Raises BadSample for what `decode_image` refuses by the header alone.
    """
    with _opened(data, MAX_PIXELS) as image:
        plain = image.format == "JPEG" and image.mode == "RGB" and image.info.get("adobe_transform", 1) == 1
        if not plain or image.layer[0][0] == ord("R") or not is_complete(data):
            return None
        return None if exif and _orientation(image) != UPRIGHT else image.size


def _orientation(image: Image.Image) -> int:
    """EXIF's orientation of an opened image, 1 to 8; upright if it is missing, unknown or unreadable."""
    from PIL import Image

    tags = Image.Exif()
    try:
        tags.load(image.info.get("exif"))
        found = tags.get(ORIENTATION)
    except Exception:  # damaged EXIF fails in many ways, and viewers show such an image as it is stored
        return UPRIGHT
    return found if found in range(1, 9) else UPRIGHT


def _turned(image: Image.Image, orientation: int) -> Image.Image:
    from PIL.Image import Transpose as Turn

    if orientation == UPRIGHT:
        return image
    turns = (Turn.FLIP_LEFT_RIGHT, Turn.ROTATE_180, Turn.FLIP_TOP_BOTTOM, Turn.TRANSPOSE)
    turns += (Turn.ROTATE_270, Turn.TRANSVERSE, Turn.ROTATE_90)
    return image.transpose(turns[orientation - 2])


@contextmanager
def _opened(data: bytes, max_pixels: int) -> Iterator[Image.Image]:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise BadSample(f"the image has {width} x {height} pixels, more than {max_pixels:,}")
            if max(width, height) > MAX_ASPECT * min(width, height):
                ratio = f"one side more than {MAX_ASPECT} times the other"
                raise BadSample(f"the image has {width} x {height} pixels, {ratio}")
            yield image
    except BadSample:
        raise
    except Image.DecompressionBombError:
        raise BadSample(f"the image has more than {max_pixels:,} pixels") from None
    except Exception as error:  # hostile bytes fail in many ways and must not stop a run
        raise BadSample(f"the image cannot be decoded ({type(error).__name__})") from None


def _to_rgb(image: Image.Image) -> Image.Image:
    from PIL import Image

    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I"):  # 16-bit grey; PIL's own conversion clips at 255
        import numpy as np

        pixels = np.asarray(image).clip(0, 65535).astype(np.uint32) >> 8
        return Image.fromarray(pixels.astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        colours = image.convert("RGBA")
        white = Image.new("RGBA", colours.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, colours).convert("RGB")
    return image.convert("RGB")
