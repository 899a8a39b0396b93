"""Prompt filters by a threshold on the uncertainty: one for each class, one for all, or a quantile over all prompts.

C classes, P prompts of a class. Source: ProLIP (Chun et al., ICLR 2025), prompt filters of its zero-shot evaluation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from zeroshot.filtering.filters import FilterOptions

STEPS = 20  # values of a setting that is chosen
DEVIATIONS = tuple(step / 4 for step in range(-8, 9))


def keep_below(u: Tensor, limit: Tensor) -> Tensor:
    """Equal weights (C, P) of the prompts with u <= limit; a class that would lose every prompt keeps the most certain.

    Args:
        u: (C, P); limit: (C, 1) or a scalar.
    """
    kept = u <= limit
    place = u.argsort(dim=1, stable=True).argsort(dim=1)
    kept |= (place == 0) & ~kept.any(dim=1, keepdim=True)
    return kept.to(u.dtype) / kept.sum(dim=1, keepdim=True)


def class_deviation(u: Tensor, options: FilterOptions) -> Tensor:
    """The prompts of a class below its mean uncertainty + c standard deviations; `options.deviations` is c."""
    exact = u.double()  # the mean of equal prompts is theirs, to the bit
    spread = exact.std(dim=1, keepdim=True, correction=0)
    return keep_below(u, exact.mean(dim=1, keepdim=True) + (options.deviations or 0.0) * spread)


def threshold(u: Tensor, options: FilterOptions) -> Tensor:
    """The prompts below one uncertainty, the same for all classes; all of them without `options.threshold`."""
    return keep_below(u, u.max() if options.threshold is None else u.new_tensor(options.threshold))


def quantile(u: Tensor, options: FilterOptions) -> Tensor:
    """The most certain share of all C x P prompts, which leaves some classes more prompts than others."""
    share = 1.0 if options.quantile is None else options.quantile
    place = max(1, round(share * u.numel())) - 1
    return keep_below(u, u.flatten().sort().values[place])


SETTINGS = {"class-deviation": "deviations", "threshold": "threshold", "quantile": "quantile"}  # filter -> its option


def candidates(name: str, u: Tensor) -> list[float]:
    """The settings of a threshold filter to choose from, ascending; they depend on the prompts alone."""
    if name == "class-deviation":
        return list(DEVIATIONS)
    if name == "quantile":
        return [(step + 1) / STEPS for step in range(STEPS)]
    low, high = float(u.min()), float(u.max())
    return [*torch.linspace(low, high, STEPS + 1, dtype=torch.float64)[1:-1].tolist(), high]
