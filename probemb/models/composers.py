"""Composers: from the k embeddings of a query, images and texts alike, to one. `product` is MPC's, the others are
baselines (MPC §4.2, Table 4, and its public code). N queries of k parts, D dimensions.
"""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor, nn

from probemb.compose import Product, compose
from probemb.errors import UserError, nearest
from probemb.gaussian import Gaussian


class Composer(nn.Module):
    """From the parts of a query to one normal, as the sum of both means and variances (PCME + addition, MPC Eq. 9)."""

    probabilistic = True  # the log-variances of the parts are read, and those of the result mean something
    weighs = False  # parts can have weights, and the log-normaliser means something

    def __init__(self, dim: int):
        super().__init__()

    def forward(self, parts: Gaussian, weights: Sequence[float] | None = None) -> Product:
        """Gaussian (N, k, D) -> gaussian (N, D) and log_normaliser (N,), at least float32; k weights, see `compose`."""
        if weights is not None and not self.weighs:
            raise UserError(
                "This model's composer has no weights and no parts to take away.",
                "Give every part once, without a weight, or use a model trained with --method mpc.",
            )
        with torch.autocast(parts.mean.device.type, enabled=False):
            return self.compose(parts.float(), weights)

    def compose(self, parts: Gaussian, weights: Sequence[float] | None) -> Product:
        return _without_normaliser(parts.mean.sum(1), parts.log_var.logsumexp(1))


def _without_normaliser(mean_ND: Tensor, log_var_ND: Tensor) -> Product:
    return Product(Gaussian(mean_ND, log_var_ND), mean_ND.new_zeros(len(mean_ND)))


class ProductComposer(Composer):
    """`probemb.compose.compose` with its normaliser. Source: MPC Eqs. 2 to 4."""

    weighs = True

    def compose(self, parts: Gaussian, weights: Sequence[float] | None) -> Product:
        return compose(Gaussian(parts.mean.transpose(0, 1), parts.log_var.transpose(0, 1)), weights=weights)


class PairComposer(Composer):
    """Composes the means of two parts by `pair`, from left to right, over the whole (gathered) batch."""

    probabilistic = False

    def compose(self, parts: Gaussian, weights: Sequence[float] | None) -> Product:
        mean = reduce(self.pair, parts.mean.unbind(1))
        return _without_normaliser(mean, torch.zeros_like(mean))

    def pair(self, first_ND: Tensor, second_ND: Tensor) -> Tensor:
        raise NotImplementedError


class MLPComposer(PairComposer):
    """ "MPC w/o Eq. 2": [mean, log_var] from those of two parts by two layers with batch norm, from left to right."""

    probabilistic = True

    def __init__(self, dim: int):
        super().__init__(dim)
        wide = 2 * dim
        self.layers = nn.Sequential(nn.Linear(4 * dim, wide), nn.BatchNorm1d(wide), nn.ReLU(), nn.Linear(wide, wide))

    def compose(self, parts: Gaussian, weights: Sequence[float] | None) -> Product:
        return _without_normaliser(*reduce(self.pair, torch.cat([parts.mean, parts.log_var], 2).unbind(1)).chunk(2, 1))

    def pair(self, first_N2D: Tensor, second_N2D: Tensor) -> Tensor:
        return self.layers(torch.cat([first_N2D, second_N2D], 1))


class RelationshipComposer(PairComposer):
    """Two layers over both parts, which end in a sigmoid (after Santoro et al., NeurIPS 2017)."""

    def __init__(self, dim: int):
        super().__init__(dim)
        self.relation = nn.Sequential(nn.Linear(2 * dim, 2 * dim), nn.BatchNorm1d(2 * dim), nn.ReLU())
        self.out = nn.Linear(2 * dim, dim)

    def pair(self, first_ND: Tensor, second_ND: Tensor) -> Tensor:
        return self.out(self.relation(torch.cat([second_ND, first_ND], 1))).sigmoid()


class FiLMComposer(PairComposer):
    """The second part scales and shifts features of the first, then a sigmoid (after Perez et al., AAAI 2018)."""

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
        self.of_first, self.of_second = (
            nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, dim), nn.Tanh()) for _ in range(2)
        )

    def forward(self, first_ND: Tensor, second_ND: Tensor) -> Tensor:
        return self.residual(first_ND) + self.of_first(first_ND) * self.of_second(second_ND)


class MRNComposer(PairComposer):
    """Blocks that refine the first part with the second (after Kim et al., NeurIPS 2016); one in the public code."""

    def __init__(self, dim: int, blocks: int = 3):
        super().__init__(dim)
        self.blocks = nn.ModuleList(MRNBlock(dim) for _ in range(blocks))

    def pair(self, first_ND: Tensor, second_ND: Tensor) -> Tensor:
        return reduce(lambda first, block: block(first, second_ND), self.blocks, first_ND)


class TIRGComposer(PairComposer):
    """gate_weight * sigmoid(gate) * first + residual_weight * residual (after Vo et al., CVPR 2019)."""

    def __init__(self, dim: int):
        super().__init__(dim)
        wide = 2 * dim
        self.gate_weight, self.residual_weight = (nn.Parameter(torch.tensor(start)) for start in (1.0, 10.0))
        self.gate = nn.Sequential(nn.BatchNorm1d(wide), nn.ReLU(), nn.Linear(wide, dim))
        layers = nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, dim)
        self.residual = nn.Sequential(nn.BatchNorm1d(wide), nn.ReLU(), *layers)

    def pair(self, first_ND: Tensor, second_ND: Tensor) -> Tensor:
        both = torch.cat([first_ND, second_ND], 1)
        gated = self.gate(both).sigmoid() * first_ND
        return self.gate_weight * gated + self.residual_weight * self.residual(both)


COMPOSERS: dict[str, type[Composer]] = {
    "product": ProductComposer, "addition": Composer, "mlp": MLPComposer, "relationship": RelationshipComposer,
    "film": FiLMComposer, "mrn": MRNComposer, "tirg": TIRGComposer,
}  # fmt: skip


def create_composer(name: str, dim: int) -> Composer:
    if name not in COMPOSERS:
        remedy = f"Choose one of {', '.join(COMPOSERS)}."
        raise UserError(f"There is no composer '{name}'.{nearest(name, COMPOSERS)}", remedy)
    return COMPOSERS[name](dim)
