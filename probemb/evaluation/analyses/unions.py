"""Uncertainty and selection of crops A, B and their union C = A ∪ B, whose caption joins both with "and".

A union shows more, so more captions fit it: as an image it should be more uncertain. Its caption says more, so fewer
images fit it: as a text it should be less uncertain. Source: Probabilistic VSE++/VSRN §4.6, Fig. 2, Table 4.

n triplets, D dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from probemb.data.boxes import CropTriplet, PhraseDataset, crop_triplets
from probemb.data.boxes.proposals import Proposals
from probemb.errors import UserError
from probemb.evaluation.analyses.localisation import embedded_proposals, refuse_too_many
from probemb.evaluation.embedding import Embedder
from probemb.evaluation.rankings import RankingOptions, ScoreRanker, make_ranker
from probemb.evaluation.uncertainty import MEASURES
from probemb.gaussian import Gaussian
from probemb.metrics.uncertainty import standard_error

ITEMS = ("A", "B", "C")
SIDES = ("images", "captions")
# Query, and what has to be chosen rather than the other one: Table 4's columns.
TASKS = {"crop A": "i2t", "crop C": "i2t", "caption A": "t2i", "caption C": "t2i"}
BLOCK = 256  # pairs whose scores are computed at a time, with those of all pairs among them


@dataclass(frozen=True)
class EmbeddedTriplets:
    """Embeddings of n triplets of one area threshold, each side's items in the order of ITEMS.

    Attributes:
        images, captions: item -> Gaussian (n, D), or (n, K, D).
        triplets: where they come from.
    """

    images: dict[str, Gaussian]
    captions: dict[str, Gaussian]
    triplets: list[CropTriplet]


def embed_triplets(
    embedder: Embedder, data: PhraseDataset, thresholds: Sequence[float]
) -> tuple[dict[float, EmbeddedTriplets], list[tuple[str, str]]]:
    """Embed the triplets of every area threshold; each crop and each caption once.

    Returns:
        by threshold, and (name, reason) of images that could not be read. A threshold without triplets is left out.

    Raises:
        UserError: no image has two regions below any threshold; too many images that cannot be read.
    """
    found = {threshold: crop_triplets(data, threshold) for threshold in thresholds}
    every = list(chain.from_iterable(found.values()))
    if not every:
        raise UserError(
            f"No image of {data.source} has two regions of less than {max(thresholds):.0%} of its area.",
            "Raise the largest of --areas, or take images with more regions.",
        )
    crops, bad = _embed_crops(embedder, data, every)
    captions = list(dict.fromkeys(text for one in every for text in one.captions))
    place, texts = {text: row for row, text in enumerate(captions)}, embedder.texts(captions)
    lost = {data.image_ids.index(name) for name, _ in bad}
    out = {}
    for threshold, triplets in found.items():
        kept = [one for one in triplets if one.image not in lost]
        if not kept:
            continue
        images = {
            item: Gaussian.stack([crops[one.image][one.boxes[i]] for one in kept]) for i, item in enumerate(ITEMS)
        }
        rows = {item: torch.tensor([place[one.captions[i]] for one in kept]) for i, item in enumerate(ITEMS)}
        out[threshold] = EmbeddedTriplets(images, {item: texts[row] for item, row in rows.items()}, kept)
    if not out:
        raise UserError(f"No image of {data.source} with two regions could be read.", "Repair the data.")
    return out, bad


def _embed_crops(
    embedder: Embedder, data: PhraseDataset, triplets: Sequence[CropTriplet]
) -> tuple[dict[int, dict[tuple, Gaussian]], list[tuple[str, str]]]:
    """Image -> box -> Gaussian (D,), and the images that could not be read."""
    boxes: list[dict] = [{} for _ in range(len(data))]  # as ordered sets
    for one in triplets:
        boxes[one.image] |= dict.fromkeys(one.boxes)
    proposals = Proposals([list(some) for some in boxes])
    found: dict[int, dict[tuple, Gaussian]] = {}
    bad: list[tuple[str, str]] = []
    with embedder.show("crops", proposals.total) as advance:
        for image, crops, reason in embedded_proposals(embedder, data, proposals, boxes, with_tokens=False):
            if advance:
                advance(len(boxes[image]))
            if crops is None:
                bad.append((data.image_ids[image], reason))
                refuse_too_many(bad, data, embedder.max_bad)
            else:
                found[image] = {box: crops.gaussian[row] for row, box in enumerate(boxes[image])}
    return found, bad


def union_uncertainty(found: EmbeddedTriplets) -> dict:
    """Mean uncertainty of A, B and C under every measure of `uncertainty.MEASURES`, and how C differs from A.

    Returns:
        measure -> side -> {"A": {"value", "se"}, "B", "C", "difference": C less A, paired, "larger": the share of
        triplets in which C is the more uncertain one of both}.
    """
    return {
        name: {side: _one_side(getattr(found, side), measure) for side in SIDES} for name, measure in MEASURES.items()
    }


def _one_side(items: dict[str, Gaussian], measure: Callable[[Gaussian], Tensor]) -> dict:
    u = {item: _of_items(measure(gaussian)) for item, gaussian in items.items()}
    estimates = {item: _estimate(values) for item, values in u.items()}
    larger = (u["C"] > u["A"]).double() + 0.5 * (u["C"] == u["A"]).double()
    return estimates | {"difference": _estimate(u["C"] - u["A"]), "larger": _estimate(larger)}


def _of_items(u: Tensor) -> Tensor:
    """(n,) float64; the mean over several embeddings of an item."""
    return (u if u.dim() == 1 else u.mean(1)).double()


def binary_selection(found: EmbeddedTriplets, ranking: str, options: RankingOptions) -> dict:
    """Share of the triplets in which a query scores its own item above the other one of A and C; equal ones are half.

    Returns:
        task (a key of TASKS) -> {"value", "se"}, and "mean" of the four.
    """

    def scores(crop: str, caption: str) -> Tensor:
        return paired_scores(found.images[crop], found.captions[caption], ranking, options)

    s = {crop + caption: scores(crop, caption) for crop in "AC" for caption in "AC"}
    margins = {
        "crop A": s["AA"] - s["AC"],
        "crop C": s["CC"] - s["CA"],
        "caption A": s["AA"] - s["CA"],
        "caption C": s["CC"] - s["AC"],
    }
    right = {task: 0.5 * (margins[task].sign() + 1) for task in TASKS}
    return {task: _estimate(values) for task, values in right.items()} | {
        "mean": _estimate(torch.stack(list(right.values())).mean(0))
    }


def paired_scores(images: Gaussian, captions: Gaussian, ranking: str, options: RankingOptions) -> Tensor:
    """(n,) float64 scores of image i with caption i; larger is closer."""
    parts = []
    for start in range(0, len(images), BLOCK):
        rows = slice(start, start + BLOCK)
        ranker = make_ranker(ranking, images[rows], captions[rows], options)
        if not isinstance(ranker, ScoreRanker):
            raise ValueError(f"{ranking} has no scores of pairs")
        parts.append(ranker.scores(slice(None)).diagonal().cpu().double())
    return torch.cat(parts)


def _estimate(values: Tensor) -> dict:
    """Mean of values (n,) and its standard error; one triplet an image, so they are independent."""
    return {"value": float(values.mean()), "se": standard_error(values)}
