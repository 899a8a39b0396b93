"""Several queries as one: the product of their normals, with its normaliser (MPC).

    product = compose(Gaussian.stack([text, image]))   # each (D,) or (B, D)
    query = as_query(product.gaussian)                 # on the unit sphere, where means of single inputs lie

K parts, D dimensions.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from probemb.errors import UserError
from probemb.gaussian import Gaussian

MIN_NORM = 1e-3  # of a composed mean, below which it has no direction


class Product(NamedTuple):
    """A product of K normal densities: `exp(log_normaliser)` times the density of `gaussian`.

    Attributes:
        gaussian: Gaussian (..., D).
        log_normaliser: (...,) the log-integral of the product: how well the parts agree. 0 for one part.
    """

    gaussian: Gaussian
    log_normaliser: Tensor


def compose(parts: Gaussian, added_variance: float = 0.0) -> Product:
    """Product of the K normals along the first dimension.

    Precisions add up; the mean is weighted by them. The normaliser is the sum of log N(m; mu_i, V + var_i) over all
    parts but the first, m and V being the product of the parts before; it does not depend on their order.

    Args:
        parts: Gaussian (K, ..., D), K at least 1.
        added_variance: what MPC's code adds to V + var_i in the normaliser (1e-6).

    Raises:
        ValueError: no parts.

    Source: MPC, the composition and its normaliser Z.
    """
    if parts.mean.dim() < 2 or not len(parts):
        raise ValueError(f"parts of shape {tuple(parts.shape)}: give (K, ..., D) with K of at least 1")
    parts = parts.float()
    mean, log_var = parts.mean[0], parts.log_var[0]
    log_z = mean.new_zeros(mean.shape[:-1])
    for other_mean, other_log_var in zip(parts.mean[1:], parts.log_var[1:]):
        log_sum = torch.logaddexp(log_var, other_log_var)
        if added_variance:
            log_sum = torch.logaddexp(log_sum, torch.full_like(log_sum, math.log(added_variance)))
        gap = other_mean - mean
        log_z = log_z - 0.5 * (gap.square() * (-log_sum).exp() + log_sum + math.log(2 * math.pi)).sum(-1)
        mean = mean + torch.sigmoid(log_var - other_log_var) * gap  # the share of the other's precision
        log_var = -torch.logaddexp(-log_var, -other_log_var)
    return Product(Gaussian(mean, log_var), log_z)


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
