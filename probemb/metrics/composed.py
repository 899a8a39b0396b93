"""Composed retrieval (MPC): R@K and R-Precision of queries with many true targets, and the ROC AUC of feasibility.

Letters: Q queries, G gallery items, R true targets of a query. The definitions are those of `metrics.retrieval`; here
scores come a block of queries at a time, and no list is longer than a block of queries needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from probemb.metrics.retrieval import Positives, query_metrics, ranking
from probemb.metrics.uncertainty import average_ranks

BLOCK_ELEMENTS = 1 << 25  # scores held at a time: 128 MiB in float32


def composed_metrics(
    score: Callable[[slice], Tensor], positives: Positives, ks: Sequence[int] = (5, 10)
) -> dict[str, Tensor]:
    """R@K, R-Precision and mAP@R of every query, (Q,) float64 each; NaN for a query without a true target.

    R@K is 1 if any of the R true targets is among the first K; R-Precision is the share of them among the first R.

    Args:
        score: rows -> (rows, G) scores, larger is closer; see `probemb.evaluation.scores`.
        positives: the true targets.

    Returns:
        "r@K" for each K, "r_precision" and "map_at_r"; `metrics.mean_metrics` gives their means.

    Raises:
        ValueError: a score is NaN or infinite.
    """
    found = []
    for rows in _blocks(positives.n_queries, positives.n_gallery):
        of_block = positives.of_queries(rows.start, rows.stop)
        deepest = max([*ks, int(of_block.counts.max())])
        found.append(query_metrics(_closest(score(rows), deepest), of_block, ks))
    return {name: torch.cat([values[name] for values in found]) for name in found[0]}


def closest_items(score: Callable[[slice], Tensor], n_queries: int, n_gallery: int, depth: int) -> Tensor:
    """The `depth` closest items of every query, (Q, depth) int64 on the CPU; ties in the order of the gallery."""
    return torch.cat([_closest(score(rows), depth) for rows in _blocks(n_queries, n_gallery)])


def _blocks(n_queries: int, n_gallery: int) -> list[slice]:
    """Queries by blocks of BLOCK_ELEMENTS scores."""
    rows = max(1, BLOCK_ELEMENTS // max(1, n_gallery))
    return [slice(start, min(start + rows, n_queries)) for start in range(0, n_queries, rows)]


def _closest(scores_QG: Tensor, depth: int) -> Tensor:
    if not bool(torch.isfinite(scores_QG).all()):
        raise ValueError("scores hold NaN or infinity: there is no ranking to measure")
    return ranking(scores_QG, depth).cpu()


def roc_auc(score_P: Tensor, label_P: Tensor) -> float:
    """Probability that a positive scores higher than a negative; ties count half. 0.5 is chance.

    For feasibility the score of a composition is minus its uncertainty, and feasible ones are the positives.

    Args:
        score_P: finite; label_P: bool.

    Raises:
        ValueError: shapes that differ, a score that is not finite, or one of the labels is absent.
    """
    if score_P.dim() != 1 or score_P.shape != label_P.shape:
        raise ValueError(f"scores {tuple(score_P.shape)}, labels {tuple(label_P.shape)}: give (P,) of both")
    if not bool(torch.isfinite(score_P).all()):
        raise ValueError("scores hold NaN or infinity: there is no order to measure")
    label_P = label_P.bool()
    n_positive, n_negative = int(label_P.sum()), int((~label_P).sum())
    if not n_positive or not n_negative:
        raise ValueError(f"{n_positive} positives and {n_negative} negatives have no ROC curve")
    ranks = average_ranks(score_P)[label_P].sum()
    return float((ranks - n_positive * (n_positive - 1) / 2) / (n_positive * n_negative))
