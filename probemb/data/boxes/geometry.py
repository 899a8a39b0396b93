"""Boxes (left, top, right, bottom) in pixels: x from `left` up to `right`, y from `top` up to `bottom`, from 0 on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

import torch
from torch import Tensor

Box = tuple[float, float, float, float]
MAX_SIDE = 100_000  # pixels of an image


def as_size(width: object, height: object) -> tuple[int, int]:
    """Raises ValueError: no size of an image in pixels."""
    if not all(type(side) is int and 0 < side <= MAX_SIDE for side in (width, height)):
        raise ValueError(f"an image has {str(width)[:20]} x {str(height)[:20]} pixels")
    return width, height


def iou(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of boxes (N, 4) and (M, 4) -> (N, M) float64 in [0, 1]; 0 where both are empty."""
    a, b = a.double(), b.double()
    corner = torch.maximum(a[:, None, :2], b[None, :, :2])  # (N, M, 2)
    shared = (torch.minimum(a[:, None, 2:], b[None, :, 2:]) - corner).clamp_min(0).prod(dim=2)
    area_a, area_b = ((boxes[:, 2:] - boxes[:, :2]).clamp_min(0).prod(dim=1) for boxes in (a, b))
    both = area_a[:, None] + area_b[None, :] - shared
    return torch.where(both > 0, shared / both.clamp_min(torch.finfo(both.dtype).tiny), 0.0)


def enclosing(boxes: Iterable[Box]) -> Box:
    """The smallest box around all of them."""
    lefts, tops, rights, bottoms = zip(*boxes)
    return min(lefts), min(tops), max(rights), max(bottoms)


def clipped(box: Box, width: float, height: float) -> Box | None:
    """The part of a box that lies in an image; None if it has less than one pixel in width or height."""
    left, top = max(box[0], 0.0), max(box[1], 0.0)
    right, bottom = min(box[2], width), min(box[3], height)
    return (left, top, right, bottom) if right - left >= 1 and bottom - top >= 1 else None


def grid_windows(width: int, height: int, scales: Sequence[float], ratios: Sequence[float], step: float) -> list[Box]:
    """Sliding windows over an image of width x height pixels.

    Args:
        scales: of windows, as the square root of their area over that of the image, in (0, 1].
        ratios: width over height, where the image is taken for square; longer sides are cut to the image.
        step: between neighbours, as a share of the window's side; places are spread evenly up to the borders.
    """
    found: dict[Box, None] = {}
    for scale, ratio in product(scales, ratios):
        w, h = min(1.0, scale * ratio**0.5), min(1.0, scale / ratio**0.5)
        for top, left in product(_places(h, step), _places(w, step)):
            box = (left * width, top * height, (left + w) * width, (top + h) * height)
            found[tuple(round(at, 3) for at in box)] = None
    return list(found)


def _places(side: float, step: float) -> list[float]:
    """Starts of windows with this side (a share): from 0 to 1 - side, at most `step` sides apart."""
    free = 1 - side
    gaps = -int(-free / (step * side) // 1) if free > 1e-9 else 0
    return [free * i / gaps for i in range(gaps + 1)] if gaps else [free / 2]
