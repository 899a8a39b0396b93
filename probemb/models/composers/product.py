"""MPC: the product of the parts' densities. No parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from probemb.compose import Product, compose
from probemb.gaussian import Gaussian
from probemb.models.composers.composer import Composer


class ProductComposer(Composer):
    """`probemb.compose.compose` with its normaliser. Source: MPC Eqs. 2 to 4."""

    weighs = normalises = True

    def compose_parts(self, parts: Gaussian) -> Product:
        return compose(_parts_first(parts))

    def compose_weighted(self, parts: Gaussian, weights: Tensor | Sequence[float]) -> Product:
        weights = torch.as_tensor(weights)
        return compose(_parts_first(parts), weights=weights if weights.dim() == 1 else weights.T)


def _parts_first(parts: Gaussian) -> Gaussian:
    """(k, N, D)."""
    return Gaussian(parts.mean.transpose(0, 1), parts.log_var.transpose(0, 1))
