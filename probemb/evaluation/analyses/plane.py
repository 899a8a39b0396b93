"""Embeddings in a plane: means and covariances, and the ellipses that hold a share of the mass. Source: PCME Fig. 5.

N items, D dimensions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from probemb.gaussian import Gaussian


@dataclass(frozen=True)
class Plane:
    """A plane in the embedding space.

    Attributes:
        origin: (D,); axes: (D, 2), orthonormal columns.
        share: of the variance of the means that it was made from, in [0, 1]; 1 for D = 2.
    """

    origin: Tensor
    axes: Tensor
    share: float


@dataclass(frozen=True)
class Ellipses:
    """N ellipses.

    Attributes:
        centre: (N, 2); radii: (N, 2) half axes, the longer one first; angle: (N,) of the longer one, in radians.
    """

    centre: Tensor
    radii: Tensor
    angle: Tensor

    def __len__(self) -> int:
        return len(self.centre)

    def __getitem__(self, rows) -> Ellipses:
        """These rows."""
        return Ellipses(self.centre[rows], self.radii[rows], self.angle[rows])

    def holds(self, points_P2: Tensor) -> Tensor:
        """(N, P) bool, which points lie in which ellipse."""
        gap = points_P2[None] - self.centre[:, None]  # (N, P, 2)
        cos, sin = self.angle.cos()[:, None], self.angle.sin()[:, None]
        along = gap[..., 0] * cos + gap[..., 1] * sin
        across = gap[..., 1] * cos - gap[..., 0] * sin
        return (along / self.radii[:, :1]).square() + (across / self.radii[:, 1:]).square() <= 1


def plane_of(mean_ND: Tensor) -> Plane:
    """The plane of the two largest principal components of the means; the space itself for D = 2.

    Raises:
        ValueError: fewer than two dimensions.
    """
    points = mean_ND.double()
    d = points.shape[1]
    if d < 2:
        raise ValueError(f"{d} dimensions have no plane")
    if d == 2:
        return Plane(points.new_zeros(2), torch.eye(2, dtype=points.dtype), 1.0)
    origin = points.mean(0)
    _, values, rows = torch.linalg.svd(points - origin, full_matrices=True)
    axes = rows[:2].T
    axes = axes * torch.where(axes.gather(0, axes.abs().argmax(0, keepdim=True)) < 0, -1.0, 1.0)  # signs are arbitrary
    total = float(values.square().sum())
    return Plane(origin, axes, float(values[:2].square().sum()) / total if total else 1.0)


def ellipses(g: Gaussian, plane: Plane, level: float = 0.5) -> Ellipses:
    """The ellipses that hold `level` of every item's mass in the plane, that of its projected covariance.

    In two dimensions the mass within r standard deviations is 1 - exp(-r² / 2).
    """
    centre = (g.mean.double() - plane.origin) @ plane.axes
    covariance = torch.einsum("dp,nd,dq->npq", plane.axes, g.var.double(), plane.axes)
    values, vectors = torch.linalg.eigh(covariance)  # ascending
    radius = math.sqrt(-2 * math.log1p(-level))
    longer = vectors[:, :, 1]
    return Ellipses(centre, radius * values.clamp_min(0).sqrt().flip(1), torch.atan2(longer[:, 1], longer[:, 0]))
