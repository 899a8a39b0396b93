"""The linear map that heads share, in full precision, and how it starts."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from probemb.gaussian import at_least_float32


class FullPrecisionLinear(nn.Linear):
    """A linear map in at least float32, whatever autocast or the weights' own type say.

    bfloat16 resolves a log-variance near −6 in steps of 0.03, too coarse to rank items by their uncertainty.
    """

    def forward(self, x: Tensor) -> Tensor:
        with full_precision(x):
            weight = at_least_float32(self.weight)
            bias = None if self.bias is None else at_least_float32(self.bias)
            return nn.functional.linear(x.to(weight.dtype), weight, bias)


def full_precision(x: Tensor) -> AbstractContextManager:
    """A context without autocast, for x's device; autocast does not know the meta device."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


@torch.no_grad()
def start_mean(linear: nn.Linear) -> None:
    """Xavier weights, no bias."""
    nn.init.xavier_uniform_(linear.weight)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


@torch.no_grad()
def start_log_var(linear: nn.Linear, start: float) -> None:
    """Near a constant, see `add_heads`.

    Small weights: log_var stays near its bias, also behind tokens that are not normalised.
    """
    nn.init.normal_(linear.weight, std=0.1 * linear.in_features**-0.5)
    if linear.bias is not None:
        nn.init.constant_(linear.bias, start)
