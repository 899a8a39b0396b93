"""Two fully connected layers with a ReLU between them, from the tower's own pooling: the encoders of jWAE."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from probemb.models.features import Features
from probemb.models.heads.linear import FullPrecisionLinear, start_log_var, start_mean

if TYPE_CHECKING:
    from probemb.models.heads import HeadConfig


class MLPHead(nn.Module):
    """(B, P) pooled features -> (B, H) -> (B, D), with H = D: the paper names no width. Source: jWAE §4.2."""

    reads_tokens = False

    def __init__(self, pooled_width: int, embed_dim: int, bias: bool = True):
        super().__init__()
        self.hidden = FullPrecisionLinear(pooled_width, embed_dim)
        self.out = FullPrecisionLinear(embed_dim, embed_dim, bias)
        start_mean(self.hidden)

    @classmethod
    def for_mean(cls, config: HeadConfig, width: int, pooled_width: int) -> MLPHead:
        """The head of the mean."""
        head = cls(pooled_width, config.embed_dim)
        start_mean(head.out)
        return head

    @classmethod
    def for_log_var(cls, config: HeadConfig, width: int, pooled_width: int) -> MLPHead:
        """The head of the log-variance."""
        head = cls(pooled_width, config.embed_dim, config.bias)
        start_log_var(head.out, config.embed_dim)
        return head

    def forward(self, features: Features) -> Tensor:
        """Features -> (B, D)."""
        return self.out(self.hidden(features.pooled).relu())
