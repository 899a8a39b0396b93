"""Composed retrieval (MPC, §4.1): images with the concepts that each has, combinations of these, and queries.

data = find_compositions("data/composed", "test", k=2)
data.targets(data.tuples[0])                # numbers of the images that have all of its concepts
queries = data.sampled_queries(10_000)      # or data.queries, where the data has published ones
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from PIL import Image

from probemb.data.boxes import Box
from probemb.data.image_loader import Images, Place
from probemb.data.randomness import stream_of
from probemb.data.reading import check_unique, choose_split

SPLITS = ("train", "val", "test")
KINDS = ("images", "mixed", "texts")
QUERIES = 10_000  # as many as the published file of test queries has


def no_tuples() -> np.ndarray:
    return np.empty((0, 2), dtype=np.int64)


class Crop(NamedTuple):
    """An image, and a box (left, top, right, bottom) in its stored pixels; None: all of it."""

    image: int
    box: Box | None


class Crops(Sequence[Crop]):
    """The crops of one concept, image after image, kept as arrays."""

    def __init__(self, crops: Sequence[Crop]):
        self.owners = np.array([image for image, _ in crops], dtype=np.int64)
        boxes = [(np.nan,) * 4 if box is None else box for _, box in crops]
        self.boxes = np.array(boxes, dtype=np.float32).reshape(-1, 4)
        self.images, starts = np.unique(self.owners, return_index=True)  # each image once
        self._starts = [*starts.tolist(), len(crops)]

    def __len__(self) -> int:
        return len(self.owners)

    def __getitem__(self, row: int) -> Crop:
        box = self.boxes[row]
        return Crop(int(self.owners[row]), None if np.isnan(box[0]) else tuple(box.tolist()))

    def draw(self, random: np.random.RandomState, without: np.ndarray) -> Crop:
        """One image, uniformly, and one of its crops; not one of the images `without` while there are others."""
        allowed = np.flatnonzero(~among(self.images, without))
        chosen = int(allowed[random.randint(len(allowed))]) if len(allowed) else random.randint(len(self.images))
        return self[int(random.randint(self._starts[chosen], self._starts[chosen + 1]))]


def among(values: np.ndarray, ascending: np.ndarray) -> np.ndarray:
    """`np.isin` of ascending values, which takes many times longer for few of them: (n,), (m,) -> (n,) bool."""
    if not len(ascending):
        return np.zeros(len(values), dtype=bool)
    return ascending[np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)] == values


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
    """Parts, the concepts that a correct target has, and one of these targets, of training examples."""

    parts: tuple[Part, ...]
    concepts: tuple[int, ...]
    target: int = -1

    @property
    def kind(self) -> str:
        """One of KINDS: "images" alone, "texts" alone, or "mixed"."""
        images = sum(part.is_image for part in self.parts)
        return "texts" if not images else "images" if images == len(self.parts) else "mixed"


@dataclass(frozen=True, kw_only=True)
class Compositions:
    """N images, the targets (gallery), C concepts, and T combinations of k concepts; as read, of all splits.

    Attributes:
        source: the path given, for messages; notes: sentences about what the data lacks.
        images: where they lie; names: of each, unique, COCO's id if it is known; splits: of each.
        concepts: the text of each concept, whose number is its place; number: of each by its id in the data.
        held: the numbers of the concepts of each image, ascending.
        cut: for each image (concept, box in its stored pixels) of what image queries are cut from; None: all of the
            image shows each of its concepts.
        tuples: (T, k) int64, to train on or to ask for.
        unseen: (U, k) further combinations with targets here, which are not among the `tuples` of any split.
        infeasible: (F, k) combinations that no image of any split has.
        queries: published test queries; None: draw them with `sampled_queries`.
    """

    source: str
    images: Images
    names: list[str]
    splits: list[str]
    concepts: tuple[str, ...]
    held: list[list[int]]
    cut: list[list[tuple[int, Box]] | None]
    number: dict[int, int] = field(default_factory=dict)
    tuples: np.ndarray = field(default_factory=no_tuples)
    unseen: np.ndarray = field(default_factory=no_tuples)
    infeasible: np.ndarray = field(default_factory=no_tuples)
    queries: list[Query] | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self):
        check_unique(self.names, "image", self.source)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def split(self) -> str:
        """The name of the only one."""
        return self.splits[0]

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

    @cached_property
    def of_concept(self) -> list[np.ndarray]:
        """The images of each concept, ascending."""
        found: list[list[int]] = [[] for _ in self.concepts]
        for image, own in enumerate(self.held):
            for concept in own:
                found[concept].append(image)
        return [np.array(some, dtype=np.int64) for some in found]

    @cached_property
    def crops(self) -> list[Crops]:
        """For each concept what image queries of it are cut from."""
        found: list[list[Crop]] = [[] for _ in self.concepts]
        for image, (own, crops) in enumerate(zip(self.held, self.cut)):
            for concept, box in ((one, None) for one in own) if crops is None else crops:
                found[concept].append(Crop(image, box))
        return list(map(Crops, found))

    def targets(self, concepts: Sequence[int] | np.ndarray) -> np.ndarray:
        """Images that have all of the concepts, ascending, (R,) int64."""
        found, *others = sorted((self.of_concept[one] for one in concepts), key=len)
        for other in others:
            found = found[among(found, other)]
        return found

    def matches(self, concepts: np.ndarray, images: np.ndarray) -> np.ndarray:
        """Mask of the images that have all concepts of a query: (Q, c), (T,) -> (Q, T) bool."""
        used, columns = np.unique(concepts, return_inverse=True)
        held = np.stack([among(images, self.of_concept[one]) for one in used])
        return held[columns.reshape(np.shape(concepts))].all(axis=1)

    def of_split(self, split: str) -> Compositions:
        """The images of one split. Raises UserError: there is no such split."""
        choose_split(split, self.splits, self.source)
        rows = [row for row, name in enumerate(self.splits) if name == split]
        names, splits, held, cut, places = (
            [values[row] for row in rows]
            for values in (self.names, self.splits, self.held, self.cut, self.images.places)
        )
        others = tuple(f"{name}/" for name in SPLITS if name != split)
        bad = [one for one in self.images.bad if not one[0].startswith(others)]  # in no folder where splits are drawn
        images = replace(self.images, places=places, bad=bad)
        return replace(self, images=images, names=names, splits=splits, held=held, cut=cut)

    def draw(self, example: int, random: np.random.RandomState) -> Query:
        """Parts and a target for combination `example`, as MPC draws them (supplementary A).

        The target is one of the images with all concepts. Each concept is its text or an image that has it, with equal
        odds; the image is another than the target where there is one.
        """
        concepts = tuple(self.tuples[example].tolist())
        targets = self.targets(concepts)
        target = targets[[random.randint(len(targets))]]
        as_image = random.randint(2, size=len(concepts)) == 1
        return Query(self._parts(concepts, as_image, random, target), concepts, int(target[0]))

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

    def _parts(self, concepts, as_image, random: np.random.RandomState, without: np.ndarray) -> tuple[Part, ...]:
        """The text of each concept, or a crop of an image that is not among those `without`."""
        return tuple(
            Part(concept, *self.crops[concept].draw(random, without))
            if image
            else Part(concept, text=self.concepts[concept])
            for concept, image in zip(concepts, as_image)
        )

    def digest(self) -> str:
        """A fingerprint of everything that examples depend on but the pixels."""
        names = (place.name for place in self.images.places)
        found = hashlib.sha256("\0".join([*names, *self.concepts]).encode(errors="replace"))
        found.update(np.ascontiguousarray(self.tuples).tobytes())
        for images, crops in zip(self.of_concept, self.crops):
            found.update(images.tobytes() + crops.owners.tobytes() + crops.boxes.tobytes())
        return found.hexdigest()[:16]

    def named(self, concepts: Sequence[int]) -> str:
        """The concepts' texts, for messages."""
        return " + ".join(self.concepts[int(concept)] for concept in concepts)


