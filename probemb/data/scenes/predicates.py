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
from dataclasses import dataclass, field
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
    Scene,
    Thing,
    kind_label,
    layouts,
    scene_from_json,
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

    Attributes:
        things: up to three different objects.
        relation: holds between the first two of them, a key of RELATIONS.
        number: (low, high), inclusive: how many objects of the scene fit things[0], the only pattern then.
        medium, light, focus: camera settings, of CAMERA.
    """

    things: tuple[Pattern, ...] = ()
    relation: str | None = None
    number: tuple[int, int] | None = None
    medium: str | None = None
    light: str | None = None
    focus: str | None = None


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
    predicates = list(map(_predicate, captions))
    kinds = {thing: i for i, thing in enumerate(dict.fromkeys(thing for one in scenes for thing in one.things))}
    rows = np.full((len(scenes), MAX_OBJECTS), len(kinds))  # (N, 3) places in `kinds`; its length: no object
    for row, one in zip(rows, scenes):
        row[: len(one.things)] = [kinds[thing] for thing in one.things]
    cells = np.array([*(thing.cell for thing in kinds), NO_CELL])[rows]
    patterns = dict.fromkeys(pattern for predicate in predicates for pattern in predicate.things)
    fits = {pattern: np.array([*map(pattern.fits, kinds), False])[rows] for pattern in patterns}  # (N, 3) each
    camera = {name: np.array([getattr(one, name) for one in scenes]) for name in CAMERA}
    distinct = {predicate: i for i, predicate in enumerate(dict.fromkeys(predicates))}
    columns = np.empty((len(scenes), len(distinct)), dtype=bool)
    for predicate, column in distinct.items():
        found = _objects_fit(predicate, [fits[pattern] for pattern in predicate.things], cells)
        for name in CAMERA:
            if (stated := getattr(predicate, name)) is not None:
                found = found & (camera[name] == stated)
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


# ------------------------------------------------------------------------------------------------------------ KEY.json

_STATED = {"shape": SHAPES, "colour": COLOURS, "size": SIZE_WORDS, "place": PLACES, "relation": RELATIONS, **CAMERA}


def sample_to_json(scene: Scene, captions: Sequence[Caption]) -> dict:
    """The KEY.json of an image: captions and their predicates, each object's index into `class_names()`, the scene."""
    return {
        "captions": [caption.text for caption in captions],
        "labels": [kind_label(thing) for thing in scene.things],
        "scene": scene.to_json(),
        "predicates": [_compact(caption.predicate) for caption in captions],
    }


def _compact(stated: Predicate | Pattern) -> dict:
    row = {name: value for name, value in vars(stated).items() if value not in (None, ())}
    if "things" in row:
        row["things"] = list(map(_compact, stated.things))
    return row | ({"number": list(stated.number)} if "number" in row else {})


def sample_from_json(row: dict) -> tuple[Scene, list[Caption]]:
    """Scene and captions of a KEY.json, from which `match_matrix` gives the true matches. Raises ValueError."""
    try:
        texts = zip(row["captions"], row["predicates"], strict=True)
        captions = [Caption(text, _predicate_from_json(dict(stated))) for text, stated in texts]
        return scene_from_json(row["scene"]), captions
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a sample of the synthetic world: {error}") from None


def _predicate_from_json(row: dict) -> Predicate:
    """Raises ValueError, TypeError."""
    things = tuple(Pattern(**thing) for thing in row.pop("things", ()))
    number = row.pop("number", None)
    found = Predicate(things, number=number and tuple(map(int, number)), **row)
    stated = [(name, value) for one in (found, *things) for name, value in vars(one).items() if name in _STATED]
    if not all(value is None or value in _STATED[name] for name, value in stated):
        raise ValueError(f"unknown attribute: {row}")
    if len(things) > MAX_OBJECTS or (found.relation and len(things) < 2) or (number and len(things) * len(number) != 2):
        raise ValueError("a relation needs two objects, a number exactly one pattern")
    return found
