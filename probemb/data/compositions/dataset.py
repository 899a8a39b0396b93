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

from probemb.data.compositions.crops import Crops
from probemb.data.compositions.holdings import Holdings
from probemb.data.compositions.queries import Part, Query, image_part, kind_of
from probemb.data.image_loader import Images
from probemb.data.randomness import stream_of
from probemb.errors import UserError

QUERIES = 10_000  # as many as the published file of test queries has


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
        holds: image -> frozenset of its concepts, with the inverse lists.
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

    def __post_init__(self):
        asked = np.unique(np.concatenate([one.ravel() for one in (self.tuples, self.unseen, self.infeasible)]))
        without = [self.concepts[concept] for concept in asked if not len(self.crops[concept])]
        if without:
            raise UserError(
                f"{self.source}, split '{self.split}', has nothing to cut image queries of '{without[0]}' from.",
                "Leave that concept out, or use more data.",
            )

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
        parts = (
            image_part(concept, self.crops[concept].draw(random, [target])) if image else self.text_part(concept)
            for concept, image in zip(concepts, as_image)
        )
        return Example(tuple(parts), target, concepts)

    def text_part(self, concept: int) -> Part:
        return Part(concept, text=self.concepts[concept])

    def sampled_queries(self, number: int = QUERIES, seed: int = 0, tuples: np.ndarray | None = None) -> list[Query]:
        """So many test queries, a pure function of the data and the seed.

        Each is a combination, one after another, with text or image for every concept, all mixtures equally often. An
        image is one that does not have all of the concepts, where there is one: a query is not its own answer.

        Args:
            tuples: (T, k) other combinations, such as `unseen` or `infeasible`; by default `self.tuples`.
        """
        tuples = self.tuples if tuples is None else tuples
        if not len(tuples) or number < 1:
            return []
        k = tuples.shape[1]
        found = []
        for row in range(number):
            random = stream_of("query", seed, row)
            concepts = tuple(tuples[row % len(tuples)].tolist())
            mixture = sum(divmod(row, len(tuples))) % 2**k  # every combination meets every mixture in turn
            answers = self.targets(concepts)
            parts = tuple(
                image_part(concept, self.crops[concept].draw(random, answers))
                if mixture >> place & 1
                else self.text_part(concept)
                for place, concept in enumerate(concepts)
            )
            found.append(Query(parts, concepts, kind_of(parts)))
        return found

    def digest(self) -> str:
        """A fingerprint of everything that examples depend on but the pixels."""
        found = hashlib.sha256("\0".join(place.name for place in self.images.places).encode(errors="replace"))
        found.update("\0".join(self.concepts).encode(errors="replace"))
        found.update(np.ascontiguousarray(self.tuples).tobytes() + self.holds.pairs().tobytes())
        for crops in self.crops:
            found.update(crops.owners.tobytes() + crops.boxes.tobytes())
        return found.hexdigest()[:16]

    def named(self, concepts: Sequence[int]) -> str:
        """The concepts' texts, for messages."""
        return " + ".join(self.concepts[int(concept)] for concept in concepts)
