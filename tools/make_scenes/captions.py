"""True captions of a scene, from exact to vague, and their meaning: the scenes they fit, and their share of all scenes.

- "a red circle" fits every scene with at least one red circle; there may be other objects. Several objects that are
  named together must be different ones.
- A number is exact: "two circles" is exactly two circles (other objects may be there), "two shapes" is two objects in
  all. "several" is two or more.
- "large" is large or huge, "huge" and "close-up" are only huge.
- "left of", "above", … compare the columns or rows of two objects, of which there are two each.
- "photo", "drawing", "dark", "bright", "blurry", "pixelated" state how the image was made. "good", "nice", "cool" and
  "picture" state nothing.

So there are no false negatives, and a learned uncertainty can be compared with the true one. Words of zero-shot prompts
are true or false of a scene here: a prompt that states something rare fits few images.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tools.make_scenes.world import (
    CAMERA,
    COLOURS,
    MAX_OBJECTS,
    OBJECT_COUNTS,
    PLACES,
    RELATIONS,
    SHAPES,
    Scene,
    Thing,
    layouts,
    pick,
    shuffled,
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


class Mention(NamedTuple):
    """A noun phrase, the objects that it means (none for one about the picture, such as "a dark photo"), and what it
    states of each of them.
    """

    text: str
    things: tuple[Thing, ...] = ()
    pattern: Pattern = Pattern()


@dataclass(frozen=True)
class Caption:
    """Noun phrases and the words between them, and their exact meaning, which the text alone determines."""

    pieces: tuple[str | Mention, ...]
    predicate: Predicate

    @property
    def text(self) -> str:
        return "".join(piece if isinstance(piece, str) else piece.text for piece in self.pieces)


# ------------------------------------------------------------------------------------------------------------- meaning


def match_matrix(scenes: Sequence[Scene], stated: Sequence[Predicate]) -> np.ndarray:
    """Mask of the statements that are true of scenes: (N scenes, M statements) bool."""
    kinds = {thing: i for i, thing in enumerate(dict.fromkeys(thing for one in scenes for thing in one.things))}
    rows = np.full((len(scenes), MAX_OBJECTS), len(kinds))  # (N, 3) places in `kinds`; its length: no object
    for row, one in zip(rows, scenes):
        row[: len(one.things)] = [kinds[thing] for thing in one.things]
    cells = np.array([*(thing.cell for thing in kinds), NO_CELL])[rows]
    patterns = dict.fromkeys(pattern for predicate in stated for pattern in predicate.things)
    fits = {pattern: np.array([*map(pattern.fits, kinds), False])[rows] for pattern in patterns}  # (N, 3) each
    camera = {name: np.array([getattr(one, name) for one in scenes]) for name in CAMERA}
    distinct = {predicate: i for i, predicate in enumerate(dict.fromkeys(stated))}
    columns = np.empty((len(scenes), len(distinct)), dtype=bool)
    for predicate, column in distinct.items():
        found = _objects_fit(predicate, [fits[pattern] for pattern in predicate.things], cells)
        for name in CAMERA:
            if (value := getattr(predicate, name)) is not None:
                found = found & (camera[name] == value)
        columns[:, column] = found
    return columns[:, [distinct[predicate] for predicate in stated]]


@lru_cache(maxsize=100_000)
def ambiguity(stated: Predicate) -> float:
    """The true share, in [0, 1], of the world's images that the statement fits: exact, by enumeration."""
    camera = 1.0
    for name, odds in CAMERA.items():
        if getattr(stated, name) is not None:
            camera *= odds[getattr(stated, name)]
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
        spot_fits = [[[p.fits(Thing("", "", *spot)) for p in where] for spot in row] for row in spots]
        fits = (kind_fits & np.array(spot_fits, dtype=bool).reshape(1, *size[1:])).reshape(size[0] * size[1], *size[2:])
        cells = np.tile([[cell for _, cell in row] for row in spots], (size[0], 1))
        found = _objects_fit(stated, list(np.moveaxis(fits, 2, 0)), cells)
        kind_share = np.prod([[classes[one] for one in kind] for kind in kinds], axis=1)
        total += share * float(kind_share @ found.reshape(size[:2]) @ list(spots.values()))
    return camera * total


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


