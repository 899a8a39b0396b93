"""open_clip's own transformers, with an uncertainty branch or token.

branch (PCME++ §3.3)   tokens ─ block 1 … block L−u ─┬─ block L−u+1 … block L ── mean head ──── mean
                                                     └─ u blocks of its own ──── log_var head ─ log_var
token (ProLIP §3.1)    tokens, [UNC] ─ block 1 … block L ─ last norm ─┬─ pooling ─ mean head ──── mean
                                                                      └─ [UNC] ─── log_var head ─ log_var

[UNC] is one vector behind all other tokens, its position included. "prolip-code" has the public code's deviations from
the paper, which its published weights need: a text's log-variance is a map of its mean before that is normalised, the
class token of an image passes its last norm twice, and padding takes part in texts.
Shapes: B items, T tokens, L text positions, W width of the tower, D embedding.
"""

import math

import torch
from open_clip.transformer import TextTransformer, Transformer, VisionTransformer, text_global_pool
from torch import Tensor, nn

from probemb.errors import UserError
from probemb.gaussian import at_least_float32
from probemb.models.architectures import stock_image_tower, stock_text_tower
from probemb.models.encoder import BothFeatures, Encoder, Place, last_blocks, run_both, take_parts, used_columns
from probemb.models.heads import Features, full_precision, length_mask
from probemb.models.options import ModelOptions


