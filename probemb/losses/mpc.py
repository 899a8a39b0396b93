"""Losses of composed queries and their targets: MPC's, and those of its baselines (Neculai et al., CVPRW 2022).

Letters: N queries of k parts, T targets of which target i is query i's own, J samples of each, D dimensions.
log N(z; mu, Sigma) is quadratic in z, so its mean over samples, or over a target's whole distribution, is one matrix
product of 2 D columns; neither N x T x D nor N x T x J values are made.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from probemb.compose import LOG_2PI, Product
from probemb.gaussian import Gaussian, at_least_float32
from probemb.losses.output import LossOutput


def target_softmax(
    similarity_NT: Tensor, positives_NT: Tensor | None = None, temperature: float = 1.0, reverse: float = 0.0
) -> LossOutput:
    """Cross entropy of every query's own target among all targets, mean over the queries. Source: MPC Eq. 7.

    `positives_NT`: bool, correct targets, which but for its own are left out of a query's negatives. `reverse`: weight,
    from 0 to 1, of the other direction, 0 in the paper, 0.5 in its public code. The term "r@1" is the share of queries
    whose own target is the closest.
    """
    with torch.autocast(similarity_NT.device.type, enabled=False):
        logits = at_least_float32(similarity_NT)
        own = torch.arange(len(logits), device=logits.device)
        if positives_NT is not None:
            others = positives_NT.bool() & ~torch.eye(*logits.shape, dtype=torch.bool, device=logits.device)
            logits = logits.masked_fill(others, -torch.inf)
        logits = logits / temperature
        loss = F.cross_entropy(logits, own)
        terms = {"query_to_target": loss, "r@1": (logits.argmax(1) == own).to(logits.dtype).mean()}
        if reverse:
            terms["target_to_query"] = back = F.cross_entropy(logits[:, : len(logits)].T, own)
            loss = (1 - reverse) * loss + reverse * back
    return LossOutput(loss, terms)


def _with_log_var_l2(out: LossOutput, parts: Gaussian, weight: float, query: Gaussian | None = None) -> LossOutput:
    """`out` + a weight times the parts' (N, k, D) mean squared log-variance, also as a term. Source: MPC Eq. 8.

    `query`: the composition, (N, D): counts as one more part, as in the public code.
    """
    mean = at_least_float32(parts.log_var).square().mean()
    if query is not None:
        k = parts.shape[1]
        mean = (k * mean + at_least_float32(query.log_var).square().mean()) / (k + 1)
    return LossOutput(out.loss + weight * mean if weight else out.loss, out.terms | {"log_var_l2": mean})


def mpc_loss(
    parts: Gaussian, query: Product, target: Gaussian, positives: Tensor | None = None,
    generator: torch.Generator | None = None, *, form: Literal["sampled", "expected", "code"] = "sampled",
    n_samples: int = 7, temperature: float = 1.0, reverse: float = 0.0, log_var_l2: float = 1e-3,
) -> LossOutput:  # fmt: skip
    """Softmax over targets of the probabilistic similarity, + weighted squared log-variances. Source: MPC §3.3.

    Z and the normal's constant belong to the query, and the paper's softmax (Eq. 7) runs over targets: they change
    neither this loss nor its gradient. With `reverse` they count, as they differ between queries.

    Args:
        parts: (N, k, D); query: their composition, (N, D); target: (T, D).
        generator: source of the noise, on the embeddings' device; seeded alike on every rank.
        form: "sampled" (Eq. 6), "expected" (its closed form), or "code" (`mpc_code_loss`).
        n_samples: J; log_var_l2: lambda of Eq. 8; else see `target_softmax`.
    """
    if form == "code":
        z_TJD, z_NJD = (code_embedding(g)[1].sample(n_samples, generator) for g in (target, query.gaussian))
        options = dict(temperature=temperature, reverse=reverse, log_var_l2=log_var_l2)
        return mpc_code_loss(parts, query.gaussian, target, (z_NJD, z_TJD), positives, **options)
    if form == "expected":
        similarity = expected_similarity(query, target)
    else:
        similarity = sampled_similarity(query, target.float().sample(n_samples, generator))
    return _with_log_var_l2(target_softmax(similarity, positives, temperature, reverse), parts, log_var_l2)


def mpc_code_loss(
    parts: Gaussian, query: Gaussian, target: Gaussian, samples: tuple[Tensor, Tensor],
    positives: Tensor | None = None, *, temperature: float, reverse: float, log_var_l2: float,
) -> LossOutput:  # fmt: skip
    """The public code's loss, of samples (N, J, D) of the compositions, which count in `log_var_l2`, and (T, J, D)."""
    z_NJD, z_TJD = samples
    out = target_softmax(code_similarity(code_embedding(query)[0], z_TJD), positives, temperature)
    if reverse:
        n = len(z_NJD)
        back = code_similarity(code_embedding(target)[0][:n], z_NJD)
        back = target_softmax(back, None if positives is None else positives[:, :n].T, temperature)
        out.loss = (1 - reverse) * out.loss + reverse * back.loss
        out.terms["target_to_query"] = back.terms["query_to_target"]
    return _with_log_var_l2(out, parts, log_var_l2, query)


