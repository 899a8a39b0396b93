"""The interface of composers. N queries of k parts, D dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from probemb.compose import Product
from probemb.errors import UserError
from probemb.gaussian import Gaussian


class Composer(nn.Module):
    """From the parts of a query, images and texts alike, to one normal.

    Subclasses have `compose_parts`, or `pair` for composers of points, which are applied from left to right.

    Attributes:
        probabilistic: whether the log-variances of the parts are read, and those of the result mean anything.
        weighs: whether parts can have weights.
        normalises: whether the log-normaliser means anything.
        dim: D.
    """

    probabilistic: ClassVar[bool] = True
    weighs: ClassVar[bool] = False
    normalises: ClassVar[bool] = False

    def __init__(self, dim: int):
        super().__init__()
        self.dim = dim

    def forward(self, parts: Gaussian, weights: Tensor | Sequence[float] | None = None) -> Product:
        """Compose, in at least float32 also under autocast.

        Args:
            parts: Gaussian (N, k, D), k at least 1. A single part is its own composition.
            weights: (k,) or (N, k), see `probemb.compose.compose`; only where the composer `weighs`.

        Returns:
            gaussian (N, D) and log_normaliser (N,), zero where the composer has none.

        Raises:
            ValueError: parts of another shape.
            UserError: weights for a composer that has none, or as `compose`.
        """
        if parts.mean.dim() != 3 or not parts.shape[1] or parts.shape[2] != self.dim:
            raise ValueError(f"parts of shape {tuple(parts.shape)}: give (N, k, {self.dim}) with k of at least 1")
        if weights is not None and not self.weighs:
            raise UserError(
                "This model's composer has no weights and no parts to take away.",
                "Give every part once, without a weight, or use a model trained with --method mpc.",
            )
        with torch.autocast(parts.mean.device.type, enabled=False):
            parts = parts.float()
            return self.compose_parts(parts) if weights is None else self.compose_weighted(parts, weights)

    def compose_parts(self, parts: Gaussian) -> Product:
        """Parts (N, k, D) without weights."""
        raise NotImplementedError

    def compose_weighted(self, parts: Gaussian, weights: Tensor | Sequence[float]) -> Product:
        """Parts (N, k, D) with weights (k,) or (N, k), where the composer `weighs`."""
        raise NotImplementedError


class PointComposer(Composer):
    """A composer of points: it reads the means alone, and the log-variances of the result are 0.

    Queries of more than two parts are composed from left to right: the result of the first two with the third. In
    training, batch norms use the statistics of the whole (gathered) batch, so it must be applied to that.
    """

    probabilistic = False

    def compose_parts(self, parts: Gaussian) -> Product:
        mean = parts.mean[:, 0]
        for i in range(1, parts.shape[1]):
            mean = self.pair(mean, parts.mean[:, i])
        return Product(Gaussian(mean, torch.zeros_like(mean)), mean.new_zeros(len(mean)))

    def pair(self, first_ND: Tensor, second_ND: Tensor) -> Tensor:
        """Two parts as one, (N, D)."""
        raise NotImplementedError
