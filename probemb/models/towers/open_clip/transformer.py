"""open_clip's two transformers, each with an uncertainty branch: PCME++ §3.3.

All blocks but the last `n_unc_layers` are shared. Behind them the mean branch goes on with the tower's own last blocks
and the uncertainty branch with blocks of its own, so that the trunk is computed once:

    tokens ─ block 1 … block L−u ─┬─ block L−u+1 … block L ── mean head ──── mean
                                  └─ u blocks of its own ──── log_var head ─ log_var

A tower takes over an open_clip tower's parameters under their own names (`conv1`, `transformer.resblocks.0`, …).
Shapes: B items, T tokens, L text positions, W width of the tower, D embedding.
"""

from __future__ import annotations

import math
import re

import torch
from open_clip.transformer import TextTransformer, Transformer, VisionTransformer, text_global_pool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from probemb.errors import UserError
from probemb.gaussian import at_least_float32
from probemb.models.architectures import check_n_unc_layers, stock_image_tower, stock_text_tower
from probemb.models.encoder import Encoder, Place
from probemb.models.features import Features
from probemb.models.heads import HeadConfig, add_heads
from probemb.models.heads.gpo import length_mask
from probemb.models.heads.linear import full_precision
from probemb.models.parts import Parts, take_parts, take_tokens

BLOCK = re.compile(r"(uncertainty_)?transformer\.resblocks\.(\d+)\.")


