"""Image queries: the part of an image that shows a concept, or a whole image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from probemb.data.boxes.geometry import Box
from probemb.data.compositions.holdings import among
from probemb.data.failures import BadSample
from probemb.data.image_loader import Images

if TYPE_CHECKING:
    from PIL import Image


class Crop(NamedTuple):
    """An image, and a box (left, top, right, bottom) in its stored pixels; None: all of it."""

    image: int
    box: Box | None


class Crops(Sequence[Crop]):
    """The crops of one concept, image after image.

    Args:
        images: (M,) the image of each crop. boxes: (M, 4) float32 pixels; NaN: the whole image.
    """

    def __init__(self, images: np.ndarray, boxes: np.ndarray):
        order = np.argsort(images, kind="stable")
        self.boxes = np.asarray(boxes, dtype=np.float32).reshape(-1, 4)[order]
        self.owners = np.asarray(images, dtype=np.int64)[order]
        self.images, self._starts = np.unique(self.owners, return_index=True)  # each image once

    def __len__(self) -> int:
        return len(self.owners)

    def __getitem__(self, row: int) -> Crop:
        box = self.boxes[row]
        return Crop(int(self.owners[row]), None if np.isnan(box[0]) else tuple(box.tolist()))

    def draw(self, random: np.random.RandomState, without: Sequence[int] | np.ndarray = ()) -> Crop:
        """One image, uniformly, and one of its crops, uniformly.

        Args:
            without: images in ascending order that are not drawn while there are others.
        """
        allowed = np.flatnonzero(~among(self.images, np.asarray(without, dtype=np.int64)))
        chosen = int(allowed[random.randint(len(allowed))]) if len(allowed) else random.randint(len(self.images))
        end = self._starts[chosen + 1] if chosen + 1 < len(self._starts) else len(self.owners)
        return self[int(random.randint(self._starts[chosen], end))]


@dataclass(kw_only=True)
class CroppedImages(Images):
    """Crops as images: place i is that of the image which crop i is cut from.

    Attributes:
        boxes: for each place a box in its image's stored pixels, or None.
    """

    boxes: list[Box | None]

    def open(self, index: int) -> Image.Image:
        """Decode one image and cut the crop out. Raises BadSample."""
        return cropped(super().open(index), self.boxes[index])


def cropped(image: Image.Image, box: Box | None) -> Image.Image:
    """The crop in whole pixels, all that the box touches. Raises BadSample: the box does not lie in the image."""
    if box is None:
        return image
    left, top = max(0, math.floor(box[0])), max(0, math.floor(box[1]))
    right, bottom = min(image.width, math.ceil(box[2])), min(image.height, math.ceil(box[3]))
    if right <= left or bottom <= top:
        raise BadSample(f"the box {tuple(round(at) for at in box)} lies outside of its {image.width}x{image.height}")
    return image.crop((left, top, right, bottom))
