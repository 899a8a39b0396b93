"""Decoded images as uint8 tensors, resized, and normalised where the model computes.

Torch's antialiased resizing of uint8 takes a sixth of PIL's time; values differ by rounding. Pixels are (3, H, W) in
the memory order of (H, W, 3), as decoders write them. No torchvision here: it takes seconds to import.
"""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F


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
