"""open_clip's text transformer, with an uncertainty branch or token; see `blocks.py`.

With a token a text is its words, maybe a class token, and [UNC]. Padding is hidden from all of them.
"""

from __future__ import annotations

import math

import torch
from open_clip.transformer import TextTransformer, Transformer, text_global_pool
from torch import Tensor, nn

from probemb.errors import UserError
from probemb.gaussian import at_least_float32
from probemb.models.architectures import check_n_unc_layers, stock_text_tower
from probemb.models.features import Features
from probemb.models.heads import HeadConfig, add_heads
from probemb.models.pooling import length_mask
from probemb.models.towers.open_clip.blocks import TransformerTower, first_blocks, project, take_over
from probemb.models.towers.parts import Parts, take_parts, take_tokens

TOKEN_STD = 0.01  # of open_clip's class token of a text


class TextTransformerTower(TransformerTower, TextTransformer):
    """An open_clip text transformer; arguments as for `ImageTransformer`."""

    def __init__(self, stock: TextTransformer, branch: Transformer | None, head: HeadConfig):
        take_over(self, stock, branch, head.uncertainty, TOKEN_STD)
        # The public code of ProLIP predicts the log-variance from the mean, before that is normalised.
        unc_widths = (self.width, head.embed_dim) if self.published else None
        if head.kind != "clip":
            self.text_projection = None
        add_heads(self, head, self.width, self.width, own_projection=True, unc_widths=unc_widths)

    def features(self, tokens: Tensor) -> tuple[Features, Features | None]:
        """(B, L) int64, L at most the context length -> features with L tokens.

        The mean's, and [UNC], pass through the tower's last norm (`ln_final`), the branch's do not. A class token
        behind the text (CoCa's, ProLIP's) is what is pooled and takes no part as a token.
        """
        return self._features_of(tokens, self.positional_embedding[: tokens.shape[1]])

    @property
    def required_parts(self) -> int:
        """A start and an end token, in towers that look for the end."""
        return 2 if self._ends else 0

    def parts(self, tokens: Tensor) -> Parts:
        """The tokens between a text's start and its end may be dropped; all words, of tokenizers without these.

        Raises:
            UserError: padding takes part in the text (SigLIP's, CLIPA's), so that its length is no number of words.
        """
        if self.cls_emb is None and not self._ends:
            raise UserError(
                "The text tower pools its last position, be it a word or padding, so texts have no parts.",
                "Leave masked inclusion out, or choose a text tower that pools the end token, such as ViT-B-16's.",
            )
        there = self.text_mask(tokens)
        if not self._ends:
            return Parts(there, torch.zeros_like(there))
        position = torch.arange(tokens.shape[1], device=tokens.device)
        ends = (position == 0) | (position == there.sum(1, keepdim=True) - 1)
        return Parts(there & ~ends, there & ends)

    def features_of_parts(self, tokens: Tensor, kept: Tensor) -> tuple[Features, Features | None]:
        """`features` with n tokens, which keep their positions."""
        ids, positions = take_tokens(tokens, kept, self.pad_id), self.positional_embedding[kept.clamp(min=0)]
        there = take_parts(self.text_mask(tokens), kept) & (kept >= 0) if not self.published else kept >= 0
        return self._features_of(ids, positions, there)

    def project(self, pooled: Tensor) -> Tensor:
        """CLIP's projection, a matrix or a linear layer."""
        if self.text_projection is None:
            return at_least_float32(pooled)
        if isinstance(self.text_projection, nn.Linear):
            return project(pooled, self.text_projection.weight.T, self.text_projection.bias)
        return project(pooled, self.text_projection)

    def text_mask(self, tokens: Tensor) -> Tensor:
        """True up to and including each text's end token, (B, L) bool; without one, of all that is no padding, or the
        first token of an empty text.
        """
        if self.pool_type == "argmax":  # the end token has the highest id
            return length_mask(tokens.argmax(dim=-1) + 1, tokens.shape[1])
        if self.pool_type == "eos":
            return length_mask((tokens == self.eos_id).int().argmax(dim=-1) + 1, tokens.shape[1])
        there = tokens != self.pad_id
        first = torch.arange(tokens.shape[1], device=tokens.device) == 0
        return there | (first & ~there.any(1, keepdim=True))

    def trim(self, tokens: Tensor) -> Tensor:
        """(B, L) tokens without the columns behind the longest text: the same embeddings in less time.

        Leaves texts alone that see their padding (blocks that are not causal, as CLIPA's; a class token behind them;
        the public code of ProLIP).
        """
        hidden = self._hides_padding
        if not hidden and (self.attn_mask is None or self.cls_emb is not None or not self._ends):
            return tokens
        position = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        there = self.text_mask(tokens) if hidden else tokens != self.pad_id  # the end token is no padding
        return tokens[:, : max(1, int((position * there).max()))]

    @property
    def _ends(self) -> bool:
        return self.pool_type in ("argmax", "eos")

    @property
    def _hides_padding(self) -> bool:
        """Beside [UNC], except where the mean is of a position that may be padding, and in the public code."""
        with_token = self.uncertainty_token is not None and not self.published
        return with_token and (self.cls_emb is not None or self._ends)

    def _features_of(
        self, tokens: Tensor, positions: Tensor, there: Tensor | None = None
    ) -> tuple[Features, Features | None]:
        """Of tokens (B, L) at positions (L, W) or (B, L, W); `there`: (B, L), those that [UNC]'s tower shows."""
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
        """open_clip's, for a sequence of this length; with [UNC], one that hides padding."""
        length = x.shape[1]
        if self.uncertainty_token is not None:
            if there is None and self._hides_padding:
                there = self.text_mask(tokens)
            return None if there is None else self._hide(~there, x)
        mask = None if self.attn_mask is None else self.attn_mask[:length, :length]
        if self.use_pad_mask or self.cls_emb is not None:
            padding = self._build_additive_mask(tokens, length, x.dtype)
            mask = padding if mask is None else mask + padding
        return mask

    def _hide(self, hidden: Tensor, x: Tensor) -> Tensor:
        """The additive mask (B · heads, S, S) that hides tokens (B, L), and those to come in a causal tower."""
        length = x.shape[1]
        hidden = nn.functional.pad(hidden, (0, length - hidden.shape[1]))[:, None].expand(-1, length, -1)
        if self.attn_mask is not None:
            hidden = hidden | torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mask = torch.zeros(hidden.shape, dtype=x.dtype, device=x.device).masked_fill(hidden, -torch.inf)
        return mask.repeat_interleave(self.heads, 0)

    def _pooled(self, x: Tensor, tokens: Tensor, mask: Tensor) -> Features:
        if self.cls_emb is not None:
            return Features(x[:, :-1], x[:, -1], mask)
        return Features(x, text_global_pool(x, tokens, self.pool_type, self.eos_id), mask)


def make_text_tower(architecture: dict, n_unc_layers: int, head: HeadConfig, stock: TextTransformer | None = None):
    """A TextTransformerTower of open_clip's configuration; `stock` is taken over, None for random weights."""
    text = architecture["text_cfg"]
    layers = text.get("layers", 12)
    check_n_unc_layers(n_unc_layers, layers, "text")
    stock = stock or stock_text_tower(architecture)
    small = {**text, "layers": max(n_unc_layers, 1), "vocab_size": 1, "context_length": 1}
    branch = None
    if head.probabilistic and head.uncertainty == "branch":
        branch = first_blocks(stock_text_tower({**architecture, "embed_dim": 1, "text_cfg": small}), n_unc_layers)
        with torch.no_grad():
            # open_clip scales the text blocks' output matrices by 1/√(number of blocks): here that of the whole tower.
            for block in branch.resblocks:
                for linear in (block.attn.out_proj, block.mlp.c_proj):
                    linear.weight.mul_(math.sqrt(n_unc_layers / layers))
    return TextTransformerTower(stock, branch, head)
