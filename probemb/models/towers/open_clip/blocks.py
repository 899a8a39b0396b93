"""Shared parts of open_clip's two transformers: blocks in two branches, or an uncertainty token.

PCME++ §3.3 ("branch"): all blocks but the last `n_unc_layers` are shared. Behind them the mean branch goes on with the
tower's own last blocks and the uncertainty branch with blocks of its own, so that the trunk is computed once:

    tokens ─ block 1 … block L−u ─┬─ block L−u+1 … block L ── mean head ──── mean
                                  └─ u blocks of its own ──── log_var head ─ log_var

ProLIP §3.1 ("token"): one more token, [UNC], passes through all blocks, and the log-variance is read from it:

    tokens, [UNC] ─ block 1 … block L ─ last norm ─┬─ pooling ─ mean head ──── mean
                                                   └─ [UNC] ─── log_var head ─ log_var

A tower takes over an open_clip tower's parameters under their own names (`conv1`, `transformer.resblocks.0`, …). [UNC]
is one vector of its own behind all other tokens, its position included, so that these stand as in open_clip's tower.
Shapes: B items, T tokens, L text positions, W width of the tower, D embedding.
"""

from __future__ import annotations

import re

import torch
from open_clip.transformer import Transformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from probemb.gaussian import at_least_float32
from probemb.models.encoder import Encoder, Place
from probemb.models.pooling import full_precision

STEM = ("conv1", "class_embedding", "cls_emb", "positional_embedding", "token_embedding", "ln_pre")
BLOCK = re.compile(r"(uncertainty_)?transformer\.resblocks\.(\d+)\.")


class TransformerTower(Encoder):
    """Blocks in two branches, or in one with an uncertainty token; where a parameter stands.

    Attributes:
        uncertainty_transformer: the branch's blocks; None with a token, and in a point model.
        uncertainty_token: (W,), None without one.
        published: behave as the public code of ProLIP, see `HeadConfig.uncertainty`.
    """

    transformer: Transformer
    uncertainty_transformer: Transformer | None
    uncertainty_token: nn.Parameter | None
    published: bool

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute every block in the backward pass."""
        self.transformer.grad_checkpointing = enable

    def place(self, name: str) -> Place:
        """Blocks by their depth; "branch" for the uncertainty branch's own and [UNC]; "head" for both heads."""
        if name.startswith(("mean_head.", "log_var_head.")):
            return Place("head")
        if name == "uncertainty_token":
            return Place("branch")
        block = BLOCK.match(name)
        if block is None:
            return Place("trunk")
        blocks = (self.uncertainty_transformer if block[1] else self.transformer).resblocks
        return Place("branch" if block[1] else "trunk", len(blocks) - int(block[2]))

    def in_stem(self, name: str) -> bool:
        """Embeddings, the patches' convolution, and the norm behind them."""
        return name.partition(".")[0] in STEM

    def _branches(self, x: Tensor, attn_mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Last tokens of the mean and of the uncertainty branch, each (B, T, W); None without that branch."""
        blocks = self.transformer.resblocks
        if self.uncertainty_transformer is None:
            return self._run(blocks, x, attn_mask), None
        own = self.uncertainty_transformer.resblocks
        shared = self._run(blocks[: len(blocks) - len(own)], x, attn_mask)
        return self._run(blocks[len(blocks) - len(own) :], shared, attn_mask), self._run(own, shared, attn_mask)

    def _run(self, blocks: nn.ModuleList, x: Tensor, attn_mask: Tensor | None) -> Tensor:
        for block in blocks:
            if self.transformer.grad_checkpointing:
                x = checkpoint(block, x, attn_mask=attn_mask, use_reentrant=False)
            else:
                x = block(x, attn_mask=attn_mask)
        return x

    def _with_uncertainty_token(self, x: Tensor) -> Tensor:
        """(B, T, W) -> (B, T + 1, W), [UNC] behind the others; unchanged in a tower without one."""
        if self.uncertainty_token is None:
            return x
        return torch.cat([x, self.uncertainty_token.to(x.dtype).expand(len(x), 1, -1)], 1)


def take_over(tower: TransformerTower, stock: nn.Module, branch: Transformer | None, uncertainty: str, std: float):
    """Make `tower` share every parameter, buffer, module and setting of an open_clip tower.

    Args:
        branch: the uncertainty branch's blocks, or None.
        uncertainty: see `HeadConfig`; None for a point model.
        std: of the numbers that [UNC] starts from.
    """
    nn.Module.__init__(tower)
    tower.__dict__.update(stock.__dict__)
    tower.uncertainty_transformer = branch
    tower.published = uncertainty == "prolip-code"
    width = tower.transformer.width
    tower.uncertainty_token = None if uncertainty == "branch" else nn.Parameter(std * torch.randn(width))


def first_blocks(small: nn.Module, n: int) -> Transformer:
    """The n blocks of a small stock tower, drawn as open_clip draws those of a whole one; the rest is dropped."""
    small.transformer.resblocks = small.transformer.resblocks[:n]
    return small.transformer


def project(pooled_BW: Tensor, projection_WD: Tensor, bias_D: Tensor | None = None) -> Tensor:
    """pooled @ projection + bias in at least float32, also under autocast."""
    with full_precision(pooled_BW):
        projection_WD = at_least_float32(projection_WD)
        out = pooled_BW.to(projection_WD.dtype) @ projection_WD
        return out if bias_D is None else out + bias_D
