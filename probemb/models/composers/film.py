"""FiLM: the second part scales and shifts features of the first (after Perez et al., AAAI 2018)."""

from __future__ import annotations

from torch import Tensor, nn

from probemb.models.composers.composer import PointComposer


class FiLMComposer(PointComposer):
    """One residual block with feature-wise modulation, ending in a sigmoid. Source: MPC §4.2 and its public code."""

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
