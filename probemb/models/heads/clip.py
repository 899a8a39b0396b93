"""CLIP's head: a linear map of the tower's own pooling (class token, end token, average)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import functional as F

from probemb.gaussian import at_least_float32
from probemb.models.features import Features
from probemb.models.heads.linear import FullPrecisionLinear, start_log_var, start_mean

if TYPE_CHECKING:
    from probemb.models.heads import HeadConfig


class ClipHead(FullPrecisionLinear):
    """(B, P) pooled features -> (B, D), or (B, 1) for one log-variance; that may read them at unit length."""

    reads_tokens = False
    unit_length = False

    @classmethod
    def for_mean(cls, config: HeadConfig, width: int, pooled_width: int) -> ClipHead:
        """For towers without a projection of their own."""
        head = cls(pooled_width, config.embed_dim, bias=False)
        start_mean(head)
        return head

    @classmethod
    def for_log_var(cls, config: HeadConfig, width: int, pooled_width: int) -> ClipHead:
        """For the branch's pooled tokens."""
        head = cls(pooled_width, config.log_var_width, config.bias)
        head.unit_length = config.unit_features
        start_log_var(head, config.log_var_start)
        return head

    def forward(self, features: Features) -> Tensor:
        """Features -> (B, D)."""
        x = features.pooled
        return super().forward(F.normalize(at_least_float32(x), dim=-1) if self.unit_length else x)
