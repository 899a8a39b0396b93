"""Queries of several parts, each an image or a text, and the table that an evaluation encodes them from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from probemb.data.boxes.geometry import Box
from probemb.data.compositions.crops import Crop, CroppedImages
from probemb.data.image_loader import Images

KINDS = ("images", "mixed", "texts")


class Part(NamedTuple):
    """One part of a query: an image (its index, and a box in its pixels or None for all of it), or a text.

    Attributes:
        concept: the number of the concept that it stands for; -1 if it is not one, as for changes of attributes.
    """

    concept: int
    image: int = -1
    box: Box | None = None
    text: str | None = None

    @property
    def is_image(self) -> bool:
        return self.text is None


class Query(NamedTuple):
    """Parts, and the concepts that a correct target has.

    Attributes:
        kind: one of KINDS: "images" alone, "texts" alone, or "mixed".
    """

    parts: tuple[Part, ...]
    concepts: tuple[int, ...]
    kind: str


def image_part(concept: int, crop: Crop) -> Part:
    return Part(concept, crop.image, crop.box)


def kind_of(parts: Sequence[Part]) -> str:
    """One of KINDS."""
    images = sum(part.is_image for part in parts)
    return "texts" if not images else "images" if images == len(parts) else "mixed"


class QueryParts(NamedTuple):
    """The different parts of Q queries of k parts each; a part that several queries share is there once.

    Attributes:
        images: M crops and whole images, in a fixed order, each opened on its own: `ImageBatches` streams them.
        texts: T texts.
        rows: (Q, k) int64; r >= 0 is image r, r < 0 is text -r - 1.
    """

    images: CroppedImages
    texts: list[str]
    rows: np.ndarray


def query_parts(images: Images, queries: Sequence[Query]) -> QueryParts:
    """Collect the inputs to encode for these queries. Raises ValueError: they differ in their number of parts."""
    if len({len(query.parts) for query in queries}) > 1:
        raise ValueError("queries of different lengths in one table")
    crops: dict[Crop, int] = {}
    texts: dict[str, int] = {}
    rows = [
        [
            crops.setdefault(Crop(part.image, part.box), len(crops))
            if part.is_image
            else -texts.setdefault(part.text, len(texts)) - 1
            for part in query.parts
        ]
        for query in queries
    ]
    table = CroppedImages.of(images, crops)
    return QueryParts(table, list(texts), np.array(rows, dtype=np.int64).reshape(len(queries), -1))