# --------------------------------------------------------------------------------------------------- parts of queries


@dataclass(kw_only=True)
class CroppedImages(Images):
    """Crops as images: place i is that of the image which crop i is cut from.

    Attributes:
        whole: the images that they are cut from.
        crops: an image of `whole` for each place, and a box in its stored pixels, or None.
    """

    whole: Images
    crops: list[Crop]

    def open(self, index: int) -> Image.Image:
        """Decode one image and cut the crop out. Raises BadSample."""
        return self.whole.part(*self.crops[index])


def query_parts(images: Images, queries: Sequence[Query]) -> tuple[CroppedImages, list[str], np.ndarray]:
    """The inputs to encode for Q queries of k parts each; a part that several queries share is there once.

    Returns M crops and whole images; T texts; (Q, k) int64: r >= 0 is image r, r < 0 is text -r - 1.
    """
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

    def place(image: int, box: Box | None) -> Place:
        found = images.places[image]
        return found if box is None else found._replace(name=f"{found.name} {tuple(round(at) for at in box)}")

    places, whole = [place(*crop) for crop in crops], replace(images, draft=None)
    cropped = CroppedImages(places=places, source=images.source, whole=whole, crops=list(crops))
    return cropped, list(texts), np.array(rows, np.int64).reshape(len(queries), -1)