class SelfAttention(nn.MultiheadAttention):
    """open_clip's attention; on a GPU with fewer copies, and causal without reading a mask: one of two dimensions is
    the causal one, others, (B · heads, S, S), are the texts' own."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool = False, attn_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if query.is_cuda:
            return self.fused(query, attn_mask), None
        return super().forward(query, key, value, need_weights=need_weights, attn_mask=attn_mask)

    def fused(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """x (B, S, W) as query, key and value."""
        qkv = nn.functional.linear(x, self.in_proj_weight, self.in_proj_bias).unflatten(2, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if causal := mask is not None and mask.ndim == 2:
            mask = None
        elif mask is not None:
            mask = mask.to(q.dtype).unflatten(0, (len(x), self.num_heads))
        out = nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
        return self.out_proj(out.transpose(1, 2).flatten(2))


class TransformerTower(Encoder):
    """Takes over all of `stock` under open_clip's names; `branch` is None with a token (W,), and in a point model."""

    stem_prefixes = ("conv1.", "class_embedding", "cls_emb", "positional_embedding", "token_embedding.", "ln_pre.")

    def __init__(self, stock: nn.Module, branch: Transformer | None, o: ModelOptions, std: float):
        nn.Module.__init__(self)
        self.__dict__.update(stock.__dict__)
        for block in (*stock.transformer.resblocks, *(branch.resblocks if branch else ())):
            if type(block.attn) is nn.MultiheadAttention:
                block.attn.__class__ = SelfAttention  # with its weights
        self.uncertainty_transformer = branch
        self.published, width = o.uncertainty == "prolip-code", self.transformer.width
        self.uncertainty_token = None if o.uncertainty == "branch" else nn.Parameter(std * torch.randn(width))
        self.blocks = [f"transformer.resblocks.{i}" for i in range(len(self.transformer.resblocks))]
        n_own = len(branch.resblocks) if branch else 0
        self.branch_blocks = [f"uncertainty_transformer.resblocks.{i}" for i in range(n_own)]
        if o.head != "clip":  # other heads read the raw tokens
            self.drop_projection()
        unc_widths = (width, o.embed_dim) if self.published and isinstance(self, TextTransformer) else None
        self.add_heads(o, width, width, own_projection=True, unc_widths=unc_widths)

    def place(self, name: str) -> Place:
        return Place("branch") if name == "uncertainty_token" else super().place(name)

    def _branches(self, x: Tensor, attn_mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Last tokens of the mean and of the branch, (B, T, W); None without that."""
        own = self.uncertainty_transformer and self.uncertainty_transformer.resblocks
        recompute = self.grad_checkpointing
        return run_both(self.transformer.resblocks, own, x, recompute=recompute, attn_mask=attn_mask)

    def _with_uncertainty_token(self, x: Tensor) -> Tensor:
        if self.uncertainty_token is None:
            return x
        return torch.cat([x, self.uncertainty_token.to(x.dtype).expand(len(x), 1, -1)], 1)


def project(pooled_BW: Tensor, projection_WD: Tensor, bias_D: Tensor | None = None) -> Tensor:
    with full_precision(pooled_BW):
        projection_WD = at_least_float32(projection_WD)
        out = pooled_BW.to(projection_WD.dtype) @ projection_WD
        return out if bias_D is None else out + bias_D


# ------------------------------------------------------------------------------------------------- vision transformer


class PatchEmbedding(nn.Conv2d):
    """A convolution of patches that do not overlap, (B, 3, H, W) -> (B, T, W). On a GPU it is a matrix product, which
    needs no other layout of the pixels; on a CPU it gives open_clip's very bits."""

    def forward(self, pixels: Tensor) -> Tensor:
        return self.product(pixels) if pixels.is_cuda else super().forward(pixels).flatten(2).transpose(1, 2)

    def product(self, pixels: Tensor) -> Tensor:
        height, width = self.kernel_size
        rows, columns = pixels.shape[2] // height, pixels.shape[3] // width
        cut = pixels[:, :, : rows * height, : columns * width].unflatten(3, (columns, width))
        patches = cut.unflatten(2, (rows, height)).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        return nn.functional.linear(patches, self.weight.flatten(1), self.bias)


class ImageTransformer(TransformerTower, VisionTransformer):
    def __init__(self, stock: nn.Module, branch: Transformer | None, o: ModelOptions, std: float):
        super().__init__(stock, branch, o, std)
        self.conv1.__class__ = PatchEmbedding  # with its weights

    def drop_projection(self) -> None:
        self.ln_post, self.proj, self.attn_pool = nn.Identity(), None, None

    @property
    def n_tokens(self) -> int:
        height, width = self.grid_size  # not the positions' shape: ZeRO-3 takes parameters away between two passes
        return height * width + 1

    def parts(self, pixels: Tensor) -> tuple[Tensor, Tensor, int]:
        optional = pixels.new_ones((len(pixels), self.n_tokens - 1), dtype=torch.bool)
        return optional, torch.zeros_like(optional), 0

    def project(self, pooled: Tensor) -> Tensor:
        return project(pooled, self.proj)

    def features(self, pixels: Tensor, kept: Tensor | None = None) -> BothFeatures:
        """(B, 3, H, W) -> features with T tokens, the class token first; or it and n patches (no -1).

        The branch's are neither normalised nor pooled by attention: PCME++ has no norm there. [UNC] is normalised.
        """
        patches = self.conv1(self.normalized(pixels, self.conv1.weight.dtype))
        positions = self.positional_embedding.to(patches.dtype)
        patches = patches + positions[1:]
        class_token = (self.class_embedding.to(patches.dtype) + positions[0]).expand(len(patches), 1, -1)
        if kept is not None:
            tokens = torch.cat([class_token, take_parts(patches, kept)], 1)
        else:
            tokens = self.patch_dropout(torch.cat([class_token, patches], 1))
        mean_tokens, unc_tokens = self._branches(self.ln_pre(self._with_uncertainty_token(tokens)))
        if self.uncertainty_token is not None:
            mean_tokens, unc_tokens = mean_tokens[:, :-1], self.ln_post(mean_tokens[:, -1:])
        pooled = self._pool(mean_tokens)[0]
        if self.published:
            pooled = self.ln_post(pooled)
        mean = Features(mean_tokens, pooled if pooled.ndim == 2 else pooled.mean(1))
        if unc_tokens is None:
            return mean, None
        average = self.pool_type == "avg" and self.uncertainty_token is None
        return mean, Features(unc_tokens, unc_tokens[:, 1:].mean(1) if average else unc_tokens[:, 0])


# --------------------------------------------------------------------------------------------------- text transformer


class TextTransformerTower(TransformerTower, TextTransformer):
    """With a token a text is its words, maybe a class token, and [UNC]. Padding is hidden from all of them. A class
    token behind the text (CoCa's, ProLIP's) is what is pooled and takes no part as a token.
    """

    _ends = property(lambda self: self.pool_type in ("argmax", "eos"))  # it pools the end token

    @property
    def _hides_padding(self) -> bool:
        """Beside [UNC], except where the mean is of a position that may be padding, and in the public code."""
        with_token = self.uncertainty_token is not None and not self.published
        return with_token and (self.cls_emb is not None or self._ends)

    def drop_projection(self) -> None:
        self.text_projection = None

    def parts(self, tokens: Tensor) -> tuple[Tensor, Tensor, int]:
        """The tokens between a text's start and its end may be dropped; all words, of tokenizers without these."""
        if self.cls_emb is None and not self._ends:
            raise UserError(
                "The text tower pools its last position, be it a word or padding, so texts have no parts.",
                "Leave masked inclusion out, or choose a text tower that pools the end token, such as ViT-B-16's.",
            )
        there = self.text_mask(tokens)
        if not self._ends:
            return there, torch.zeros_like(there), 0
        position = torch.arange(tokens.shape[1], device=tokens.device)
        ends = (position == 0) | (position == there.sum(1, keepdim=True) - 1)
        return there & ~ends, there & ends, 2

    def project(self, pooled: Tensor) -> Tensor:
        last = self.text_projection
        if last is None:
            return at_least_float32(pooled)
        return project(pooled, last.weight.T, last.bias) if isinstance(last, nn.Linear) else project(pooled, last)

    def text_mask(self, tokens: Tensor) -> Tensor:
        """(B, L) bool, True up to the end token; without one, for all but padding, and an empty text's first token."""
        if self.pool_type == "argmax":  # the end token has the highest id
            return length_mask(tokens.argmax(dim=-1) + 1, tokens.shape[1])
        if self.pool_type == "eos":
            return length_mask((tokens == self.eos_id).int().argmax(dim=-1) + 1, tokens.shape[1])
        there = tokens != self.pad_id
        first = torch.arange(tokens.shape[1], device=tokens.device) == 0
        return there | (first & ~there.any(1, keepdim=True))

    def trim(self, tokens: Tensor) -> Tensor:
        """Texts that see their padding stay: not causal, as CLIPA's; with a class token; ProLIP's public code."""
        hidden = self._hides_padding
        if not hidden and (self.attn_mask is None or self.cls_emb is not None or not self._ends):
            return tokens
        return used_columns(tokens, self.text_mask(tokens) if hidden else tokens != self.pad_id)

    def features(self, tokens: Tensor, kept: Tensor | None = None) -> BothFeatures:
        """(B, L) int64, L at most the context length -> features with L tokens, or n, which keep their positions.

        The mean's, and [UNC], pass through the tower's last norm (`ln_final`), the branch's do not.
        """
        positions, there = self.positional_embedding[: tokens.shape[1]], None
        if kept is not None:
            there = take_parts(self.text_mask(tokens), kept) & (kept >= 0) if not self.published else kept >= 0
            tokens = take_parts(tokens, kept).masked_fill(kept < 0, self.pad_id)
            positions = self.positional_embedding[kept.clamp(min=0)]
        kind = self.transformer.get_cast_dtype()
        x = self.token_embedding(tokens).to(kind) + positions.to(kind)
        if self.cls_emb is not None:
            class_token = self.cls_emb.to(kind) + self.positional_embedding[self.context_length].to(kind)
            x = torch.cat([x, class_token.expand(len(x), 1, -1)], 1)
        x = self._with_uncertainty_token(x)
        mean_x, unc_x = self._branches(x, self._attention_mask(tokens, x, there))
        mean_x, mask = self.ln_final(mean_x), self.text_mask(tokens) if there is None else there
        if self.uncertainty_token is None:
            return self._pooled(mean_x, tokens, mask), None if unc_x is None else self._pooled(unc_x, tokens, mask)
        mean, unc_x = self._pooled(mean_x[:, :-1], tokens, mask), mean_x[:, -1:]
        return mean, Features(unc_x, self.project(mean.pooled) if self.published else unc_x[:, 0])

    def _attention_mask(self, tokens: Tensor, x: Tensor, there: Tensor | None) -> Tensor | None:
        """open_clip's, for x (B, S, W); with [UNC], (B · heads, S, S): what is not `there` is hidden, or is to come."""
        length = x.shape[1]
        if self.uncertainty_token is None:
            mask = None if self.attn_mask is None else self.attn_mask[:length, :length]
            if self.use_pad_mask or self.cls_emb is not None:
                padding = self._build_additive_mask(tokens, length, x.dtype)
                mask = padding if mask is None else mask + padding
            return mask
        if there is None and not self._hides_padding:
            return None
        hidden = ~(self.text_mask(tokens) if there is None else there)
        hidden = nn.functional.pad(hidden, (0, length - hidden.shape[1]))[:, None].expand(-1, length, -1)
        if self.attn_mask is not None:
            hidden = hidden | torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mask = torch.zeros(hidden.shape, dtype=x.dtype, device=x.device).masked_fill(hidden, -torch.inf)
        return mask.repeat_interleave(self.heads, 0)

    def _pooled(self, x: Tensor, tokens: Tensor, mask: Tensor) -> Features:
        if self.cls_emb is not None:
            return Features(x[:, :-1], x[:, -1], mask)
        return Features(x, text_global_pool(x, tokens, self.pool_type, self.eos_id), mask)


# --------------------------------------------------------------------------------------------------------------- both


def transformer(architecture: dict, part: str, o: ModelOptions, n_unc_layers: int, stock: nn.Module) -> Encoder:
    """A tower of open_clip's configuration. The branch's blocks are those of a small tower, drawn by open_clip."""
    image, config, branch = part == "vision_cfg", architecture[part], None
    blocks = stock.transformer.resblocks
    last_blocks(blocks, n_unc_layers)
    if o.probabilistic and o.uncertainty == "branch":
        size = {"vocab_size": 1, "context_length": 1}
        size = {"image_size": config.get("patch_size", 16), "attentional_pool": False} if image else size
        small = {**config, "layers": max(n_unc_layers, 1), **size}
        make = stock_image_tower if image else stock_text_tower
        branch = make({**architecture, "embed_dim": 1, part: small}).transformer
        branch.resblocks = branch.resblocks[:n_unc_layers]
        with torch.no_grad():
            # open_clip scales the text blocks' output matrices by 1/√(number of blocks): here that of the whole tower.
            for block in () if image else branch.resblocks:
                for linear in (block.attn.out_proj, block.mlp.c_proj):
                    linear.weight.mul_(math.sqrt(n_unc_layers / len(blocks)))
    if image:
        return ImageTransformer(stock, branch, o, std=stock.transformer.width**-0.5)
    return TextTransformerTower(stock, branch, o, std=0.01)  # as open_clip's class token of a text
