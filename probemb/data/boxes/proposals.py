"""Proposals: the boxes of an image among which a phrase is looked for, from a file or as a grid of sliding windows."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from probemb.data.boxes.geometry import Box, clipped, grid_windows
from probemb.data.boxes.phrases import PhraseDataset
from probemb.data.captions.dataset import read_text
from probemb.errors import UserError

MAX_PROPOSALS = 10_000  # of an image


@dataclass(frozen=True)
class Proposals:
    """For each image of a dataset its boxes, and how many of them were dropped because nothing lies in the image."""

    boxes: list[list[Box]]
    dropped: int = 0
    source: str = ""

    @property
    def total(self) -> int:
        return sum(map(len, self.boxes))


def grid_proposals(data: PhraseDataset, scales: Sequence[float], ratios: Sequence[float], step: float) -> Proposals:
    """`grid_windows` of every image. Raises UserError: too many windows."""
    for name, values in (("scales", scales), ("ratios", ratios)):
        if not values:
            raise UserError(f"--grid.{name} is empty.", "Name at least one number.")
    if max(scales) > 1:
        raise UserError(f"--grid.scales has {max(scales):g}, more than the image.", "Give shares from 0 to 1.")
    shared: dict[tuple[int, int], list[Box]] = {}
    for size in data.sizes:
        if size not in shared:
            shared[size] = grid_windows(*size, scales, ratios, step)
    most = max(map(len, shared.values()))
    if most > MAX_PROPOSALS:
        raise UserError(
            f"The grid has {most:,} windows an image, more than {MAX_PROPOSALS:,}.",
            "Take larger scales or a larger step.",
        )
    return Proposals([shared[size] for size in data.sizes], 0, "grid")


def read_proposals(file: str | Path, data: PhraseDataset, top: int | None) -> Proposals:
    """Proposals of a JSON file, also gzipped: {image id: [[left, top, right, bottom], ...]}, the best ones first.

    Boxes are in pixels of the image, half-open and from 0 on. Parts outside the image are cut off.

    Args:
        top: so many of the first ones of each image; None: all.

    Raises UserError: an image without proposals; malformed boxes.
    """
    path, remedy = Path(file), "Write {image id: [[left, top, right, bottom], ...]} in pixels, as JSON."
    try:
        found = json.loads(read_text(path).decode("utf-8-sig"))
        if not isinstance(found, dict):
            raise ValueError("it is no object with image ids")
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} holds no proposals: {str(error)[:200]}.", remedy) from None
    missing = [one for one in data.image_ids if not found.get(one)]
    if missing:
        raise UserError(
            f"{path} has no proposals for {len(missing):,} of the {len(data):,} images, {missing[0]} for one.",
            "Add them, or evaluate a split that the file covers.",
        )
    boxes, dropped = [], 0
    for one, size in zip(data.image_ids, data.sizes):
        try:
            rows = [_box(row) for row in found[one][:top]]
            if len(rows) > MAX_PROPOSALS:
                raise ValueError(f"there are {len(rows):,}, more than {MAX_PROPOSALS:,}")
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise UserError(f"The proposals of image {one} in {path} are malformed: {error}.", remedy) from None
        inside = [box for box in (clipped(row, *size) for row in rows) if box is not None]
        if not inside:
            raise UserError(f"No proposal of image {one} in {path} lies in the image.", remedy)
        dropped += len(rows) - len(inside)
        boxes.append(inside)
    return Proposals(boxes, dropped, str(path))


def _box(row: object) -> Box:
    if not isinstance(row, list) or len(row) != 4 or any(isinstance(at, bool) for at in row):
        raise ValueError("a box is not a list of four numbers")
    box = tuple(float(at) for at in row)
    if not all(map(math.isfinite, box)) or box[0] >= box[2] or box[1] >= box[3]:
        raise ValueError(f"the box {str(row)[:80]} is empty or not finite")
    return box
