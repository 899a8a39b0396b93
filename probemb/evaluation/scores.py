"""Scores of images with captions for rankings, a block of rows at a time, without gradients; larger is closer.

Letters: N rows, M columns, D dimensions, E = D + 2. CSD with any weights of the variances, 2-Wasserstein and the cosine
of the means separate into one dot product: |x - y|^2 + r + c = -(2x, -(|x|^2 + r), -1) . (y, 1, |y|^2 + c). Each side's
vectors are computed once, and a block of scores is one matrix product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from probemb.cross_attention import CrossAttention
from probemb.distances import (
    bhattacharyya,
    elk,
    inclusion,
    kl_factors,
    match_probability_of_samples,
    mean_distance_of_samples,
    near_origin,
)
from probemb.evaluation.attention import AttentionScores
from probemb.evaluation.kept_tokens import KeptTokens
from probemb.gaussian import Gaussian, at_least_float32
from probemb.losses.triplet import order_similarity

SAMPLE_ELEMENTS = 1 << 23  # distances between samples computed at a time
PAIR_ELEMENTS = 1 << 14  # pairs whose scores do not separate, computed at a time: fits the processor's cache
INSTANCE_ELEMENTS = 1 << 24  # dot products of single embeddings computed at a time
LARGE_U = 512.0  # float32 resolves 6e-5 there; squared distances of means of unit length are 4 at most
WHOLE_ELEMENTS = 1 << 28  # scores that `both_ways` holds: 1 GiB in float32


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
    """A mean over pairs of samples, (N, M): `score` of samples (N, J, D) and (M, 1, D), such as the match probability.

    The samples are the same for all rows. One of the J sets is held at a time and redrawn when needed: for 25,000
    captions all sets would take a gigabyte.
    """

    left: Gaussian
    right: Gaussian
    score: Callable[[Tensor, Tensor], Tensor]
    n_samples: int
    seeds: tuple[int, int] = (1, 2)

    def __call__(self, rows: slice) -> Tensor:
        left = torch.stack([self._draw(0, j)[rows] for j in range(self.n_samples)], 1)  # (rows, J, D)
        total = left.new_zeros(len(left), len(self.right))
        step = max(1, SAMPLE_ELEMENTS // max(1, len(self.right)))
        with torch.autocast(left.device.type, enabled=False), torch.no_grad():
            for k in range(self.n_samples):
                right = self._draw(1, k)[:, None]
                for some, part in zip(total.split(step), left.split(step)):
                    some += self.score(part, right)
                del right  # before the next one is drawn
        return total.div_(self.n_samples)

    def _draw(self, side: int, sample: int) -> Tensor:
        gaussian = (self.left, self.right)[side]
        generator = torch.Generator(gaussian.mean.device).manual_seed(self.seeds[side] + 2 * sample)
        noise = torch.randn(gaussian.shape, dtype=gaussian.mean.dtype, device=gaussian.mean.device, generator=generator)
        return noise.mul_(gaussian.std).add_(gaussian.mean)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, M)."""
        return len(self.left), len(self.right)

    def only(self, rows: Tensor, columns: Tensor) -> SampledScores:
        """The scores of these rows and columns alone; with new samples, unless these are all."""
        return replace(self, left=_take(self.left, rows), right=_take(self.right, columns))

    def transposed(self) -> SampledScores:
        """(M, N), of the same samples."""
        return replace(self, left=self.right, right=self.left, seeds=self.seeds[::-1])


