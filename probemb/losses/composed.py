"""Losses of composed queries and their targets: the softmax over targets, and the similarities of MPC's rivals.

Letters: N queries of k parts, T targets, J samples, D dimensions. Target i is query i's own; T is at least N.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from probemb.gaussian import Gaussian, at_least_float32
from probemb.losses.output import LossOutput


def target_softmax(
    similarity_NT: Tensor, positives_NT: Tensor | None = None, temperature: float = 1.0, reverse: float = 0.0
) -> LossOutput:
    """Cross entropy of every query's own target among all targets, mean over the queries. Source: MPC Eq. 7.

    Args:
        similarity_NT: larger is closer.
        positives_NT: bool, targets that are correct for a query: other ones than its own are left out instead of being
            negatives. None: all others are negatives, as in the paper.
        temperature: divides the similarities; 1 in the paper.
        reverse: weight, from 0 to 1, of the cross entropy of every target's own query among the queries; the other
            direction has the rest. 0 in the paper, 0.5 in its public code.

    Returns:
        terms "query_to_target", "target_to_query" if it has a weight, and "r@1", the share of queries whose own target
        is the closest.

    Raises:
        ValueError: fewer targets than queries, or positives of another shape.
    """
    with torch.autocast(similarity_NT.device.type, enabled=False):
        logits = _without_other_positives(at_least_float32(similarity_NT), positives_NT) / temperature
        loss, own = _own_among(logits)
        terms = {"query_to_target": loss.detach(), "r@1": (logits.argmax(1) == own).to(logits.dtype).mean()}
        if reverse:
            back, _ = _own_among(logits[:, : len(logits)].T)
            terms["target_to_query"] = back.detach()
            loss = (1 - reverse) * loss + reverse * back
    return LossOutput(loss, terms)


def _without_other_positives(similarity_NT: Tensor, positives_NT: Tensor | None) -> Tensor:
    """Similarities, -inf for correct targets that are not the query's own."""
    n, t = similarity_NT.shape
    if t < n:
        raise ValueError(f"{n} queries have {t} targets: target i is that of query i")
    if positives_NT is None:
        return similarity_NT
    if positives_NT.shape != (n, t):
        raise ValueError(f"positives are {tuple(positives_NT.shape)}, the similarities {(n, t)}")
    own = torch.eye(n, t, dtype=torch.bool, device=similarity_NT.device)
    return similarity_NT.masked_fill(positives_NT.bool() & ~own, -torch.inf)


def _own_among(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy of the diagonal among the columns, and the columns' indices of it."""
    own = torch.arange(len(logits), device=logits.device)
    return F.cross_entropy(logits, own), own


def log_var_l2(parts: Gaussian, query: Gaussian | None = None) -> Tensor:
    """Mean of the squared log-variances of the parts (N, k, D), a scalar. Source: MPC Eq. 8.

    Args:
        query: the composition, (N, D): counts as one more part, as in the public code.
    """
    mean = at_least_float32(parts.log_var).square().mean()
    if query is None:
        return mean
    k = parts.shape[1]
    return (k * mean + at_least_float32(query.log_var).square().mean()) / (k + 1)


def sampled_cosine(z_NJD: Tensor, z_TJD: Tensor) -> Tensor:
    """Mean cosine of all J x J pairs of samples, (N, T). Source: MPC Eq. 5 with the cosine.

    It is the product of the means of the unit vectors, so the pairs are never made.
    """
    with torch.autocast(z_NJD.device.type, enabled=False):
        left, right = (F.normalize(at_least_float32(z), dim=-1).mean(1) for z in (z_NJD, z_TJD))
        return left @ right.T


class SampledCosineLoss(nn.Module):
    """`target_softmax` of `sampled_cosine`, + a weight times `log_var_l2`: PCME + addition, and "MPC w/o Eq. 6".

    Args:
        n_samples: J, of each side.
        temperature, reverse: see `target_softmax`.
        log_var_l2: weight of the log-variances' squares.
        as_code: as the public code, which takes the log-variances for logarithms of standard deviations when it
            samples, and counts the composition in `log_var_l2`.
    """

    def __init__(
        self,
        n_samples: int = 7,
        temperature: float = 1.0,
        reverse: float = 0.0,
        log_var_l2: float = 1e-3,
        as_code: bool = False,
    ):
        super().__init__()
        self.n_samples, self.temperature, self.reverse = n_samples, temperature, reverse
        self.log_var_l2, self.as_code = log_var_l2, as_code

    def forward(
        self,
        parts: Gaussian,
        query: Gaussian,
        target: Gaussian,
        positives: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> LossOutput:
        """Parts (N, k, D), their composition (N, D), targets (T, D), positives (N, T) bool; see `target_softmax`."""
        with torch.autocast(query.mean.device.type, enabled=False):
            sides = query.float(), target.float()
            if self.as_code:
                sides = tuple(Gaussian(g.mean, 2 * g.log_var) for g in sides)
            samples = [g.sample(self.n_samples, generator) for g in reversed(sides)]  # targets first, as in MPCLoss
            return self.of_samples(parts, query, samples[1], samples[0], positives)

    def of_samples(
        self, parts: Gaussian, query: Gaussian, z_NJD: Tensor, z_TJD: Tensor, positives: Tensor | None = None
    ) -> LossOutput:
        """`forward` with given samples of the compositions and of the targets."""
        out = target_softmax(sampled_cosine(z_NJD, z_TJD), positives, self.temperature, self.reverse)
        return add_log_var_l2(out, parts, query if self.as_code else None, self.log_var_l2)


def add_log_var_l2(out: LossOutput, parts: Gaussian, query: Gaussian | None, weight: float) -> LossOutput:
    """`out` with a weight times `log_var_l2`, which is a term of it even without a weight."""
    penalty = log_var_l2(parts, query)
    loss = out.loss + weight * penalty if weight else out.loss
    return LossOutput(loss, out.terms | {"log_var_l2": penalty.detach()})


class ScaledCosineLoss(nn.Module):
    """`target_softmax` of scale^2 times the cosine of the means, with a learned scale: TIRG's loss, for all points.

    Args:
        scale: at the start; 4 in the public code, which multiplies both sides by it.
    """

    def __init__(self, scale: float = 4.0):
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), float(scale)))

    def forward(self, query_ND: Tensor, target_TD: Tensor, positives: Tensor | None = None) -> LossOutput:
        """Means of the compositions and of the targets, positives (N, T) bool; see `target_softmax`."""
        with torch.autocast(query_ND.device.type, enabled=False):
            left, right = (F.normalize(at_least_float32(x), dim=-1) for x in (query_ND, target_TD))
            return target_softmax(self.scale.square() * (left @ right.T), positives)
