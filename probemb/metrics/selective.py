"""Precision when the most uncertain queries are refused, and thresholds with a guaranteed precision.

curve = precision_curve(uncertainty, correct)      # both (Q,), of a validation set
highest_threshold(curve, 0.8)                      # refuse what is more uncertain; None if 0.8 is out of reach
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

POINTS = 20
CONFIDENCE = 0.95


@dataclass(frozen=True)
class PrecisionCurve:
    """Coverage and precision of answering only queries with an uncertainty up to a threshold, thresholds ascending.

    Attributes:
        threshold: uncertainties.
        coverage: share of the queries that are answered.
        precision: share of those answered correctly.
        at_least: lower bounds of the precision on new queries of the same kind, for all thresholds at once.
        queries: their number.
        confidence: of the bounds.
    """

    threshold: list[float]
    coverage: list[float]
    precision: list[float]
    at_least: list[float]
    queries: int
    confidence: float = CONFIDENCE


def precision_curve(
    uncertainty: Tensor, correct: Tensor, points: int = POINTS, confidence: float = CONFIDENCE
) -> PrecisionCurve:
    """Thresholds that answer equal steps of the queries, with exact binomial bounds (Clopper and Pearson).

    The error of the bounds is divided among the points (Bonferroni), so that one may choose among them. Queries are
    assumed to be independent.

    Args:
        uncertainty: (Q,) finite; correct: (Q,) bool.

    Raises:
        ValueError: no queries, or shapes that differ.
    """
    if uncertainty.dim() != 1 or uncertainty.shape != correct.shape or not len(correct):
        raise ValueError(
            f"uncertainty {tuple(uncertainty.shape)} and correct {tuple(correct.shape)}: give (Q,) of both"
        )
    n = len(correct)
    u, order = uncertainty.double().sort(stable=True)
    right = correct[order].double().cumsum(0)
    ends = {max(1, round(n * step / points)) - 1 for step in range(1, points + 1)}
    ends = sorted({int(torch.searchsorted(u, u[end], right=True)) - 1 for end in ends})  # equal uncertainties together
    alpha = (1 - confidence) / len(ends)
    hits, answered = [int(right[end]) for end in ends], [end + 1 for end in ends]
    return PrecisionCurve(
        threshold=[float(u[end]) for end in ends],
        coverage=[m / n for m in answered],
        precision=[hit / m for hit, m in zip(hits, answered)],
        at_least=[lower_bound(hit, m, alpha) for hit, m in zip(hits, answered)],
        queries=n,
        confidence=confidence,
    )


def highest_threshold(curve: PrecisionCurve, precision: float) -> float | None:
    """The largest threshold at which the precision is at least the wanted one by its lower bound; None if none is."""
    fitting = [u for u, bound in zip(curve.threshold, curve.at_least) if bound >= precision]
    return max(fitting, default=None)


def lower_bound(hits: int, n: int, alpha: float) -> float:
    """The share p at which `hits` or more of `n` have the probability alpha: the exact one-sided bound."""
    if not hits:
        return 0.0
    k = torch.arange(hits, n + 1, dtype=torch.float64)
    log_ways = math.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    low, high = 0.0, 1.0
    for _ in range(50):
        p = (low + high) / 2
        tail = torch.logsumexp(log_ways + k * math.log(p) + (n - k) * math.log1p(-p), 0)
        low, high = (p, high) if tail < math.log(alpha) else (low, p)
    return low
