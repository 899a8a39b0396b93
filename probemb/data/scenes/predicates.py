"""Meaning of captions of the synthetic world: the scenes they fit, and their share of all scenes.

- "a red circle" fits every scene with at least one red circle; there may be other objects. Several objects that are
  named together must be different ones.
- A number is exact: "two circles" is exactly two circles (other objects may be there), "two shapes" is two objects in
  all. "several" is two or more.
- "large" is large or huge, "huge" and "close-up" are only huge.
- "left of", "above", … compare the columns or rows of two objects, of which there are two each.
- "photo", "drawing", "dark", "bright", "blurry", "pixelated" state how the image was made.
"""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache

import numpy as np

from probemb.data.scenes.world import (
    CAMERA,
    COLOURS,
    MAX_OBJECTS,
    OBJECT_COUNTS,
    PLACES,
    RELATIONS,
    SHAPES,
    SIZES,
    Scene,
    Thing,
    layouts,
)

SIZE_WORDS = {"small": ("small",), "large": ("large", "huge"), "huge": ("huge",)}
NO_CELL = -1  # of an object that is not there


@dataclass(frozen=True)
class Pattern:
    """Stated attributes of one object; None: not stated. `size` is a key of SIZE_WORDS, `place` of PLACES."""

    shape: str | None = None
    colour: str | None = None
    size: str | None = None
    place: str | None = None

    def fits(self, thing: Thing) -> bool:
        return (
            self.shape in (None, thing.shape)
            and self.colour in (None, thing.colour)
            and (self.size is None or thing.size in SIZE_WORDS[self.size])
            and (self.place is None or thing.cell in PLACES[self.place])
        )


@dataclass(frozen=True)
class Predicate:
    """Everything that a caption states: a conjunction.

    things up to three different objects relation holds between the first two of them (a key of RELATIONS) number (low,
    high): how many objects of the scene fit things[0], the only pattern then; inclusive medium, light, focus camera
    settings (CAMERA)
    """

    things: tuple[Pattern, ...] = ()
    relation: str | None = None
    number: tuple[int, int] | None = None
    medium: str | None = None
    light: str | None = None
    focus: str | None = None

    def __post_init__(self):
        known = (
            all(
                pattern.shape in (None, *SHAPES)
                and pattern.colour in (None, *COLOURS)
                and pattern.size in (None, *SIZE_WORDS)
                and pattern.place in (None, *PLACES)
                for pattern in self.things
            )
            and self.relation in (None, *RELATIONS)
            and all(getattr(self, setting) in (None, *values) for setting, values in CAMERA.items())
        )
        if not known or len(self.things) > MAX_OBJECTS:
            raise ValueError(f"unknown attribute or too many objects: {self}")
        if (self.relation and len(self.things) < 2) or (self.number and (len(self.things) != 1)):
            raise ValueError("a relation needs two objects, a number exactly one pattern")

    def to_json(self) -> dict:
        """A compact description that `predicate_from_json` reads."""
        row = {name: value for name, value in asdict(self).items() if value not in (None, ())}
        if self.things:
            row["things"] = [{k: v for k, v in asdict(thing).items() if v is not None} for thing in self.things]
        if self.number:
            row["number"] = list(self.number)
        return row


def predicate_from_json(row: dict) -> Predicate:
    """Inverse of `Predicate.to_json`. Raises ValueError."""
    try:
        row = dict(row)
        things = tuple(Pattern(**thing) for thing in row.pop("things", ()))
        number = row.pop("number", None)
        if number is not None:
            low, high = number
            number = (int(low), int(high))
        return Predicate(things, number=number, **row)
    except TypeError as error:
        raise ValueError(f"not the description of a caption: {error}") from None


@dataclass(frozen=True)
class Mention:
    """A noun phrase of a caption.

    Attributes:
        start, end: its place in the caption's text.
        things: the objects that it means; none for a phrase about the picture, such as "a dark photo".
        pattern: what it states of each of them.
    """

    start: int
    end: int
    things: tuple[Thing, ...] = ()
    pattern: Pattern = Pattern()


@dataclass(frozen=True)
class Caption:
    """A text and its exact meaning; `mentions` are its noun phrases in order, known where it is drawn."""

    text: str
    predicate: Predicate
    mentions: tuple[Mention, ...] = field(default=(), compare=False)


