"""Crop and resize decoded images as uint8 tensors; normalise them where the model computes.

Torch's antialiased resizing of uint8 takes a sixth of PIL's time, and uint8 batches take a quarter of float32's memory
on their way to the device. Boxes and sizes are those of the PIL transforms that the classes replace, and the resampling
filters are the same; values differ by rounding (`tests/data/test_pixels.py` bounds it). Pixels are (3, H, W) in the
memory order of (H, W, 3), as decoders write them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from timm.data.random_erasing import RandomErasing as TimmsRandomErasing
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms import InterpolationMode, RandomResizedCrop, Resize


def as_pixels(image: Image.Image) -> Tensor:
    """A decoded image as (3, H, W) uint8; other modes become RGB."""
    array = np.array(image if image.mode == "RGB" else image.convert("RGB"))
    return torch.from_numpy(array).permute(2, 0, 1)


def empty_stack(one: Tensor, count: int, pinned: bool = False) -> Tensor:
    """Memory for so many tensors like this one, pixels in the order of (H, W, 3); `pinned`: in page-locked memory."""
    if not _channels_last(one):
        return torch.empty(count, *one.shape, dtype=one.dtype, pin_memory=pinned)
    channels, height, width = one.shape
    return torch.empty(count, height, width, channels, dtype=one.dtype, pin_memory=pinned).permute(0, 3, 1, 2)


def stack(images: Sequence[Tensor]) -> Tensor:
    """Tensors of one shape and type as one; (3, H, W) pixels stay in the memory order of (H, W, 3).

    `torch.stack` transposes those, at five times the time.
    """
    if not _channels_last(images[0]):
        return torch.stack(tuple(images))
    return torch.stack([image.permute(1, 2, 0) for image in images]).permute(0, 3, 1, 2)


def _channels_last(image: Tensor) -> bool:
    return image.ndim == 3 and image.stride(0) == 1 < image.shape[0]


def resize(pixels: Tensor, size: Sequence[int], interpolation: InterpolationMode) -> Tensor:
    """(3, H, W) uint8 to (height, width), bicubic or bilinear, with antialiasing as PIL has it."""
    if tuple(pixels.shape[1:]) == tuple(size):
        return pixels
    one = pixels.permute(1, 2, 0)[None].permute(0, 3, 1, 2)  # with the strides by which torch finds its fast kernel
    return F.interpolate(one, tuple(size), mode=interpolation.value, antialias=True, align_corners=False)[0]


class RandomCrop(RandomResizedCrop):
    """torchvision's RandomResizedCrop, to (3, h, w) uint8."""

    def forward(self, image: Image.Image) -> Tensor:
        top, left, height, width = self.get_params(image, self.scale, self.ratio)
        crop = as_pixels(image)[:, top : top + height, left : left + width]
        return resize(crop, self.size, self.interpolation)


class Resized:
    """A PIL image resized to (3, h, w) uint8, as torchvision's Resize or open_clip's ResizeKeepRatio (`step`) would."""

    def __init__(self, step: Resize):
        self.step = step

    def __call__(self, image: Image.Image) -> Tensor:
        if isinstance(self.step, Resize):
            wanted = self.step.size if isinstance(self.step.size, Sequence) else [self.step.size]
            size = _short_side(*image.size, wanted[0]) if len(wanted) == 1 else wanted
        else:
            size = self.step.get_params(image, self.step.size, self.step.longest)
        return resize(as_pixels(image), size, self.step.interpolation)

    def __repr__(self) -> str:
        return f"Resized({self.step})"


def _short_side(width: int, height: int, short: int) -> tuple[int, int]:
    """(height, width) with a shorter side of `short` pixels; the longer is cut to whole pixels, as torchvision does."""
    long = int(short * max(width, height) / min(width, height))
    return (long, short) if width <= height else (short, long)


class RandomErasing:
    """Fill random rectangles of (3, H, W) uint8 with noise, in place, as timm's RandomErasing of mode "pixel" does.

    The noise is normal with the mean and deviation, of colours from 0 to 1, by which the model normalises; it is cut at
    black and white. `probability`: share of the images that lose something; `count`: largest number of rectangles.
    """

    def __init__(self, probability: float, count: int, mean: Sequence[float], std: Sequence[float]):
        self.erase = TimmsRandomErasing(probability, mode="pixel", max_count=count, device="cpu")
        self.mean, self.std = (255 * torch.tensor(numbers)[:, None, None] for numbers in (mean, std))

    def __call__(self, pixels: Tensor) -> Tensor:
        noise = self.erase(torch.full(pixels.shape, torch.nan))
        erased = ~noise.isnan()
        pixels[erased] = (noise * self.std + self.mean)[erased].round().clamp(0, 255).to(torch.uint8)
        return pixels

    def __repr__(self) -> str:
        return repr(self.erase)


def normalize(pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(B, 3, H, W) uint8 -> float32, (x / 255 − mean) / std of each channel, contiguous.

    The channels' numbers are no tensors: nothing is copied to the device, and half-precision models keep them exact.
    """
    x = pixels.to(torch.float32, memory_format=torch.contiguous_format).div_(255)
    for channel, numbers in enumerate(zip(mean, std, strict=True)):
        x[:, channel].sub_(numbers[0]).div_(numbers[1])
    return x
