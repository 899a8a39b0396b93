"""The synthetic world in published formats with regions and boxes.

regions/        SCAN's and VSRN's region features: SPLIT_ims.npy (N, R, F) float32, SPLIT_caps.txt, SPLIT_ids.txt,
                and what is true of them in SPLIT_truth.npz
entities/       Flickr30k Entities: Annotations/ID.xml, Sentences/ID.txt, flickr30k-images/ID.jpg, val.txt, test.txt
visual_genome/  Visual Genome: region_descriptions.json, image_data.json, VG_100K/ID.jpg
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable
from itertools import count as count_from
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from probemb.data.boxes import Box
from tools.make_scenes import world
from tools.make_scenes.captions import Caption, Mention, draw_captions, write_truth
from tools.make_scenes.drawing import boxes, jpeg, render
from tools.make_scenes.world import Scene

CAPTIONS = 5  # of an image in regions/ and entities/, as the published files have


class Form(NamedTuple):
    """One piece of work: `count` images of a part, written into a folder below the set's, in order, by one process."""

    write: Callable[[Form], None]
    folder: Path
    part: str
    count: int
    seed: str  # of the part's scenes: `val` of a form shows the images of the set's `val`
    size: int  # side of an image in pixels

    def lines(self, name: str, rows: Iterable) -> None:
        (self.folder / name).write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")


def plan_forms(folder: Path, counts: dict[str, int], seed: int, size: int) -> list[Form]:
    """All forms of a set whose parts train and val have so many images."""
    train, val = counts.get("train", 0), counts.get("val", 0)
    planned = [(write_regions, "regions", "train", train), (write_regions, "regions", "val", val)]
    planned += [(write_regions, "regions", "test", val), (write_entities, "entities", "val", val)]
    planned += [(write_visual_genome, "visual_genome", "crops", val)]
    return [
        Form(write, folder / name, part, count, f"{seed} {part}", size) for write, name, part, count in planned if count
    ]


def write_form(form: Form) -> int:
    """The number of its images."""
    form.folder.mkdir(exist_ok=True)
    form.write(form)
    return form.count


# ------------------------------------------------------------------------------------------------------------- regions
# An image has R = 6 regions in a random order: its objects, the whole image, and background. A region's F = 437
# features are its crop of 12 x 12 pixels, row by row in RGB from -1 to 1, and its box: left, top, right, bottom and
# area as shares of the image.

SPLITS = {"val": "dev"}  # the published files' names of splits
REGIONS, CROP = 6, 12
FEATURES = 3 * CROP * CROP + 5


def write_regions(form: Form) -> None:
    name = SPLITS.get(form.part, form.part)
    file = form.folder / f"{name}_ims.npy"
    features = np.lib.format.open_memmap(file, "w+", np.float32, (form.count, REGIONS, FEATURES))
    ids = [str(index) for index in range(form.count)]
    scenes = [world.scene(form.seed, index) for index in range(form.count)]
    captions = [draw_captions(scene, CAPTIONS) for scene in scenes]
    for row, scene in zip(features, scenes):
        row[:] = region_features(render(scene, form.size), choose_regions(scene, form.size))
    features.flush()
    form.lines(f"{name}_caps.txt", (caption.text for row in captions for caption in row))
    form.lines(f"{name}_ids.txt", ids)
    if form.part != "train":
        write_truth(form.folder / f"{name}_truth.npz", ids, scenes, captions)


def choose_regions(scene: Scene, size: int) -> list[Box]:
    """REGIONS boxes (left, top, right, bottom) in pixels; a pure function of the scene."""
    draw, things = random.Random(f"regions {scene.seed}"), boxes(scene, size)

    def somewhere() -> Box:
        """A box up to the size of a small object."""
        width, height = (size * (0.1 + 0.2 * draw.random()) for _ in range(2))
        left, top = (size - width) * draw.random(), (size - height) * draw.random()
        return left, top, left + width, top + height

    def covered(a: Box) -> float:
        """Pixels that a box shares with the objects."""
        return sum(
            max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1])) for b in things
        )

    found = [*things, (0.0, 0.0, float(size), float(size))]
    while len(found) < REGIONS:
        found.append(min([somewhere() for _ in range(24)], key=covered))  # the emptiest of 24
    return world.shuffled(draw, found)


def region_features(image: Image.Image, regions: list[Box]) -> np.ndarray:
    """(R, FEATURES) float32 of the regions of one image."""
    width, height = image.size
    rows = np.empty((len(regions), FEATURES), dtype=np.float32)
    for row, box in zip(rows, regions):
        crop = image.resize((CROP, CROP), Image.Resampling.BILINEAR, box=box)
        left, top, right, bottom = box[0] / width, box[1] / height, box[2] / width, box[3] / height
        row[:-5] = np.asarray(crop, dtype=np.float32).reshape(-1) / 127.5 - 1
        row[-5:] = left, top, right, bottom, (right - left) * (bottom - top)
    return rows


# ------------------------------------------------------------------------------------------------------------ entities
# The captions with their noun phrases marked: [/EN#ID/TYPE phrase]. One id is one object, or one group of objects, in
# all captions of an image. Boxes count pixels from 1, both ends included. The test split is as large as the val split.


