"""Images of all splits with their concepts, and the crops that image queries are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from probemb.data.boxes.geometry import Box
from probemb.data.image_loader import Images, Place
from probemb.data.reading import check_unique, choose_split

SPLITS = ("train", "val", "test")
SHARES = (4, 1, 1)  # of the images, in the order of SPLITS (MPC, supplementary A)


def among(values: np.ndarray, ascending: np.ndarray) -> np.ndarray:
    """Mask of the values that are among others, which are in ascending order: (n,), (m,) -> (n,) bool.

    The same as `np.isin`, which takes many times longer for few values.
    """
    if not len(ascending):
        return np.zeros(len(values), dtype=bool)
    places = np.searchsorted(ascending, values)
    return ascending[np.minimum(places, len(ascending) - 1)] == values


class Holdings:
    """The concepts of N images, and the images of C concepts, from (P, 2) pairs (image, concept) in any order.

    Attributes:
        pairs: (P, 2) int64, each once, in ascending order.
        of_image: for each image its concepts, ascending; of_concept: for each concept its images, ascending.
    """

    def __init__(self, pairs: np.ndarray, n_images: int, n_concepts: int):
        self.pairs = np.unique(np.asarray(pairs, dtype=np.int64).reshape(-1, 2), axis=0)
        images, concepts = self.pairs.T
        order = np.argsort(concepts, kind="stable")
        self.of_image = np.split(concepts, np.searchsorted(images, np.arange(1, n_images)))
        self.of_concept = np.split(images[order], np.searchsorted(concepts[order], np.arange(1, n_concepts)))

    def with_all(self, concepts: Sequence[int] | np.ndarray) -> np.ndarray:
        """The images that have all of the concepts, in ascending order, (R,) int64."""
        found, *others = sorted((self.of_concept[one] for one in concepts), key=len)
        for other in others:
            found = found[among(found, other)]
        return found

    def matches(self, concepts: np.ndarray, images: np.ndarray) -> np.ndarray:
        """Mask of the images that have all concepts of a query: (Q, c), (T,) -> (Q, T) bool."""
        used, columns = np.unique(concepts, return_inverse=True)
        held = np.stack([among(images, self.of_concept[one]) for one in used])
        return held[columns.reshape(np.shape(concepts))].all(axis=1)

    def dense(self) -> np.ndarray:
        """(N, C) bool."""
        held = np.zeros((len(self.of_image), len(self.of_concept)), dtype=bool)
        held[tuple(self.pairs.T)] = True
        return held


# ------------------------------------------------------------------------------------------------------------- crops


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


# ------------------------------------------------------------------------------------------------------------ images

WHOLE = (np.nan,) * 4
Held = tuple[Sequence[int], Sequence[tuple[int, Box]] | None]


@dataclass(frozen=True)
class ConceptImages:
    """N images and the concepts that each has.

    Attributes:
        images: where they lie; names: of each, unique; splits: of each, one of SPLITS.
        held: the numbers of each image's concepts, ascending, and (concept, box in its stored pixels) of what image
            queries are cut from; None: all of the image shows each of them.
        concepts: the text of each of C concepts by its id in the data, such as COCO's; its number is its place here.
        source: the path given, for messages.
        notes: sentences about what the data lacks.
    """

    images: Images
    names: list[str]
    held: list[Held]
    concepts: dict[int, str]
    splits: list[str]
    source: str | Path
    notes: Sequence[str] = ()

    def __post_init__(self):
        check_unique(self.names, "image", self.source)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def number(self) -> dict[int, int]:
        """The number of each concept by its id."""
        return {one: number for number, one in enumerate(self.concepts)}

    def holdings(self) -> Holdings:
        """Of all images."""
        pairs = [(image, number) for image, (numbers, _) in enumerate(self.held) for number in numbers]
        return Holdings(np.array(pairs), len(self), len(self.concepts))

    def split(self, split: str) -> ConceptImages:
        """The images of one split, renumbered. Raises UserError: there is no such split."""
        choose_split(split, self.splits, self.source)
        rows = [row for row, name in enumerate(self.splits) if name == split]

        def is_here(name: str) -> bool:  # where splits are drawn, a bad sample has none
            folder = name.partition("/")[0]
            return folder == split or (split == "train" and folder not in SPLITS)

        bad = [one for one in self.images.bad if is_here(one[0])]
        images = replace(self.images, places=[self.images.places[row] for row in rows], bad=bad)
        names, held = [self.names[row] for row in rows], [self.held[row] for row in rows]
        return replace(self, images=images, names=names, held=held, splits=[split] * len(rows))

    def crops(self) -> tuple[Crops, ...]:
        """For each concept what image queries of it are cut from."""
        shown: list[list[tuple[int, Box]]] = [[] for _ in self.concepts]
        for image, (numbers, crops) in enumerate(self.held):
            for number, box in ((number, WHOLE) for number in numbers) if crops is None else crops:
                shown[number].append((image, box))
        return tuple(Crops(np.array([i for i, _ in some]), np.array([box for _, box in some])) for some in shown)


def draw_splits(names: list[str], seed: int, test: set[str] | None = None) -> list[str]:
    """The split of each image: 4:1:1 in the order of a hash of seed and name.

    Args:
        test: names of the test images where they are published; the others are divided 4:1.
    """
    free = [row for row, name in enumerate(names) if test is None or name not in test]
    free.sort(key=lambda row: blake2b(f"split/{seed}/{names[row]}".encode(), digest_size=16).digest())
    shares = SHARES if test is None else SHARES[:2]
    ends = [len(free) * sum(shares[: place + 1]) // sum(shares) for place in range(len(shares))]
    splits = ["test"] * len(names)
    for split, start, end in zip(SPLITS, [0, *ends], ends):
        for row in free[start:end]:
            splits[row] = split
    return splits
