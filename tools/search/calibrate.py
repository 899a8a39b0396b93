"""Calibrate an index on held-out pairs, in INDEX/calibration.json: how many results to show, and what to refuse.

Every caption of a validation set is a query (every image, for an index of captions). The results that hold its own item
in a promised share of queries are counted in the index itself, as if it held that item too, for each fifth of the
queries by their uncertainty (split conformal prediction). The uncertainty up to which answers are precise is measured
among the validation set alone; other fitting items make a query ambiguous.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from probemb.conformal import results_to_show
from probemb.data.captions.find import find_captions
from probemb.errors import UserError
from probemb.evaluation.embedding import embed_pairs
from probemb.metrics.uncertainty import PrecisionCurve, highest_threshold, precision_curve
from probemb.progress import silent
from probemb.search import build_index, search
from tools.search.query import Searcher

NAME = "calibration.json"
SLICE = 4096  # queries at a time
COVERAGES = range(50, 100)  # percent


def calibrate(
    searcher: Searcher, data: str, precision: float | None, within: int = 1, show: Callable = silent
) -> tuple[dict, PrecisionCurve]:
    """Content of calibration.json, and precisions at thresholds of u. Raises UserError: unfit data, or no threshold.

    precision: what answers below the largest threshold should have, by its lower bound (95 %); None: no threshold. An
    answer is correct if the query's own item is among the `within` closest.
    """
    captions = find_captions(data, exif=True)
    if within > len(captions):
        raise UserError(f"--within is {within}, and {data} has {len(captions):,} images.", "Give a number up to that.")
    embedded = embed_pairs(replace(searcher.encoder.embedder, workers=None, show=show), captions)
    images, texts, owner = embedded.images, embedded.texts, embedded.owner
    places, u_images, u_texts = torch.arange(len(images)), images.uncertainty(), texts.uncertainty()
    own = (images.mean[owner] - texts.mean).square().sum(1)  # then with both variances, as the index ranks
    if searcher.index.kind == "text":
        kind, queries, gallery, wanted, holds, group = "image", images, texts, places, owner, places
        own = own + u_images[owner] + searcher.weight * u_texts
        own = torch.full((len(images),), torch.inf).scatter_reduce_(0, owner, own, "amin")
    else:
        kind, queries, gallery, wanted, holds, group = "text", texts, images, owner, places, owner
        own = own + u_texts + searcher.weight * u_images[owner]
    u, parts = queries.uncertainty(), torch.arange(len(queries)).split(SLICE)
    alone = build_index(gallery, tolerance=searcher.weight)
    found = torch.cat([search(alone, queries[part], within)[1] for part in parts])
    curve = precision_curve(u, (holds[found] == wanted[:, None]).any(1))
    threshold = None if precision is None else highest_threshold(curve, precision)
    if precision is not None and threshold is None:
        what = f"On {data} no uncertainty promises a precision of {precision:g}, but at most {max(curve.at_least):.3f}."
        remedy = "Ask for less with --min-precision, count the K closest with --within K, or calibrate on more queries."
        raise UserError(what, remedy)
    ranks = torch.cat([searcher.ranks(queries[part], own[part]) for part in parts])
    fifths, results = results_to_show(ranks, u, group, COVERAGES)
    about = {"weights": searcher.index.weights, "kind": kind, "data": str(data), "gallery": len(gallery)}
    about |= {"within": within, "precision": precision, "max_uncertainty": threshold, "weight": searcher.weight}
    answered = None if threshold is None else curve.coverage[curve.threshold.index(threshold)]
    return about | {"coverage": answered, "fifths": fifths, "results": results}, curve


def load_calibration(folder: Path, weights: str) -> dict | None:
    """The calibration of an index, or None. Raises UserError: it is of another model."""
    path = folder / NAME
    if not path.exists():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["weights"] != weights:
        again = f"Make it again with `python -m tools.search --index {folder} --calibrate DATA`."
        raise UserError(f"{path} was made with another model than the index.", again)
    return content
