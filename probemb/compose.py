"""Several queries as one: the product of their normals, with its normaliser (MPC). K parts, D dimensions.

product = compose(Gaussian.stack([text, image]))                     # each (D,) or (B, D)
product = compose(Gaussian.stack([text, image]), weights=[1, -0.5])  # the image's density divides
query = as_query(product.gaussian)                                   # on the unit sphere, like single inputs
"""

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
    """A product of normal densities: exp(log_normaliser), (...,), times the density of `gaussian`, (..., D)."""

    gaussian: Gaussian
    log_normaliser: Tensor


def compose(parts: Gaussian, added_variance: float = 0.0, weights: Sequence[float] | None = None) -> Product:
    """Product of the K normals (K, ..., D), or of powers of their densities. Source: MPC Eqs. 2 to 4, with Z.

    Precisions add up; the mean is weighted by them. A weight w is the power w of a part's density, whose precision is w
    times the part's; parts of negative weight divide: their precisions are subtracted. At least one is above 0.
    `added_variance` is what MPC's code adds to variances in the normaliser (1e-6), not where parts divide.
    Raises UserError: a division leaves no precision in a dimension.
    """
    with torch.autocast(parts.mean.device.type, enabled=False):
        parts = parts.float()
        return _multiply(parts, added_variance) if weights is None else _weighted(parts, added_variance, weights)


def _multiply(parts: Gaussian, added_variance: float = 0.0) -> Product:
    """Z is the sum of log N(m; mu_i, V + var_i) over all parts but the first, m and V those of the product before."""
    mean, log_var = parts.mean[0], parts.log_var[0]
    log_z = mean.new_zeros(mean.shape[:-1])
    for other_mean, other_log_var in zip(parts.mean[1:], parts.log_var[1:]):
        log_sum = torch.logaddexp(log_var, other_log_var)
        if added_variance:
            log_sum = torch.logaddexp(log_sum, torch.full_like(log_sum, math.log(added_variance)))
        gap = other_mean - mean
        log_z = log_z - 0.5 * (gap.square() * (-log_sum).exp() + log_sum + LOG_2PI).sum(-1)
        mean = mean + torch.sigmoid(log_var - other_log_var) * gap  # the share of the other's precision
        log_var = -torch.logaddexp(-log_var, -other_log_var)
    return Product(Gaussian(mean, log_var), log_z)


def _weighted(parts: Gaussian, added_variance: float, weights: Sequence[float]) -> Product:
    """The product of the parts with positive weights, divided by that of the others."""
    w = torch.as_tensor(weights, dtype=parts.mean.dtype, device=parts.mean.device)
    size = w.abs().masked_fill(w == 0, 1).view(-1, *[1] * (parts.mean.dim() - 1))
    # A power of a density is the density of a normal, times a constant.
    powers = Gaussian(parts.mean, parts.log_var - size.log())
    log_constant = 0.5 * ((1 - size) * (LOG_2PI + parts.log_var) - size.log()).sum(-1)
    signs = w.sign().view(-1, *[1] * (log_constant.dim() - 1))
    above = _multiply(powers[w > 0], added_variance)
    above = Product(above.gaussian, above.log_normaliser + (log_constant * signs).sum(0))
    return _divide(above, _multiply(powers[w < 0]), weights) if bool((w < 0).any()) else above


def _divide(above: Product, below: Product, weights: Sequence[float]) -> Product:
    (mean, log_var), (other_mean, other_log_var) = ((p.gaussian.mean, p.gaussian.log_var) for p in (above, below))
    left = -torch.expm1(log_var - other_log_var)  # the share of above's precision that remains, (..., D)
    if bool((left <= 64 * torch.finfo(left.dtype).eps).any()):
        parts = [str(part) for part, weight in enumerate(weights, 1) if weight < 0]
        named, dim = f"part{'s' if len(parts) > 1 else ''} {' and '.join(parts)}", left.shape[-1]
        empty = int((left <= 1e-4).reshape(-1, dim).sum(1).max())
        raise UserError(
            f"Taking away {named} of the query leaves no density: in {empty} of {dim} dimensions as much precision "
            "goes as the other parts have.",
            f"Leave {named} out, or take away less, with a weight closer to 0.",
        )
    gap = mean - other_mean
    log_difference = other_log_var + left.log()  # of the variances: below's is the larger one
    terms = gap.square() * (-log_difference).exp() + LOG_2PI + 2 * other_log_var - log_difference
    log_z = above.log_normaliser - below.log_normaliser + 0.5 * terms.sum(-1)
    return Product(Gaussian(mean + (1 - left) / left * gap, log_var - left.log()), log_z)


def as_query(product: Gaussian) -> Gaussian:
    """The composition with its mean at unit length, as the gallery's. Raises UserError: the parts cancel out."""
    norm = product.mean.norm(dim=-1, keepdim=True)
    if not bool((norm > MIN_NORM).all()):
        raise UserError("The parts of the query cancel each other out.", "Leave one of them out.")
    return Gaussian(product.mean / norm, product.log_var)
