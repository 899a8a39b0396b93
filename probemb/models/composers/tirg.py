"""TIRG: the first part, gated, plus a residual of both (after Vo et al., CVPR 2019)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from probemb.models.composers.composer import PointComposer


class TIRGComposer(PointComposer):
    """gate_weight * sigmoid(gate) * first + residual_weight * residual. Source: MPC §4.2 and its public code.

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
