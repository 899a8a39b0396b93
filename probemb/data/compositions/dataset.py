"""Composed retrieval (MPC, §4.1): images with the concepts that each has, combinations of these, and queries."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
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
no_tuples = partial(np.empty, (0, 2), np.int64)


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
    """A text, or an image and a box in its pixels (None: all of it), for a concept (-1: a change of attributes)."""

    concept: int
    image: int = -1
    box: Box | None = None
    text: str | None = None

    @property
    def is_image(self) -> bool:
        return self.text is None


class Query(NamedTuple):
    """The concepts that a correct target has, and for training one of these targets."""

    parts: tuple[Part, ...]
    concepts: tuple[int, ...]
    target: int = -1

    @property
    def kind(self) -> str:
        """One of KINDS."""
        kinds = {"images" if part.is_image else "texts" for part in self.parts}
        return kinds.pop() if len(kinds) == 1 else "mixed"


@dataclass(frozen=True, kw_only=True)
class Compositions:
    """N images, the targets (gallery), C concepts, and T combinations of k concepts; as read, of all splits."""

    source: str  # the path given, for messages
    images: Images
    names: list[str]  # of the images, unique, COCO's id if it is known
    splits: list[str]  # of each image
    concepts: tuple[str, ...]  # their texts; a concept's number is its place
    held: list[list[int]]  # the concepts of each image, ascending
    # for each image (concept, box in its stored pixels) of image queries; None: all of it shows each of its concepts
    cut: list[list[tuple[int, Box]] | None]
    number: dict[int, int] = field(default_factory=dict)  # of each concept by its id in the data
    tuples: np.ndarray = field(default_factory=no_tuples)  # (T, k) int64, to train on or to ask for
    unseen: np.ndarray = field(default_factory=no_tuples)  # (U, k) not among the `tuples` of any split, with targets
    infeasible: np.ndarray = field(default_factory=no_tuples)  # (F, k) that no image of any split has
    queries: list[Query] | None = None  # published ones; None: draw them with `sampled_queries`
    notes: tuple[str, ...] = ()  # about what the data lacks

    def __post_init__(self):
        check_unique(self.names, "image", self.source)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def split(self) -> str:
        return self.splits[0]

    @property
    def k(self) -> int:
        return self.tuples.shape[1]

    @property
    def texts(self) -> tuple[str, ...]:
        """Of which a vocabulary is made."""
        return self.concepts

    @property
    def n_examples(self) -> int:
        """Different training examples to draw."""
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
        """Of each concept."""
        found: list[list[Crop]] = [[] for _ in self.concepts]
        for image, (own, crops) in enumerate(zip(self.held, self.cut)):
            for concept, box in ((one, None) for one in own) if crops is None else crops:
                found[concept].append(Crop(image, box))
        return list(map(Crops, found))

    def boxes(self) -> list[Crop]:
        """Every part of an image that a query may show, once."""
        asked = [Crop(part.image, part.box) for query in self.queries or () for part in query.parts if part.is_image]
        return sorted({crop for some in (asked, *self.crops) for crop in some if crop.box is not None})

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

    def of_split(self, split: str) -> "Compositions":
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
        """So many test queries of (T, k) combinations, by default `self.tuples`; a pure function of data and seed.

        Each is a combination, one after another, with text or image for every concept, all mixtures equally often. An
        image is one that does not have all of the concepts, where there is one: a query is not its own answer.
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
        return " + ".join(self.concepts[int(concept)] for concept in concepts)


CHANGE = "replace {} with {}"
Key = tuple[str, ...]  # a description without one of its words


@dataclass(frozen=True)
class AttributeChanges(Compositions):
    """Fashion200k: images with one description each, which is their concept; `tuples` are empty, k is 2.

    Descriptions that differ in one word are neighbours; a query is an image and "replace red with blue", its targets
    are all images with the changed description.
    """

    @cached_property
    def neighbours(self) -> dict[Key, set[int]]:
        """Descriptions without one word, each with the descriptions that they are of, at least two."""
        found: dict[Key, set[int]] = {}
        for number, text in enumerate(self.concepts):
            for key in _shortened(text):
                found.setdefault(key, set()).add(number)
        return {key: of for key, of in found.items() if len(of) > 1}

    @cached_property
    def sources(self) -> list[int]:
        """Images whose description has a neighbour."""
        known = set().union(*self.neighbours.values())
        return [image for image, (concept,) in enumerate(self.held) if concept in known]

    @property
    def texts(self) -> tuple[str, ...]:
        return *self.concepts, CHANGE.format("", "")

    @property
    def n_examples(self) -> int:
        return len(self.sources)

    def draw(self, example: int, random: np.random.RandomState) -> Query:
        """A source image, one of the changes that lead to a description with images, and one of those images."""
        source = self.sources[example]
        (concept,) = self.held[source]
        keys = sorted(key for key in _shortened(self.concepts[concept]) if key in self.neighbours)
        key = keys[random.randint(len(keys))]
        others = sorted(self.neighbours[key] - {concept})
        changed = others[random.randint(len(others))]
        targets = self.targets([changed])
        target = int(targets[random.randint(len(targets))])
        return Query(self.change(source, changed), (changed,), target)

    def change(self, source: int, changed: int) -> tuple[Part, Part]:
        """The image, and "replace x with y": the first words that the other description has not, as TIRG has it."""
        (concept,) = self.held[source]
        a, b = self.concepts[concept].split(), self.concepts[changed].split()
        before = next((word for word in a if word not in b), a[-1])
        after = next((word for word in b if word not in a), b[-1])
        return Part(concept, source), Part(-1, text=CHANGE.format(before, after))

    def sampled_queries(self, number: int = QUERIES, seed: int = 0, tuples: np.ndarray | None = None) -> list[Query]:
        """So many changes, drawn as for training. `tuples` is of no meaning here."""
        number = min(number, self.n_examples)
        rows = ((row * self.n_examples // number, stream_of("query", seed, row)) for row in range(number))
        return [self.draw(*row)._replace(target=-1) for row in rows]


def _shortened(text: str) -> set[Key]:
    """A description without each of its words in turn."""
    words = tuple(text.split())
    return {words[:place] + words[place + 1 :] for place in range(len(words))}


@dataclass(kw_only=True)
class CroppedImages(Images):
    """Crops of `whole` as images: place i is that of the image which crop i is cut from."""

    whole: Images
    crops: list[Crop]

    def open(self, index: int) -> Image.Image:
        return self.whole.part(*self.crops[index])


def crop_images(images: Images, crops: Sequence[Crop]) -> CroppedImages:
    """Crops as images, named by image and box."""

    def place(image: int, box: Box | None) -> Place:
        found = images.places[image]
        return found if box is None else found._replace(name=f"{found.name} {tuple(round(at) for at in box)}")

    places, whole = [place(*crop) for crop in crops], replace(images, draft=None)
    return CroppedImages(places=places, source=images.source, whole=whole, crops=list(crops))


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
    return crop_images(images, list(crops)), list(texts), np.array(rows, np.int64).reshape(len(queries), -1)