def write_truth(file: Path, ids: Sequence[str], scenes: Sequence[Scene], captions: Sequence[Sequence[Caption]]) -> None:
    """Write what is true of images, as `probemb.data.captions.find` reads it; captions: of each image."""
    stated = {caption.text: caption.predicate for row in captions for caption in row}
    matches = match_matrix(scenes, list(stated.values()))
    shares = [ambiguity(predicate) for predicate in stated.values()]
    np.savez_compressed(file, images=ids, texts=list(stated), matches=matches, ambiguity=shares)


# ------------------------------------------------------------------------------------------------------------- writing

_NUMBERS = {1: "one", 2: "two", 3: "three"}
_PLACE_WORDS = {"left": "on the left", "right": "on the right", "top": "at the top", "bottom": "at the bottom"}
_PLACE_WORDS["middle"] = "in the middle"
_SIZE_WORDS = {"small": ("small",), "large": ("large", "large", "big"), "huge": ("huge",)}
_CAMERA_WORDS = {
    "photo": ("photo",),
    "drawing": ("drawing", "sketch", "doodle"),
    None: ("picture", "image"),  # of any medium
    "dark": ("dark",),
    "bright": ("bright",),
    "blurry": ("blurry",),
    "pixelated": ("pixelated", "low resolution"),
}


def draw_captions(scene: Scene, count: int = 5) -> list[Caption]:
    """`count` true captions of the scene, from exact to vague; a pure function of the scene."""
    draw = random.Random(f"captions {scene.seed}")
    writers = (_exact, _without_sizes, _one_object, _one_attribute, _vague)
    levels = [round(i * (len(writers) - 1) / max(count - 1, 1)) for i in range(count)]
    return [writers[level](scene, draw) for level in levels]


def _exact(scene: Scene, draw: random.Random) -> Caption:
    """Every object with shape, colour and size; their relation; the camera settings."""
    things = shuffled(draw, scene.things)
    patterns = [Pattern(thing.shape, thing.colour, thing.size) for thing in things]
    return _write_list(things, patterns, _true_camera(scene, draw, 0.7, 0.7), draw, place=0.6, relation=1.0)


def _without_sizes(scene: Scene, draw: random.Random) -> Caption:
    """Every object with shape and colour; sometimes their relation."""
    things = shuffled(draw, scene.things)
    patterns = [Pattern(thing.shape, thing.colour) for thing in things]
    return _write_list(things, patterns, _true_camera(scene, draw, 0.4, 0.3), draw, place=0.4, relation=0.5)


def _one_object(scene: Scene, draw: random.Random) -> Caption:
    """Shape and colour of one object, often as a prompt."""
    thing = pick(draw, scene.things)
    pattern = Pattern(thing.shape, thing.colour, thing.size if draw.random() < 0.25 else None)
    camera = _true_camera(scene, draw, 0.6, 0.4)
    if draw.random() < 0.1 and sum(map(pattern.fits, scene.things)) == 1:
        return _write_number(scene, pattern, camera, draw)
    return _write_list([thing], [pattern], camera, draw)


def _one_attribute(scene: Scene, draw: random.Random) -> Caption:
    """A shape, a colour or a size alone; two objects by one attribute each; several objects of one kind."""
    chosen = shuffled(draw, scene.things)[:2]
    camera = _true_camera(scene, draw, 0.3, 0.2)
    by_shape = draw.random() < 0.5
    patterns = [Pattern(shape=thing.shape) if by_shape else Pattern(colour=thing.colour) for thing in chosen]
    if len(chosen) == 2 and draw.random() < 0.5:
        if patterns[0] == patterns[1] or draw.random() < 0.25:
            return _write_number(scene, patterns[0], camera, draw)
        return _write_list(chosen, patterns, camera, draw, relation=0.5)
    if draw.random() < 0.3:
        patterns[0] = Pattern(patterns[0].shape, patterns[0].colour, chosen[0].size)
    return _write_list(chosen[:1], patterns[:1], camera, draw, place=0.2)


def _vague(scene: Scene, draw: random.Random) -> Caption:
    """Only the number of objects, one unnamed object, or only the camera settings."""
    kind = draw.random()
    if kind < 0.55:
        return _write_number(scene, Pattern(), _true_camera(scene, draw, 0.3, 0.2), draw)
    if kind < 0.75:
        thing = pick(draw, scene.things)
        return _write_list([thing], [Pattern()], _true_camera(scene, draw, 0.4, 0.3), draw, place=0.3)
    camera = _true_camera(scene, draw, 1.0, 0.6)
    return Caption((Mention(_camera_words(camera, draw)),), Predicate(**camera))


