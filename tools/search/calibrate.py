"""Calibrate an index: the uncertainty up to which queries are answered precisely enough, in INDEX/calibration.json.

Every caption of a validation set is a query (every image, for an index of captions). An answer is correct if the
query's own item is among the K closest of the validation set; other fitting items make a query ambiguous.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from probemb.data.captions.find import find_captions
from probemb.errors import UserError
from probemb.evaluation.embedding import embed_pairs
from probemb.metrics.uncertainty import PrecisionCurve, highest_threshold, precision_curve
from probemb.progress import silent
from probemb.reports.results import write_json
from probemb.search import build_index, search
from tools.search.query import Searcher

NAME = "calibration.json"
GENERATOR = "probemb tools.search --calibrate"
SLICE = 4096  # queries at a time


def calibrate(
    searcher: Searcher, data: str, precision: float, within: int = 1, show: Callable = silent
) -> tuple[dict, PrecisionCurve]:
    """The largest threshold of u below which the precision is at least that, by its lower bound (95 %).

    Args:
        data: images with captions, as `find_captions` takes them.
        within: K.
        show: as `probemb.progress.progress`.

    Returns:
        content of calibration.json; precisions at other thresholds.

    Raises:
        UserError: the data cannot be read or is smaller than `within`, or no threshold reaches the precision.
    """
    captions = find_captions(data, exif=True)
    if within > len(captions):
        raise UserError(f"--within is {within}, and {data} has {len(captions):,} images.", "Give a number up to that.")
    embedded = embed_pairs(replace(searcher.encoder.embedder, workers=None, show=show), captions)
    places = torch.arange(len(embedded.images))
    if searcher.index.kind == "text":
        kind, queries, gallery, wanted, holds = "image", embedded.images, embedded.texts, places, embedded.owner
    else:
        kind, queries, gallery, wanted, holds = "text", embedded.texts, embedded.images, embedded.owner, places
    own = build_index(gallery, tolerance=searcher.weight)
    found = torch.cat([search(own, queries[part], within)[1] for part in torch.arange(len(queries)).split(SLICE)])
    curve = precision_curve(queries.uncertainty(), (holds[found] == wanted[:, None]).any(1))
    threshold = highest_threshold(curve, precision)
    if threshold is None:
        raise UserError(
            f"On {data} no uncertainty promises a precision of {precision:g}, but at most {max(curve.at_least):.3f}.",
            "Ask for less with --min-precision, count the K closest with --within K, or calibrate on more queries.",
        )
    about = {"weights": searcher.index.weights, "kind": kind, "data": str(data), "gallery": len(gallery)}
    about |= {"within": within, "precision": precision, "max_uncertainty": threshold}
    return about | {"coverage": curve.coverage[curve.threshold.index(threshold)]}, curve


def save_calibration(folder: Path, calibration: dict) -> Path:
    """Write calibration.json beside the index. Raises UserError: the folder cannot be written."""
    try:
        write_json(folder / NAME, calibration, GENERATOR)
    except OSError as error:
        what = f"The calibration cannot be written into {folder} ({error.strerror})."
        raise UserError(what, "Make the folder writable.") from None
    return folder / NAME


def load_calibration(folder: Path, weights: str) -> dict | None:
    """The calibration of an index, or None. Raises UserError: broken, or of another model."""
    path = folder / NAME
    if not path.exists():
        return None
    again = f"Make it again with `python -m tools.search --index {folder} --calibrate DATA`."
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise UserError(f"{path} is not a calibration.", again) from None
    if content["weights"] != weights:
        raise UserError(f"{path} was made with another model than the index.", again)
    return content
