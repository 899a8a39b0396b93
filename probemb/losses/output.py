"""The result of every loss, and what losses of a batch of N pairs share: cosines, positives, blocks of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from probemb.gaussian import Gaussian, at_least_float32

BLOCK_ELEMENTS = 1 << 22  # of an intermediate result of a block of rows: 16 MiB in float32


@dataclass
class LossOutput:
    """Attributes:
    loss: scalar tensor to minimise.
    terms: the parts by name, detached scalars, before their weights.
    """

    loss: Tensor
    terms: dict[str, Tensor] = field(default_factory=dict)


def cosine_similarity(image: Gaussian, text: Gaussian) -> Tensor:
    """Cosines of the means, unit rows (N, D) and (M, D), as (N, M) in at least float32, also under autocast."""
    with torch.autocast(image.mean.device.type, enabled=False):
        return at_least_float32(image.mean) @ at_least_float32(text.mean).T


def positive_pairs(similarity_NN: Tensor, match_NN: Tensor | None = None) -> Tensor:
    """Pairs that are never negatives, (N, N) bool: the diagonal, and every pair with a match above 0.

    Raises:
        ValueError: similarities that are not square, or labels of another shape.
    """
    n = len(similarity_NN)
    if similarity_NN.shape != (n, n):
        raise ValueError(f"N pairs have N x N similarities, these are {tuple(similarity_NN.shape)}")
    own = torch.eye(n, dtype=torch.bool, device=similarity_NN.device)
    if match_NN is None:
        return own
    if match_NN.shape != similarity_NN.shape:
        raise ValueError(f"match is {tuple(match_NN.shape)}, the pairs are {tuple(similarity_NN.shape)}")
    return own | (match_NN > 0)


def in_row_blocks(fn: Callable[[Tensor], Tensor], x: Tensor, elements_per_row: int) -> list[Tensor]:
    """[fn(block)] of blocks of rows of x whose intermediate results have at most BLOCK_ELEMENTS.

    Several blocks are recomputed in the backward pass, so that one at a time is held.
    """
    rows = max(1, BLOCK_ELEMENTS // max(1, elements_per_row))
    if rows >= len(x):
        return [fn(x)]
    return [checkpoint(fn, block, use_reentrant=False, preserve_rng_state=False) for block in x.split(rows)]


def root(squared: Tensor) -> Tensor:
    """Square root whose slope at zero is zero instead of infinite."""
    positive = squared > 0
    return torch.where(positive, squared.masked_fill(~positive, 1).sqrt(), squared)
