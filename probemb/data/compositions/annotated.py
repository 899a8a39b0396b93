"""Images of all splits with their concepts, as readers give them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import pairwise

import numpy as np

from probemb.data.captions.dataset import check_unique, choose_split
from probemb.data.compositions.crops import Crops
from probemb.data.compositions.holdings import Holdings
from probemb.data.image_loader import Images

SPLITS = ("train", "val", "test")
SHARES = (4, 1, 1)  # of the images, in the order of SPLITS (MPC, supplementary A)


@dataclass(frozen=True)
class ConceptImages:
    """N images and the concepts that each has.

    Attributes:
        images: where they lie; names: of each, unique; splits: of each, one of SPLITS.
        concepts: the text of each of C concepts; concept_ids: their numbers in the data, such as COCO's.
        pairs: (P, 2) int64, (image, concept).
        crop_pairs, crop_boxes: (M, 2) int64, (image, concept) of what image queries are cut from, and (M, 4) float32
            boxes in the image's stored pixels; NaN: the whole image.
        source: the path given, for messages.
        notes: sentences about what the data lacks.
    """

    images: Images
    names: list[str]
    concepts: tuple[str, ...]
    concept_ids: tuple[int, ...]
    pairs: np.ndarray
    crop_pairs: np.ndarray
    crop_boxes: np.ndarray
    splits: list[str]
    source: str
    notes: tuple[str, ...] = ()

    def __post_init__(self):
        check_unique(self.names, "image", self.source)
        check_unique(self.concepts, "concept", self.source)

    def __len__(self) -> int:
        return len(self.names)

    def holdings(self) -> Holdings:
        """Of all images."""
        return Holdings(self.pairs, len(self), len(self.concepts))

    def split(self, split: str | None) -> ConceptImages:
        """The images of one split, numbered anew; all for None. Raises UserError: there is no such split."""
        if split is None:
            return self
        choose_split(split, self.splits, self.source)
        rows = [row for row, name in enumerate(self.splits) if name == split]
        number = np.full(len(self), -1, dtype=np.int64)
        number[rows] = np.arange(len(rows))
        here, shown = number[self.pairs[:, 0]] >= 0, number[self.crop_pairs[:, 0]] >= 0
        pairs, crop_pairs = self.pairs[here].copy(), self.crop_pairs[shown].copy()
        pairs[:, 0], crop_pairs[:, 0] = number[pairs[:, 0]], number[crop_pairs[:, 0]]
        return replace(
            self,
            images=replace(self.images, places=[self.images.places[row] for row in rows], bad=self._bad_of(split)),
            names=[self.names[row] for row in rows],
            pairs=pairs,
            crop_pairs=crop_pairs,
            crop_boxes=self.crop_boxes[shown],
            splits=[split] * len(rows),
        )

    def _bad_of(self, split: str) -> list[tuple[str, str]]:
        """Unusable samples of a split folder; those of drawn splits, whose split nobody knows, count for "train"."""
        folders = [(name.partition("/")[0], (name, why)) for name, why in self.images.bad]
        return [one for folder, one in folders if folder == split or (split == "train" and folder not in SPLITS)]

    def crops(self) -> tuple[Crops, ...]:
        """For each concept what image queries of it are cut from."""
        order = np.argsort(self.crop_pairs[:, 1], kind="stable")
        bounds = np.searchsorted(self.crop_pairs[order, 1], np.arange(len(self.concepts) + 1))
        rows = (order[start:end] for start, end in pairwise(bounds))
        return tuple(Crops(self.crop_pairs[one, 0], self.crop_boxes[one]) for one in rows)


def draw_splits(names: list[str], seed: int, test: set[str] | None = None) -> list[str]:
    """The split of each image: 4:1:1 in the order of a hash of seed and name.

    Args:
        test: names of the test images where they are published; the others are divided 4:1.
    """
    free = [row for row, name in enumerate(names) if test is None or name not in test]
    free.sort(key=lambda row: blake2b(f"split/{seed}/{names[row]}".encode(), digest_size=16).digest())
    shares = SHARES if test is None else SHARES[:2]
    splits, start = ["test"] * len(names), 0
    for place, split in enumerate(SPLITS[: len(shares)]):
        end = len(free) * sum(shares[: place + 1]) // sum(shares)
        for row in free[start:end]:
            splits[row] = split
        start = end
    return splits
