"""Contents and distribution of the synthetic world: objects, camera, and the draw of a scene from a seed.

The distribution is small enough to be enumerated (`layouts`, uniform shapes and colours, independent camera settings),
so that the true ambiguity of a caption can be computed. The draw uses the same tables.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

SHAPES = ("circle", "square", "triangle", "diamond", "star", "cross", "ring", "heart")
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "white", "black")
SIZES = ("small", "large", "huge")  # huge: fills the picture, only where there is one object

# Places: four corners, numbered row by row, and the middle (only where there is one object).
CORNERS = (0, 1, 2, 3)
MIDDLE = 4
PLACES = {"left": (0, 2), "right": (1, 3), "top": (0, 1), "bottom": (2, 3), "middle": (MIDDLE,)}
RELATIONS = {  # name -> does it hold between corners a and b, numbers or arrays
    "left of": lambda a, b: a % 2 < b % 2,
    "right of": lambda a, b: a % 2 > b % 2,
    "above": lambda a, b: a // 2 < b // 2,
    "below": lambda a, b: a // 2 > b // 2,
}

OBJECT_COUNTS = {1: 0.5, 2: 0.3, 3: 0.2}
MAX_OBJECTS = max(OBJECT_COUNTS)
SINGLE_SIZES = {"small": 0.35, "large": 0.4, "huge": 0.25}
CAMERA = {  # independent of each other and of the objects
    "medium": {"photo": 0.8, "drawing": 0.2},
    "light": {"normal": 0.7, "dark": 0.15, "bright": 0.15},
    "focus": {"sharp": 0.76, "blurry": 0.12, "pixelated": 0.12},
}

_Choice = TypeVar("_Choice")


@dataclass(frozen=True)
class Thing:
    """One object of a scene. `cell` is its place: 0..3 the corners row by row, 4 the middle."""

    shape: str
    colour: str
    size: str
    cell: int


@dataclass(frozen=True)
class Scene:
    """One image of the world: its objects and camera settings. `seed` fixes everything that no caption can state."""

    things: tuple[Thing, ...]
    medium: str
    light: str
    focus: str
    seed: int

    def to_json(self) -> dict:
        """A compact description that `scene_from_json` reads."""
        things = [[thing.shape, thing.colour, thing.size, thing.cell] for thing in self.things]
        return {"things": things, "medium": self.medium, "light": self.light, "focus": self.focus, "seed": self.seed}


def scene_from_json(row: dict) -> Scene:
    """Inverse of `Scene.to_json`. Raises ValueError: not a scene of this world."""
    try:
        found = Scene(
            tuple(Thing(*thing) for thing in row["things"]), row["medium"], row["light"], row["focus"], row["seed"]
        )
        layout = tuple((thing.size, thing.cell) for thing in found.things)
        valid = (
            layout in {spots for _, spots in layouts(len(found.things))}
            and all(thing.shape in SHAPES and thing.colour in COLOURS for thing in found.things)
            and all(getattr(found, setting) in values for setting, values in CAMERA.items())
            and type(found.seed) is int
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"not the description of a scene: {error}") from None
    if not valid:
        raise ValueError("not the description of a scene: unknown attribute or layout")
    return found


@lru_cache
def layouts(count: int) -> tuple[tuple[float, tuple[tuple[str, int], ...]], ...]:
    """All (probability, ((size, cell) of each object)) of `count` objects; the probabilities sum to 1.

    One object: a huge one is in the middle, others in any of the five places. More: small or large, in different
    corners. Raises KeyError for a count that does not occur.
    """
    OBJECT_COUNTS[count]
    if count == 1:
        found = []
        for size, share in SINGLE_SIZES.items():
            cells = (MIDDLE,) if size == "huge" else (*CORNERS, MIDDLE)
            found += [(share / len(cells), ((size, cell),)) for cell in cells]
        return tuple(found)
    spots = [
        tuple(zip(sizes, cells))
        for cells in itertools.permutations(CORNERS, count)
        for sizes in itertools.product(("small", "large"), repeat=count)
    ]
    return tuple((1 / len(spots), spot) for spot in spots)


def pick(draw: random.Random, options: Sequence[_Choice]) -> _Choice:
    """One of the options, uniformly. Uses only `random()`, whose stream is the same in all Python versions."""
    return options[int(draw.random() * len(options))]


def pick_weighted(draw: random.Random, weighted: Sequence[tuple[float, _Choice]]) -> _Choice:
    at = draw.random()
    for weight, option in weighted:
        at -= weight
        if at < 0:
            return option
    return weighted[-1][1]


def scene(seed: int | str, index: int) -> Scene:
    """Scene number `index` of the endless sequence `seed`; a pure function of both."""
    draw = random.Random(f"scene {seed} {index}")
    count = pick_weighted(draw, [(share, n) for n, share in OBJECT_COUNTS.items()])
    kinds = [(pick(draw, SHAPES), pick(draw, COLOURS)) for _ in range(count)]
    return _finish(draw, kinds)


def single_scene(seed: int | str, index: int, shape: str, colour: str) -> Scene:
    """Like `scene`, with one object of this shape and colour."""
    draw = random.Random(f"single {seed} {index}")
    draw.random(), draw.random()  # as in earlier versions, which drew a shape and a colour here
    return _finish(draw, [(shape, colour)])


def _finish(draw: random.Random, kinds: list[tuple[str, str]]) -> Scene:
    spots = pick_weighted(draw, layouts(len(kinds)))
    camera = {name: pick_weighted(draw, [(p, v) for v, p in values.items()]) for name, values in CAMERA.items()}
    things = tuple(Thing(shape, colour, size, cell) for (shape, colour), (size, cell) in zip(kinds, spots))
    return Scene(things, seed=int(draw.random() * 2**32), **camera)


# ----------------------------------------------------------------------------------------------------------- classes

_KINDS = list(itertools.product(COLOURS, SHAPES))


def class_names() -> list[str]:
    """Names of the 64 kinds of objects, such as "red circle", which fit "a photo of a {}."."""
    return [f"{colour} {shape}" for colour, shape in _KINDS]


def sized_class_names() -> list[str]:
    """Names of the 192 classes of zero-shot classification, such as "small red circle": every kind in three sizes."""
    return [f"{size} {kind}" for size in SIZES for kind in class_names()]


def kind_label(thing: Thing) -> int:
    """Index into `class_names()`."""
    return _KINDS.index((thing.colour, thing.shape))


def class_label(scene: Scene) -> int | None:
    """Index into `class_names()` of the scene's only object; None for scenes with several."""
    return kind_label(scene.things[0]) if len(scene.things) == 1 else None


def sized_class_label(scene: Scene) -> int:
    """Index into `sized_class_names()` of the scene's only object."""
    (thing,) = scene.things
    return SIZES.index(thing.size) * len(_KINDS) + kind_label(thing)


def class_scene(seed: int | str, index: int) -> Scene:
    """Scene `index` of a balanced set of single-object scenes: its class is `index` modulo 64."""
    colour, shape = _KINDS[index % len(_KINDS)]
    return single_scene(seed, index, shape, colour)


def unseen_classes() -> list[int]:
    """Indices of the 16 classes that have no images in training; each colour and each shape is in two of them."""
    return [i for i in range(len(_KINDS)) if sum(divmod(i, len(SHAPES))) % 4 == 0]


def scene_of_split(seed: int | str, index: int, unseen: bool) -> Scene:
    """Scene `index` of a balanced set of single-object scenes, of the unseen classes or of all others."""
    held = unseen_classes()
    chosen = [kind for label, kind in enumerate(_KINDS) if (label in held) == unseen]
    colour, shape = chosen[index % len(chosen)]
    return single_scene(seed, index, shape, colour)
