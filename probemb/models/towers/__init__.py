"""Uncertainty branches, and parts of an input, of all towers.

A branch is a tower's last blocks again, with weights of their own, behind the blocks that both share:

trunk ─ … ─┬─ its last n blocks ─────── mean
           └─ n blocks of the branch ── log_var

Parts are patches or tokens that a tower reads, for masked inclusion and patch dropout:

    kept = draw_parts(model.visual, pixels, share=0.25, generator=generator)   # (B, n) patches of each image
    masked = model.encode_image(pixels, kept=kept)                             # Gaussian (B, D)

`kept` is (B, n) int64: rows of increasing positions, filled with -1 behind those of a row that keeps fewer. They keep
their positions, and the others cost nothing. Class and uncertainty tokens are no parts, and are always there.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from probemb.errors import UserError

LONGEST = 2**16  # parts of an input

# ----------------------------------------------------------------------------------------------------------- branches


def last_blocks(blocks: Sequence[nn.Module], n: int) -> list[nn.Module]:
    """The last n blocks of a tower. Raises UserError: it has fewer."""
    if not 0 <= n <= len(blocks):
        raise UserError(
            f"n_unc_layers is {n}, but a tower has {len(blocks)} blocks.",
            f"Set it to a number from 0 to {len(blocks)}; two numbers are for image and text.",
        )
    return list(blocks[len(blocks) - n :])


def run_both(
    blocks: Sequence[nn.Module], own: Sequence[nn.Module] | None, x: Tensor, *more: Tensor, recompute: bool = False,
    **options,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The outputs of all blocks, and of the branch: `own` in place of as many last ones; None without a branch."""

    def run(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
        for block in blocks:
            call = partial(checkpoint, block, use_reentrant=False) if recompute else block
            x = call(x, *more, **options)
        return x

    shared = len(blocks) - len(own or ())
    x = run(blocks[:shared], x)
    return run(blocks[shared:], x), None if own is None else run(own, x)


class Branch(nn.ModuleList):
    """The blocks of a branch whose trunk is computed by a library: they continue from the input of its last n blocks,
    which hooks note with all other arguments of a block (attention masks, rotary positions).
    """

    def __init__(self, own: Sequence[nn.Module], trunk_blocks: Sequence[nn.Module]):
        super().__init__(own)
        self.heard: list[tuple[tuple, dict]] | None = None  # not while checkpointed blocks are recomputed
        for block in last_blocks(trunk_blocks, len(own)):
            # Checkpointing may call what is inside a Sequential one by one, and then never the Sequential itself.
            while isinstance(block, nn.Sequential) and len(block):
                block = block[0]
            block.register_forward_pre_hook(self._note_input, with_kwargs=True)

    def _note_input(self, block: nn.Module, args: tuple, kwargs: dict) -> None:
        if self.heard is not None:
            self.heard.append((args, kwargs))

    def forward(self, recompute: bool) -> Tensor:
        heard, self.heard = self.heard, None
        (x, *_), _ = heard[0]
        for block, (args, kwargs) in zip(self, heard):
            call = partial(checkpoint, block, use_reentrant=False) if recompute else block
            x = call(x, *args[1:], **kwargs)
            x = x[0] if isinstance(x, tuple) else x
        return x


def run_with(branch: Branch | None, run: Callable[[], Any], recompute: bool) -> tuple[Any, Tensor | None]:
    """`run()`, a trunk's forward pass, and the output of the branch behind it."""
    if branch is None:
        return run(), None
    branch.heard = []
    return run(), branch(recompute)


# -------------------------------------------------------------------------------------------------------------- parts


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