@dataclass(frozen=True, eq=False)
class PairScores:
    """Scores that do not separate, (N, M): `score` of rows with columns, or of columns with rows if `flipped`."""

    left: Gaussian
    right: Gaussian
    score: Callable[[Gaussian, Gaussian], Tensor]
    flipped: bool = False

    @torch.no_grad()
    def __call__(self, rows: slice) -> Tensor:
        left, step = self.left[rows], max(1, PAIR_ELEMENTS // max(1, len(self.right)))
        parts = (left[start : start + step] for start in range(0, len(left), step))
        if self.flipped:
            return torch.cat([self.score(self.right, part).T for part in parts])
        return torch.cat([self.score(part, self.right) for part in parts])

    @property
    def shape(self) -> tuple[int, int]:
        """(N, M)."""
        return len(self.left), len(self.right)

    def only(self, rows: Tensor, columns: Tensor) -> PairScores:
        """The scores of these rows and columns alone."""
        return replace(self, left=_take(self.left, rows), right=_take(self.right, columns))

    def transposed(self) -> PairScores:
        """(M, N)."""
        return PairScores(self.right, self.left, self.score, not self.flipped)


@dataclass(frozen=True, eq=False)
class LargerScores:
    """The larger one of two scores of every pair, (N, M)."""

    one: DotScores
    other: DotScores

    def __call__(self, rows: slice) -> Tensor:
        return torch.maximum(self.one(rows), self.other(rows))

    @property
    def shape(self) -> tuple[int, int]:
        """(N, M)."""
        return self.one.shape

    def only(self, rows: Tensor, columns: Tensor) -> LargerScores:
        """The scores of these rows and columns alone."""
        return LargerScores(self.one.only(rows, columns), self.other.only(rows, columns))

    def transposed(self) -> LargerScores:
        """(M, N)."""
        return LargerScores(self.one.transposed(), self.other.transposed())


@dataclass(frozen=True, eq=False)
class MultiInstanceScores:
    """The largest dot product of any of a row's K embeddings with any of a column's, (N, M). Source: PVSE."""

    left: Tensor
    right: Tensor

    def __call__(self, rows: slice) -> Tensor:
        left, (m, k, d) = self.left[rows], self.right.shape
        columns, step = self.right.reshape(m * k, d).T, max(1, INSTANCE_ELEMENTS // max(1, m * k * k))
        found = []
        with torch.autocast(left.device.type, enabled=False):
            for part in left.split(step):
                dots = (part.reshape(-1, d) @ columns).view(len(part), part.shape[1], m, k)
                found.append(dots.amax((1, 3)))
        return torch.cat(found) if found else left.new_zeros(0, m)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, M)."""
        return len(self.left), len(self.right)

    def only(self, rows: Tensor, columns: Tensor) -> MultiInstanceScores:
        """The scores of these rows and columns alone."""
        return MultiInstanceScores(_take(self.left, rows), _take(self.right, columns))

    def transposed(self) -> MultiInstanceScores:
        """(M, N)."""
        return MultiInstanceScores(self.right, self.left)


Scores = DotScores | SampledScores | PairScores | LargerScores | MultiInstanceScores | AttentionScores


def _take(x, index: Tensor):
    """Rows of a tensor or Gaussian, without a copy if they are all rows in order."""
    whole = len(index) == len(x) and torch.equal(index, torch.arange(len(x)))
    return x if whole else x[index.to(x.device if isinstance(x, Tensor) else x.mean.device)]


def both_ways(
    scores: Scores, most: int = WHOLE_ELEMENTS
) -> tuple[Tensor | Callable[[slice], Tensor], Tensor | Callable[[slice], Tensor]]:
    """Scores and their transpose for repeated reading: computed once if at most `most`, else at every read."""
    rows, columns = scores.shape
    if rows * columns > most:
        return scores, scores.transposed()
    whole = scores(slice(None))
    return whole, whole.T


def _squared_euclidean(x: Tensor, y: Tensor, row: Tensor | float = 0.0, column: Tensor | float = 0.0) -> DotScores:
    x_own, y_own = -(x.square().sum(1, keepdim=True) + row), y.square().sum(1, keepdim=True) + column
    return DotScores(
        torch.cat([2 * x, x_own, -torch.ones_like(x_own)], 1), torch.cat([y, torch.ones_like(y_own), y_own], 1)
    )


@torch.no_grad()
def tolerance_scores(a: Gaussian, b: Gaussian, i2t: float = 1.0, t2i: float = 1.0) -> DotScores:
    """-(|mu_a - mu_b|^2 + t2i u_a + i2t u_b) of images (N, D) and captions (M, D), u the sum of the variances.

    A weight bears the name of the direction whose gallery it weighs: `i2t` the captions, `t2i` the images. A query's
    own term is a constant of its ranking. 1 and 1 is -CSD, 0 and 0 the means; below 0, a large variance of an item is
    a tolerance: it lies closer to everything. Float64 where u is so large that float32 would blur the ranking.
    """
    u_a, u_b = t2i * a.uncertainty()[:, None], i2t * b.uncertainty()[:, None]
    x, y = at_least_float32(a.mean), at_least_float32(b.mean)
    if max(float(u.abs().max()) if len(u) else 0.0 for u in (u_a, u_b)) > LARGE_U:
        x, y, u_a, u_b = x.double(), y.double(), u_a.double(), u_b.double()
    return _squared_euclidean(*near_origin(x, y), u_a, u_b)


def csd_scores(a: Gaussian, b: Gaussian) -> DotScores:
    """-CSD, Gaussians (N, D) and (M, D)."""
    return tolerance_scores(a, b)


@torch.no_grad()
def wasserstein2_scores(a: Gaussian, b: Gaussian) -> DotScores:
    """-(squared 2-Wasserstein distance)."""
    x, y = (torch.cat([g.mean, g.std], 1) for g in (a.float(), b.float()))
    return _squared_euclidean(*near_origin(x, y))


@torch.no_grad()
def mean_scores(a: Gaussian, b: Gaussian) -> DotScores:
    """Dot product of the means, their cosine at unit length."""
    return DotScores(at_least_float32(a.mean), at_least_float32(b.mean))


@torch.no_grad()
def match_probability_scores(
    a: Gaussian, b: Gaussian, scale: float = 1.0, shift: float = 0.0, n_samples: int = 8
) -> SampledScores:
    """PCME's match probability in [0, 1], by Monte Carlo with one set of samples for all pairs."""
    score = partial(match_probability_of_samples, scale=float(scale), shift=float(shift))
    return SampledScores(a.float(), b.float(), score, n_samples)


@torch.no_grad()
def average_l2_scores(a: Gaussian, b: Gaussian, n_samples: int = 8) -> SampledScores:
    """-(mean distance of samples), by Monte Carlo with one set of samples for all pairs. Source: PCME Table 1."""
    return SampledScores(a.float(), b.float(), lambda x, y: -mean_distance_of_samples(x, y), n_samples)


@torch.no_grad()
def kl_scores(a: Gaussian, b: Gaussian) -> DotScores:
    """-KL(a || b); see `distances.kl`."""
    left, right, row, col = kl_factors(a.float(), b.float())
    one_a, one_b = torch.ones_like(row), torch.ones_like(col)
    return DotScores(
        -0.5 * torch.cat([left, row[:, None], one_a[:, None]], 1),
        torch.cat([right, one_b[:, None], col[:, None]], 1),
    )


def reverse_kl_scores(a: Gaussian, b: Gaussian) -> DotScores:
    """-KL(b || a); see `distances.kl`."""
    return kl_scores(b, a).transposed()


def min_kl_scores(a: Gaussian, b: Gaussian) -> LargerScores:
    """-min(KL(a || b), KL(b || a)); see `distances.min_kl`."""
    return LargerScores(kl_scores(a, b), kl_scores(b, a).transposed())


def symmetric_kl_scores(a: Gaussian, b: Gaussian) -> DotScores:
    """-(mean of KL(a || b) and KL(b || a)); see `distances.symmetric_kl`."""
    there, back = kl_scores(a, b), kl_scores(b, a).transposed()
    left = torch.cat([there.left, back.left], 1)
    return DotScores(0.5 * left, torch.cat([there.right, back.right], 1))


@torch.no_grad()
def multi_instance_scores(a: Gaussian, b: Gaussian) -> MultiInstanceScores:
    """Largest dot product of the means of K embeddings, (N, K, D) and (M, K, D); (N, D) and (M, D) are K = 1."""
    return MultiInstanceScores(*(at_least_float32(g.mean if g.mean.ndim == 3 else g.mean[:, None]) for g in (a, b)))


@torch.no_grad()
def order_scores(a: Gaussian, b: Gaussian) -> PairScores:
    """Minus what each caption exceeds each image by; see `losses.order_similarity`."""
    return PairScores(a.float(), b.float(), lambda a, b: order_similarity(a.mean, b.mean))


def log_likelihood_scores(a: Gaussian, b: Gaussian) -> PairScores:
    """Log of the expected likelihood kernel, the integral of p_a p_b; see `distances.elk`."""
    return PairScores(a.float(), b.float(), lambda a, b: -elk(a, b))


def bhattacharyya_scores(a: Gaussian, b: Gaussian) -> PairScores:
    """-(Bhattacharyya distance); see `distances.bhattacharyya`."""
    return PairScores(a.float(), b.float(), lambda a, b: -bhattacharyya(a, b))


def inclusion_scores(a: Gaussian, b: Gaussian) -> PairScores:
    """Inclusion of each image in each caption; see `distances.inclusion`."""
    return PairScores(a.float(), b.float(), inclusion)


def attention_scores(
    a: Gaussian, b: Gaussian, how: CrossAttention, tokens: tuple[KeptTokens, KeptTokens]
) -> AttentionScores:
    """Stacked cross attention of the tokens of images and captions; the Gaussians have no part in it."""
    return AttentionScores(*tokens, how, str(a.mean.device))


SCORES: dict[str, Callable[..., Scores]] = {
    "csd": csd_scores,
    "mean": mean_scores,
    "wasserstein2": wasserstein2_scores,
    "match-probability": match_probability_scores,
    "tolerance": tolerance_scores,
    "log-likelihood": log_likelihood_scores,
    "inclusion": inclusion_scores,
    "kl": kl_scores,
    "reverse-kl": reverse_kl_scores,
    "min-kl": min_kl_scores,
    "symmetric-kl": symmetric_kl_scores,
    "bhattacharyya": bhattacharyya_scores,
    "average-l2": average_l2_scores,
    "multi-instance": multi_instance_scores,
    "attention": attention_scores,
    "order": order_scores,
}
