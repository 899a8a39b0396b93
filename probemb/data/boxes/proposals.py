"""Proposals: the candidate boxes of an image for its phrases, from a file or as a grid of sliding windows.

Models that read regions need the proposals' features too (`read_region_proposals`):

    NAME_ims.npy      (N, P, W) features of the proposals of N images, as `read_regions` reads them
    NAME_boxes.npy    (N, P, 4) float32 or float64, their boxes in pixels, half-open; zeros where an image has fewer
    NAME_ids.txt      the images' ids, one a line
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from probemb.data.boxes.geometry import Box, clipped, grid_windows
from probemb.data.boxes.phrases import PhraseDataset
from probemb.data.image_loader import REGIONS, RegionImages, read_regions
from probemb.data.reading import as_list, check_unique, checked, read_json, read_lines, read_npy
from probemb.errors import UserError

MAX_PROPOSALS = 10_000  # of an image
_WRITE = "Write features, boxes and ids together with `python -m tools.write_regions --proposals`."


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
    """`grid_windows` of every image. Raises UserError: too many windows, or none."""
    if not scales or not ratios or max(scales) > 1:
        raise UserError("--grid.scales or --grid.ratios has no usable number.", "Give shares of the image from 0 to 1.")
    shared = {size: grid_windows(*size, scales, ratios, step) for size in set(data.sizes)}
    if (most := max(map(len, shared.values()))) > MAX_PROPOSALS:
        raise UserError(f"The grid has {most:,} windows an image.", "Take larger scales or a larger step.")
    return Proposals([shared[size] for size in data.sizes], 0, "grid")


def read_proposals(file: str | Path, data: PhraseDataset, top: int | None) -> Proposals:
    """Proposals of a JSON file, also gzipped: {image id: [[left, top, right, bottom], ...]}, the best ones first.

    Boxes are in pixels of the image, half-open and from 0 on. Parts outside the image are cut off.

    Args:
        top: so many of the first ones of each image; None: all.

    Raises UserError: an image without proposals; malformed boxes.
    """
    path, content = Path(file), read_json(Path(file))
    what, remedy = "a file of proposals", "Write {image id: [[left, top, right, bottom], ...]} in pixels, as JSON."
    _refuse_missing(path, data, content)
    found = []
    for one, size in zip(data.image_ids, data.sizes):
        with checked(path, f"{what} for image {one}", remedy):
            boxes = np.array(as_list(content[one], "the boxes", MAX_PROPOSALS)[:top], np.float64)
            found.append(_inside(boxes, np.arange(len(boxes)), size))
    return Proposals([boxes for boxes, _, _ in found], sum(dropped for _, _, dropped in found), str(path))


def read_region_proposals(file: str | Path, data: PhraseDataset, top: int | None) -> Proposals:
    """Proposals with their features, for the images of a dataset; boxes and ids lie beside the features.

    Args:
        file: NAME_ims.npy, of which one image at a time is read later.
        top: so many of the first ones of each image; None: all.

    Raises UserError: files that do not belong together, an image that they do not have, malformed boxes.
    """
    path = Path(file)
    stem = path.name.removesuffix(REGIONS)
    ids_file, boxes_file = path.with_name(f"{stem}_ids.txt"), path.with_name(f"{stem}_boxes.npy")
    if stem == path.name or not ids_file.is_file() or not boxes_file.is_file():
        raise UserError(f"{path} is not NAME{REGIONS} with NAME_ids.txt and NAME_boxes.npy beside it.", _WRITE)
    ids = read_lines(ids_file)
    check_unique(ids, "image id", ids_file)
    images = read_regions(path, ids)
    with checked(boxes_file, "an array of the regions' boxes", _WRITE):
        boxes = read_npy(boxes_file, mapped=True)
        if boxes.dtype.kind != "f" or boxes.shape != (len(ids), images.shape[0], 4):
            raise ValueError(f"it holds {boxes.dtype} {boxes.shape}")
    row_of = {one: row for row, one in enumerate(ids)}
    _refuse_missing(path, data, row_of)
    chosen, found = [row_of[one] for one in data.image_ids], []
    for row, one, size in zip(chosen, data.image_ids, data.sizes):
        with checked(boxes_file, f"an array of boxes for image {one}", _WRITE):
            image_boxes = np.array(boxes[row], np.float64)
            proposed = (image_boxes != 0).any(1).nonzero()[0]  # zeros alone are no proposal
            found.append(_inside(image_boxes, proposed[:top], size))
    features = replace(images, places=[images.places[row] for row in chosen])
    kept, rows, dropped = zip(*found)
    return Proposals(list(kept), sum(dropped), str(path), features, list(rows))


def _refuse_missing(path: Path, data: PhraseDataset, known: object) -> None:
    missing = [one for one in data.image_ids if not isinstance(known, dict) or known.get(one) in (None, [])]
    if missing:
        raise UserError(
            f"{path} has no proposals for {len(missing):,} of the {len(data):,} images, {missing[0]} for one.",
            "Add them, or evaluate a split that the file covers.",
        )


def _inside(boxes_P4: np.ndarray, rows: np.ndarray, size: tuple[int, int]) -> tuple[list[Box], list[int], int]:
    """Those of the rows whose boxes lie in the image: boxes, rows, and how many do not. Raises ValueError."""
    boxes = boxes_P4[rows].reshape(-1, 4)
    if not np.isfinite(boxes).all() or (boxes[:, :2] >= boxes[:, 2:]).any():
        raise ValueError("a box is empty or not finite")
    placed = [(row, box) for row, one in zip(rows.tolist(), boxes.tolist()) if (box := clipped(tuple(one), *size))]
    if not placed:
        raise ValueError("no box lies in the image")
    return [box for _, box in placed], [row for row, _ in placed], len(rows) - len(placed)
