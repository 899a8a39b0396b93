"""Composers: from the k embeddings of a query, images and texts alike, to one. `product` is MPC's, the others are
baselines. N queries of k parts, D dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from probemb.compose import Product, compose
from probemb.errors import UserError, nearest
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
        raise NotImplementedError

    def compose_weighted(self, parts: Gaussian, weights: Tensor | Sequence[float]) -> Product:
        """Only where the composer `weighs`."""
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


class AdditionComposer(Composer):
    """PCME + addition: means and variances add up. Source: MPC Eq. 9."""

    def compose_parts(self, parts: Gaussian) -> Product:
        mean, log_var = parts.mean.sum(1), parts.log_var.logsumexp(1)
        return Product(Gaussian(mean, log_var), mean.new_zeros(len(mean)))


class MLPComposer(Composer):
    """ "MPC w/o Eq. 2": [mean, log_var] from those of two parts by two layers with batch norm. Source: MPC Table 4.

    More than two parts are composed from left to right. In training the batch norm uses the statistics of the whole
    (gathered) batch.
    """

    def __init__(self, dim: int):
        super().__init__(dim)
        self.layers = nn.Sequential(
            nn.Linear(4 * dim, 2 * dim), nn.BatchNorm1d(2 * dim), nn.ReLU(), nn.Linear(2 * dim, 2 * dim)
        )

    def compose_parts(self, parts: Gaussian) -> Product:
        mean, log_var = parts.mean[:, 0], parts.log_var[:, 0]
        for i in range(1, parts.shape[1]):
            both = torch.cat([mean, log_var, parts.mean[:, i], parts.log_var[:, i]], 1)
            mean, log_var = self.layers(both).chunk(2, 1)
        return Product(Gaussian(mean, log_var), mean.new_zeros(len(mean)))


class RelationshipComposer(PointComposer):
    """Two layers over both parts, which end in a sigmoid (after Santoro et al., NeurIPS 2017). Source: as FiLM."""

    def __init__(self, dim: int):
        super().__init__(dim)
        self.relation = nn.Sequential(nn.Linear(2 * dim, 2 * dim), nn.BatchNorm1d(2 * dim), nn.ReLU())
        self.out = nn.Linear(2 * dim, dim)

    def pair(self, first_ND: Tensor, second_ND: Tensor) -> Tensor:
        return self.out(self.relation(torch.cat([second_ND, first_ND], 1))).sigmoid()


class FiLMComposer(PointComposer):
    """The second part scales and shifts features of the first, and a sigmoid ends it (after Perez et al., AAAI 2018).
    Source: MPC §4.2 and its public code."""

    def __init__(self, dim: int):
        super().__init__(dim)
        self.widen = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU())
        self.modulated = nn.Sequential(nn.Linear(2 * dim, 2 * dim), nn.BatchNorm1d(2 * dim))
        self.scale, self.shift = nn.Linear(dim, 2 * dim), nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(2 * dim, dim)

    def pair(self, first_ND: Tensor, second_ND: Tensor) -> Tensor:
        wide = self.widen(first_ND)
        modulated = self.scale(second_ND) * self.modulated(wide) + self.shift(second_ND)
        return self.out(modulated.relu() + wide).sigmoid()


class MRNBlock(nn.Module):
    """W first + f(first) * g(second): f and g are two layers with tanh each."""

    def __init__(self, dim: int):
        super().__init__()
        self.residual = nn.Linear(dim, dim)
        self.of_first = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, dim), nn.Tanh())
        self.of_second = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, dim), nn.Tanh())

    def forward(self, first_ND: Tensor, second_ND: Tensor) -> Tensor:
        return self.residual(first_ND) + self.of_first(first_ND) * self.of_second(second_ND)


class MRNComposer(PointComposer):
    """Blocks that each refine the first part with the second (after Kim et al., NeurIPS 2016). Source: MPC §4.2.

    Args:
        blocks: three in the paper; its public code has one.
    """

    def __init__(self, dim: int, blocks: int = 3):
        super().__init__(dim)
        self.blocks = nn.ModuleList(MRNBlock(dim) for _ in range(blocks))

    def pair(self, first_ND: Tensor, second_ND: Tensor) -> Tensor:
        for block in self.blocks:
            first_ND = block(first_ND, second_ND)
        return first_ND


class TIRGComposer(PointComposer):
    """gate_weight * sigmoid(gate) * first + residual_weight * residual (after Vo et al., CVPR 2019). Source: as FiLM.

    Both weights are learned; they start from 1 and 10, as published.
    """

    def __init__(self, dim: int):
        super().__init__(dim)
        wide = 2 * dim
        self.gate_weight = nn.Parameter(torch.tensor(1.0))
        self.residual_weight = nn.Parameter(torch.tensor(10.0))
        self.gate = nn.Sequential(nn.BatchNorm1d(wide), nn.ReLU(), nn.Linear(wide, dim))
        self.residual = nn.Sequential(
            nn.BatchNorm1d(wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, dim)
        )

    def pair(self, first_ND: Tensor, second_ND: Tensor) -> Tensor:
        both = torch.cat([first_ND, second_ND], 1)
        gated = self.gate(both).sigmoid() * first_ND
        return self.gate_weight * gated + self.residual_weight * self.residual(both)


COMPOSERS: dict[str, type[Composer]] = {
    "product": ProductComposer,
    "addition": AdditionComposer,
    "mlp": MLPComposer,
    "relationship": RelationshipComposer,
    "film": FiLMComposer,
    "mrn": MRNComposer,
    "tirg": TIRGComposer,
}
ALIASES = {"mpc": "product", "pcme-addition": "addition"}  # the methods that are named after their composer


def create_composer(name: str, dim: int) -> Composer:
    """A composer of embeddings of `dim` dimensions, with random weights where it has any.

    Raises:
        UserError: an unknown name.
    """
    known = [*COMPOSERS, *ALIASES]
    if name not in known:
        raise UserError(f"There is no composer '{name}'.{nearest(name, known)}", f"Choose one of {', '.join(known)}.")
    return COMPOSERS[ALIASES.get(name, name)](dim)
