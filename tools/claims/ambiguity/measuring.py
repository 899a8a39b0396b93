"""Retrieval, tolerance and uncertainty of a training on scenes, from its kept embeddings. Every true match is known."""

from __future__ import annotations

import torch

from probemb.evaluation.embed_pairs import EmbeddedPairs
from probemb.evaluation.predictors import assess, query_scores
from probemb.evaluation.rankings import (
    RankingOptions,
    both_directions,
    depth_for,
    make_ranker,
    own_captions,
    rank_all,
)
from probemb.evaluation.tolerance import Tolerance, choose_tolerance, sweep
from probemb.evaluation.uncertainty import spearman
from probemb.metrics import query_metrics
from probemb.models.match import MatchModel
from tools.claims.embeddings import Pair
from tools.claims.scenes.world import Part

LAMBDAS = (-2.0, -1.5, -1.25, -1.0, -0.75, -0.5, -0.25, 0.0, 0.5, 1.0, 2.0)
CHOSEN = "chosen on validation scenes"


def as_pairs(pair: Pair, part: Part) -> EmbeddedPairs:
    """With the images that captions belong to."""
    return EmbeddedPairs(*pair, torch.tensor(part.dataset.owner()), list(range(len(part.dataset))), [])


def look(pair: Pair, part: Part) -> dict:
    """Metrics on validation scenes, to choose by: "tolerance", "spearman", "rsum" by CSD, in percent, and "i2t" and
    "t2i": mAP@R of all true matches at the best weights.
    """
    pairs = as_pairs(pair, part)
    tolerance = choose_tolerance(pairs, part.positives, "map_at_r", LAMBDAS, CHOSEN, "all true captions")
    return {
        "tolerance": vars(tolerance),
        "spearman": spearman(pairs.texts.uncertainty(), part.ambiguity),
        "rsum": _retrieval(pairs, part, "csd", RankingOptions())["own"]["rsum"],
        **{way: max(tolerance.curve[way]) for way in ("i2t", "t2i")},
    }


def measure(pair: Pair, part: Part, weights: dict, match: MatchModel, closely: bool) -> dict:
    """Everything on test scenes, where nothing is chosen.

    Args:
        weights: "i2t" and "t2i" of the ranking "tolerance".
        closely: whether also to rank by inclusion and log-likelihood and to sweep the weights, which takes longer.

    Returns:
        "spearman" of the captions' u with their true ambiguity; "retrieval": ranking -> "own" and "true" positives ->
        "i2t", "t2i", "rsum" in percent; "predictors": rows of `assess` for the captions, whose first answer is by CSD;
        "curve": {"lambda", "i2t", "t2i"} if `closely`.
    """
    pairs, positives = as_pairs(pair, part), part.positives
    options = RankingOptions(tolerance=Tolerance(weights["i2t"], weights["t2i"], chosen=CHOSEN))
    names = ("csd", "mean", "tolerance", *(("inclusion", "log-likelihood") if closely else ()))
    found: dict = {"retrieval": {name: _retrieval(pairs, part, name, options) for name in names}}
    found["spearman"] = spearman(pairs.texts.uncertainty(), part.ambiguity)
    found["predictors"] = assess(
        query_scores(pairs.texts, pairs.images, match), _right(pairs), pairs.owner, part.ambiguity
    )
    if closely:
        found["curve"] = {
            "lambda": list(LAMBDAS),
            "i2t": sweep(pairs.images, pairs.texts, positives, "map_at_r", LAMBDAS),
            "t2i": sweep(pairs.texts, pairs.images, positives.transposed(), "map_at_r", LAMBDAS),
        }
    return found


def _retrieval(pairs: EmbeddedPairs, part: Part, name: str, options: RankingOptions) -> dict:
    kinds = {"own": own_captions(pairs.owner, len(pairs.images)), "true": part.positives}
    ranker = make_ranker(name, pairs.images, pairs.texts, options)
    ranked = rank_all(ranker, len(pairs.images), len(pairs.texts), depth_for(list(kinds.values())))
    return {kind: both_directions(ranked, positives) for kind, positives in kinds.items()}


def _right(pairs: EmbeddedPairs) -> torch.Tensor:
    """(M,) whether the closest image by CSD is the caption's own."""
    own = own_captions(pairs.owner, len(pairs.images))
    ranked = rank_all(make_ranker("csd", pairs.images, pairs.texts), len(pairs.images), len(pairs.texts), (1, 1))
    return query_metrics(ranked.t2i, own.transposed(), (1,))["r@1"]
