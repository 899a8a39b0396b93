"""The uncertainty branch of towers whose forward pass is a library's: their last blocks again, with weights of its own.

    trunk ─ … ─┬─ its last n blocks ─ norm, pooling ─ mean
               └─ n blocks of the branch ─ average or class token ─ log_var head ─ log_var

Hooks note what the trunk's last blocks are called with, so that the trunk is computed once and needs no change.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from probemb.errors import UserError


def check_n_unc_layers(n: int, available: int, which: str) -> None:
    """Raise UserError for an uncertainty branch longer than its tower, `which` is "image" or "text"."""
    if n > available:
        raise UserError(
            f"n_unc_layers is {n}, but the {which} tower has {available} blocks.",
            f"Set it to a number from 0 to {available}; two numbers are for image and text.",
        )


class Branch(nn.ModuleList):
    """n blocks that continue from the input of a trunk's last n blocks.

    Call `listen` before the trunk's forward pass, and the branch itself with `heard()` after it. Further arguments of a
    trunk's block (attention masks, rotary positions) are passed on to the branch's block in its place.
    """

    def __init__(self, own: Sequence[nn.Module], trunk_blocks: Sequence[nn.Module]):
        super().__init__(own)
        self.grad_checkpointing = False
        self._listening = False  # not while checkpointed blocks are recomputed
        self._start: Tensor | None = None
        self._arguments: list[tuple[tuple, dict]] = []
        for i, block in enumerate(trunk_blocks[len(trunk_blocks) - len(own) :]):
            # Checkpointing may call what is inside a Sequential one by one, and then never the Sequential itself.
            while isinstance(block, nn.Sequential) and len(block):
                block = block[0]
            block.register_forward_pre_hook(partial(self._note_input, i), with_kwargs=True)

    def listen(self) -> None:
        """Note the next forward pass of the trunk."""
        self._listening, self._arguments = True, []

    def heard(self) -> tuple[Tensor, list[tuple[tuple, dict]]]:
        """The arguments of `forward`; they are forgotten here."""
        heard = self._start, self._arguments
        self._listening, self._start, self._arguments = False, None, []
        return heard

    def forward(self, x: Tensor, arguments: list[tuple[tuple, dict]]) -> Tensor:
        for block, (args, kwargs) in zip(self, arguments):
            if self.grad_checkpointing:
                x = checkpoint(block, x, *args, use_reentrant=False, **kwargs)
            else:
                x = block(x, *args, **kwargs)
            x = x[0] if isinstance(x, tuple) else x
        return x

    def _note_input(self, i: int, block: nn.Module, args: tuple, kwargs: dict) -> None:
        if self._listening:
            if i == 0:
                self._start = args[0]
            self._arguments.append((args[1:], kwargs))


def meta_twin(module: nn.Module) -> nn.Module:
    """A copy on the meta device: shapes without numbers, for dry runs that cost no memory."""
    memo = {}
    for tensor in (*module.parameters(), *module.buffers()):
        twin = tensor.detach().to("meta")
        memo[id(tensor)] = nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin
    return deepcopy(module, memo)


def drop_unused(trunk: nn.Module, run) -> None:
    """Replace children of a trunk that take no part in `run(trunk)`, so that every parameter gets a gradient."""
    twin, used = meta_twin(trunk), set()
    for name, module in twin.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: used.add(name.partition(".")[0]))
    with torch.no_grad():
        run(twin)
    for name, child in list(trunk.named_children()):
        if name not in used and any(True for _ in child.parameters()):
            setattr(trunk, name, nn.Identity())
