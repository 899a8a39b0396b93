"""Split conformal prediction: sets that contain the truth at a promised rate, for classes and for retrieval.

n labelled calibration items give the threshold; for exchangeable items the set of a new one contains its label with
probability 1 - α or more, whatever the model. Letters: n calibration items, N items, K classes or gallery items.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RAPS_PENALTIES = (0.001, 0.01, 0.1, 0.2, 0.5)
TUNING_SHARE = 0.3  # of the calibration items, which the threshold then does not see


def threshold(scores: Tensor, alpha: float) -> float:
    """The ceil((n + 1)(1 - α))-th smallest calibration score (n,); infinity where n is too small for α."""
    rank = math.ceil((len(scores) + 1) * (1 - alpha) - 1e-9)  # 10 · (1 - 0.7) is 3.0000000000000004
    return math.inf if rank > len(scores) else scores.double().kthvalue(max(rank, 1)).values.item()


def class_thresholds(scores: Tensor, labels: Tensor, classes: int, alpha: float) -> Tensor:
    """A `threshold` from the items of each class, (K,); infinity for a class with too few."""
    return torch.tensor([threshold(scores[labels == k], alpha) for k in range(classes)], dtype=torch.float64)


@dataclass(frozen=True)
class Score:
    """A nonconformity score: larger is stranger.

    name: lac (1 - p), aps (the mass down to the label), raps (aps with a penalty for each rank after `k_reg`) or saps
    (the ranks in place of the mass). penalty: of raps and saps.
    """

    name: str = "lac"
    penalty: float = 0.0
    k_reg: int = 0

    def __call__(self, probability: Tensor, u: Tensor | None = None) -> Tensor:
        """Scores (N, K) of probabilities (N, K). u: (N,) uniform draws that make coverage exact; None: conservative.

        Sources: Sadinle et al. 2019 (LAC); Romano et al. 2020 (APS); Angelopoulos et al. 2021 (RAPS); Huang et al.
        2024 (SAPS).
        """
        if self.name == "lac":
            return 1 - probability
        ordered, order = probability.sort(dim=1, descending=True, stable=True)
        draw = ordered.new_zeros(len(ordered), 1) if u is None else u.reshape(len(ordered), -1).to(ordered)
        rank = torch.arange(1, ordered.shape[1] + 1, device=ordered.device)
        if self.name == "saps":
            top = ordered[:, :1]
            score = torch.where(rank == 1, (1 - draw) * top, top + self.penalty * (rank - 1 - draw))
        else:
            penalty = self.penalty * (rank - self.k_reg).clamp_min(0) if self.name == "raps" else 0
            score = ordered.cumsum(1) - draw * ordered + penalty
        return torch.empty_like(score).scatter_(1, order, score)


def of_labels(scores: Tensor, labels: Tensor) -> Tensor:
    """The score of each item's own label, (N,); labels (N,), or bool (N, K): the least of several true ones."""
    if labels.dtype == torch.bool:
        return scores.masked_fill(~labels, torch.inf).amin(1)
    return scores.gather(1, labels[:, None])[:, 0]


def tune_raps(probability: Tensor, labels: Tensor, alpha: float, penalties: Sequence[float] = RAPS_PENALTIES) -> Score:
    """RAPS with k_reg and the penalty of the smallest sets; the items must not be those of the threshold.

    k_reg: the 1 - α quantile of the true label's rank, as the authors choose it.
    """
    own = probability.gather(1, labels[:, None])
    rank = (probability > own).sum(1) + 1
    k_reg = int(threshold(rank, alpha)) if threshold(rank, alpha) < math.inf else probability.shape[1]
    scores = [Score("raps", penalty, k_reg) for penalty in penalties]

    def size(score: Score) -> float:
        found = score(probability)
        return (found <= threshold(of_labels(found, labels), alpha)).sum(1).double().mean().item()

    return min(scores, key=size)


def prediction_sets(scores: Tensor, limit: float | Tensor) -> Tensor:
    """bool (N, K): the labels whose score is at most the threshold, or its class' (K,)."""
    return scores <= torch.as_tensor(limit, dtype=scores.dtype, device=scores.device)


def describe_sets(sets: Tensor, labels: Tensor, alpha: float) -> dict:
    """What to report of prediction sets (N, K) bool and labels (N,).

    Returns:
        "coverage", "size", "empty" (share); "macro_coverage" and "class_gap" (mean |coverage - (1 - α)| of the
        classes present); "size_gap": the largest |coverage - (1 - α)| over sets of similar size.
    """
    hit = sets.gather(1, labels[:, None])[:, 0].double()
    size = sets.sum(1)
    by_class = torch.stack([hit[labels == k].mean() for k in labels.unique()])
    strata = torch.bucketize(size, torch.tensor([1, 3, 10, 100, 1000], device=size.device))
    by_size = torch.stack([hit[strata == s].mean() for s in strata.unique()])
    return {
        "coverage": hit.mean().item(), "size": size.double().mean().item(), "empty": (size == 0).double().mean().item(),
        "macro_coverage": by_class.mean().item(), "class_gap": (by_class - (1 - alpha)).abs().mean().item(),
        "size_gap": (by_size - (1 - alpha)).abs().max().item(),
    }  # fmt: skip


def transported(logits: Tensor, labels: Tensor, epsilon: float = 1.0, rounds: int = 3) -> Tensor:
    """Class probabilities (n + m, K) of calibration and test items together by Sinkhorn. Source: Conf-OT (2025).

    labels: (n,) of the first items, which give the classes' marginal. Transductive: it sees the test items.
    """
    classes = torch.bincount(labels, minlength=logits.shape[1]).to(logits)
    plan = (logits / epsilon - (logits / epsilon).amax()).exp()
    plan = plan / plan.sum()
    for _ in range(rounds):
        plan = plan / plan.sum(0) * (classes / classes.sum())
        plan = plan / plan.sum(1, keepdim=True) / len(plan)
    return plan / plan.sum(1, keepdim=True)
