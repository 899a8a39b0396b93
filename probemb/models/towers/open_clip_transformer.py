"""open_clip's two towers, each with an uncertainty branch: PCME++ §3.3.

All blocks but the last `n_unc_layers` are shared. Behind them the mean branch goes on with the tower's own last blocks
and the uncertainty branch with blocks of its own, so that the trunk is computed once:

    tokens ─ block 1 … block L−u ─┬─ block L−u+1 … block L ── mean head ──── mean
                                  └─ u blocks of its own ──── log_var head ─ log_var

The towers of a point model end with the mean branch; their log_var is the constant POINT_LOG_VAR.

A tower takes over an open_clip tower's parameters under their own names (`conv1`, `transformer.resblocks.0`, …) and
runs everything inside its own `forward`: engines that shard parameters (ZeRO-3, FSDP) gather a module's parameters
when its forward starts, and compute wrongly or not at all where a parameter is used from outside.

Shapes: B items, T tokens, L text positions, W width of the tower, D embedding.
"""

from __future__ import annotations

import torch
from open_clip.transformer import TextTransformer, Transformer, VisionTransformer, text_global_pool
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from probemb.gaussian import at_least_float32
from probemb.models.heads.gpo import FullPrecisionLinear, GPOHead, l2_normalize, length_mask

HEADS = ("clip", "gpo")
# log_var of a point model: a variance of 1e-13, with which CSD is the squared distance of the means to float32's
# precision, and which still has a finite inverse and logarithm.
POINT_LOG_VAR = -30.0


