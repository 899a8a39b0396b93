"""MRN: multimodal residual learning with element-wise products (after Kim et al., NeurIPS 2016)."""

from __future__ import annotations

from torch import Tensor, nn

from probemb.models.composers.composer import PointComposer


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
    """Blocks of `MRNBlock`, each of which refines the first part with the second. Source: MPC §4.2.

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
