"""Several queries as one: the product of their normals, with its normaliser (MPC), and composers that models train.
N queries, K parts, D dimensions.

product = compose(Gaussian.stack([text, image]))                     # each (D,) or (B, D)
product = compose(Gaussian.stack([text, image]), weights=[1, -0.5])  # the image's density divides
query = as_query(product.gaussian)                                   # on the unit sphere, like single inputs
"""

import math
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn

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


# ------------------------------------------------------------------------------------------------------------ composers
# From the embeddings of a query, images and texts alike, to one. `product` is MPC's, the others are baselines (MPC
# §4.2, Table 4, and its public code).


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
    """`compose` with its normaliser. Source: MPC Eqs. 2 to 4."""

    weighs = True

    def compose(self, parts: Gaussian, weights: Sequence[float] | None) -> Product:
        return compose(Gaussian(parts.mean.transpose(0, 1), parts.log_var.transpose(0, 1)), weights=weights)


class PairComposer(Composer):
    """Composes the means of two parts by `pair`, from left to right, over the whole (gathered) batch."""

    probabilistic = False

    def compose(self, parts: Gaussian, weights: Sequence[float] | None) -> Product:
        mean = reduce(self.pair, parts.mean.unbind(1))
        return _without_normaliser(mean, torch.zeros_like(mean))


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
