"""The shape and the range of predicted covariances. Source: Probabilistic VSE++/VSRN §4.2.

B items, D dimensions; K embeddings an item come as (B, K, D).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from probemb.errors import UserError, nearest
from probemb.gaussian import at_least_float32

COVARIANCES = ("ellipsoidal", "spherical-mean", "spherical")


@dataclass(frozen=True)
class Covariance:
    """Post-processing of a log-variance head's output.

    Attributes:
        kind: "ellipsoidal" (a variance for each dimension), "spherical-mean" (the mean of D predicted variances, for
            every dimension) or "spherical" (one predicted value).
        log_var_range: bounds of the predicted log-variances, None for none. A value beyond them has no gradient.
        log_var_start: where they start in a new model; None for the default of `start`.
    """

    kind: str = "ellipsoidal"
    log_var_range: tuple[float, float] | None = None
    log_var_start: float | None = None

    def width(self, embed_dim: int) -> int:
        """Number of log-variances that the head predicts per embedding."""
        return 1 if self.kind == "spherical" else embed_dim

    def start(self, embed_dim: int) -> float:
        """`log_var_start`, or −log D (see `add_heads`), or the middle of a range that leaves that out.

        The middle of [log 0.1, log 10] is 0, where a duplicate of the mean's own layers starts too.
        """
        start = -math.log(embed_dim) if self.log_var_start is None else self.log_var_start
        if self.log_var_range is None or self.log_var_range[0] < start < self.log_var_range[1]:
            return start
        return sum(self.log_var_range) / 2

    def __call__(self, predicted: Tensor, shape: torch.Size) -> Tensor:
        """(B, width) or (B, K, width) predictions -> log-variances of a shape, (B, D) or (B, K, D)."""
        if self.log_var_range is not None:
            predicted = predicted.clamp(*self.log_var_range)
        if self.kind == "ellipsoidal":
            return predicted
        if self.kind == "spherical-mean":
            predicted = at_least_float32(predicted).logsumexp(-1, keepdim=True) - math.log(shape[-1])
        return predicted.expand(shape).contiguous()


def make_covariance(kind: str, log_var_range: Sequence[float] | None, log_var_start: float | None = None) -> Covariance:
    """A `Covariance` of a configuration's values.

    Raises:
        UserError: an unknown kind, a range that is none, or a start that is no number.
    """
    if log_var_start is not None and not math.isfinite(log_var_start):
        raise UserError(f"log_var_start is {log_var_start}.", "Give a number, such as -10 (ProLIP), or leave it out.")
    if kind not in COVARIANCES:
        raise UserError(
            f"There is no covariance '{kind}'.{nearest(kind, COVARIANCES)}", f"Choose one of {', '.join(COVARIANCES)}."
        )
    if log_var_range is None:
        return Covariance(kind, None, log_var_start)
    ends = tuple(float(end) for end in log_var_range)
    if len(ends) != 2 or not all(map(math.isfinite, ends)) or ends[0] >= ends[1]:
        raise UserError(
            f"log_var_range is {list(log_var_range)}.",
            "Give two numbers in ascending order, such as [-2.303, 2.303] for variances from 0.1 to 10.",
        )
    return Covariance(kind, ends, log_var_start)
