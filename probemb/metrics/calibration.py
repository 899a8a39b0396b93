"""Probabilities against shares: reliability in bins, expected calibration error, Brier score, and a logistic refit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BINS = 15


@dataclass(frozen=True)
class Reliability:
    """Predicted probabilities against observed shares, in bins of equal width that hold any item.

    Attributes:
        predicted, observed: mean of each bin; counts: items in each.
        ece: mean over all items of their bin's |predicted - observed|. Source: Guo et al. 2017, Eq. 3.
        brier: mean squared difference of single items.
    """

    predicted: list[float]
    observed: list[float]
    counts: list[int]
    ece: float
    brier: float


def reliability(probability: Tensor, share: Tensor, n_bins: int = BINS) -> Reliability:
    """Bin items by probability.

    Args:
        probability, share: (P,) in [0, 1].

    Raises:
        ValueError: shapes that differ, no items, or values outside of [0, 1].
    """
    p, s = probability.double(), share.double()
    if p.dim() != 1 or p.shape != s.shape or not len(p):
        raise ValueError(f"probability {tuple(p.shape)} and share {tuple(s.shape)}: give (P,) of both")
    if not all(((x >= 0) & (x <= 1)).all() for x in (p, s)):
        raise ValueError("probabilities and shares lie in [0, 1]")
    place = (p * n_bins).long().clamp_max(n_bins - 1)
    counts = torch.bincount(place, minlength=n_bins)
    held = counts > 0
    sums = [torch.zeros(n_bins, dtype=torch.float64).index_add_(0, place, x)[held] for x in (p, s)]
    predicted, observed = (x / counts[held] for x in sums)
    error = ((predicted - observed).abs() * counts[held]).sum() / len(p)
    brier = (p - s).square().mean()
    return Reliability(predicted.tolist(), observed.tolist(), counts[held].tolist(), float(error), float(brier))


def fit_logistic(x: Tensor, share: Tensor) -> tuple[float, float]:
    """a and b of sigmoid(a x + b) with the least cross entropy against shares, (P,) each.

    Raises:
        ValueError: shares that are all 0 or all 1, to which no finite a and b belong.
    """
    from sklearn.linear_model import LogisticRegression

    x, share = x.double(), share.double()
    if share.max() == 0 or share.min() == 1:
        raise ValueError("all shares are equal to 0 or to 1")
    centre, spread = x.mean(), x.std(correction=0).clamp_min(1e-12)
    both = ((x - centre) / spread).repeat(2)[:, None].numpy()  # each item once as a match and once as none, weighted
    labels = torch.arange(2).flip(0).repeat_interleave(len(x)).numpy()
    fitted = LogisticRegression(C=1e8, tol=1e-8, max_iter=1000)
    fitted.fit(both, labels, sample_weight=torch.cat([share, 1 - share]).numpy())
    a = float(fitted.coef_[0, 0]) / float(spread)
    return a, float(fitted.intercept_[0]) - a * float(centre)
