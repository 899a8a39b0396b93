"""Decode an image that a server sent, resize it, and encode it as a JPEG.

The steps are those of img2dataset's Resizer, done with the same packages, and the same pixels come out. Resizer itself
takes only encoded images, which it decodes with OpenCV; here `decode_image` decodes.
"""

from __future__ import annotations

import ctypes
import functools
import os
from contextlib import suppress

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # no request for its latest version

import albumentations
import cv2
import numpy as np
import pyarrow as pa
from PIL import Image

from probemb.data.failures import BadSample
from probemb.data.images import decode_image

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_SIGNATURES = {
    "HTML, no image": (b"<!doctype html", b"<html", b"<head", b"<script", b"<body"),
    "broken image": (b"\xff\xd8\xff", b"\x89png\r\n", b"riff"),
    "GIF image": (b"gif87a", b"gif89a"),
    "TIFF image": (b"ii*\0", b"mm\0*", b"ii+\0", b"mm\0+"),
    "gzip-encoded": (b"\x1f\x8b",),
}


class Resizing:
    """Decodes, resizes and encodes as the command's `settings` say; called as img2dataset's Resizer is."""

    def __init__(self, settings: dict):
        size, mode, self._upscale = settings["image_size"], settings["resize"], settings["upscale"]
        self._min_size, self._quality = settings["min_size"], settings["quality"]
        self._limit, self._side = size, {"border": max, "keep_ratio_largest": max}.get(mode, min)
        scale = albumentations.LongestMaxSize if self._side is max else albumentations.SmallestMaxSize
        self._smaller, self._larger, self._finish = None, None, None
        if mode != "no":
            self._smaller = scale(max_size=size, interpolation=cv2.INTER_AREA, p=1.0)
            self._larger = scale(max_size=size, interpolation=cv2.INTER_LANCZOS4, p=1.0)
        if mode == "center_crop":
            self._finish = albumentations.CenterCrop(height=size, width=size)
        elif mode == "border":
            white = {"border_mode": cv2.BORDER_CONSTANT, "value": [255, 255, 255]}
            self._finish = albumentations.PadIfNeeded(min_height=size, min_width=size, p=1.0, **white)

    def __call__(self, stream, _=None) -> tuple:
        """Returns (JPEG, width, height, original width, original height, None), or the reason in the last place."""
        _prepare_process()
        data = stream.read()
        try:
            image = decode_image(data, exif=True)
        except BadSample as error:
            return None, None, None, None, None, f"{kind_of(data)}|{error}"
        if min(image.size) < self._min_size:
            return None, None, None, None, None, f"too small|{image.width} x {image.height} pixels"
        try:
            pixels = self._resized(_to_bgr(image))
            height, width = pixels.shape[:2]
            made, jpeg = cv2.imencode(".jpg", pixels, (cv2.IMWRITE_JPEG_QUALITY, self._quality))
            if not made:
                raise ValueError(f"no JPEG can have {width} x {height} pixels")
        except Exception as error:  # one image must not stop a shard
            return None, None, None, None, None, f"cannot be resized|{error}"
        return jpeg.tobytes(), width, height, image.width, image.height, None

    def _resized(self, pixels: np.ndarray) -> np.ndarray:
        shrink = self._side(pixels.shape[:2]) > self._limit
        if self._smaller is None or not (shrink or self._upscale):
            return pixels
        pixels = (self._smaller if shrink else self._larger)(image=pixels)["image"]
        return self._finish(image=pixels)["image"] if self._finish else pixels


@functools.cache
def _prepare_process() -> None:
    """Keep large images in one piece, and their memory in the process.

    Pillow divides images at 16 MiB, and Arrow cannot take the pieces. glibc gives blocks of more than 32 MiB back to
    the system; the page faults for the next photograph cost as much as decoding it.
    """
    cv2.setNumThreads(1)
    Image.core.set_use_block_allocator(1)
    with suppress(OSError, AttributeError):  # no glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 128 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 256 << 20)


def _to_bgr(image: Image.Image) -> np.ndarray:
    """An RGB image as OpenCV's (H, W, 3). Pillow's own (H, W, 4) is read in place, several times faster than a copy."""
    padded = pa.array(image).flatten().to_numpy().reshape(image.height, image.width, 4)
    return cv2.cvtColor(padded, cv2.COLOR_RGBA2BGR)


def kind_of(data: bytes) -> str:
    """The kind of an answer that cannot be decoded."""
    start = data[:512].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if not start:
        return "empty answer"
    return next((kind for kind, signatures in _SIGNATURES.items() if start.startswith(signatures)), "no image")