def _write_list(
    things: Sequence[Thing], patterns: Sequence[Pattern], camera: dict[str, str], draw: random.Random,
    place: float = 0.0, relation: float = 0.0,
) -> Caption:  # fmt: skip
    """The objects by their patterns. place, relation: odds of stating a single one's place, the relation of two."""
    patterns, stated = list(patterns), None
    if len(things) == 1 and draw.random() < place:
        where = pick(draw, [name for name, cells in PLACES.items() if things[0].cell in cells])
        patterns[0] = replace(patterns[0], place=where)
    elif len(things) > 1 and draw.random() < relation:
        stated = pick(draw, [name for name, holds in RELATIONS.items() if holds(things[0].cell, things[1].cell)])
    predicate = Predicate(tuple(patterns), stated, **camera)
    adjectives, article = (), None
    prompt = bool(camera) or draw.random() < 0.15
    if prompt and len(patterns) == 1:
        if patterns[0].size == "huge":  # stated by the camera's words instead
            adjectives, patterns[0] = ("close-up",), replace(patterns[0], size=None)
        article = "the" if draw.random() < 0.3 else None
    names = [Mention(_noun_phrase(one, draw, article), (thing,), one) for one, thing in zip(patterns, things)]
    between = [f" {stated} ", ", and "] if stated else [", ", " and "][MAX_OBJECTS - len(names) :]
    pieces = [names[0], *itertools.chain(*zip(between, names[1:]))]
    return _finish(pieces, predicate, prompt, camera, draw, adjectives)


def _write_number(scene: Scene, pattern: Pattern, camera: dict[str, str], draw: random.Random) -> Caption:
    """The number of objects that fit the pattern: exact, or "several"."""
    meant = tuple(filter(pattern.fits, scene.things))
    several = len(meant) > 1 and draw.random() < 0.25
    number = (2, MAX_OBJECTS) if several else (len(meant), len(meant))
    text = _noun_phrase(pattern, draw, "several" if several else _NUMBERS[len(meant)])
    prompt = bool(camera) or draw.random() < 0.15
    predicate = Predicate((pattern,), number=number, **camera)
    return _finish([Mention(text, meant, pattern)], predicate, prompt, camera, draw)


def _noun_phrase(pattern: Pattern, draw: random.Random, determiner: str | None = None) -> str:
    """ "a small red circle at the top"; a number as determiner makes the plural."""
    words = [pick(draw, _SIZE_WORDS[pattern.size])] if pattern.size else []
    words += [pattern.colour] if pattern.colour else []
    noun = pattern.shape or pick(draw, ("shape", "shape", "object"))
    if determiner not in (None, "the", "one"):
        noun += "es" if noun == "cross" else "s"
    words.append(noun)
    words.insert(0, determiner or _article(words[0]))
    if pattern.place:
        words.append(_PLACE_WORDS[pattern.place])
    return " ".join(words)


def _true_camera(scene: Scene, draw: random.Random, medium: float, setting: float) -> dict[str, str]:
    """Some of the scene's camera settings, with these odds; light and focus only where they are special."""
    chances = {"medium": medium, "light": setting, "focus": setting}
    chosen = {name: getattr(scene, name) for name, chance in chances.items() if draw.random() < chance}
    return {name: value for name, value in chosen.items() if value not in ("normal", "sharp")}


def _camera_words(camera: dict[str, str], draw: random.Random, adjectives: Sequence[str] = ()) -> str:
    """ "a dark blurry photo"; without a medium "a dark picture"."""
    words = [pick(draw, _CAMERA_WORDS[camera[name]]) for name in ("light", "focus") if name in camera]
    if not words and draw.random() < 0.15:
        words = [pick(draw, ("good", "nice", "cool"))]
    words = [*words, *adjectives, pick(draw, _CAMERA_WORDS[camera.get("medium")])]
    return f"{_article(words[0])} {' '.join(words)}"


def _finish(
    pieces: list[str | Mention], predicate: Predicate, prompt: bool, camera: dict[str, str], draw: random.Random,
    adjectives: Sequence[str] = (),
) -> Caption:  # fmt: skip
    """The caption, after the camera's words if it is a prompt; sometimes with a full stop."""
    if prompt:
        pieces = [Mention(_camera_words(camera, draw, adjectives)), " of ", *pieces]
    return Caption((*pieces, ".") if draw.random() < 0.25 else tuple(pieces), predicate)


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"
