"""Generalized pooling operator (GPO): a learned average of every channel's sorted values.

Source: VSE∞ (Chen et al., "Learning the Best Pooling Strategy for Visual Semantic Embedding"), as used by PCME++ §3.3.

Shapes: B items, T tokens, D channels, P size of a positional code, H hidden size.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from probemb.gaussian import at_least_float32
from probemb.models.features import Features
from probemb.models.heads.linear import FullPrecisionLinear, full_precision, start_log_var, start_mean

if TYPE_CHECKING:
    from probemb.models.heads import HeadConfig

TEMPERATURE = 0.1


class GPO(nn.Module):
    """Pools (B, T, D) to (B, D): each channel sorted in descending order, then averaged with learned weights.

    The weights come from a bidirectional GRU over positional codes, so they depend on the number of valid tokens and
    on nothing else. They are computed once per length, not once per item.

    Args:
        code_dim: size of a positional code (the paper's d_pe).
        hidden_dim: size of the GRU's hidden state.
    """

    def __init__(self, code_dim: int = 32, hidden_dim: int = 32):
        super().__init__()
        self.code_dim = code_dim
        self.gru = nn.GRU(code_dim, hidden_dim, batch_first=True, bidirectional=True)
        self.linear = nn.Linear(hidden_dim, 1, bias=False)

    def forward(self, features_BTD: Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """Pooled features, (B, D), in at least float32 (also under autocast).

        Args:
            features_BTD: (B, T, D) float.
            mask_BT: (B, T) bool, True for tokens that take part; None for all of them. Sorting makes their places
                irrelevant: only their number counts. An item without any token pools to zero.
        """
        with full_precision(features_BTD):
            features_BTD = at_least_float32(features_BTD)
            n_tokens = features_BTD.shape[1]
            if mask_BT is None:
                weights_T = self.weights([n_tokens])[0].to(features_BTD.dtype)
                return _sort_tokens(features_BTD) @ weights_T
            lengths_B = mask_BT.sum(dim=1)
            table_LT = self.weights(list(range(n_tokens, 0, -1))).to(features_BTD.dtype)  # row 0: all tokens
            weights_BT = table_LT[n_tokens - lengths_B.clamp(min=1)]
            lowest = torch.finfo(features_BTD.dtype).min  # sorts tokens that take no part behind all others
            sorted_BDT = _sort_tokens(features_BTD.masked_fill(~mask_BT[..., None], lowest))
            padding_BT = length_mask(lengths_B, n_tokens).logical_not()
            return torch.einsum("bdt,bt->bd", sorted_BDT.masked_fill(padding_BT[:, None], 0), weights_BT)

    @torch.compiler.disable  # a compiler unrolls or rejects the GRU, which costs next to nothing
    def weights(self, lengths: list[int]) -> Tensor:
        """Pooling weights of sequences with these lengths (in descending order): (len(lengths), max(lengths)).

        A row sums to 1 and is 0 behind its length.
        """
        longest = lengths[0]
        parameter = self.linear.weight
        codes_TP = positional_codes(longest, self.code_dim, parameter.device).to(parameter.dtype)
        packed = pack_padded_sequence(
            codes_TP.expand(len(lengths), -1, -1), torch.tensor(lengths), batch_first=True, enforce_sorted=True
        )
        states_LT2H, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True, total_length=longest)
        forward_LTH, backward_LTH = states_LT2H.chunk(2, dim=-1)
        scores_LT = at_least_float32(self.linear((forward_LTH + backward_LTH) / 2).squeeze(-1))
        valid_LT = length_mask(torch.tensor(lengths).to(scores_LT.device, non_blocking=True), longest)
        return (scores_LT / TEMPERATURE).masked_fill(~valid_LT, -torch.inf).softmax(dim=-1)


def _sort_tokens(features_BTD: Tensor) -> Tensor:
    """Each channel's values in descending order, (B, D, T); twice as fast with the tokens side by side in memory."""
    return features_BTD.transpose(1, 2).contiguous().sort(dim=-1, descending=True).values


class GPOHead(nn.Module):
    """A linear map of every token, then GPO: tokens (B, T, W) -> (B, D). PCME++ §3.3 (COCO).

    GPO's weights sum to 1, so a constant added to the bias is added to every output.
    """

    reads_tokens = True

    def __init__(self, width: int, embed_dim: int, bias: bool = True, code_dim: int = 32, hidden_dim: int = 32):
        super().__init__()
        self.linear = FullPrecisionLinear(width, embed_dim, bias)
        self.pool = GPO(code_dim, hidden_dim)

    @classmethod
    def for_mean(cls, config: HeadConfig, width: int, pooled_width: int) -> GPOHead:
        """The head of the mean."""
        head = cls(width, config.embed_dim, **config.options)
        start_mean(head.linear)
        return head

    @classmethod
    def for_log_var(cls, config: HeadConfig, width: int, pooled_width: int) -> GPOHead:
        """The head of the log-variance."""
        head = cls(width, config.log_var_width, config.bias, **config.options)
        start_log_var(head.linear, config.log_var_start)
        return head

    def forward(self, features: Features) -> Tensor:
        """Features -> (B, D)."""
        return self.pool(self.linear(features.tokens), features.mask)

    def embed_tokens(self, tokens_BTW: Tensor) -> Tensor:
        """(B, T, W) -> (B, T, D), before pooling."""
        return self.linear(tokens_BTW)


def positional_codes(n: int, code_dim: int, device: torch.device | str = "cpu") -> Tensor:
    """Sinusoidal codes of positions 0 … n−1, (n, code_dim): sine in even, cosine in odd columns.

    Always float32, so that a model has the same codes at every precision.
    """
    rates = torch.exp(torch.arange(0, code_dim, 2, dtype=torch.float32, device=device) * -(math.log(10000) / code_dim))
    angles = torch.arange(n, dtype=torch.float32, device=device)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


def length_mask(lengths_B: Tensor, n_tokens: int) -> Tensor:
    """(B,) lengths -> (B, n_tokens) bool, True for the first `length` tokens of each item."""
    return torch.arange(n_tokens, device=lengths_B.device) < lengths_B[:, None]


def size_augment_mask(
    batch: int, n_tokens: int, ratio: float = 0.2, generator: torch.Generator | None = None
) -> Tensor:
    """Mask of the image tokens that SizeAugment keeps, (batch, n_tokens) bool: the `token_mask` of `encode_image`.

    Each image draws p ~ U(0, 1). If p > ratio, each of its tokens (the class token too) is dropped with probability
    ratio·p; otherwise all stay. Source: VSE∞; PCME++ §B.2 (ratio 0.2).
    """
    p_B1 = torch.rand(batch, 1, generator=generator)
    keep_BT = torch.rand(batch, n_tokens, generator=generator) > ratio * p_B1
    return keep_BT | (p_B1 <= ratio)
