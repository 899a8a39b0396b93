"""PIE-Net: K embeddings of an item, each its pooled features with what one attention over its tokens adds.

Sources: PVSE (Song and Soleymani 2019) for the mean; PCME (Chun et al. 2021) for the log-variance.
Shapes: B items, T tokens, W their width, P width of the pooled features, D embedding, K embeddings, H hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from probemb.gaussian import at_least_float32
from probemb.models.features import Features
from probemb.models.heads.linear import FullPrecisionLinear, full_precision, start_log_var, start_mean

if TYPE_CHECKING:
    from probemb.models.heads import HeadConfig


class TokenAttention(nn.Module):
    """K averages of tokens, (B, T, W) -> (B, K, W), weighted by softmax_T(W₂ tanh(W₁ x)) over the unmasked ones."""

    def __init__(self, width: int, n_heads: int, hidden_dim: int):
        super().__init__()
        self.hidden = FullPrecisionLinear(width, hidden_dim, bias=False)
        self.scores = FullPrecisionLinear(hidden_dim, n_heads, bias=False)
        start_mean(self.hidden)
        start_mean(self.scores)

    def weights(self, tokens_BTW: Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """Weight of every token in the K averages, (B, T, K), in at least float32, also under autocast."""
        scores_BTK = self.scores(self.hidden(tokens_BTW).tanh())
        if mask_BT is not None:
            scores_BTK = scores_BTK.masked_fill(~mask_BT[..., None], torch.finfo(scores_BTK.dtype).min)
            return scores_BTK.softmax(1).masked_fill(~mask_BT[..., None], 0.0)  # of an item without tokens all are 0
        return scores_BTK.softmax(1)

    def forward(self, tokens_BTW: Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """In at least float32, also under autocast."""
        with full_precision(tokens_BTW):
            weights_BTK = self.weights(tokens_BTW, mask_BT)
            return weights_BTK.transpose(1, 2) @ tokens_BTW.to(weights_BTK.dtype)


class FullPrecisionLayerNorm(nn.LayerNorm):
    """A layer norm in at least float32, also with half-precision weights."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = at_least_float32(self.weight), at_least_float32(self.bias)
        return nn.functional.layer_norm(x.to(weight.dtype), self.normalized_shape, weight, bias, self.eps)


class PIEHead(nn.Module):
    """Features -> (B, K, D), or (B, D) for K = 1.

    The mean is LayerNorm(p + sigmoid(fc(a))) and the log-variance p + fc(a), with a the attention's average of tokens
    and p the projected pooled features.

    Args:
        hidden_dim: H; None for half of the tokens' width.
        project: False where pooled features of size D are p themselves (PCME's texts: a GRU's last state).
        norm: sigmoid and LayerNorm, as for a mean; no LayerNorm of two numbers, of which it leaves the order alone.
    """

    reads_tokens = True
    several = True

    def __init__(
        self,
        width: int,
        pooled_width: int,
        embed_dim: int,
        n_embeddings: int = 1,
        hidden_dim: int | None = None,
        project: bool = True,
        norm: bool = True,
        bias: bool = True,
    ):
        super().__init__()
        project = project or pooled_width != embed_dim
        self.attention = TokenAttention(width, n_embeddings, hidden_dim or max(width // 2, 1))
        self.fc = FullPrecisionLinear(width, embed_dim, bias)
        self.project = FullPrecisionLinear(pooled_width, embed_dim, bias) if project else nn.Identity()
        self.bounded = norm
        self.norm = FullPrecisionLayerNorm(embed_dim) if norm and embed_dim > 2 else nn.Identity()

    @classmethod
    def for_mean(cls, config: HeadConfig, width: int, pooled_width: int) -> PIEHead:
        """The head of the mean."""
        head = cls(width, pooled_width, config.embed_dim, config.n_embeddings, **config.options)
        start_mean(head.fc)
        if isinstance(head.project, nn.Linear):
            start_mean(head.project)
        return head

    @classmethod
    def for_log_var(cls, config: HeadConfig, width: int, pooled_width: int) -> PIEHead:
        """The head of the log-variance."""
        options = {**config.options, "norm": False, "bias": config.bias}
        head = cls(width, pooled_width, config.log_var_width, config.n_embeddings, **options)
        start_log_var(head.fc, config.log_var_start)
        if isinstance(head.project, nn.Linear):
            start_log_var(head.project, 0.0)  # the start is in the other map's bias
        return head

    def forward(self, features: Features) -> Tensor:
        """In at least float32, also under autocast."""
        return self.with_residuals(features)[0]

    def with_residuals(self, features: Features) -> tuple[Tensor, Tensor]:
        """The embeddings, and what the attention adds to the pooled features, (B, K, D), of K = 1 too."""
        residual_BKD = self.fc(self.attention(features.tokens, features.mask))
        with full_precision(features.tokens):
            pooled_B1D = at_least_float32(self.project(features.pooled)).unsqueeze(1)
            if self.bounded:
                residual_BKD = residual_BKD.sigmoid()
            out = self.norm(pooled_B1D + residual_BKD)
            return (out.squeeze(1) if out.shape[1] == 1 else out), residual_BKD

    def embed_tokens(self, tokens_BTW: Tensor) -> Tensor:
        """(B, T, W) -> (B, T, D), by the map behind the attention."""
        return self.fc(tokens_BTW)
