"""Contents and distribution of the synthetic world, "scenes": objects, camera, classes, and the draw from a seed.

The distribution is small enough to be enumerated (`layouts`, uniform shapes and colours, independent camera settings),
so that the share of all images that a caption fits is computed exactly. The draw uses the same tables, and of `random`
only `random()`, whose stream is the same in all versions of Python.
"""

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter

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

# Choices and their odds.
OBJECT_COUNTS = {1: 0.5, 2: 0.3, 3: 0.2}
MAX_OBJECTS = max(OBJECT_COUNTS)
SINGLE_SIZES = {"small": 0.35, "large": 0.4, "huge": 0.25}
CAMERA = {  # independent of each other and of the objects
    "medium": {"photo": 0.8, "drawing": 0.2},
    "light": {"normal": 0.7, "dark": 0.15, "bright": 0.15},
    "focus": {"sharp": 0.76, "blurry": 0.12, "pixelated": 0.12},
}

# The 64 kinds of objects, which fit "a photo of a {}."; the 192 classes of zero-shot classification, every kind in
# three sizes; and the 16 kinds without images in training: each colour and each shape is in two of them.
KINDS = tuple(f"{colour} {shape}" for colour in COLOURS for shape in SHAPES)
SIZED_KINDS = tuple(f"{size} {kind}" for size in SIZES for kind in KINDS)
UNSEEN = tuple(i for i in range(len(KINDS)) if sum(divmod(i, len(SHAPES))) % 4 == 0)
SEEN = tuple(i for i in range(len(KINDS)) if i not in UNSEEN)


@dataclass(frozen=True)
class Thing:
    """One object of a scene. `cell` is its place: 0..3 the corners row by row, 4 the middle."""

    shape: str
    colour: str
    size: str
    cell: int

    @property
    def kind(self) -> int:
        """Index into KINDS."""
        return COLOURS.index(self.colour) * len(SHAPES) + SHAPES.index(self.shape)

    @property
    def sized_kind(self) -> int:
        """Index into SIZED_KINDS."""
        return SIZES.index(self.size) * len(KINDS) + self.kind


@dataclass(frozen=True)
class Scene:
    """One image of the world: its objects and camera settings. `seed` fixes everything that no caption can state."""

    things: tuple[Thing, ...]
    medium: str
    light: str
    focus: str
    seed: int


@lru_cache
def layouts(count: int) -> dict[tuple[tuple[str, int], ...], float]:
    """The probability of every layout, ((size, cell) of each object), of so many objects.

    One object: a huge one is in the middle, others in any of the five places. More: small or large, in different
    corners.
    """
    if count == 1:
        cells = {size: (MIDDLE,) if size == "huge" else (*CORNERS, MIDDLE) for size in SINGLE_SIZES}
        return {((size, cell),): SINGLE_SIZES[size] / len(cells[size]) for size in SINGLE_SIZES for cell in cells[size]}
    spots = [
        tuple(zip(sizes, cells))
        for cells in itertools.permutations(CORNERS, count)
        for sizes in itertools.product(("small", "large"), repeat=count)
    ]
    return dict.fromkeys(spots, 1 / len(spots))


def pick(draw: random.Random, options: Sequence):
    """One of the options, uniformly."""
    return options[int(draw.random() * len(options))]


def shuffled(draw: random.Random, options: Iterable) -> list:
    """The options in a random order."""
    return [option for _, option in sorted(((draw.random(), option) for option in options), key=itemgetter(0))]


def pick_weighted(draw: random.Random, odds: Mapping):
    """One of the options, with these odds."""
    at = draw.random()
    for option, share in odds.items():
        at -= share
        if at < 0:
            return option
    return option


def scene(seed: int | str, index: int) -> Scene:
    """Scene number `index` of the endless sequence `seed`; a pure function of both."""
    draw = random.Random(f"scene {seed} {index}")
    kinds = [(pick(draw, SHAPES), pick(draw, COLOURS)) for _ in range(pick_weighted(draw, OBJECT_COUNTS))]
    return _finish(draw, kinds)


def class_scene(seed: int | str, index: int, kinds: Sequence[int] = range(len(KINDS))) -> Scene:
    """Scene `index` of a set with one object an image, in which all of these kinds (of KINDS) are equally frequent."""
    draw = random.Random(f"single {seed} {index}")
    draw.random(), draw.random()  # where `scene` draws a shape and a colour
    colour, shape = divmod(kinds[index % len(kinds)], len(SHAPES))
    return _finish(draw, [(SHAPES[shape], COLOURS[colour])])


def _finish(draw: random.Random, kinds: list[tuple[str, str]]) -> Scene:
    spots = pick_weighted(draw, layouts(len(kinds)))
    camera = {name: pick_weighted(draw, odds) for name, odds in CAMERA.items()}
    things = tuple(Thing(shape, colour, size, cell) for (shape, colour), (size, cell) in zip(kinds, spots))
    return Scene(things, seed=int(draw.random() * 2**32), **camera)
