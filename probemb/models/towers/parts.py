"""Parts of an input that a tower reads, patches or tokens, for masked inclusion and patch dropout.

    kept = draw_parts(model.visual, pixels, share=0.25, generator=generator)   # (B, n) patches of each image
    masked = model.encode_image(pixels, kept=kept)                             # Gaussian (B, D)

`kept` is (B, n) int64: rows of increasing positions, filled with -1 behind those of a row that keeps fewer. They keep
their positions, and the others cost nothing. Class and uncertainty tokens are no parts, and are always there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LONGEST = 2**16  # parts of an input


def chances(key: int, rows: Tensor) -> Callable[[int], Tensor]:
    """Uniform numbers for `draw_parts`, a function of P that gives (B, P) float64 in [0, 1): SplitMix64 of a key of 64
    bits, the row's number (rows: (B,) int64) and the position, as int64 with the same bits, on every device.
    """

    def shifted(z: Tensor, bits: int) -> Tensor:
        return (z >> bits) & ((1 << (64 - bits)) - 1)  # as if it had no sign

    def draw(n_parts: int) -> Tensor:
        z = rows[:, None] * LONGEST + torch.arange(n_parts, device=rows.device)
        z = z * -0x61C8864680B583EB + (key - ((key >> 63) << 64))
        z = (z ^ shifted(z, 30)) * -0x40A7B892E31B1A47
        z = (z ^ shifted(z, 27)) * -0x6B2FB644ECCEEE15
        return shifted(z ^ shifted(z, 31), 11).double() / 2**53

    return draw


def draw_parts(
    tower, inputs: Tensor, share: float, generator: torch.Generator | None = None,
    chance: Callable[[int], Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Random parts of every input, (B, n) int64: all that are required, and a share of the others, at least one.

    n follows from the shape. Numbers are those of `chance` (see `chances`), or of a generator on the CPU.
    """
    optional, required, always = tower.parts(inputs)
    n_parts = optional.shape[1]
    drawn = chance(n_parts) if chance else torch.rand(optional.shape, generator=generator).to(inputs.device)
    rank = drawn.masked_fill(required, -1.0).masked_fill(~(optional | required), 2.0).argsort(1).argsort(1)
    n_optional = optional.sum(1)
    n_drawn = (share * n_optional.double()).round().long().clamp(min=1)  # as `round` below, half to even
    n_kept = torch.minimum(n_drawn, n_optional) + required.sum(1)
    position = torch.arange(n_parts, device=inputs.device).expand_as(rank)
    kept = torch.where(rank < n_kept[:, None], position, n_parts).sort(1).values
    most = max(n_parts - always, 0)
    kept = kept[:, : min(most, max(1, round(share * most))) + always]
    return torch.where(kept == n_parts, -1, kept)


def used_columns(tokens: Tensor, used: Tensor) -> Tensor:
    """(B, L) tokens without the columns behind the last one that is used, (B, L) bool; at least one."""
    position = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    return tokens[:, : max(1, int((position * used.any(0)).max()))]


def take_parts(x: Tensor, kept: Tensor) -> Tensor:
    """(B, P, W) or (B, P) -> (B, n, W) or (B, n); what stands for -1 is the first part."""
    return x[torch.arange(len(x), device=x.device)[:, None], kept.clamp(min=0)]
