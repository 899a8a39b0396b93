"""Regions in SCAN's and VSRN's form: SPLIT_ims.npy (N, R, F) float32, SPLIT_caps.txt with five captions an image.

An image has R = 6 regions in a random order: its objects, the whole image, and background. A region's F = 437 features
are its crop of 12 x 12 pixels, row by row in RGB from -1 to 1, and its box: left, top, right, bottom and area as shares
of the image. SPLIT_scenes.jsonl also says what each region shows ("objects": the object's index, -1 for the whole
image, -2 for background) and where ("regions": boxes in pixels).
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np

from tools.scene_forms.chunk import Chunk, truth

if TYPE_CHECKING:
    from PIL import Image

    from probemb.data.scenes.world import Scene

REGIONS = 6  # of an image; at most three are objects
CROP = 12  # pixels of a region's side
FEATURES = 3 * CROP * CROP + 5
WHOLE, BACKGROUND = -1, -2
CAPTIONS = 5  # of an image, as the published files have
_TRIED = 24  # places of a background region, of which the emptiest is taken
_FILES = {"train": "train", "val": "dev", "test": "test"}

Box = tuple[float, float, float, float]


def parts(counts: dict[str, int]) -> dict[str, int]:
    """Images by part; the test split is as large as the validation split."""
    found = {"train": counts.get("train", 0), "val": counts.get("val", 0), "test": counts.get("val", 0)}
    return {name: count for name, count in found.items() if count}


def prepare(chunk: Chunk) -> None:
    """Make the part's array, which its chunks fill."""
    _features(chunk, "w+").flush()


def write_chunk(chunk: Chunk) -> dict[str, list[str]]:
    """Fill the chunk's rows of the array; its lines of captions, ids and truth."""
    from probemb.data import scenes

    features, name = _features(chunk, "r+"), _FILES[chunk.part]
    lines: dict[str, list[str]] = {f"{name}_{kind}": [] for kind in ("caps.txt", "ids.txt", "scenes.jsonl")}
    for index in chunk.indices:
        scene = scenes.scene(chunk.scene_seed, index)
        captions = scenes.draw_captions(scene, CAPTIONS)
        regions, objects = choose_regions(scene, chunk.size)
        features[index] = region_features(scenes.render(scene, chunk.size), regions)
        lines[f"{name}_caps.txt"] += [caption.text for caption in captions]
        lines[f"{name}_ids.txt"].append(str(index))
        placed = [[round(at, 3) for at in box] for box in regions]
        lines[f"{name}_scenes.jsonl"].append(truth(scene, captions, chunk.size, regions=placed, objects=objects))
    features.flush()
    return lines


def _features(chunk: Chunk, mode: str) -> np.memmap:
    file = chunk.folder / f"{_FILES[chunk.part]}_ims.npy"
    if mode == "r+":
        return np.lib.format.open_memmap(file, mode)
    return np.lib.format.open_memmap(file, mode, np.float32, (chunk.total, REGIONS, FEATURES))


def choose_regions(scene: Scene, size: int) -> tuple[list[Box], list[int]]:
    """REGIONS boxes (left, top, right, bottom) in pixels, and what each shows; a pure function of the scene."""
    from probemb.data.scenes import boxes

    draw = random.Random(f"regions {scene.seed}")
    things = boxes(scene, size)
    found: list[tuple[Box, int]] = [(box, i) for i, box in enumerate(things)]
    found.append(((0.0, 0.0, float(size), float(size)), WHOLE))
    while len(found) < REGIONS:
        tried = [_somewhere(size, draw) for _ in range(_TRIED)]
        found.append((min(tried, key=lambda box: sum(_shared(box, thing) for thing in things)), BACKGROUND))
    order = sorted((draw.random(), row) for row in range(REGIONS))
    return [found[row][0] for _, row in order], [found[row][1] for _, row in order]


def _somewhere(size: int, draw: random.Random) -> Box:
    """A box up to the size of a small object, anywhere."""
    width, height = (size * (0.1 + 0.2 * draw.random()) for _ in range(2))
    left, top = (size - width) * draw.random(), (size - height) * draw.random()
    return left, top, left + width, top + height


def _shared(a: Box, b: Box) -> float:
    """Pixels that two boxes have in common."""
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def region_features(image: Image.Image, regions: list[Box]) -> np.ndarray:
    """(R, FEATURES) float32 of the regions of one image."""
    from PIL import Image

    width, height = image.size
    rows = np.empty((len(regions), FEATURES), dtype=np.float32)
    for row, box in zip(rows, regions):
        crop = image.resize((CROP, CROP), Image.Resampling.BILINEAR, box=box)
        left, top, right, bottom = box[0] / width, box[1] / height, box[2] / width, box[3] / height
        row[:-5] = np.asarray(crop, dtype=np.float32).reshape(-1) / 127.5 - 1
        row[-5:] = left, top, right, bottom, (right - left) * (bottom - top)
    return rows
