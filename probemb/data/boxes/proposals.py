"""Proposals: the boxes of an image among which a phrase is looked for, from a file or as a grid of sliding windows.

Models that read regions need the proposals' features too (`read_region_proposals`):

    NAME_ims.npy      (N, P, W) features of the proposals of N images, as in `probemb.data.regions`
    NAME_boxes.npy    (N, P, 4) float32 or float64, their boxes in pixels, half-open; zeros where an image has fewer
    NAME_ids.txt      the images' ids, one a line
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from probemb.data.boxes.geometry import Box, clipped, grid_windows
from probemb.data.boxes.phrases import PhraseDataset
from probemb.data.captions.dataset import check_unique, read_text
from probemb.data.npy import npy_header, read_npy
from probemb.data.regions import ENDING, RegionImages, read_header, read_regions
from probemb.errors import UserError

MAX_PROPOSALS = 10_000  # of an image


@dataclass(frozen=True)
class Proposals:
    """Boxes of the images of a dataset.

    Attributes:
        boxes: for each image its boxes.
        dropped: how many were dropped because nothing of them lies in the image.
        features: of the boxes, for models that read regions: (P, W) of each image; None for crops of pixels.
        rows: for each image the rows of `features` that belong to its boxes.
    """

    boxes: list[list[Box]]
    dropped: int = 0
    source: str = ""
    features: RegionImages | None = None
    rows: list[list[int]] | None = None

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


# ----------------------------------------------------------------------------------------------------------- features


def read_region_proposals(file: str | Path, data: PhraseDataset, top: int | None) -> Proposals:
    """Proposals with their features, for the images of a dataset; boxes and ids lie beside the features.

    Args:
        file: NAME_ims.npy, of which one image at a time is read later.
        top: so many of the first ones of each image; None: all.

    Raises UserError: files that do not belong together, an image that they do not have, malformed boxes.
    """
    path = Path(file)
    if not path.name.endswith(ENDING):
        raise UserError(f"{path} is not called NAME{ENDING}.", f"Name the features. {_WRITE}")
    beside = {one: path.with_name(path.name.removesuffix(ENDING) + one) for one in ("_ids.txt", "_boxes.npy")}
    for name in beside.values():
        if not name.is_file():
            raise UserError(f"There is no {name.name} beside {path}.", _WRITE)
    ids = [line.strip() for line in read_text(beside["_ids.txt"]).decode("utf-8-sig", "replace").splitlines()]
    check_unique(ids, "image id", str(beside["_ids.txt"]))
    header = read_header(path)
    if header.shape[0] != len(ids):
        raise UserError(
            f"{path} has {header.shape[0]:,} rows, but {beside['_ids.txt'].name} beside it {len(ids):,} ids.", _WRITE
        )
    images = read_regions(path, ids, 1)
    boxes = _read_boxes(beside["_boxes.npy"], header.shape[:2])
    places = {one: row for row, one in enumerate(ids)}
    missing = [one for one in data.image_ids if one not in places]
    if missing:
        raise UserError(
            f"{path} has no regions for {len(missing):,} of the {len(data):,} images, {missing[0]} for one.",
            "Add them, or evaluate a split that the file covers.",
        )
    chosen = [places[one] for one in data.image_ids]
    found = [_inside(boxes[row], size, top, path, one) for row, size, one in zip(chosen, data.sizes, data.image_ids)]
    return Proposals(
        [kept for kept, _, _ in found], sum(dropped for _, _, dropped in found), str(path),
        replace(images, places=[images.places[row] for row in chosen]), [rows for _, rows, _ in found],
    )  # fmt: skip


_WRITE = "Write features, boxes and ids together with `python -m tools.write_regions --proposals`."


def _read_boxes(path: Path, shape: tuple[int, int]) -> np.ndarray:
    """(N, P, 4), memory-mapped. Raises UserError: another shape or type, cut off, or Python objects."""
    try:
        with open(path, "rb") as opened:
            found, fortran, dtype = npy_header(opened)
            if dtype.hasobject or dtype.kind != "f" or fortran:
                raise ValueError(f"it holds {'Python objects' if dtype.hasobject else dtype}")
            if found != (*shape, 4):
                raise ValueError(f"its shape is {found}, not {(*shape, 4)}")
        return read_npy(path, mapped=True)
    except (ValueError, OSError) as error:
        raise UserError(f"{path} holds no boxes of {path.parent}'s regions: {str(error)[:200]}.", _WRITE) from None


def _inside(
    boxes_P4: np.ndarray, size: tuple[int, int], top: int | None, path: Path, one: str
) -> tuple[list[Box], list[int], int]:
    """Boxes that lie in the image, their rows, and how many do not; boxes of zeros alone are no proposals."""
    boxes = np.array(boxes_P4, np.float64)
    there = (boxes != 0).any(1)
    if not np.isfinite(boxes).all() or ((boxes[:, :2] >= boxes[:, 2:]).any(1) & there).any():
        raise UserError(f"A box of image {one} beside {path} is empty or not finite.", _WRITE)
    rows = there.nonzero()[0][:top].tolist()
    placed = [(row, box) for row in rows if (box := clipped(tuple(boxes[row].tolist()), *size)) is not None]
    if not placed:
        raise UserError(f"No proposal of image {one} beside {path} lies in the image.", _WRITE)
    return [box for _, box in placed], [row for row, _ in placed], len(rows) - len(placed)
