"""MPC's loss: how probable samples of the targets are under the composition of a query (Neculai et al., CVPRW 2022).

Letters: N queries of k parts, T targets, J samples of each, D dimensions. log N(z; mu, Sigma) is quadratic in z, so its
mean over samples, or over a target's whole distribution, is one matrix product of 2 D columns; neither N x T x D nor
N x T x J values are made.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from probemb.compose import Product
from probemb.gaussian import Gaussian
from probemb.losses.composed import add_log_var_l2, target_softmax
from probemb.losses.output import LossOutput

Form = Literal["sampled", "expected", "code"]
FORMS = ("sampled", "expected", "code")
LOG_2PI = math.log(2 * math.pi)


def log_density(query: Gaussian, mean_TD: Tensor, var_TD: Tensor) -> Tensor:
    """Expected log N(z; mu, Sigma) in nats for z with these means and variances, whatever its distribution, (N, T)."""
    with torch.autocast(query.mean.device.type, enabled=False):
        left, right, row = log_density_factors(query, mean_TD, var_TD)
        return torch.addmm(row[:, None], left, right.T)


def log_density_factors(query: Gaussian, mean_TD: Tensor, var_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """left (N, 2D), right (T, 2D) and row (N,) with `log_density` = left @ right.T + row."""
    origin = mean_TD.detach().mean(0)  # a common origin keeps the squares small
    precision, mean = (-query.log_var).exp(), query.mean - origin
    left = torch.cat([-0.5 * precision, precision * mean], 1)
    right = torch.cat([(mean_TD - origin).square() + var_TD, mean_TD - origin], 1)
    row = -0.5 * (precision * mean.square() + query.log_var + LOG_2PI).sum(1)
    return left, right, row


def expected_similarity(query: Product, target: Gaussian) -> Tensor:
    """E log( N(z; mu_c, Sigma_c) Z ) over z of the target, (N, T): the limit of MPC's Eq. 6 for many samples."""
    with torch.autocast(target.mean.device.type, enabled=False):
        g, target = query.gaussian.float(), target.float()
        return log_density(g, target.mean, target.var) + query.log_normaliser[:, None]


def sampled_similarity(query: Product, z_TJD: Tensor) -> Tensor:
    """Mean over J samples of each target of log( N(z; mu_c, Sigma_c) Z ), (N, T). Source: MPC Eq. 6."""
    with torch.autocast(z_TJD.device.type, enabled=False):
        return log_density(query.gaussian.float(), *_moments(z_TJD)) + query.log_normaliser[:, None]


def _moments(z_TJD: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of J samples, (T, D) each."""
    mean = z_TJD.mean(1)
    return mean, (z_TJD - mean[:, None]).square().mean(1)


def code_similarity(query: Gaussian, z_TJD: Tensor) -> Tensor:
    """The similarity that the public code trains with, (N, T).

    It adds Z and the normal's constant along the targets' axis and then subtracts every target's largest similarity to
    any query, so both cancel: what is left is -1/2 (z - mu)^T Sigma^-1 (z - mu) from that largest one.

    Args:
        query: with means of unit length, as the code has them.
    """
    with torch.autocast(z_TJD.device.type, enabled=False):
        query = query.float()
        constant = -0.5 * (query.log_var + LOG_2PI).sum(1, keepdim=True)
        exponent = log_density(query, *_moments(z_TJD)) - constant
        return exponent - exponent.max(0, keepdim=True).values


def code_embedding(g: Gaussian) -> tuple[Gaussian, Gaussian]:
    """A normal as the public code compares it, and as it samples it.

    Means are put to unit length; a log-variance is taken for the logarithm of a standard deviation when sampling.
    """
    g = g.float()
    unit = F.normalize(g.mean, dim=-1)
    return Gaussian(unit, g.log_var), Gaussian(unit, 2 * g.log_var)


class MPCLoss(nn.Module):
    """Softmax over targets of the probabilistic similarity, + weighted squared log-variances. Source: MPC §3.3.

    Z and the normal's constant belong to the query, and the paper's softmax (Eq. 7) runs over targets: they change the
    similarity but neither this loss nor its gradient. With `reverse` they count, as they differ between queries.

    Args:
        form: "sampled" (Eq. 6), "expected" (its closed form), or "code", the public code's similarity, in which Z and
            the constant cancel in every direction (`code_similarity`, `code_embedding`). There, the other direction
            takes the target for the query and samples the composition.
        n_samples: J.
        temperature, reverse: see `target_softmax`; the public code has 0.5 for `reverse`.
        log_var_l2: lambda of Eq. 8; with "code" the composition counts as one more part.
    """

    def __init__(
        self,
        form: Form = "sampled",
        n_samples: int = 7,
        temperature: float = 1.0,
        reverse: float = 0.0,
        log_var_l2: float = 1e-3,
    ):
        super().__init__()
        if form not in FORMS:
            raise ValueError(f"form is one of {', '.join(FORMS)}, not {form!r}")
        if n_samples < 1:
            raise ValueError(f"n_samples is at least 1, not {n_samples}")
        self.form, self.n_samples, self.temperature = form, n_samples, temperature
        self.reverse, self.log_var_l2 = reverse, log_var_l2

    def forward(
        self,
        parts: Gaussian,
        query: Product,
        target: Gaussian,
        positives: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> LossOutput:
        """The loss of N queries.

        Args:
            parts: (N, k, D); query: their composition, (N, D); target: (T, D), of which target i is query i's own.
            positives: (N, T) bool, see `target_softmax`.
            generator: source of the noise, on the embeddings' device; seeded alike on every rank.

        Returns:
            terms of `target_softmax`, and "log_var_l2".
        """
        if self.form == "code":
            sampled = [code_embedding(g)[1] for g in (target, query.gaussian)]
            z_TJD, z_NJD = (g.sample(self.n_samples, generator) for g in sampled)
            return self.code_loss(parts, query.gaussian, target, z_NJD, z_TJD, positives)
        if self.form == "expected":
            similarity = expected_similarity(query, target)
        else:
            similarity = sampled_similarity(query, target.float().sample(self.n_samples, generator))
        out = target_softmax(similarity, positives, self.temperature, self.reverse)
        return add_log_var_l2(out, parts, None, self.log_var_l2)

    def code_loss(
        self,
        parts: Gaussian,
        query: Gaussian,
        target: Gaussian,
        z_NJD: Tensor,
        z_TJD: Tensor,
        positives: Tensor | None = None,
    ) -> LossOutput:
        """The loss of form "code" with given samples of the compositions and of the targets."""
        out = target_softmax(code_similarity(code_embedding(query)[0], z_TJD), positives, self.temperature)
        if self.reverse:
            n = len(z_NJD)
            back = code_similarity(code_embedding(target)[0][:n], z_NJD)
            back = target_softmax(back, None if positives is None else positives[:, :n].T, self.temperature)
            out.loss = (1 - self.reverse) * out.loss + self.reverse * back.loss
            out.terms["target_to_query"] = back.terms["query_to_target"]
        return add_log_var_l2(out, parts, query, self.log_var_l2)
