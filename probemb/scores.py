"""Scores of images with captions, a block of rows at a time: larger is closer. For rankings, without gradients.

Letters: N rows, M columns, D dimensions, E = D + 2. CSD, 2-Wasserstein and the cosine of the means separate into one
dot product: |x - y|^2 + r + c = -(2x, -(|x|^2 + r), -1) . (y, 1, |y|^2 + c). What belongs to one side is computed once,
so a block is a single matrix product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from probemb.distances import match_probability_of_samples
from probemb.gaussian import Gaussian, at_least_float32

SAMPLE_ELEMENTS = 1 << 24  # distances between samples held at a time


@dataclass(frozen=True, eq=False)
class DotScores:
    """left_NE @ right_ME.T; `scores(rows)` gives (rows, M)."""

    left: Tensor
    right: Tensor

    def __call__(self, rows: slice) -> Tensor:
        with torch.autocast(self.left.device.type, enabled=False):
            return self.left[rows] @ self.right.T

    @property
    def shape(self) -> tuple[int, int]:
        """(N, M)."""
        return len(self.left), len(self.right)

    def only(self, rows: Tensor, columns: Tensor) -> DotScores:
        """The scores of these rows and columns alone."""
        return DotScores(_take(self.left, rows), _take(self.right, columns))

    def transposed(self) -> DotScores:
        """(M, N)."""
        return DotScores(self.right, self.left)


@dataclass(frozen=True, eq=False)
class SampledScores:
    """PCME's match probability of samples (N, J, D) and (M, J, D), drawn once; see `distances.match_probability`."""

    left: Tensor
    right: Tensor
    scale: float
    shift: float

    def __call__(self, rows: slice) -> Tensor:
        m, n_samples, _ = self.right.shape
        step = max(1, SAMPLE_ELEMENTS // (m * n_samples))
        with torch.autocast(self.left.device.type, enabled=False), torch.no_grad():
            return torch.cat(
                [
                    match_probability_of_samples(part, self.right, self.scale, self.shift)
                    for part in self.left[rows].split(step)
                ]
            )

    @property
    def shape(self) -> tuple[int, int]:
        """(N, M)."""
        return len(self.left), len(self.right)

    def only(self, rows: Tensor, columns: Tensor) -> SampledScores:
        """The scores of these rows and columns alone."""
        return SampledScores(_take(self.left, rows), _take(self.right, columns), self.scale, self.shift)

    def transposed(self) -> SampledScores:
        """(M, N)."""
        return SampledScores(self.right, self.left, self.scale, self.shift)


Scores = DotScores | SampledScores


def _take(x: Tensor, index: Tensor) -> Tensor:
    whole = len(index) == len(x) and torch.equal(index, torch.arange(len(x)))
    return x if whole else x[index.to(x.device)]


def _squared_euclidean(x: Tensor, y: Tensor, row: Tensor | float = 0.0, column: Tensor | float = 0.0) -> DotScores:
    x_own, y_own = -(x.square().sum(1, keepdim=True) + row), y.square().sum(1, keepdim=True) + column
    return DotScores(
        torch.cat([2 * x, x_own, -torch.ones_like(x_own)], 1), torch.cat([y, torch.ones_like(y_own), y_own], 1)
    )


@torch.no_grad()
def csd_scores(a: Gaussian, b: Gaussian) -> DotScores:
    """-CSD, Gaussians (N, D) and (M, D)."""
    u_a, u_b = a.uncertainty()[:, None], b.uncertainty()[:, None]
    return _squared_euclidean(at_least_float32(a.mean), at_least_float32(b.mean), u_a, u_b)


@torch.no_grad()
def wasserstein2_scores(a: Gaussian, b: Gaussian) -> DotScores:
    """-(squared 2-Wasserstein distance)."""
    x, y = (torch.cat([g.mean, g.std], 1) for g in (a.float(), b.float()))
    return _squared_euclidean(x, y)


@torch.no_grad()
def mean_scores(a: Gaussian, b: Gaussian) -> DotScores:
    """Dot product of the means, which is their cosine where they have unit length."""
    return DotScores(at_least_float32(a.mean), at_least_float32(b.mean))


@torch.no_grad()
def match_probability_scores(
    a: Gaussian, b: Gaussian, scale: float = 1.0, shift: float = 0.0, n_samples: int = 8, seed: int = 0
) -> SampledScores:
    """PCME's match probability in [0, 1], by Monte Carlo with one set of samples for all pairs."""
    generator = torch.Generator(a.mean.device).manual_seed(seed)
    samples = [g.float().sample(n_samples, generator) for g in (a, b)]
    return SampledScores(*samples, float(scale), float(shift))


SCORES: dict[str, Callable[..., Scores]] = {
    "csd": csd_scores,
    "mean": mean_scores,
    "wasserstein2": wasserstein2_scores,
    "match-probability": match_probability_scores,
}
