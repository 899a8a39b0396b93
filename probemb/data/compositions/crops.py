"""Image queries: the part of an image that shows a concept, or a whole image."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from probemb.data.boxes.geometry import Box
from probemb.data.compositions.holdings import among
from probemb.data.image_loader import Images, Place

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
        whole: the images that they are cut from.
        crops: an image of `whole` for each place, and a box in its stored pixels, or None.
    """

    whole: Images
    crops: list[Crop]

    @staticmethod
    def of(images: Images, crops: Iterable[Crop]) -> CroppedImages:
        """The crops of these images, each with a name."""
        crops = list(crops)
        places = [_named(images.places[image], box) for image, box in crops]
        return CroppedImages(places=places, source=images.source, whole=replace(images, draft=None), crops=crops)

    def open(self, index: int) -> Image.Image:
        """Decode one image and cut the crop out. Raises BadSample."""
        return self.whole.part(*self.crops[index])


def _named(place: Place, box: Box | None) -> Place:
    return place if box is None else place._replace(name=f"{place.name} {tuple(round(at) for at in box)}")
