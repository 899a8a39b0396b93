"""Average precision and ROC AUC of scores of single pairs, with bootstrap intervals that resample clusters of pairs.

Pairs of one caption, or of one image, are not independent: they share its embedding and how people understood it.
Resampling single pairs would give intervals that are too narrow, so whole clusters are drawn with replacement. With
clusters of two kinds, images and captions, both are drawn, and a pair counts as the product of both counts (Owen, "The
pigeonhole bootstrap", Annals of Applied Statistics 2007).

Letters: P pairs, C clusters, R resamples. Weighted metrics count pair i as weight_i pairs, as scikit-learn does.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

RESAMPLES, CONFIDENCE = 1000, 0.95
BLOCK_ELEMENTS = 1 << 21  # weights of pairs held at a time


class PairMetrics(NamedTuple):
    """Average precision and ROC AUC, (R,) float64 each; NaN where one of the two labels is absent."""

    average_precision: Tensor
    roc_auc: Tensor


def cluster_weights(n_clusters: int, n_resamples: int = RESAMPLES, seed: int = 0) -> Tensor:
    """Count how often each of C clusters is drawn in every resample.

    Returns:
        (R + 1, C) float32; row 0 is the data itself, all ones. The same seed gives the same counts, so that metrics of
        two scores can be compared resample by resample.
    """
    drawn = torch.randint(n_clusters, (n_resamples, n_clusters), generator=torch.Generator().manual_seed(seed))
    counts = torch.zeros(n_resamples, n_clusters).scatter_add_(1, drawn, torch.ones(1).expand_as(drawn))
    return torch.cat([torch.ones(1, n_clusters), counts])


def pair_metrics(scores_P: Tensor, label_P: Tensor, *clusters: tuple[Tensor, Tensor]) -> PairMetrics:
    """Both metrics under every row of weights; pairs of equal scores share one threshold.

    Args:
        scores_P: finite, larger means more likely a match; label_P: bool.
        clusters: for each kind of cluster (P,) int64 in [0, C), the pairs' clusters, and (R, C) of `cluster_weights`.

    Raises:
        ValueError: shapes that differ, no pairs, or scores that are not finite.
    """
    places = [cluster_P for cluster_P, _ in clusters]
    if not len(scores_P) or scores_P.dim() != 1 or any(x.shape != scores_P.shape for x in (label_P, *places)):
        raise ValueError(f"scores {tuple(scores_P.shape)}, label {tuple(label_P.shape)}: give (P,) of both")
    if not torch.isfinite(scores_P).all():
        raise ValueError("scores hold NaN or infinity: there is no order to measure")
    ordered, order = scores_P.double().sort(descending=True, stable=True)
    last_T = torch.cat([(ordered[1:] != ordered[:-1]).nonzero().flatten(), torch.tensor([len(ordered) - 1])])
    positive_P, step = label_P[order].bool(), max(1, BLOCK_ELEMENTS // len(ordered))
    blocks = zip(*(weights_RC.split(step) for _, weights_RC in clusters))
    parts = [
        _weighted(math.prod(w[:, place_P[order]] for w, place_P in zip(block, places)), positive_P, last_T)
        for block in blocks
    ]
    return PairMetrics(*(torch.cat(column) for column in zip(*parts)))


def _weighted(weight_RP: Tensor, positive_P: Tensor, last_T: Tensor) -> tuple[Tensor, Tensor]:
    """AP = sum over thresholds of (gain of recall) * precision; AUC by trapezia over the same thresholds."""
    total_RT = weight_RP.cumsum(1, dtype=torch.float64)[:, last_T]
    found_RT = (weight_RP * positive_P).cumsum(1, dtype=torch.float64)[:, last_T]
    positives, negatives = found_RT[:, -1], total_RT[:, -1] - found_RT[:, -1]
    gain_RT = found_RT.diff(dim=1, prepend=found_RT.new_zeros(len(found_RT), 1))
    precision_RT = found_RT / total_RT.clamp_min(1e-12)
    false_RT = total_RT - found_RT
    wrong_RT = false_RT.diff(dim=1, prepend=false_RT.new_zeros(len(false_RT), 1))
    area = (wrong_RT * (found_RT - gain_RT / 2)).sum(1)
    undefined = (positives == 0) | (negatives == 0)
    found = (gain_RT * precision_RT).sum(1) / positives, area / (positives * negatives)
    return found[0].masked_fill(undefined, torch.nan), found[1].masked_fill(undefined, torch.nan)


def estimate(values_R: Tensor, confidence: float = CONFIDENCE) -> dict[str, float]:
    """{"value", "low", "high"} of values whose first is that of the data; resamples without a value are left out."""
    values = values_R[1:].double()
    values = values[~values.isnan()]
    tail = (1 - confidence) / 2
    low, high = values.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)) if len(values) else [torch.nan] * 2
    return {"value": float(values_R[0]), "low": float(low), "high": float(high)}
