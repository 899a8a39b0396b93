"""Tests of how well a score of queries predicts what becomes of them: rank correlation and the gain of refusal.

The score is high for queries that are called uncertain. Standard errors are linearised (the sum of squared influences)
at fixed ranks: exact to first order where there is no relation, somewhat too wide where there is one. Items of one
cluster, such as the captions of one image, may depend on each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from probemb.metrics.uncertainty import average_ranks, pearson, rejection_curve

SIGNIFICANT = 1.96  # standard errors
LEAST = 5  # items of a half: the standard error of fewer says nothing


@dataclass(frozen=True)
class Estimate:
    """A value with its standard error."""

    value: float
    se: float

    @property
    def z(self) -> float:
        """The value in standard errors; 0 where both are 0."""
        return self.value / self.se if self.se else float("inf") * self.value if self.value else 0.0


@dataclass(frozen=True)
class Halves:
    """Mean outcomes of the half of the queries called certain and of the others.

    Attributes:
        certain, rest: means; queries whose score equals the median belong to neither.
        difference: certain - rest.
    """

    certain: float
    rest: float
    difference: Estimate


def rank_correlation(score: Tensor, outcome: Tensor, cluster: Tensor | None = None) -> Estimate | None:
    """Spearman's correlation; None if fewer than three items are known or one side is constant.

    Args:
        score, outcome: (Q,), items that are not finite in both are left out.
        cluster: (Q,) int64, by default every item is its own.
    """
    score, outcome, cluster = _known(score, outcome, cluster)
    if len(score) < 3:
        return None
    x, y = average_ranks(score), average_ranks(outcome)
    value = pearson(x, y)
    if value is None:
        return None
    x, y = ((one - one.mean()) / one.std(correction=0) for one in (x, y))
    return Estimate(value, _standard_error((x * y - value / 2 * (x.square() + y.square())) / len(x), cluster))


def halves(score: Tensor, outcome: Tensor, cluster: Tensor | None = None) -> Halves | None:
    """Outcomes below and above the median score; None if one half has fewer than LEAST items. Arguments as above."""
    score, outcome, cluster = _known(score, outcome, cluster)
    ranks = average_ranks(score)
    middle = (len(ranks) - 1) / 2
    low, high = ranks < middle, ranks > middle
    if min(int(low.sum()), int(high.sum())) < LEAST:
        return None
    certain, rest = float(outcome[low].mean()), float(outcome[high].mean())
    influence = low * (outcome - certain) / low.sum() - high * (outcome - rest) / high.sum()
    return Halves(certain, rest, Estimate(certain - rest, _standard_error(influence, cluster)))


def rejection_gain(score: Tensor, outcome: Tensor, cluster: Tensor | None = None) -> Estimate | None:
    """The area under the rejection curve on the scale on which refusing at random is 0 and the oracle 1.

    None if no item is known, or all outcomes are equal. Arguments as above; see `rejection_curve`.
    """
    score, outcome, cluster = _known(score, outcome, cluster)
    curve = rejection_curve(score, outcome)
    if curve is None or curve.oracle - curve.random <= 1e-12:
        return None
    # The area is the mean of outcome x weight: the i-th most certain counts in every mean over i items or more.
    n = len(score)
    weight = (1 / torch.arange(1, n + 1, dtype=torch.float64)).flip(0).cumsum(0).flip(0)
    _, group, counts = score.unique(return_inverse=True, return_counts=True)
    of_group = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, group.sort().values, weight) / counts
    centred = (outcome - curve.random) * (of_group[group] - 1)
    possible = curve.oracle - curve.random
    se = _standard_error((centred - centred.mean()) / n, cluster)
    return Estimate((curve.area - curve.random) / possible, se / possible)


def cluster_standard_error(values: Tensor, cluster: Tensor) -> float:
    """Standard error of the mean of (Q,) values, those of one cluster being dependent; cluster: (Q,) int64."""
    values = values.double().cpu()
    return _standard_error((values - values.mean()) / len(values), cluster.cpu())


def _known(score: Tensor, outcome: Tensor, cluster: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    score, outcome = score.double().cpu(), outcome.double().cpu()
    cluster = torch.arange(len(score)) if cluster is None else cluster
    keep = torch.isfinite(score) & torch.isfinite(outcome)
    return score[keep], outcome[keep], cluster[keep]


def _standard_error(influence: Tensor, cluster: Tensor) -> float:
    _, group = cluster.unique(return_inverse=True)
    total = influence.new_zeros(int(group.max()) + 1).index_add_(0, group, influence)
    return float(total.square().sum().sqrt())