def write_entities(form: Form) -> None:
    sentences, annotations, pictures = (form.folder / x for x in ("Sentences", "Annotations", "flickr30k-images"))
    for folder in (sentences, annotations, pictures):
        folder.mkdir()
    for split, first in (("val", 1_000_000), ("test", 2_000_000)):
        for index in range(form.count):
            number, scene = first + index, world.scene(form.seed.removesuffix(form.part) + split, index)
            drawn = draw_captions(scene, CAPTIONS)
            ids = phrase_ids(scene, drawn, 16 * number)
            form.lines(f"Sentences/{number}.txt", (marked(scene, caption, ids) for caption in drawn))
            (annotations / f"{number}.xml").write_text(annotation(scene, ids, f"{number}.jpg", form.size))
            (pictures / f"{number}.jpg").write_bytes(jpeg(scene, form.size))
        form.lines(f"{split}.txt", range(first, first + form.count))


def phrase_ids(scene: Scene, captions: list[Caption], first: int) -> dict[tuple[int, ...], int]:
    """The id of each object or group of objects (indices) that the captions mention; () is the picture itself."""
    ids: dict[tuple[int, ...], int] = {}
    for caption in captions:
        for piece in caption.pieces:
            if isinstance(piece, Mention):
                ids.setdefault(_meant(scene, piece), first + len(ids))
    return ids


def _meant(scene: Scene, mention: Mention) -> tuple[int, ...]:
    return tuple(sorted(scene.things.index(thing) for thing in mention.things))


def phrase_type(mention: Mention) -> str:
    """Type of a phrase: exact (shape, colour, and size or place), kind (shape and colour), shape, colour, object (none
    of them), or scene (the picture itself, without a box)."""
    if not mention.things:
        return "scene"
    pattern = mention.pattern
    if pattern.shape and pattern.colour:
        return "exact" if pattern.size or pattern.place else "kind"
    return "shape" if pattern.shape else "colour" if pattern.colour else "object"


def marked(scene: Scene, caption: Caption, ids: dict[tuple[int, ...], int]) -> str:
    """The caption with its phrases marked, and its punctuation set apart, as the published sentences have it."""
    return "".join(
        piece.replace(",", " ,").replace(".", " .")
        if isinstance(piece, str)
        else f"[/EN#{ids[_meant(scene, piece)]}/{phrase_type(piece)} {piece.text}]"
        for piece in caption.pieces
    )


def annotation(scene: Scene, ids: dict[tuple[int, ...], int], name: str, size: int) -> str:
    """The XML of an image: the box of each object with the ids of all phrases that mean it."""
    lines = [f"<filename>{name}</filename>"]
    lines.append(f"<size><width>{size}</width><height>{size}</height><depth>3</depth></size>")
    for thing, (left, top, right, bottom) in enumerate(boxes(scene, size)):
        if names := "".join(f"<name>{number}</name>" for meant, number in ids.items() if thing in meant):
            low = f"<xmin>{math.floor(left) + 1}</xmin><ymin>{math.floor(top) + 1}</ymin>"
            high = f"<xmax>{math.ceil(right)}</xmax><ymax>{math.ceil(bottom)}</ymax>"
            lines.append(f"<object>{names}<bndbox>{low}{high}</bndbox></object>")
    if () in ids:
        lines.append(f"<object><name>{ids[()]}</name><scene>1</scene><nobndbox>1</nobndbox></object>")
    return "\n".join(["<annotation>", *lines, "</annotation>\n"])


# ------------------------------------------------------------------------------------------------------- visual_genome
# Every image has two or three objects, each a region described by shape, colour and size. Crop triplets A, B and their
# union follow from any two regions, with "a and b" as the union's caption (`probemb.data.boxes.crop_triplets`).


def write_visual_genome(form: Form) -> None:
    (form.folder / "VG_100K").mkdir()
    regions, images = [], []
    for index in range(form.count):
        several = (world.scene(f"{form.seed} {index}", i) for i in count_from())
        number, scene = index + 1, next(one for one in several if len(one.things) > 1)
        (form.folder / "VG_100K" / f"{number}.jpg").write_bytes(jpeg(scene, form.size))
        regions.append(json.dumps({"id": number, "regions": described(scene, number, form.size)}))
        images.append(json.dumps({"image_id": number, "width": form.size, "height": form.size}))
    for name, rows in (("region_descriptions.json", regions), ("image_data.json", images)):
        (form.folder / name).write_text("[" + ",\n".join(rows) + "]\n", encoding="utf-8")


def described(scene: Scene, number: int, size: int) -> list[dict]:
    """The regions of an image, with whole pixels counted from 0."""
    found = []
    for i, (thing, (left, top, right, bottom)) in enumerate(zip(scene.things, boxes(scene, size))):
        x, y = math.floor(left), math.floor(top)
        phrase = f"a {thing.size} {thing.colour} {thing.shape}"
        place = {"x": x, "y": y, "width": math.ceil(right) - x, "height": math.ceil(bottom) - y}
        found.append({"region_id": 4 * number + i, "image_id": number, "phrase": phrase, **place})
    return found
