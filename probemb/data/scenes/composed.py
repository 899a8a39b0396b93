"""Composed scenes: several objects in a picture, of which some are often together and some never.

The concepts are the 64 kinds of objects ("red circle") and three settings ("drawing", "dark picture", "bright
picture"). A picture's one to five objects, all of different kinds, come from one of the world's groups of kinds, as the
things of a kitchen or a street do; so combinations of them occur often, and kinds that no group has both of are never
in one picture, however many are drawn. Nor is a picture both dark and bright.
"""

from __future__ import annotations

import random
from functools import lru_cache
from itertools import combinations

from probemb.data.boxes.geometry import Box
from probemb.data.scenes.drawing import boxes
from probemb.data.scenes.world import (
    CAMERA,
    COLOURS,
    CORNERS,
    MIDDLE,
    SHAPES,
    Scene,
    Thing,
    class_names,
    kind_label,
    pick,
    pick_weighted,
)

SETTINGS = {"drawing": "drawing", "dark": "dark picture", "bright": "bright picture"}  # value of the camera -> text
OBJECTS = {1: 0.05, 2: 0.1, 3: 0.1, 4: 0.2, 5: 0.55}  # share of the pictures by number of objects
# Number of groups, and of kinds in each: triples and more recur in narrow ones, pairs vary in wide ones.
_NARROW, _WIDE = (40, 7), (6, 24)
_IN_NARROW = 0.78  # share of the pictures
_PATCH = (0.07, 0.47, 0.53, 0.93)  # borders of the corners, as shares of the side


def composed_concepts() -> list[str]:
    """The texts of the 67 concepts; their numbers are places in this list."""
    return [*class_names(), *SETTINGS.values()]


@lru_cache
def groups(seed: int) -> tuple[tuple[int, ...], ...]:
    """The groups of kinds of a world, the narrow ones first; a pure function of the seed."""
    kinds, found = range(len(class_names())), []
    for name, (count, size) in (("narrow", _NARROW), ("wide", _WIDE)):
        for number in range(count):
            draw = random.Random(f"group {seed} {name} {number}")
            found.append(tuple(sorted(_some(kinds, size, draw))))
    return tuple(found)


def impossible_pairs(seed: int) -> set[tuple[int, int]]:
    """Pairs of concepts that no picture of this world has, in ascending order."""
    together = {pair for group in groups(seed) for pair in combinations(group, 2)}
    apart = {pair for pair in combinations(range(len(class_names())), 2) if pair not in together}
    names = composed_concepts()
    return apart | {(names.index(SETTINGS["dark"]), names.index(SETTINGS["bright"]))}


def composed_scene(world: int, seed: str, index: int) -> Scene:
    """Picture `index` of the endless sequence `seed`, with the groups of the world; a pure function of all three."""
    draw = random.Random(f"composed {world} {seed} {index}")
    narrow, every = _NARROW[0], groups(world)
    group = pick(draw, every[:narrow] if draw.random() < _IN_NARROW else every[narrow:])
    count = pick_weighted(draw, [(share, number) for number, share in OBJECTS.items()])
    cells = (*CORNERS, MIDDLE) if count > len(CORNERS) else _some(CORNERS, count, draw)
    things = []
    for kind, cell in zip(_some(group, count, draw), cells):
        colour, shape = divmod(kind, len(SHAPES))
        size = "large" if count <= len(CORNERS) and draw.random() < 0.5 else "small"
        things.append(Thing(SHAPES[shape], COLOURS[colour], size, cell))
    medium, light = (pick_weighted(draw, [(p, v) for v, p in CAMERA[name].items()]) for name in ("medium", "light"))
    return Scene(tuple(things), medium, light, "sharp", int(draw.random() * 2**32))


def scene_concepts(scene: Scene) -> list[int]:
    """The numbers of the concepts that a picture has, ascending."""
    names = composed_concepts()
    settings = [names.index(text) for value, text in SETTINGS.items() if value in (scene.medium, scene.light)]
    return sorted([kind_label(thing) for thing in scene.things] + settings)


def concept_boxes(scene: Scene, size: int) -> list[tuple[int, Box]]:
    """Locate each concept in a picture of size x size pixels: the objects' boxes, and for settings an empty corner.

    A picture without an empty corner has no box of its settings.
    """
    found = [(kind_label(thing), box) for thing, box in zip(scene.things, boxes(scene, size))]
    free = [cell for cell in CORNERS if cell not in {thing.cell for thing in scene.things}]
    if free and MIDDLE not in {thing.cell for thing in scene.things}:
        low, middle, after, high = (at * size for at in _PATCH)
        left, right = ((low, middle), (after, high))[free[0] % 2]
        top, bottom = ((low, middle), (after, high))[free[0] // 2]
        settings = (concept for concept in scene_concepts(scene) if concept >= len(class_names()))
        found += [(concept, (left, top, right, bottom)) for concept in settings]
    return found


def _some(options, count: int, draw: random.Random) -> list:
    """So many different ones, in a random order; uses only `random()`, the same in all versions of Python."""
    return [one for _, one in sorted((draw.random(), one) for one in options)[:count]]
