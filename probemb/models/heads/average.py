"""The average of tokens in the embedding space: the head of methods that compare tokens, such as SCAN."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from probemb.gaussian import at_least_float32
from probemb.models.features import Features
from probemb.models.heads.linear import FullPrecisionLinear, start_log_var, start_mean

if TYPE_CHECKING:
    from probemb.models.heads import HeadConfig


class AverageHead(nn.Module):
    """Tokens (B, T, W) -> (B, D), by a linear map of each where W is not D; log-variances always have a map."""

    reads_tokens = True

    def __init__(self, linear: nn.Module):
        super().__init__()
        self.linear = linear

    @classmethod
    def for_mean(cls, config: HeadConfig, width: int, pooled_width: int) -> AverageHead:
        """The head of the mean; without parameters where the tower's tokens are of size D."""
        if width == config.embed_dim:
            return cls(nn.Identity())
        linear = FullPrecisionLinear(width, config.embed_dim)
        start_mean(linear)
        return cls(linear)

    @classmethod
    def for_log_var(cls, config: HeadConfig, width: int, pooled_width: int) -> AverageHead:
        """The head of the log-variance."""
        linear = FullPrecisionLinear(width, config.log_var_width, config.bias)
        start_log_var(linear, config.log_var_start)
        return cls(linear)

    def forward(self, features: Features) -> Tensor:
        """Features -> (B, D), in at least float32; an item without any token gives zero."""
        x = self.embed_tokens(features.tokens)
        if features.mask is None:
            return x.mean(1)
        return (x * features.mask[..., None]).sum(1) / features.mask.sum(1, keepdim=True).clamp(min=1)

    def embed_tokens(self, tokens_BTW: Tensor) -> Tensor:
        """(B, T, W) -> (B, T, D)."""
        return at_least_float32(self.linear(tokens_BTW))
