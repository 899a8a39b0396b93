"""The ablation "MPC w/o Eq. 2": a perceptron in place of the product."""

from __future__ import annotations

import torch
from torch import nn

from probemb.compose import Product
from probemb.gaussian import Gaussian
from probemb.models.composers.composer import Composer


class MLPComposer(Composer):
    """[mean, log_var] from those of two parts: two layers with batch norm, 4 D to 2 D to 2 D. Source: MPC Table 4.

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
