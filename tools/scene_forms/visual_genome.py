"""Crops with descriptions in Visual Genome's form: region_descriptions.json, image_data.json, VG_100K/ID.jpg.

Every image has two or three objects, each a region described by shape, colour and size. Crop triplets A, B and their
union follow from any two regions, with "a and b" as the union's caption (`probemb.data.boxes.crop_triplets`).
"""

from __future__ import annotations

import json
import math
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from tools.scene_forms.chunk import Chunk, jpeg, truth

if TYPE_CHECKING:
    from probemb.data.scenes.world import Scene

_LINES = {"regions.jsonl": "region_descriptions.json", "images.jsonl": "image_data.json"}


def parts(counts: dict[str, int]) -> dict[str, int]:
    """Images by part: as many as the validation split has."""
    return {"crops": counts["val"]} if counts.get("val") else {}


def prepare(chunk: Chunk) -> None:
    """Make the folder of the images."""
    (chunk.folder / "VG_100K").mkdir(exist_ok=True)


def write_chunk(chunk: Chunk) -> dict[str, list[str]]:
    """Write the images; a line of each of both JSON files, and of the truth, for each of them."""
    from probemb.data import scenes

    regions, images, known = [], [], []
    for index in chunk.indices:
        number, scene = index + 1, scene_of_several(chunk.scene_seed, index)
        (chunk.folder / "VG_100K" / f"{number}.jpg").write_bytes(jpeg(scene, chunk.size))
        regions.append(json.dumps({"id": number, "regions": describe(scene, number, chunk.size)}))
        images.append(json.dumps({"image_id": number, "width": chunk.size, "height": chunk.size}))
        known.append(truth(scene, scenes.draw_captions(scene), chunk.size, image_id=number))
    return {"regions.jsonl": regions, "images.jsonl": images, "scenes.jsonl": known}


def finish(folder: Path) -> None:
    """Turn the lines into the two published files, each one JSON list."""
    for lines, name in _LINES.items():
        rows = (folder / lines).read_text(encoding="utf-8").splitlines()
        (folder / name).write_text("[" + ",\n".join(rows) + "]\n", encoding="utf-8")
        (folder / lines).unlink()


def scene_of_several(seed: str, index: int) -> Scene:
    """Scene `index` of an endless sequence of scenes with two or three objects; a pure function of both."""
    from probemb.data.scenes import scene

    return next(one for one in (scene(f"{seed} {index}", i) for i in count()) if len(one.things) > 1)


def describe(scene: Scene, number: int, size: int) -> list[dict]:
    """The regions of an image, with whole pixels counted from 0."""
    from probemb.data.scenes import boxes

    found = []
    for i, (thing, (left, top, right, bottom)) in enumerate(zip(scene.things, boxes(scene, size))):
        x, y = math.floor(left), math.floor(top)
        phrase = f"a {thing.size} {thing.colour} {thing.shape}"
        place = {"x": x, "y": y, "width": math.ceil(right) - x, "height": math.ceil(bottom) - y}
        found.append({"region_id": 4 * number + i, "image_id": number, "phrase": phrase, **place})
    return found
