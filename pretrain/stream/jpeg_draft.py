"""Reduced decoding of JPEGs, given the crop that the transform will take."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch


class CropDraft:
    """Reduced size of a JPEG for a transform that starts with torchvision's RandomResizedCrop or `RandomCrop`; no other
    reduces.

    A JPEG can be decoded at 1/8, 1/4 or 1/2 of its size, at a fraction of the cost. The crop is drawn as the transform
    will draw it, from the same seed; the smallest size is taken at which it has at least as many pixels in both
    directions as the transform's result. The crop's size is that in the whole image; its place is drawn separately.

    Args:
        transform: the crop itself, or a Compose whose first step is one.
    """

    def __init__(self, transform: Callable):
        first = next(iter(getattr(transform, "transforms", [transform])), None)
        size = getattr(first, "size", ())
        self._crop = first if hasattr(first, "get_params") and hasattr(first, "ratio") and len(size) == 2 else None
        self._height, self._width = size if self._crop else (0, 0)

    def needed(self, width: int, height: int, seed: Callable[[], None]) -> tuple[int, int] | None:
        """Width and height for the decoder, or None for full size; `seed` sets the transform's random state."""
        if self._crop is None or width < 2 * self._width or height < 2 * self._height:
            return None
        for factor in self._factors(width, height):
            small = torch.empty(1, 1, 1).expand(1, -(-height // factor), -(-width // factor))  # no memory, only a size
            seed()
            _, _, crop_height, crop_width = self._crop.get_params(small, self._crop.scale, self._crop.ratio)
            if crop_height >= self._height and crop_width >= self._width:
                return width // factor, height // factor
        return None

    def _factors(self, width: int, height: int) -> Iterator[int]:
        return (k for k in (8, 4, 2) if width >= k * self._width and height >= k * self._height)
