"""Fully connected layers with a ReLU between them, from the tower's own pooling: the encoders of jWAE."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from probemb.models.features import Features
from probemb.models.heads.linear import FullPrecisionLinear, start_log_var, start_mean

if TYPE_CHECKING:
    from probemb.models.heads import HeadConfig


class MLPHead(nn.Module):
    """(B, P) pooled features -> (B, D), or (B, 1) for one log-variance. Source: jWAE §4.2.

    The hidden layer's width, which the paper does not name, is D.

    Args:
        layers: 2; 1 is a linear map, as jWAE has it behind a GRU.
    """

    reads_tokens = False

    def __init__(self, pooled_width: int, embed_dim: int, out: int, bias: bool = True, layers: int = 2):
        super().__init__()
        self.hidden = FullPrecisionLinear(pooled_width, embed_dim) if layers == 2 else None
        self.out = FullPrecisionLinear(pooled_width if self.hidden is None else embed_dim, out, bias)
        if self.hidden is not None:
            start_mean(self.hidden)

    @classmethod
    def for_mean(cls, config: HeadConfig, width: int, pooled_width: int) -> MLPHead:
        """The head of the mean."""
        head = cls(pooled_width, config.embed_dim, config.embed_dim, **config.options)
        start_mean(head.out)
        return head

    @classmethod
    def for_log_var(cls, config: HeadConfig, width: int, pooled_width: int) -> MLPHead:
        """The head of the log-variance."""
        head = cls(pooled_width, config.embed_dim, config.log_var_width, config.bias, **config.options)
        start_log_var(head.out, config.log_var_start)
        return head

    def forward(self, features: Features) -> Tensor:
        """Features -> (B, D)."""
        x = features.pooled
        return self.out(x if self.hidden is None else self.hidden(x).relu())
