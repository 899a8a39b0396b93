"""Relationship: a perceptron over both parts (after Santoro et al., NeurIPS 2017)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from probemb.models.composers.composer import PointComposer


class RelationshipComposer(PointComposer):
    """Two layers over the concatenation of two points, which end in a sigmoid. Source: MPC §4.2 and its public code."""

    def __init__(self, dim: int):
        super().__init__(dim)
        self.relation = nn.Sequential(nn.Linear(2 * dim, 2 * dim), nn.BatchNorm1d(2 * dim), nn.ReLU())
        self.out = nn.Linear(2 * dim, dim)

    def pair(self, first_ND: Tensor, second_ND: Tensor) -> Tensor:
        return self.out(self.relation(torch.cat([second_ND, first_ND], 1))).sigmoid()
