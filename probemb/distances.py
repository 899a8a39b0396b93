"""Pairwise distances between diagonal normals, (N, D) and (M, D) to (N, M), in at least float32; smaller is closer.

Nothing of size N x M x D is held: a distance that separates into per-item vectors is one matrix product; any other (a
sum of variances in a denominator or a logarithm) is summed over slices of D, recomputed in the backward pass.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from probemb.gaussian import Gaussian, at_least_float32

SAMPLES = 8  # of an item, for a match probability
BLOCK_ELEMENTS = 1 << 22  # elements of an intermediate result: 16 MiB in float32
ORDER_ELEMENTS = 1 << 18, 1 << 25  # of some rows times M x D: a CPU's cache; 128 MiB of a GPU


def _full_precision(fn):
    @wraps(fn)
    def wrapped(a: Gaussian, b: Gaussian) -> Tensor:
        with torch.autocast(a.mean.device.type, enabled=False):
            return fn(a.float(), b.float())

    return wrapped


def squared_euclidean(x_ND: Tensor, y_MD: Tensor, row_N: Tensor | float = 0.0, col_M: Tensor | float = 0.0) -> Tensor:
    """|x_i - y_j|^2 + row_i + col_j as one matrix product, (N, M)."""
    row = x_ND.square().sum(1) + row_N
    col = y_MD.square().sum(1) + col_M
    return torch.addmm(row[:, None] + col[None, :], x_ND, y_MD.T, alpha=-2)


def near_origin(x_ND: Tensor, y_MD: Tensor) -> tuple[Tensor, Tensor]:
    """Both seen from the average y: distances from products lose fewer digits near the origin."""
    origin = y_MD.detach().mean(0)
    return x_ND - origin, y_MD - origin


@_full_precision
def csd(a: Gaussian, b: Gaussian) -> Tensor:
    """Closed-form sampled distance E|Z_a - Z_b|^2 = |mu_a - mu_b|^2 + sum(var_a + var_b). Source: PCME++ Eq. 1."""
    return squared_euclidean(*near_origin(a.mean, b.mean), a.uncertainty(), b.uncertainty())


@_full_precision
def wasserstein2(a: Gaussian, b: Gaussian) -> Tensor:
    """|mu_a - mu_b|^2 + |std_a - std_b|^2, the squared distance. Source: PCME++ §2.2."""
    return squared_euclidean(*near_origin(torch.cat([a.mean, a.std], 1), torch.cat([b.mean, b.std], 1)))


@_full_precision
def kl(a: Gaussian, b: Gaussian) -> Tensor:
    """KL(a || b) in nats. Source: PCME, test-time distances; Probabilistic VSE++.

    As matrix products: near pairs of very small variances (below e^-10 for unit means in float32) want float64.
    """
    left, right, row, col = kl_factors(a, b)
    return 0.5 * torch.addmm(row[:, None] + col[None, :], left, right.T)


@_full_precision
def symmetric_kl(a: Gaussian, b: Gaussian) -> Tensor:
    """Mean of KL(a || b) and KL(b || a), "JS" in the papers, although that has no closed form for normals."""
    return 0.5 * (kl(a, b) + kl(b, a).T)


@_full_precision
def min_kl(a: Gaussian, b: Gaussian) -> Tensor:
    """The smaller one of KL(a || b) and KL(b || a). Source: Probabilistic VSE++, similarity."""
    return torch.minimum(kl(a, b), kl(b, a).T)


def kl_factors(a: Gaussian, b: Gaussian) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """left (N, 2D), right (M, 2D), row (N,) and col (M,) with 2 KL(a || b) = left @ right.T + row + col.

    Everything is measured from b's average, and variances by their difference from it, var_a / var_b - 1 = A + P + A P:
    the D ones of many nearly equal variances would cost float32 its digits.
    """
    origin, unit = b.mean.detach().mean(0), b.log_var.detach().mean(0)
    mu_a, mu_b = ((g.mean - origin) * (-0.5 * unit).exp() for g in (a, b))
    log_a, log_b = a.log_var - unit, b.log_var - unit
    more_a, more_precise_b = log_a.expm1(), (-log_b).expm1()
    left = torch.cat([more_a + mu_a.square(), -2 * mu_a], 1)
    right = torch.cat([more_precise_b, mu_b * (1 + more_precise_b)], 1)
    row = (more_a - log_a + mu_a.square()).sum(1)
    col = (more_precise_b + log_b + mu_b.square() * (1 + more_precise_b)).sum(1)
    return left, right, row, col


@_full_precision
def elk(a: Gaussian, b: Gaussian) -> Tensor:
    """-log of the expected likelihood kernel, the integral of p_a(x) p_b(x). Source: PCME, test-time distances."""
    return _overlap(a, b, 1.0) + 0.5 * a.shape[1] * math.log(2 * math.pi)


@_full_precision
def bhattacharyya(a: Gaussian, b: Gaussian) -> Tensor:
    """Bhattacharyya distance, -log of the integral of sqrt(p_a(x) p_b(x)). Source: PCME, test-time distances."""
    separable = 0.25 * (a.log_var.sum(1)[:, None] + b.log_var.sum(1)[None, :])
    return _overlap(a, b, 0.5) - separable - 0.5 * a.shape[1] * math.log(2)


def _overlap(a: Gaussian, b: Gaussian, weight: float) -> Tensor:
    """Half the sum over D of weight * (mu_a - mu_b)^2 / v + log v with v = var_a + var_b, (N, M)."""

    def term(mu_a, log_var_a, mu_b, log_var_b):
        log_sum = torch.logaddexp(log_var_a, log_var_b)
        return weight * (mu_a - mu_b).square() * (-log_sum).exp() + log_sum

    return 0.5 * sum_over_slices(term, (a.mean, a.log_var), (b.mean, b.log_var))


@_full_precision
def inclusion(a: Gaussian, b: Gaussian) -> Tensor:
    """Inclusion of a in b, the log of the integral of p_a^2 p_b over that of p_a p_b^2; positive: a lies in b.

    Antisymmetric, and no distance: 0 for equal variances wherever the means are. Source: ProLIP, inclusion loss.
    """

    def term(mu_a, log_var_a, mu_b, log_var_b):
        return inclusion_per_dimension(Gaussian(mu_a, log_var_a), Gaussian(mu_b, log_var_b))

    return sum_over_slices(term, (a.mean, a.log_var), (b.mean, b.log_var))


def inclusion_per_dimension(
    inner: Gaussian, outer: Gaussian, form: Literal["exact", "code"] = "exact", eps: float = -10.0
) -> Tensor:
    """The terms of `inclusion` row by row, (B, D), or for shapes that broadcast. The public code's form, "code", counts
    the ratio of the widths twice and weighs the distance of the means by e^eps. Source: ProLIP §3.3.
    """
    v1, v2 = inner.var, outer.var
    left, right = 2 * v1 + v2, v1 + 2 * v2
    apart, widths = (inner.mean - outer.mean).square() * ((v2 - v1) / left / right), outer.log_var - inner.log_var
    if form == "code":
        apart, widths = math.exp(eps) * apart, 2 * widths
    return apart + 0.5 * (left / right).log() + 0.5 * widths


def sum_over_slices(term: Callable[..., Tensor], a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Sum over D of term(*a, *b) of every pair, (N, M), a slice of D at a time, recomputed in the backward pass.

    `term` takes a's (N, D) tensors as (N, 1, d), then b's (M, D) as (1, M, d), and returns (N, M, d).
    """
    (n, d), m = a[0].shape, len(b[0])
    width = max(1, min(d // 2, BLOCK_ELEMENTS // max(1, n * m)))  # at most half of D, so never N x M x D

    def one_slice(*columns: Tensor) -> Tensor:
        return term(*(x[:, None] for x in columns[: len(a)]), *(x[None] for x in columns[len(a) :])).sum(-1)

    total = a[0].new_zeros(n, m)
    for start in range(0, d, width):
        total = total + recomputed(one_slice, *(x[:, start : start + width] for x in (*a, *b)))
    return total


def in_row_blocks(
    fn: Callable[..., Tensor], tensors: Sequence[Tensor], elements_per_row: int, held: int = BLOCK_ELEMENTS
) -> Tensor:
    """fn(*tensors), by blocks of rows whose intermediate results have at most `held` elements; several blocks are
    recomputed in the backward pass, so that one at a time is held.
    """
    rows = max(1, held // max(1, elements_per_row))
    if rows >= len(tensors[0]):
        return fn(*tensors)
    return torch.cat([recomputed(fn, *block) for block in zip(*(x.split(rows) for x in tensors))])


def recomputed(fn: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """fn(*tensors), whose intermediate results are computed again in the backward pass."""
    if not torch.is_grad_enabled():  # checkpoint would hold them
        return fn(*tensors)
    return checkpoint(fn, *tensors, use_reentrant=False, preserve_rng_state=False)


# Values of --distance, beside match-probability, whose logits are its log-odds.
_ALL = (csd, wasserstein2, kl, symmetric_kl, min_kl, bhattacharyya, elk)
DISTANCES: dict[str, Callable[[Gaussian, Gaussian], Tensor]] = {fn.__name__.replace("_", "-"): fn for fn in _ALL}

# ---------------------------------------------------------------------------------------------------- match probability


def match_probability(a: Gaussian, b: Gaussian, scale: Tensor | float = 1.0, shift: Tensor | float = 0.0) -> Tensor:
    """PCME++'s match probability sigmoid(shift - scale CSD), (N, M). Source: PCME++ Eq. 2."""
    return torch.sigmoid(shift - scale * csd(a, b))


def match_probability_of_samples(
    z_a_NJD: Tensor, z_b_MKD: Tensor, scale: Tensor | float = 1.0, shift: Tensor | float = 0.0
) -> Tensor:
    """Mean over all J x K sample pairs of sigmoid(2 (shift - scale |z_a - z_b|)), (N, M); 2 as in PCME's code."""
    return _mean_over_samples(z_a_NJD, z_b_MKD, lambda distance: torch.sigmoid(2 * (shift - scale * distance)))


def match_log_odds_of_samples(
    z_a_NJD: Tensor, z_b_MKD: Tensor, scale: Tensor | float = 1.0, shift: Tensor | float = 0.0
) -> Tensor:
    """Log-odds of `match_probability_of_samples`, with a gradient also where that rounds to 0 or 1."""

    def log_odds(distance_NMK: Tensor) -> Tensor:
        logit = 2 * (shift - scale * distance_NMK)
        return F.logsigmoid(torch.stack([logit, -logit])).logsumexp(-1)  # (2, N, M)

    match, other = torch.stack(list(_of_each_sample(z_a_NJD, z_b_MKD, log_odds))).logsumexp(0)
    return match - other


def mean_distance_of_samples(z_a_NJD: Tensor, z_b_MKD: Tensor) -> Tensor:
    """Mean over all J x K sample pairs of |z_a - z_b|, (N, M). Source: PCME, test-time distances ("average L2")."""
    return _mean_over_samples(z_a_NJD, z_b_MKD, lambda distance: distance)


def _mean_over_samples(z_a_NJD: Tensor, z_b_MKD: Tensor, value: Callable[[Tensor], Tensor]) -> Tensor:
    return sum(_of_each_sample(z_a_NJD, z_b_MKD, lambda distance: value(distance).mean(-1))) / z_a_NJD.shape[1]


def _of_each_sample(z_a_NJD: Tensor, z_b_MKD: Tensor, value: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    """`value` of the distances (N, M, K) of b's samples to each of a's; recomputed in the backward pass."""

    def one_sample(z_a_ND: Tensor) -> Tensor:
        squared = squared_euclidean(*near_origin(z_a_ND, z_b_MKD.flatten(0, 1)))
        distance = squared.clamp_min(torch.finfo(squared.dtype).tiny).sqrt()  # the root has no slope at zero
        return value(distance.view(-1, *z_b_MKD.shape[:2]))

    return (recomputed(one_sample, z_a_ND) for z_a_ND in z_a_NJD.unbind(1))


# ---------------------------------------------------------------------------------------------------- order embeddings


def order_similarity(image_ND: Tensor, text_MD: Tensor, squared: bool = True) -> Tensor:
    """Minus the penalty ||max(0, |text| - |image|)||^2 of every pair, (N, M). Source: order embeddings, Eq. 2.

    `squared`: False for the norm itself, as the public code of VSE++ and PVSE has it.
    """
    with torch.autocast(image_ND.device.type, enabled=False):
        text_MD = at_least_float32(text_MD).abs()

        def penalty_of(rows_nD: Tensor) -> Tensor:
            excess_nMD = (text_MD - rows_nD[:, None]).relu()
            return torch.linalg.vecdot(excess_nMD, excess_nMD)

        held = ORDER_ELEMENTS[text_MD.is_cuda]
        penalty = in_row_blocks(penalty_of, [at_least_float32(image_ND).abs()], text_MD.numel(), held)
        return -(penalty if squared else root(penalty))


def root(squared: Tensor) -> Tensor:
    """Square root whose slope at zero is zero instead of infinite."""
    positive = squared > 0
    return torch.where(positive, squared.masked_fill(~positive, 1).sqrt(), squared)
