"""Composed scenes: several objects in a picture, of which some are often together and some never.

The concepts are the 64 kinds of objects ("red circle") and three settings ("drawing", "dark picture", "bright
picture"). A picture's one to five objects, all of different kinds, come from one of the world's groups of kinds, as the
things of a kitchen or a street do; so combinations of them occur often, and kinds that no group has both of are never
in one picture, however many are drawn. Nor is a picture both dark and bright.
"""

import json
import random
from functools import lru_cache
from itertools import combinations
from pathlib import Path

from probemb.data.boxes import Box
from probemb.data.compositions.find import CATEGORIES, COMBINATIONS, read_concept_shards, sample_tuples
from probemb.data.shards.write import encode_captions
from tools.make_scenes.drawing import boxes, jpeg
from tools.make_scenes.world import CAMERA, CORNERS, KINDS, MIDDLE, Scene, Thing, pick, pick_weighted, shuffled

SETTINGS = {"drawing": "drawing", "dark": "dark picture", "bright": "bright picture"}  # value of the camera -> text
CONCEPTS = (*KINDS, *SETTINGS.values())  # a concept's number is its place here
OBJECTS = {1: 0.05, 2: 0.1, 3: 0.1, 4: 0.2, 5: 0.55}  # share of the pictures by number of objects
# Number of groups, and of kinds in each: triples and more recur in narrow ones, pairs vary in wide ones.
_NARROW, _WIDE = (40, 7), (6, 24)
_IN_NARROW = 0.78  # share of the pictures
_PATCH = (0.07, 0.47, 0.53, 0.93)  # borders of the corners, as shares of the side


@lru_cache
def groups(seed: int) -> tuple[tuple[int, ...], ...]:
    """The groups of kinds of a world, the narrow ones first; a pure function of the seed."""
    return tuple(
        tuple(sorted(shuffled(random.Random(f"group {seed} {name} {number}"), range(len(KINDS)))[:size]))
        for name, (count, size) in (("narrow", _NARROW), ("wide", _WIDE))
        for number in range(count)
    )


def impossible_pairs(seed: int) -> set[tuple[int, int]]:
    """Pairs of concepts that no picture of this world has, in ascending order."""
    together = {pair for group in groups(seed) for pair in combinations(group, 2)}
    apart = set(combinations(range(len(KINDS)), 2)) - together
    return apart | {(CONCEPTS.index(SETTINGS["dark"]), CONCEPTS.index(SETTINGS["bright"]))}


def composed_scene(world: int, seed: str, index: int) -> Scene:
    """Picture `index` of the endless sequence `seed`, with the groups of the world; a pure function of all three."""
    draw = random.Random(f"composed {world} {seed} {index}")
    narrow, every = _NARROW[0], groups(world)
    group = pick(draw, every[:narrow] if draw.random() < _IN_NARROW else every[narrow:])
    count = pick_weighted(draw, OBJECTS)
    cells = (*CORNERS, MIDDLE) if count > len(CORNERS) else shuffled(draw, CORNERS)[:count]
    things = []
    for kind, cell in zip(shuffled(draw, group), cells):
        colour, shape = KINDS[kind].split()
        size = "large" if count <= len(CORNERS) and draw.random() < 0.5 else "small"
        things.append(Thing(shape, colour, size, cell))
    medium, light = (pick_weighted(draw, CAMERA[name]) for name in ("medium", "light"))
    return Scene(tuple(things), medium, light, "sharp", int(draw.random() * 2**32))


def scene_concepts(scene: Scene) -> list[int]:
    """The numbers of the concepts that a picture has, ascending."""
    settings = [CONCEPTS.index(text) for value, text in SETTINGS.items() if value in (scene.medium, scene.light)]
    return sorted([thing.kind for thing in scene.things] + settings)


def concept_boxes(scene: Scene, size: int) -> list[tuple[int, Box]]:
    """Locate each concept in a picture of size x size pixels: the objects' boxes, and for settings an empty corner.

    A picture without an empty corner has no box of its settings.
    """
    found = [(thing.kind, box) for thing, box in zip(scene.things, boxes(scene, size))]
    cells = {thing.cell for thing in scene.things}
    free = [cell for cell in CORNERS if cell not in cells]
    if free and MIDDLE not in cells:
        low, middle, after, high = (at * size for at in _PATCH)
        left, right = ((low, middle), (after, high))[free[0] % 2]
        top, bottom = ((low, middle), (after, high))[free[0] // 2]
        settings = (concept for concept in scene_concepts(scene) if concept >= len(KINDS))
        found += [(concept, (left, top, right, bottom)) for concept in settings]
    return found


# ------------------------------------------------------------------------------------------------------------- writing
# train, val and test (4:1:1) as shards: KEY.jpg, KEY.txt (its concepts), KEY.json (categories, boxes). Lists of
# combinations: 2_, 3_ and 4_cat_combinations.json are asked for in all splits; ..._zero_shot are further pairs, never
# among those; ..._impossible are pairs that no picture of this world has; 2_unseen_train and 2_unseen_test are another
# setup: pairs to train on, and other pairs of the same concepts.


def composed_sample(world: int, split: str, index: int, size: int) -> dict[str, bytes]:
    """Members of one sample, by extension; a pure function of the arguments."""
    scene = composed_scene(world, split, index)
    held = scene_concepts(scene)
    placed = [
        [concept + 1, [round(at, 3) for at in (left, top, right - left, bottom - top)]]
        for concept, (left, top, right, bottom) in concept_boxes(scene, size)
    ]
    row = {"categories": [concept + 1 for concept in held], "boxes": placed, "width": size, "height": size}
    text = encode_captions(CONCEPTS[concept] for concept in held)
    return {"jpg": jpeg(scene, size), "txt": text, "json": json.dumps(row, separators=(",", ":")).encode()}


def write_combinations(folder: Path, seed: int) -> None:
    """Write the categories, and as many combinations as the paper has, each of at least 8, 2 and 2 images by split."""

    def write(name: str, rows: list) -> None:
        lines = ",\n".join(map(json.dumps, rows))
        (folder / name).write_text(f"[{lines}]\n", encoding="utf-8")

    write(CATEGORIES, [{"id": number, "name": name} for number, name in enumerate(CONCEPTS, 1)])
    found = read_concept_shards(folder, seed)
    for k in (2, 3, 4):
        drawn = sample_tuples(found, k, seed, impossible=impossible_pairs(seed))
        for name in COMBINATIONS if k == 2 else ["seen"]:
            write(COMBINATIONS[name][1].format(k), (drawn[name] + 1).tolist())
