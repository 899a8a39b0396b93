"""One split of composed retrieval: images, concepts, combinations to ask for, and queries.

data = find_compositions("data/composed", "test", k=2)
data.targets(data.tuples[0])                # numbers of the images that have all of its concepts
queries = data.sampled_queries(10_000)      # or data.queries, where the data has published ones
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from probemb.data.boxes.geometry import Box
from probemb.data.compositions.concepts import Crop, CroppedImages, Crops, Holdings
from probemb.data.image_loader import Images
from probemb.data.randomness import stream_of
from probemb.errors import UserError

KINDS = ("images", "mixed", "texts")
QUERIES = 10_000  # as many as the published file of test queries has


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
    """Parts, and the concepts that a correct target has."""

    parts: tuple[Part, ...]
    concepts: tuple[int, ...]

    @property
    def kind(self) -> str:
        """One of KINDS: "images" alone, "texts" alone, or "mixed"."""
        images = sum(part.is_image for part in self.parts)
        return "texts" if not images else "images" if images == len(self.parts) else "mixed"


class Example(NamedTuple):
    """A training example: the parts of a query, one correct target, and the concepts that a target has."""

    parts: tuple[Part, ...]
    target: int
    concepts: tuple[int, ...]


@dataclass(frozen=True)
class Compositions:
    """N images of one split, C concepts, and T combinations of k concepts.

    Attributes:
        source: the path given, for messages; split: its name.
        images: the targets (gallery), opened by number.
        concepts: the text of each concept.
        holds: the concepts of each image, and the images of each concept.
        crops: for each concept what image queries are cut from.
        tuples: (T, k) int64, to train on or to ask for.
        unseen: (U, k) further combinations with targets here, which are not among the `tuples` of any split.
        infeasible: (F, k) combinations that no image of any split has.
        queries: published test queries; None: draw them with `sampled_queries`.
        notes: sentences about what the data lacks.
    """

    source: str
    split: str | None
    images: Images
    concepts: tuple[str, ...]
    holds: Holdings
    crops: tuple[Crops, ...]
    tuples: np.ndarray
    unseen: np.ndarray
    infeasible: np.ndarray
    queries: list[Query] | None = None
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.images)

    @property
    def k(self) -> int:
        """Parts of a query."""
        return self.tuples.shape[1]

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts with all words of text parts, of which a vocabulary is made."""
        return self.concepts

    @property
    def n_examples(self) -> int:
        """Different training examples to draw: one for each combination."""
        return len(self.tuples)

    def targets(self, concepts: Sequence[int] | np.ndarray) -> np.ndarray:
        """Images that have all of the concepts, ascending, (R,) int64."""
        return self.holds.with_all(concepts)

    def matches(self, concepts: np.ndarray, images: np.ndarray) -> np.ndarray:
        """Mask of the images that have all concepts: (Q, c), (T,) -> (Q, T) bool."""
        return self.holds.matches(concepts, images)

    def draw(self, example: int, random: np.random.RandomState) -> Example:
        """Parts and a target for combination `example`, as MPC draws them (supplementary A).

        The target is one of the images with all concepts. Each concept is its text or an image that has it, with equal
        odds; the image is another than the target where there is one.
        """
        concepts = tuple(self.tuples[example].tolist())
        targets = self.targets(concepts)
        if not len(targets):
            raise UserError(
                f"No image of {self.source}, split '{self.split}', has all of {self.named(concepts)}.",
                "Ask for combinations that every split has.",
            )
        target = int(targets[random.randint(len(targets))])
        as_image = random.randint(2, size=len(concepts)) == 1
        return Example(self._parts(concepts, as_image, random, [target]), target, concepts)

    def sampled_queries(self, number: int = QUERIES, seed: int = 0, tuples: np.ndarray | None = None) -> list[Query]:
        """So many test queries, a pure function of the data and the seed.

        Each is a combination, one after another, with text or image for every concept, all mixtures equally often. An
        image is one that does not have all of the concepts, where there is one: a query is not its own answer.

        Args:
            tuples: (T, k) other combinations, such as `unseen` or `infeasible`; by default `self.tuples`.
        """
        tuples = self.tuples if tuples is None else tuples
        found = []
        for row in range(number if len(tuples) else 0):
            concepts = tuple(tuples[row % len(tuples)].tolist())
            mixture = sum(divmod(row, len(tuples)))  # every combination meets every mixture in turn
            as_image = [mixture >> place & 1 for place in range(len(concepts))]
            parts = self._parts(concepts, as_image, stream_of("query", seed, row), self.targets(concepts))
            found.append(Query(parts, concepts))
        return found

    def _parts(self, concepts, as_image, random: np.random.RandomState, without) -> tuple[Part, ...]:
        """The text of each concept, or a crop of an image that is not among those `without`."""
        return tuple(
            Part(concept, *self.crops[concept].draw(random, without)) if image else self.text_part(concept)
            for concept, image in zip(concepts, as_image)
        )

    def text_part(self, concept: int) -> Part:
        return Part(concept, text=self.concepts[concept])

    def digest(self) -> str:
        """A fingerprint of everything that examples depend on but the pixels."""
        found = hashlib.sha256("\0".join(place.name for place in self.images.places).encode(errors="replace"))
        found.update("\0".join(self.concepts).encode(errors="replace"))
        found.update(np.ascontiguousarray(self.tuples).tobytes() + self.holds.pairs.tobytes())
        for crops in self.crops:
            found.update(crops.owners.tobytes() + crops.boxes.tobytes())
        return found.hexdigest()[:16]

    def named(self, concepts: Sequence[int]) -> str:
        """The concepts' texts, for messages."""
        return " + ".join(self.concepts[int(concept)] for concept in concepts)


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
    """Collect the inputs to encode for these queries, which have equally many parts."""
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
    return QueryParts(CroppedImages.of(images, crops), list(texts), np.array(rows, np.int64).reshape(len(queries), -1))