class ImageTower(VisionTransformer):
    """An open_clip vision transformer that returns a mean and a log-variance.

    Args:
        stock: the tower whose parameters this one takes over; not to be used any more.
        uncertainty: the uncertainty branch's blocks (possibly an empty list of them); None for a point model, which
            has neither the branch nor its head.
        head: "clip" pools the class token and keeps the tower's own projection; "gpo" pools all tokens.
        embed_dim: D.
        bias: whether the log-variance head has a bias.
        pooling: GPO's sizes, {"code_dim", "hidden_dim"}.
    """

    def __init__(
        self,
        stock: VisionTransformer,
        uncertainty: Transformer | None,
        head: str,
        embed_dim: int,
        bias: bool,
        pooling: dict,
    ):
        _take_over(self, stock)
        width = self.transformer.width
        self.uncertainty_transformer = uncertainty
        if head == "gpo":
            self.ln_post, self.proj = nn.Identity(), None  # GPO reads the raw tokens
            self.mean_head = GPOHead(width, embed_dim, **pooling)
        self.log_var_head = None if uncertainty is None else _log_var_head(head, width, embed_dim, bias, pooling)

    def forward(self, pixels: Tensor, token_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(B, 3, H, W) -> mean, l2-normalised, and log_var, both (B, D) in at least float32.

        `token_mask` (B, T) bool leaves tokens out of GPO's pooling (head "gpo" only).
        """
        tokens = self._embeds(pixels.to(self.conv1.weight.dtype))
        mean_tokens, unc_tokens = _branches(self.transformer, self.uncertainty_transformer, tokens, None)
        if self.proj is None:
            mean = l2_normalize(self.mean_head(mean_tokens, token_mask))
        else:
            _refuse_mask(token_mask)
            mean = F.normalize(_project(self._pool(mean_tokens)[0], self.proj), dim=-1)
        if unc_tokens is None:
            return mean, torch.full_like(mean, POINT_LOG_VAR)
        if self.proj is None:
            return mean, self.log_var_head(unc_tokens, token_mask)
        return mean, self.log_var_head(self._global_pool(unc_tokens)[0])


class TextTower(TextTransformer):
    """An open_clip text transformer that returns a mean and a log-variance; arguments as for `ImageTower`."""

    def __init__(
        self,
        stock: TextTransformer,
        uncertainty: Transformer | None,
        head: str,
        embed_dim: int,
        bias: bool,
        pooling: dict,
    ):
        _take_over(self, stock)
        self.uncertainty_transformer = uncertainty
        if head == "gpo":
            self.text_projection = None
            self.mean_head = GPOHead(self.width, embed_dim, **pooling)
        self.log_var_head = None if uncertainty is None else _log_var_head(head, self.width, embed_dim, bias, pooling)

    def forward(self, tokens: Tensor, token_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(B, L) int64, L at most the context length -> mean, l2-normalised, and log_var, both (B, D).

        Under GPO the tokens behind the end of the text take no part, or those that `token_mask` (B, L) names.
        The mean passes through the tower's last norm (`ln_final`), the log-variance does not.
        """
        x, attn_mask = self._embeds(tokens)
        if attn_mask is not None:
            attn_mask = attn_mask[..., : x.shape[1], : x.shape[1]]
        mean_x, unc_x = _branches(self.transformer, self.uncertainty_transformer, x, attn_mask)
        mean_x = self.ln_final(mean_x)
        if self.text_projection is None:
            token_mask = self.text_mask(tokens) if token_mask is None else token_mask
            mean = l2_normalize(self.mean_head(mean_x, token_mask))
        else:
            _refuse_mask(token_mask)
            pooled = text_global_pool(mean_x, tokens, self.pool_type, self.eos_id)
            mean = F.normalize(_project(pooled, self.text_projection), dim=-1)
        if unc_x is None:
            return mean, torch.full_like(mean, POINT_LOG_VAR)
        if self.text_projection is None:
            return mean, self.log_var_head(unc_x, token_mask)
        return mean, self.log_var_head(text_global_pool(unc_x, tokens, self.pool_type, self.eos_id))

    def text_mask(self, tokens: Tensor) -> Tensor:
        """True up to and including each text's end token, (B, L) bool."""
        if self.pool_type == "argmax":  # the end token has the highest id
            return length_mask(tokens.argmax(dim=-1) + 1, tokens.shape[1])
        if self.pool_type == "eos":
            return length_mask((tokens == self.eos_id).int().argmax(dim=-1) + 1, tokens.shape[1])
        return tokens != self.pad_id


def _take_over(tower: nn.Module, stock: nn.Module) -> None:
    """Makes `tower` share every parameter, buffer, module and setting of an open_clip tower."""
    nn.Module.__init__(tower)
    tower.__dict__.update(stock.__dict__)


def _log_var_head(head: str, width: int, embed_dim: int, bias: bool, pooling: dict) -> nn.Module:
    if head == "clip":
        return FullPrecisionLinear(width, embed_dim, bias)
    return GPOHead(width, embed_dim, bias, **pooling)


def _branches(
    transformer: Transformer, uncertainty: Transformer | None, x: Tensor, attn_mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Last tokens of the mean and of the uncertainty branch, each (B, T, W); None without that branch."""

    def run(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        for block in blocks:
            if transformer.grad_checkpointing:
                x = checkpoint(block, x, attn_mask=attn_mask, use_reentrant=False)
            else:
                x = block(x, attn_mask=attn_mask)
        return x

    if uncertainty is None:
        return run(transformer.resblocks, x), None
    n_shared = len(transformer.resblocks) - len(uncertainty.resblocks)
    shared = run(transformer.resblocks[:n_shared], x)
    return run(transformer.resblocks[n_shared:], shared), run(uncertainty.resblocks, shared)


def _project(pooled_BW: Tensor, projection_WD: Tensor) -> Tensor:
    """pooled @ projection in at least float32, also under autocast."""
    with torch.autocast(pooled_BW.device.type, enabled=False):
        projection_WD = at_least_float32(projection_WD)
        return pooled_BW.to(projection_WD.dtype) @ projection_WD


def _refuse_mask(token_mask: Tensor | None) -> None:
    if token_mask is not None:
        raise ValueError('head "clip" pools one token, so it takes no token_mask')
