"""Crop and resize decoded images as uint8 tensors; normalise them where the model computes.

Torch's antialiased resizing of uint8 takes a sixth of PIL's time, and uint8 batches take a quarter of float32's memory
on their way to the device. Boxes and sizes are those of the PIL transforms that the classes replace, and the resampling
filters are the same; values differ by rounding (`tests/data/test_pixels.py` bounds it). Pixels are (3, H, W) in the
memory order of (H, W, 3), as decoders write them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from PIL import Image
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
    """(3, H, W) uint8 to (height, width), with antialiasing as PIL has it.

    Args:
        interpolation: BICUBIC or BILINEAR.
    """
    if tuple(pixels.shape[1:]) == tuple(size):
        return pixels
    one = pixels.permute(1, 2, 0)[None].permute(0, 3, 1, 2)  # with the strides by which torch finds its fast kernel
    return F.interpolate(one, tuple(size), mode=interpolation.value, antialias=True, align_corners=False)[0]


class RandomCrop(RandomResizedCrop):
    """torchvision's RandomResizedCrop, with the same boxes for the same random state, to (3, h, w) uint8."""

    def forward(self, image: Image.Image) -> Tensor:
        """Crop, then resize."""
        top, left, height, width = self.get_params(image, self.scale, self.ratio)
        crop = as_pixels(image)[:, top : top + height, left : left + width]
        return resize(crop, self.size, self.interpolation)

    @staticmethod
    def get_params(image: Image.Image | Tensor, scale: Sequence[float], ratio: Sequence[float]) -> tuple[int, ...]:
        """(top, left, height, width), as torchvision draws them, at a third of its time."""
        width, height = image.size if isinstance(image, Image.Image) else (image.shape[-1], image.shape[-2])
        drawn, log_ratio = torch.empty(1), _log(tuple(ratio))
        for _ in range(10):
            area = width * height * drawn.uniform_(*scale).item()
            aspect = drawn.uniform_(*log_ratio).exp().item()
            w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < w <= width and 0 < h <= height:
                return torch.randint(height - h + 1, ()).item(), torch.randint(width - w + 1, ()).item(), h, w
        # None fits: the largest box in the middle whose aspect is allowed.
        w, h = min(width, round(height * max(ratio))), min(height, round(width / min(ratio)))
        return (height - h) // 2, (width - w) // 2, h, w


@cache
def _log(numbers: tuple[float, ...]) -> tuple[float, ...]:
    """Logarithms in float32, as torchvision takes them."""
    return tuple(torch.tensor(numbers).log().tolist())


class Resized:
    """A PIL image resized to (3, h, w) uint8, to the size that a transform of PIL images would give it.

    Args:
        step: torchvision's Resize, or open_clip's ResizeKeepRatio.
    """

    def __init__(self, step: Resize):
        self.step = step

    def __call__(self, image: Image.Image) -> Tensor:
        """Resize the whole image."""
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
    """Fill random rectangles of (3, H, W) uint8 with noise, in place: timm's RandomErasing of mode "pixel" as open_clip
    calls it, with draws of torch's global random state.

    The noise is normal with the mean and deviation by which the model normalises, cut at black and white; timm's is of
    normalised floats and not cut. Each rectangle has between 2 % and a third of the image's area, by their number, and
    an aspect between 0.3 and 1 / 0.3; where ten draws do not fit, it is left out.

    Args:
        probability: share of the images that lose something.
        count: largest number of rectangles; an image has 1 to so many.
        mean, std: of each channel, for colours from 0 to 1.
    """

    AREA, ASPECT = (0.02, 1 / 3), (math.log(0.3), math.log(1 / 0.3))

    def __init__(self, probability: float, count: int, mean: Sequence[float], std: Sequence[float]):
        self.probability, self.count = probability, count
        self.mean, self.std = (255 * torch.tensor(numbers)[:, None, None] for numbers in (mean, std))

    def __call__(self, pixels: Tensor) -> Tensor:
        """Erase; returns `pixels`."""
        drawn, (height, width) = torch.empty(()), pixels.shape[1:]
        if drawn.uniform_().item() >= self.probability:
            return pixels
        count = torch.randint(self.count, ()).item() + 1
        for _ in range(count):
            for _ in range(10):
                area = drawn.uniform_(*self.AREA).item() * height * width / count
                aspect = math.exp(drawn.uniform_(*self.ASPECT).item())
                h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
                if h < height and w < width:
                    top, left = torch.randint(height - h + 1, ()).item(), torch.randint(width - w + 1, ()).item()
                    noise = (torch.randn(3, h, w) * self.std + self.mean).round().clamp(0, 255)
                    pixels[:, top : top + h, left : left + w] = noise.to(torch.uint8)
                    break
        return pixels

    def __repr__(self) -> str:
        return f"RandomErasing({self.probability}, {self.count})"


def normalize(pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(B, 3, H, W) uint8 -> float32, (x / 255 − mean) / std of each channel, contiguous.

    The channels' numbers are no tensors: nothing is copied to the device, and half-precision models keep them exact.
    """
    x = pixels.to(torch.float32, memory_format=torch.contiguous_format).div_(255)
    for channel, numbers in enumerate(zip(mean, std, strict=True)):
        x[:, channel].sub_(numbers[0]).div_(numbers[1])
    return x
