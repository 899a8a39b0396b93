"""Decode untrusted images; hold them as uint8 tensors, resized, and normalised where the model computes.

Torch's antialiased resizing of uint8 takes a sixth of PIL's time; values differ by rounding. Pixels are (3, H, W) in
the memory order of (H, W, 3), as decoders write them. No torchvision here: it takes seconds to import.
"""

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from PIL import Image
from PIL.Image import Transpose
from torch import Tensor
from torch.nn import functional as F

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


def _is_endless(data: bytes) -> bool:
    """True for a JPEG of too many scans or markers, as libjpeg finds those of its first picture, and Pillow before the
    first scan: byte by byte. Of most JPEGs two counts show that there are few.
    """
    if data[:2] != b"\xff\xd8" or (data.count(b"\xff") <= MAX_MARKERS and data.count(b"\xff\xda") <= MAX_SCANS):
        return False
    markers: list[int] = []
    position, pattern = 2, _BEFORE_SCANS
    while len(markers) <= MAX_MARKERS and _END not in markers[-1:] and (found := pattern.search(data, position)):
        markers.append(kind := found[0][1])
        position = found.end() - (kind == 0xFF)
        if kind not in _BARE:
            position += int.from_bytes(data[position : position + 2], "big")
        if kind == _SCAN:
            pattern = _AFTER_SCAN
    return markers.count(_SCAN) > MAX_SCANS or len(markers) > MAX_MARKERS


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
    if _is_endless(data):
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


# -------------------------------------------------------------------------------------------------------------- pixels


def as_pixels(image: Image.Image) -> Tensor:
    """A decoded image as (3, H, W) uint8; other modes become RGB."""
    array = bytearray((image if image.mode == "RGB" else image.convert("RGB")).tobytes())
    return torch.frombuffer(array, dtype=torch.uint8).view(image.height, image.width, 3).permute(2, 0, 1)


def empty_stack(one: Tensor, count: int, pinned: bool = False) -> Tensor:
    """Memory for so many tensors like this one, pixels in the order of (H, W, 3); `pinned`: in page-locked memory."""
    if not _channels_last(one):
        return torch.empty(count, *one.shape, dtype=one.dtype, pin_memory=pinned)
    channels, height, width = one.shape
    return torch.empty(count, height, width, channels, dtype=one.dtype, pin_memory=pinned).permute(0, 3, 1, 2)


def stack(images: Sequence[Tensor]) -> Tensor:
    """`torch.stack`, which would transpose pixels, at five times the time."""
    if not _channels_last(images[0]):
        return torch.stack(tuple(images))
    return torch.stack([image.permute(1, 2, 0) for image in images]).permute(0, 3, 1, 2)


def _channels_last(image: Tensor) -> bool:
    return image.ndim == 3 and image.stride(0) == 1 < image.shape[0]


def resize(pixels: Tensor, size: Sequence[int], mode: str) -> Tensor:
    """(3, H, W) uint8 to (height, width), bicubic or bilinear, with antialiasing as PIL has it."""
    if tuple(pixels.shape[1:]) == tuple(size):
        return pixels
    one = pixels.permute(1, 2, 0)[None].permute(0, 3, 1, 2)  # with the strides by which torch finds its fast kernel
    return F.interpolate(one, tuple(size), mode=mode, antialias=True, align_corners=False)[0]


def normalize(pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(B, 3, H, W) uint8 -> float32, (x / 255 − mean) / std of each channel, contiguous."""
    x = pixels.to(torch.float32, memory_format=torch.contiguous_format).div_(255)
    for channel, numbers in enumerate(zip(mean, std, strict=True)):
        x[:, channel].sub_(numbers[0]).div_(numbers[1])
    return x
