"""Several queries as one: the product of their normals, with its normaliser (MPC).

    product = compose(Gaussian.stack([text, image]))                     # each (D,) or (B, D)
    product = compose(Gaussian.stack([text, image]), weights=[1, -0.5])  # the image's density divides
    query = as_query(product.gaussian)                                   # on the unit sphere, like single inputs

K parts, D dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from probemb.errors import UserError
from probemb.gaussian import Gaussian

MIN_NORM = 1e-3  # of a composed mean, below which it has no direction
LOG_2PI = math.log(2 * math.pi)


class Product(NamedTuple):
    """A product of K normal densities: `exp(log_normaliser)` times the density of `gaussian`.

    Attributes:
        gaussian: Gaussian (..., D).
        log_normaliser: (...,) the log-integral of the product: how well the parts agree. 0 for one part.
    """

    gaussian: Gaussian
    log_normaliser: Tensor


def compose(parts: Gaussian, added_variance: float = 0.0, weights: Tensor | Sequence[float] | None = None) -> Product:
    """Product of the K normals along the first dimension, or of powers of their densities.

    Precisions add up; the mean is weighted by them. Without weights the normaliser is the sum of log N(m; mu_i, V +
    var_i) over all parts but the first, m and V being the product of the parts before; it does not depend on their
    order. A weight w is the power w of a part's density, whose precision is w times the part's. Parts of negative
    weight divide: their precisions are subtracted.

    Args:
        parts: Gaussian (K, ..., D), K at least 1.
        added_variance: what MPC's code adds to V + var_i in the normaliser (1e-6). Not added where parts divide.
        weights: (K,), or (K, ...) for weights of their own in every item of the batch; 0 leaves a part out.

    Raises:
        UserError: weights that are not finite, no weight above 0, or a division after which a dimension has no
            precision left, so that no normal has that density.

    Source: MPC Eqs. 2 to 4, the composition and its normaliser Z.
    """
    with torch.autocast(parts.mean.device.type, enabled=False):
        parts = parts.float()
        if weights is None:
            return _multiply(parts, added_variance)
        return _weighted(parts, added_variance, _check_weights(weights, parts))


def _multiply(parts: Gaussian, added_variance: float = 0.0, active: Tensor | None = None) -> Product:
    """The product, part by part.

    Args:
        active: (K, ...) bool, which parts are multiplied; an item without any gets its first part.
    """
    mean, log_var = parts.mean[0], parts.log_var[0]
    log_z = mean.new_zeros(mean.shape[:-1])
    begun = None if active is None else active[0]
    for i in range(1, len(parts)):
        other_mean, other_log_var = parts.mean[i], parts.log_var[i]
        log_sum = torch.logaddexp(log_var, other_log_var)
        if added_variance:
            log_sum = torch.logaddexp(log_sum, torch.full_like(log_sum, math.log(added_variance)))
        gap = other_mean - mean
        step = -0.5 * (gap.square() * (-log_sum).exp() + log_sum + LOG_2PI).sum(-1)
        both_mean = mean + torch.sigmoid(log_var - other_log_var) * gap  # the share of the other's precision
        both_log_var = -torch.logaddexp(-log_var, -other_log_var)
        if begun is None:
            mean, log_var, log_z = both_mean, both_log_var, log_z + step
            continue
        both, first = (active[i] & begun)[..., None], (active[i] & ~begun)[..., None]
        mean = torch.where(both, both_mean, torch.where(first, other_mean, mean))
        log_var = torch.where(both, both_log_var, torch.where(first, other_log_var, log_var))
        log_z = log_z + torch.where(both[..., 0], step, torch.zeros_like(step))
        begun = begun | active[i]
    return Product(Gaussian(mean, log_var), log_z)


def _check_weights(weights: Tensor | Sequence[float], parts: Gaussian) -> Tensor:
    """Weights (K, ...), one for every part of every item."""
    weights = torch.as_tensor(weights, dtype=parts.mean.dtype, device=parts.mean.device)
    if weights.dim() == 1:
        weights = weights.view(-1, *[1] * (parts.mean.dim() - 2)).expand(parts.shape[:-1])
    if not bool(torch.isfinite(weights).all()):
        raise UserError("A weight of the query is not a finite number.", "Give numbers such as 1, 0.5 or -0.5.")
    if not bool((weights > 0).any(0).all()):
        raise UserError("No part of the query has a weight above 0.", "Give at least one part such a weight.")
    return weights


def _weighted(parts: Gaussian, added_variance: float, weights: Tensor) -> Product:
    """The product of the parts with positive weights, divided by that of the others; weights (K, ...)."""
    size = torch.where(weights == 0, torch.ones_like(weights), weights.abs())[..., None]
    # A power of a density is the density of a normal, times a constant.
    powers = Gaussian(parts.mean, parts.log_var - size.log())
    log_constant = 0.5 * ((1 - size) * (LOG_2PI + parts.log_var) - size.log()).sum(-1)
    log_constants = (log_constant * weights.sign()).sum(0)
    above = _multiply(powers, added_variance, weights > 0)
    above = Product(above.gaussian, above.log_normaliser + log_constants)
    if not bool((weights < 0).any()):
        return above
    below = _multiply(powers, 0.0, weights < 0)
    divides = (weights < 0).any(0)
    log_share = above.gaussian.log_var - below.gaussian.log_var  # of the precision, that is taken away
    left = -torch.expm1(log_share.masked_fill(~divides[..., None], -math.inf))
    if bool((left <= 64 * torch.finfo(left.dtype).eps).any()):
        raise _nothing_left(weights, left)
    return _divide(above, below, left, divides)


def _divide(above: Product, below: Product, left: Tensor, divides: Tensor) -> Product:
    """above / below, `left` (..., D) being the share of above's precision that remains; only of items that divide."""
    (mean, log_var), (other_mean, other_log_var) = ((p.gaussian.mean, p.gaussian.log_var) for p in (above, below))
    gap = mean - other_mean
    log_difference = other_log_var + left.log()  # of the variances: below's is the larger one
    terms = gap.square() * (-log_difference).exp() + LOG_2PI + 2 * other_log_var - log_difference
    log_z = above.log_normaliser - below.log_normaliser + 0.5 * terms.sum(-1)
    every = divides[..., None]
    return Product(
        Gaussian(
            torch.where(every, mean + (1 - left) / left * gap, mean),
            torch.where(every, log_var - left.log(), log_var),
        ),
        torch.where(divides, log_z, above.log_normaliser),
    )


def _nothing_left(weights: Tensor, left: Tensor) -> UserError:
    """Names the parts that divide, and in how many dimensions nothing is left of some item."""
    parts = [str(part + 1) for part, weight in enumerate(weights) if bool((weight < 0).any())]
    named = f"part{'s' if len(parts) > 1 else ''} {' and '.join(parts)}"
    dim = left.shape[-1]
    empty = int((left <= 1e-4).reshape(-1, dim).sum(1).max())
    return UserError(
        f"Taking away {named} of the query leaves no density: in {empty} of {dim} dimensions as much precision "
        "goes as the other parts have.",
        f"Leave {named} out, or take away less, with a weight closer to 0.",
    )


def as_query(product: Gaussian) -> Gaussian:
    """The composition with its mean at unit length, as the gallery's; variances stay.

    A weighted mean of unit vectors is shorter, which would change the weight of the gallery's uncertainties.

    Raises:
        UserError: the parts cancel each other out.
    """
    norm = product.mean.norm(dim=-1, keepdim=True)
    if not bool((norm > MIN_NORM).all()):
        raise UserError("The parts of the query cancel each other out.", "Leave one of them out.")
    return Gaussian(product.mean / norm, product.log_var)
