"""The result of every loss, and what losses of a batch of N pairs share: cosines, positives, blocks of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    terms: the parts by name, scalars, before their weights; detached here.
    """

    loss: Tensor
    terms: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self):
        self.terms = {name: value.detach() for name, value in self.terms.items()}


def cosine_similarity(image: Gaussian, text: Gaussian) -> Tensor:
    """Cosines of the means, unit rows (N, D) and (M, D), as (N, M) in at least float32, also under autocast."""
    with torch.autocast(image.mean.device.type, enabled=False):
        return at_least_float32(image.mean) @ at_least_float32(text.mean).T


def positive_pairs(similarity_NN: Tensor, match_NN: Tensor | None = None) -> Tensor:
    """Pairs that are never negatives, (N, N) bool: the diagonal, and every pair with a match above 0."""
    own = torch.eye(len(similarity_NN), dtype=torch.bool, device=similarity_NN.device)
    return own if match_NN is None else own | (match_NN > 0)


def in_row_blocks(
    fn: Callable[..., Tensor], tensors: Sequence[Tensor], elements_per_row: int, held: int = BLOCK_ELEMENTS
) -> Tensor:
    """fn(*tensors), one after the other of blocks of rows whose intermediate results have at most `held` elements.

    Several blocks are recomputed in the backward pass, so that one at a time is held.
    """
    rows = max(1, held // max(1, elements_per_row))
    if rows >= len(tensors[0]):
        return fn(*tensors)
    blocks = zip(*(x.split(rows) for x in tensors))
    return torch.cat([checkpoint(fn, *block, use_reentrant=False, preserve_rng_state=False) for block in blocks])


def root(squared: Tensor) -> Tensor:
    """Square root whose slope at zero is zero instead of infinite."""
    positive = squared > 0
    return torch.where(positive, squared.masked_fill(~positive, 1).sqrt(), squared)
