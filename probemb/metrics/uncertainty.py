"""Uncertainty against quality: bins, correlations, and the gain of refusing the most uncertain queries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bins:
    """Items in bins of (nearly) equal count, from certain to uncertain, with correlations.

    Attributes:
        uncertainty, accuracy: mean of each bin; counts: items in each.
        accuracy_se: standard error of each mean accuracy over independent items; None for a bin of one item.
        pearson: of the bins' means, as in PCME++ Fig. 3; None if one of the two is constant.
        spearman: rank correlation over single items; None likewise.
    """

    uncertainty: list[float]
    accuracy: list[float]
    counts: list[int]
    accuracy_se: list[float | None]
    pearson: float | None
    spearman: float | None


def uncertainty_bins(uncertainty: Tensor, score: Tensor, n_bins: int = 10, cut_over_all: bool = False) -> Bins | None:
    """Bin items by uncertainty and take the mean score of each bin. None if fewer than two items have a score.

    Args:
        uncertainty: (Q,); score: (Q,), NaN for an item without one.
        cut_over_all: cut the bins over items without a score too, as PCME++'s evaluation does although ECCV Caption
            has only some queries. Counts, means and correlations are over the items with a score.
    """
    known = torch.isfinite(uncertainty.double())
    scored = torch.isfinite(score.double())
    keep = known if cut_over_all else known & scored
    u, s, has = uncertainty[keep].double(), score[keep].double(), scored[keep]
    if int(has.sum()) < 2:
        return None
    parts = u.argsort(stable=True).tensor_split(min(n_bins, len(u)))
    parts = [part[has[part]] for part in parts]
    parts = [part for part in parts if len(part)]
    mean_u = [float(u[part].mean()) for part in parts]
    mean_s = [float(s[part].mean()) for part in parts]
    return Bins(
        mean_u,
        mean_s,
        [len(part) for part in parts],
        [standard_error(s[part]) for part in parts],
        pearson(torch.tensor(mean_u, dtype=torch.float64), torch.tensor(mean_s, dtype=torch.float64)),
        pearson(average_ranks(u[has]), average_ranks(s[has])),
    )


def standard_error(values: Tensor) -> float | None:
    """Standard error of the mean of n independent values (n,); None for fewer than two."""
    return float(values.double().std() / len(values) ** 0.5) if len(values) > 1 else None


def pearson(a: Tensor, b: Tensor) -> float | None:
    """Pearson's correlation; None if one of the two is constant."""
    if not len(a) or a.min() == a.max() or b.min() == b.max():  # their rounded mean may differ from them
        return None
    a, b = a - a.mean(), b - b.mean()
    scale = float(a.norm() * b.norm())
    return None if scale == 0 or not math.isfinite(scale) else max(-1.0, min(1.0, float(a @ b) / scale))


def average_ranks(x: Tensor) -> Tensor:
    """Ranks from 0; equal values share the mean of their ranks."""
    _, inverse, counts = x.unique(return_inverse=True, return_counts=True)
    end = counts.cumsum(0).double()
    return (end - (counts.double() + 1) / 2)[inverse]


@dataclass(frozen=True)
class RejectionCurve:
    """The mean score of the queries that are answered when the most uncertain ones are refused.

    Attributes:
        refused: shares of the queries that are refused; score: mean score of the others at each share.
        area: mean of the curve over every possible number of refused queries, from none to all but one.
        random: the area if queries were refused at random, which is the score of all.
        oracle: the area if the worst answers were refused first: the upper bound.
    """

    refused: list[float]
    score: list[float]
    area: float
    random: float
    oracle: float


def rejection_curve(
    uncertainty: Tensor, score: Tensor, refused: Sequence[float] = tuple(i / 20 for i in range(20))
) -> RejectionCurve | None:
    """Refuse the most uncertain queries first; queries of equal uncertainty count with their mean score.

    Args:
        uncertainty: (Q,); score: (Q,), items with a NaN score are left out; refused: shares in [0, 1).

    Returns:
        None if no query has a score.
    """
    keep = torch.isfinite(score.double()) & torch.isfinite(uncertainty.double())
    u, s = uncertainty[keep].double(), score[keep].double()
    if not len(u):
        return None
    _, group, counts = u.unique(return_inverse=True, return_counts=True)
    shared = torch.zeros(len(counts), dtype=s.dtype).index_add_(0, group, s) / counts
    answered = torch.arange(1, len(u) + 1)
    kept_mean = shared.repeat_interleave(counts).cumsum(0) / answered  # over the i + 1 most certain
    best = s.sort(descending=True).values.cumsum(0) / answered
    at = [max(1, len(u) - math.floor(share * len(u) + 1e-9)) for share in refused]
    return RejectionCurve(
        list(refused),
        [float(kept_mean[n - 1]) for n in at],
        float(kept_mean.mean()),
        float(s.mean()),
        float(best.mean()),
    )
