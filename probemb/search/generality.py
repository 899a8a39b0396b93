"""Inclusion of one item in another, from what an index knows of them: the distance of their means, and both u."""

from __future__ import annotations

import torch
from torch import Tensor


def inclusion_of_spheres(apart: Tensor, u_a: Tensor, u_b: Tensor, dim: int) -> Tensor:
    """`distances.inclusion` of a in b, of normals with the same variance in all dimensions; positive: a lies in b.

    log ∫ p_a² p_b − log ∫ p_a p_b² with the variances u_a / D and u_b / D. It is above 0 exactly if u_b > u_a: b is the
    more general one. Source: ProLIP §3.3.

    Args:
        apart: squared distances of the means; u_a, u_b: sums of the variances, above 0; all of shapes that broadcast.
        dim: D.
    """
    apart, a, b = apart.double(), u_a.double() / dim, u_b.double() / dim
    left, right = 2 * a + b, a + 2 * b
    return apart * (b - a) / (left * right) + dim / 2 * (torch.log(left / right) + torch.log(b / a))
