"""Images and phrases with the boxes that these mean, as all readers return them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import NamedTuple

from probemb.data.boxes.geometry import Box
from probemb.data.image_loader import Images

MAX_PHRASES = 5_000  # of an image
MAX_TEXT = 1_000  # characters of a phrase
MAX_SIDE = 100_000  # pixels of an image


class Phrase(NamedTuple):
    """A phrase and what it means.

    Attributes:
        image: index of its image; text: without marks.
        kind: its type, such as "people" or "clothing/bodyparts"; "" where the data has none.
        boxes: at least one.
    """

    image: int
    text: str
    kind: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class PhraseDataset:
    """N images and their phrases.

    Attributes:
        images: where they lie; image_ids: their names; sizes: (width, height) in pixels, as the annotations have them.
        phrases: image after image; without_box: number of phrases that mean nothing that has a box, which are left out.
        split: the one that was asked for; None: everything. source: the path given, for messages.
    """

    images: Images
    image_ids: list[str]
    sizes: list[tuple[int, int]]
    phrases: list[Phrase]
    without_box: int = 0
    split: str | None = None
    source: str = ""

    def __len__(self) -> int:
        return len(self.image_ids)

    def only(self, rows: Sequence[int]) -> PhraseDataset:
        """The same data with these images alone, in this order."""
        place = {row: i for i, row in enumerate(rows)}
        kept = [phrase._replace(image=place[phrase.image]) for phrase in self.phrases if phrase.image in place]
        return replace(
            self,
            images=replace(self.images, places=[self.images.places[row] for row in rows]),
            image_ids=[self.image_ids[row] for row in rows],
            sizes=[self.sizes[row] for row in rows],
            phrases=sorted(kept, key=lambda phrase: phrase.image),
        )

    def by_image(self) -> list[list[int]]:
        """For each image the indices of its phrases."""
        rows: list[list[int]] = [[] for _ in self.image_ids]
        for i, phrase in enumerate(self.phrases):
            rows[phrase.image].append(i)
        return rows


def name_hash(name: str) -> int:
    """The order in which images are sampled."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")
