"""Recall of phrase localisation, its upper bound and what guessing would reach.

A phrase is found at k if one of the first k proposals has an IoU of at least 0.5 with its box. Q phrases.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from probemb.metrics.prediction import cluster_standard_error

KS = (1, 5, 10)
THRESHOLD = 0.5  # of the IoU


def recall_at(first_overlaps_QK: Tensor, k: int, threshold: float = THRESHOLD) -> Tensor:
    """(Q,) bool: found among the first k.

    Args:
        first_overlaps_QK: IoU of the first K proposals, best ranked first; -1 where an image has fewer.
    """
    return (first_overlaps_QK[:, :k] >= threshold).any(dim=1)


def chance_at(good: int, total: int, k: int) -> float:
    """Probability that k of `total` proposals, drawn without replacement, have one of the `good` ones."""
    if good == 0:
        return 0.0
    if total - good < k:
        return 1.0
    log_none = (
        math.lgamma(total - good + 1) - math.lgamma(total - good - k + 1)
        - math.lgamma(total + 1) + math.lgamma(total - k + 1)
    )  # fmt: skip
    return -math.expm1(log_none)


def summarise(found: dict[str, Tensor], cluster: Tensor, rows: Tensor | None = None) -> dict[str, dict]:
    """Mean and standard error of each outcome.

    Args:
        found: name -> (Q,) outcomes; cluster: (Q,) the image of each phrase, whose phrases depend on each other.
        rows: (Q,) bool, the phrases to take; None: all.

    Returns:
        name -> {"value", "se"}.
    """
    some = torch.ones(len(cluster), dtype=torch.bool) if rows is None else rows
    return {
        name: {"value": float(x[some].double().mean()), "se": cluster_standard_error(x[some], cluster[some])}
        for name, x in found.items()
    }
