"""Full-precision layers, and the poolings of tokens that heads are made of: GPO and PIE-Net's attention.

Shapes: B items, T tokens, W their width, D channels, K embeddings, P size of a positional code, H hidden size.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from probemb.gaussian import at_least_float32

TEMPERATURE = 0.1  # of GPO's weights


class FullPrecisionLinear(nn.Linear):
    """A linear map in at least float32, whatever autocast or the weights' own type say.

    bfloat16 resolves a log-variance near −6 in steps of 0.03, too coarse to rank items by their uncertainty.
    """

    def forward(self, x: Tensor) -> Tensor:
        with full_precision(x):
            weight = at_least_float32(self.weight)
            bias = None if self.bias is None else at_least_float32(self.bias)
            return nn.functional.linear(x.to(weight.dtype), weight, bias)


class FullPrecisionLayerNorm(nn.LayerNorm):
    """A layer norm in at least float32, also with half-precision weights."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = at_least_float32(self.weight), at_least_float32(self.bias)
        return nn.functional.layer_norm(x.to(weight.dtype), self.normalized_shape, weight, bias, self.eps)


def full_precision(x: Tensor) -> AbstractContextManager:
    """A context without autocast, for x's device; autocast does not know the meta device."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


@torch.no_grad()
def start_mean(linear: nn.Linear) -> None:
    """Xavier weights, no bias."""
    nn.init.xavier_uniform_(linear.weight)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


@torch.no_grad()
def start_log_var(linear: nn.Linear, start: float) -> None:
    """Near a constant, see `add_heads`.

    Small weights: log_var stays near its bias, also behind tokens that are not normalised.
    """
    nn.init.normal_(linear.weight, std=0.1 * linear.in_features**-0.5)
    if linear.bias is not None:
        nn.init.constant_(linear.bias, start)


class GPO(nn.Module):
    """Pools (B, T, D) to (B, D): each channel sorted in descending order, then averaged with learned weights.

    Source: VSE∞ (Chen et al., "Learning the Best Pooling Strategy for Visual Semantic Embedding"); PCME++ §3.3.

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