def log_density_factors(query: Gaussian, mean_TD: Tensor, var_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """left (N, 2D), right (T, 2D) and row (N,): left @ right.T + row is the expected log N(z; mu, Sigma) in nats for z
    with these means and variances, whatever its distribution.
    """
    origin = mean_TD.detach().mean(0)  # a common origin keeps the squares small
    precision, mean = (-query.log_var).exp(), query.mean - origin
    left = torch.cat([-0.5 * precision, precision * mean], 1)
    right = torch.cat([(mean_TD - origin).square() + var_TD, mean_TD - origin], 1)
    row = -0.5 * (precision * mean.square() + query.log_var + LOG_2PI).sum(1)
    return left, right, row


def _log_density(query: Gaussian, mean_TD: Tensor, var_TD: Tensor) -> Tensor:
    left, right, row = log_density_factors(query, mean_TD, var_TD)
    return torch.addmm(row[:, None], left, right.T)


def _of_samples(query: Gaussian, z_TJD: Tensor) -> Tensor:
    return _log_density(query, z_TJD.mean(1), z_TJD.var(1, correction=0))


def expected_similarity(query: Product, target: Gaussian) -> Tensor:
    """E log( N(z; mu_c, Sigma_c) Z ) over z of the target, (N, T): the limit of MPC's Eq. 6 for many samples."""
    with torch.autocast(target.mean.device.type, enabled=False):
        target = target.float()
        return _log_density(query.gaussian.float(), target.mean, target.var) + query.log_normaliser[:, None]


def sampled_similarity(query: Product, z_TJD: Tensor) -> Tensor:
    """Mean over J samples of each target of log( N(z; mu_c, Sigma_c) Z ), (N, T). Source: MPC Eq. 6."""
    with torch.autocast(z_TJD.device.type, enabled=False):
        return _of_samples(query.gaussian.float(), z_TJD) + query.log_normaliser[:, None]


def code_similarity(query: Gaussian, z_TJD: Tensor) -> Tensor:
    """The similarity that the public code trains with, (N, T); means of `query` have unit length.

    It adds Z and the normal's constant along the targets' axis and then subtracts every target's largest similarity to
    any query, so both cancel: what is left is -1/2 (z - mu)^T Sigma^-1 (z - mu) from that largest one.
    """
    with torch.autocast(z_TJD.device.type, enabled=False):
        query = query.float()
        constant = -0.5 * (query.log_var + LOG_2PI).sum(1, keepdim=True)
        exponent = _of_samples(query, z_TJD) - constant
        return exponent - exponent.max(0, keepdim=True).values


def code_embedding(g: Gaussian) -> tuple[Gaussian, Gaussian]:
    """A normal, of unit mean, as the public code compares it, and as it samples it, with log-variances as log sigma."""
    g = g.float()
    unit = F.normalize(g.mean, dim=-1)
    return Gaussian(unit, g.log_var), Gaussian(unit, 2 * g.log_var)


# ----------------------------------------------------------------------------------------------------------- baselines


def sampled_cosine_loss(
    parts: Gaussian, query: Gaussian, target: Gaussian, positives: Tensor | None = None,
    generator: torch.Generator | None = None, *, samples: tuple[Tensor, Tensor] | None = None, n_samples: int = 7,
    temperature: float = 1.0, reverse: float = 0.0, log_var_l2: float = 1e-3, as_code: bool = False,
) -> LossOutput:  # fmt: skip
    """Softmax over targets of the mean cosine of samples, + weighted squared log-variances. Source: MPC Eq. 5, 7, 8.

    The mean over all J x J pairs is the product of the means of the unit vectors. `samples`: (N, J, D) and (T, J, D),
    instead of drawn ones. `as_code`: the composition counts in `log_var_l2`, as in the public code.
    """
    with torch.autocast(query.mean.device.type, enabled=False):
        if samples is None:
            samples = [g.float().sample(n_samples, generator) for g in (target, query)][::-1]  # targets first
        left, right = (F.normalize(at_least_float32(z), dim=-1).mean(1) for z in samples)
        out = target_softmax(left @ right.T, positives, temperature, reverse)
        return _with_log_var_l2(out, parts, log_var_l2, query if as_code else None)


def scaled_cosine_loss(
    query_ND: Tensor, target_TD: Tensor, scale: Tensor, positives: Tensor | None = None
) -> LossOutput:
    """`target_softmax` of scale^2 times the cosine of the means: TIRG's loss, whose scale is learned, 4 at first."""
    with torch.autocast(query_ND.device.type, enabled=False):
        left, right = (F.normalize(at_least_float32(x), dim=-1) for x in (query_ND, target_TD))
        return target_softmax(scale.square() * (left @ right.T), positives)
