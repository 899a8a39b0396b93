"""Uncertainty branches: a tower's last blocks again, with weights of their own, behind the blocks that both share.

trunk ─ … ─┬─ its last n blocks ─────── mean
           └─ n blocks of the branch ── log_var
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from probemb.errors import UserError


def last_blocks(blocks: Sequence[nn.Module], n: int) -> list[nn.Module]:
    """The last n blocks of a tower. Raises UserError: it has fewer."""
    if not 0 <= n <= len(blocks):
        raise UserError(
            f"n_unc_layers is {n}, but a tower has {len(blocks)} blocks.",
            f"Set it to a number from 0 to {len(blocks)}; two numbers are for image and text.",
        )
    return list(blocks[len(blocks) - n :])


def run_both(
    run: Callable[[nn.ModuleList, Tensor], Tensor], blocks: nn.ModuleList, own: nn.ModuleList | None, x: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The outputs of all blocks, and of the branch: `own` in place of as many last ones; None without a branch."""
    shared = len(blocks) - len(own or ())
    x = run(blocks[:shared], x)
    return run(blocks[shared:], x), None if own is None else run(own, x)


class Branch(nn.ModuleList):
    """The blocks of a branch whose trunk is computed by a library: they continue from the input of its last n blocks,
    which hooks note with all other arguments of a block (attention masks, rotary positions).
    """

    def __init__(self, own: Sequence[nn.Module], trunk_blocks: Sequence[nn.Module]):
        super().__init__(own)
        self.grad_checkpointing = False
        self.heard: list[tuple[tuple, dict]] | None = None  # not while checkpointed blocks are recomputed
        for block in last_blocks(trunk_blocks, len(own)):
            # Checkpointing may call what is inside a Sequential one by one, and then never the Sequential itself.
            while isinstance(block, nn.Sequential) and len(block):
                block = block[0]
            block.register_forward_pre_hook(self._note_input, with_kwargs=True)

    def _note_input(self, block: nn.Module, args: tuple, kwargs: dict) -> None:
        if self.heard is not None:
            self.heard.append((args, kwargs))

    def forward(self) -> Tensor:
        heard, self.heard = self.heard, None
        (x, *_), _ = heard[0]
        for block, (args, kwargs) in zip(self, heard):
            call = partial(checkpoint, block, use_reentrant=False) if self.grad_checkpointing else block
            x = call(x, *args[1:], **kwargs)
            x = x[0] if isinstance(x, tuple) else x
        return x


def run_with(branch: Branch | None, run: Callable[[], Any]) -> tuple[Any, Tensor | None]:
    """`run()`, a trunk's forward pass, and the output of the branch behind it."""
    if branch is None:
        return run(), None
    branch.heard = []
    return run(), branch()