def match_matrix(scenes: Sequence[Scene], captions: Sequence[Caption | Predicate]) -> np.ndarray:
    """Mask of the captions that are true of scenes: (N scenes, M captions) bool."""
    predicates = [_predicate(caption) for caption in captions]
    distinct = {predicate: i for i, predicate in enumerate(dict.fromkeys(predicates))}
    columns = np.empty((len(scenes), len(distinct)), dtype=bool)
    codes, cells = _tabulate(scenes)
    camera = {name: np.array([getattr(one, name) for one in scenes]) for name in CAMERA}
    patterns = {pattern for predicate in distinct for pattern in predicate.things}
    fits = {pattern: _pattern_table(pattern)[codes] & (cells != NO_CELL) for pattern in patterns}  # (N, 3) each
    places = {place: np.isin(cells, allowed) for place, allowed in PLACES.items()}
    for pattern in patterns:
        if pattern.place:
            fits[pattern] &= places[pattern.place]
    for predicate, column in distinct.items():
        found = _objects_fit(predicate, [fits[pattern] for pattern in predicate.things], cells)
        for name in CAMERA:
            if getattr(predicate, name) is not None:
                found = found & (camera[name] == getattr(predicate, name))
        columns[:, column] = found
    return columns[:, [distinct[predicate] for predicate in predicates]]


@lru_cache(maxsize=100_000)
def _share(stated: Predicate) -> float:
    camera = 1.0
    for name, values in CAMERA.items():
        if getattr(stated, name) is not None:
            camera *= values[getattr(stated, name)]
    # Objects matter only through the patterns they fit. Shape and colour are independent of size and place, so their
    # 64 combinations fall into a few classes: the sets of patterns whose shape and colour they have.
    what = [Pattern(shape=p.shape, colour=p.colour) for p in stated.things]
    where = [Pattern(size=p.size, place=p.place) for p in stated.things]
    classes: dict[tuple[bool, ...], float] = {}
    for shape, colour in itertools.product(SHAPES, COLOURS):
        fits = tuple(p.fits(Thing(shape, colour, "", NO_CELL)) for p in what)
        classes[fits] = classes.get(fits, 0.0) + 1 / (len(SHAPES) * len(COLOURS))
    total = 0.0
    for count, share in OBJECT_COUNTS.items():
        spots = layouts(count)
        kinds = list(itertools.product(classes, repeat=count))
        size = (len(kinds), len(spots), count, len(stated.things))
        kind_fits = np.array(kinds, dtype=bool).reshape(size[0], 1, *size[2:])
        spot_fits = [[[p.fits(Thing("", "", *spot)) for p in where] for spot in row] for _, row in spots]
        fits = (kind_fits & np.array(spot_fits, dtype=bool).reshape(1, *size[1:])).reshape(size[0] * size[1], *size[2:])
        cells = np.tile([[cell for _, cell in row] for _, row in spots], (size[0], 1))
        found = _objects_fit(stated, list(np.moveaxis(fits, 2, 0)), cells)
        kind_share = np.prod([[classes[one] for one in kind] for kind in kinds], axis=1)
        total += share * float(kind_share @ found.reshape(size[:2]) @ [probability for probability, _ in spots])
    return camera * total


def ambiguity(caption: Caption | Predicate) -> float:
    """The true share, in [0, 1], of the world's images that the caption fits: exact, by enumeration."""
    return _share(_predicate(caption))


def _predicate(caption: Caption | Predicate) -> Predicate:
    return caption.predicate if isinstance(caption, Caption) else caption


def _objects_fit(stated: Predicate, fits: list[np.ndarray], cells: np.ndarray) -> np.ndarray:
    """Check the objects of K scenes against a statement. fits: per pattern (K, n) bool; cells (K, n). -> (K,) bool."""
    if stated.number:
        low, high = stated.number
        found = fits[0].sum(axis=1)
        return (low <= found) & (found <= high)
    result = np.zeros(len(cells), dtype=bool)
    for chosen in itertools.permutations(range(cells.shape[1]), len(fits)):
        found = np.ones(len(cells), dtype=bool)
        for fit, position in zip(fits, chosen):
            found &= fit[:, position]
        if stated.relation:
            found &= RELATIONS[stated.relation](cells[:, chosen[0]], cells[:, chosen[1]])
        result |= found
    return result


def _tabulate(scenes: Sequence[Scene]) -> tuple[np.ndarray, np.ndarray]:
    """Objects as numbers: codes of (shape, colour, size), and cells (NO_CELL: no object), both (N, MAX_OBJECTS)."""
    codes = np.zeros((len(scenes), MAX_OBJECTS), dtype=np.int64)
    cells = np.full((len(scenes), MAX_OBJECTS), NO_CELL)
    for row, one in enumerate(scenes):
        for column, thing in enumerate(one.things):
            codes[row, column] = _CODES[thing.shape, thing.colour, thing.size]
            cells[row, column] = thing.cell
    return codes, cells


_KINDS = list(itertools.product(SHAPES, COLOURS, SIZES))
_CODES = {kind: code for code, kind in enumerate(_KINDS)}


@lru_cache(maxsize=10_000)
def _pattern_table(pattern: Pattern) -> np.ndarray:
    """Mask of the codes whose object has the stated shape, colour and size: (codes,) bool."""
    anywhere = Pattern(pattern.shape, pattern.colour, pattern.size)
    return np.array([anywhere.fits(Thing(*kind, cell=NO_CELL)) for kind in _KINDS])