class _Transformer(Encoder):
    """The parts that both towers share: blocks in two branches, and where a parameter stands."""

    transformer: Transformer
    uncertainty_transformer: Transformer | None

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute every block in the backward pass."""
        self.transformer.grad_checkpointing = enable

    def place(self, name: str) -> Place:
        """Blocks by their depth; "branch" for the uncertainty branch's own; "head" for both heads."""
        if name.startswith(("mean_head.", "log_var_head.")):
            return Place("head")
        block = BLOCK.match(name)
        if block is None:
            return Place("trunk")
        blocks = (self.uncertainty_transformer if block[1] else self.transformer).resblocks
        return Place("branch" if block[1] else "trunk", len(blocks) - int(block[2]))

    def _branches(self, x: Tensor, attn_mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Last tokens of the mean and of the uncertainty branch, each (B, T, W); None without that branch."""

        def run(blocks: nn.ModuleList, x: Tensor) -> Tensor:
            for block in blocks:
                if self.transformer.grad_checkpointing:
                    x = checkpoint(block, x, attn_mask=attn_mask, use_reentrant=False)
                else:
                    x = block(x, attn_mask=attn_mask)
            return x

        blocks = self.transformer.resblocks
        if self.uncertainty_transformer is None:
            return run(blocks, x), None
        own = self.uncertainty_transformer.resblocks
        shared = run(blocks[: len(blocks) - len(own)], x)
        return run(blocks[len(blocks) - len(own) :], shared), run(own, shared)


class ImageTransformer(_Transformer, VisionTransformer):
    """An open_clip vision transformer.

    Args:
        stock: the tower whose parameters this one takes over; not to be used any more.
        branch: the uncertainty branch's blocks (possibly an empty list of them); None for a point model.
        head: of the mean and the log-variance.
    """

    def __init__(self, stock: VisionTransformer, branch: Transformer | None, head: HeadConfig):
        _take_over(self, stock)
        self.uncertainty_transformer = branch
        width = self.transformer.width
        if head.kind != "clip":  # other heads read the raw tokens
            self.ln_post, self.proj, self.attn_pool = nn.Identity(), None, None
        add_heads(self, head, width, width, own_projection=True)

    @property
    def n_tokens(self) -> int:
        """T, the class token included."""
        return len(self.positional_embedding)

    def features(self, pixels: Tensor) -> tuple[Features, Features | None]:
        """(B, 3, H, W) -> features with T tokens, the class token first.

        The log-variance's are neither normalised nor pooled by attention: PCME++ has no norm there.
        """
        return self._features_of(self._embed(pixels, None))

    def parts(self, pixels: Tensor) -> Parts:
        """Every patch, row by row, may be dropped."""
        optional = torch.ones(len(pixels), self.n_tokens - 1, dtype=torch.bool, device=pixels.device)
        return Parts(optional, torch.zeros_like(optional))

    def features_of_parts(self, pixels: Tensor, kept: Tensor) -> tuple[Features, Features | None]:
        """`features` with the class token and n patches, which keep their positions. All images keep n: no -1."""
        return self._features_of(self._embed(pixels, kept))

    def _embed(self, pixels: Tensor, kept: Tensor | None) -> Tensor:
        """What the first block reads, (B, T, W) or, of some patches, (B, 1 + n, W)."""
        patches = self.conv1(self.normalized(pixels, self.conv1.weight.dtype)).flatten(2).transpose(1, 2)
        positions = self.positional_embedding.to(patches.dtype)
        patches = patches + positions[1:]
        class_token = (self.class_embedding.to(patches.dtype) + positions[0]).expand(len(patches), 1, -1)
        if kept is not None:
            return self.ln_pre(torch.cat([class_token, take_parts(patches, kept)], 1))
        return self.ln_pre(self.patch_dropout(torch.cat([class_token, patches], 1)))

    def _features_of(self, tokens: Tensor) -> tuple[Features, Features | None]:
        """The blocks and the pooling."""
        mean_tokens, unc_tokens = self._branches(tokens)
        pooled = self._pool(mean_tokens)[0]
        mean = Features(mean_tokens, pooled if pooled.ndim == 2 else pooled.mean(1))
        if unc_tokens is None:
            return mean, None
        average = self.pool_type == "avg"
        return mean, Features(unc_tokens, unc_tokens[:, 1:].mean(1) if average else unc_tokens[:, 0])

    def project(self, pooled: Tensor) -> Tensor:
        """CLIP's projection."""
        return _project(pooled, self.proj)


class TextTransformerTower(_Transformer, TextTransformer):
    """An open_clip text transformer; arguments as for `ImageTransformer`."""

    required_parts = 2  # the start and the end token

    def __init__(self, stock: TextTransformer, branch: Transformer | None, head: HeadConfig):
        _take_over(self, stock)
        self.uncertainty_transformer = branch
        if head.kind != "clip":
            self.text_projection = None
        add_heads(self, head, self.width, self.width, own_projection=True)

    def features(self, tokens: Tensor) -> tuple[Features, Features | None]:
        """(B, L) int64, L at most the context length -> features with L tokens.

        The mean's pass through the tower's last norm (`ln_final`), the log-variance's do not. A class token behind the
        text (CoCa's) is what is pooled and takes no part as a token.
        """
        return self._features_of(tokens, self.positional_embedding[: tokens.shape[1]])

    def parts(self, tokens: Tensor) -> Parts:
        """The tokens between a text's start and its end may be dropped.

        Raises:
            UserError: padding takes part in the text (SigLIP's, CLIPA's), so that its length is no number of words.
        """
        if self.cls_emb is None and self.pool_type not in ("argmax", "eos"):
            raise UserError(
                "The text tower pools its last position, be it a word or padding, so texts have no parts.",
                "Leave masked inclusion out, or choose a text tower that pools the end token, such as ViT-B-16's.",
            )
        there = self.text_mask(tokens)
        position = torch.arange(tokens.shape[1], device=tokens.device)
        ends = (position == 0) | (position == there.sum(1, keepdim=True) - 1)
        return Parts(there & ~ends, there & ends)

    def features_of_parts(self, tokens: Tensor, kept: Tensor) -> tuple[Features, Features | None]:
        """`features` with n tokens, which keep their positions."""
        return self._features_of(take_tokens(tokens, kept, self.pad_id), self.positional_embedding[kept.clamp(min=0)])

    def _features_of(self, tokens: Tensor, positions: Tensor) -> tuple[Features, Features | None]:
        """Of tokens (B, L) at positions (L, W) or (B, L, W)."""
        kind = self.transformer.get_cast_dtype()
        x = self.token_embedding(tokens).to(kind) + positions.to(kind)
        if self.cls_emb is not None:
            class_token = self.cls_emb.to(kind) + self.positional_embedding[self.context_length].to(kind)
            x = torch.cat([x, class_token.expand(len(x), 1, -1)], 1)
        mean_x, unc_x = self._branches(x, self._attention_mask(tokens, x))
        mean_x, mask = self.ln_final(mean_x), self.text_mask(tokens)
        return self._pooled(mean_x, tokens, mask), None if unc_x is None else self._pooled(unc_x, tokens, mask)

    def _attention_mask(self, tokens: Tensor, x: Tensor) -> Tensor | None:
        """open_clip's, for a sequence of this length."""
        length = x.shape[1]
        mask = None if self.attn_mask is None else self.attn_mask[:length, :length]
        if self.use_pad_mask or self.cls_emb is not None:
            padding = self._build_additive_mask(tokens, length, x.dtype)
            mask = padding if mask is None else mask + padding
        return mask

    def _pooled(self, x: Tensor, tokens: Tensor, mask: Tensor) -> Features:
        if self.cls_emb is not None:
            return Features(x[:, :-1], x[:, -1], mask)
        return Features(x, text_global_pool(x, tokens, self.pool_type, self.eos_id), mask)

    def project(self, pooled: Tensor) -> Tensor:
        """CLIP's projection, a matrix or a linear layer."""
        if self.text_projection is None:
            return at_least_float32(pooled)
        if isinstance(self.text_projection, nn.Linear):
            return _project(pooled, self.text_projection.weight.T, self.text_projection.bias)
        return _project(pooled, self.text_projection)

    def text_mask(self, tokens: Tensor) -> Tensor:
        """True up to and including each text's end token, (B, L) bool."""
        if self.pool_type == "argmax":  # the end token has the highest id
            return length_mask(tokens.argmax(dim=-1) + 1, tokens.shape[1])
        if self.pool_type == "eos":
            return length_mask((tokens == self.eos_id).int().argmax(dim=-1) + 1, tokens.shape[1])
        return tokens != self.pad_id

    def trim(self, tokens: Tensor) -> Tensor:
        """(B, L) tokens without the columns behind the longest text: the same embeddings in less time.

        Leaves texts alone that see their padding (blocks that are not causal, as CLIPA's; a class token behind them).
        """
        if self.attn_mask is None or self.cls_emb is not None or self.pool_type not in ("argmax", "eos"):
            return tokens
        position = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        longest = int((position * (tokens != self.pad_id)).max())  # the end token is no padding
        return tokens[:, : max(1, longest)]


def make_image_tower(architecture: dict, n_unc_layers: int, head: HeadConfig, stock: VisionTransformer | None = None):
    """An ImageTransformer of open_clip's configuration; `stock` is taken over, None for random weights."""
    vision = architecture["vision_cfg"]
    check_n_unc_layers(n_unc_layers, vision.get("layers", 12), "image")
    stock = stock or stock_image_tower(architecture)
    patch = vision.get("patch_size", 16)
    small = {**vision, "layers": max(n_unc_layers, 1), "image_size": patch, "attentional_pool": False}
    branch = None
    if head.probabilistic:
        branch = _blocks(stock_image_tower({**architecture, "embed_dim": 1, "vision_cfg": small}), n_unc_layers)
    return ImageTransformer(stock, branch, head)


def make_text_tower(architecture: dict, n_unc_layers: int, head: HeadConfig, stock: TextTransformer | None = None):
    """A TextTransformerTower of open_clip's configuration; `stock` is taken over, None for random weights."""
    text = architecture["text_cfg"]
    layers = text.get("layers", 12)
    check_n_unc_layers(n_unc_layers, layers, "text")
    stock = stock or stock_text_tower(architecture)
    small = {**text, "layers": max(n_unc_layers, 1), "vocab_size": 1, "context_length": 1}
    branch = None
    if head.probabilistic:
        branch = _blocks(stock_text_tower({**architecture, "embed_dim": 1, "text_cfg": small}), n_unc_layers)
        with torch.no_grad():
            # open_clip scales the text blocks' output matrices by 1/√(number of blocks): here that of the whole tower.
            for block in branch.resblocks:
                for linear in (block.attn.out_proj, block.mlp.c_proj):
                    linear.weight.mul_(math.sqrt(n_unc_layers / layers))
    return TextTransformerTower(stock, branch, head)


def _blocks(small: nn.Module, n: int) -> Transformer:
    """The n blocks of a small stock tower, drawn as open_clip draws those of a whole one; the rest is dropped."""
    small.transformer.resblocks = small.transformer.resblocks[:n]
    return small.transformer


def _take_over(tower: nn.Module, stock: nn.Module) -> None:
    """Make `tower` share every parameter, buffer, module and setting of an open_clip tower."""
    nn.Module.__init__(tower)
    tower.__dict__.update(stock.__dict__)


def _project(pooled_BW: Tensor, projection_WD: Tensor, bias_D: Tensor | None = None) -> Tensor:
    """pooled @ projection + bias in at least float32, also under autocast."""
    with full_precision(pooled_BW):
        projection_WD = at_least_float32(projection_WD)
        out = pooled_BW.to(projection_WD.dtype) @ projection_WD
        return out if bias_D is None else out + bias_D
