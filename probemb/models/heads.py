"""Heads: from a tower's features to the mean or the log-variance of an embedding, and the poolings they are made of.

A head is a module from `Features` to (B, D), or to (B, K, D) for K embeddings an item. One that looks at every token
has `embed_tokens`: (B, T, W) -> (B, T, D). All compute in at least float32, also under autocast, as bfloat16 resolves a
log-variance near -6 in steps of 0.03, too coarse to rank by uncertainty. But maps of every token that end in a mean or
in weights of tokens have the towers' precision: they are the large ones.

Shapes: B items, T tokens, W their width, P width of the pooled features, D embedding, K embeddings an item.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from probemb.gaussian import at_least_float32
from probemb.models.options import ModelOptions

TEMPERATURE = 0.1  # of GPO's weights
GPO_SIZES = {"code_dim": 32, "hidden_dim": 32}


class Features(NamedTuple):
    """A trunk's output: tokens (B, T, W); pooled (B, P), its own summary; mask (B, T) bool, None if all take part."""

    tokens: Tensor
    pooled: Tensor
    mask: Tensor | None = None


def full_precision(x: Tensor) -> AbstractContextManager:
    """A context without autocast, for x's device; autocast does not know the meta device."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


class FullPrecisionLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with full_precision(x):
            weight = at_least_float32(self.weight)
            bias = None if self.bias is None else at_least_float32(self.bias)
            return F.linear(x.to(weight.dtype), weight, bias)


class FullPrecisionLayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        weight, bias = at_least_float32(self.weight), at_least_float32(self.bias)
        return F.layer_norm(x.to(weight.dtype), self.normalized_shape, weight, bias, self.eps)


@torch.no_grad()
def start_mean(linear: nn.Linear) -> None:
    """Xavier weights, no bias."""
    nn.init.xavier_uniform_(linear.weight)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


@torch.no_grad()
def _start(linear: nn.Linear, o: ModelOptions, log_var: bool, start: float | None = None) -> None:
    """Initial weights of an output layer; a log-variance stays near its bias, `start` or where the options say."""
    if not log_var:
        start_mean(linear)
        return
    nn.init.normal_(linear.weight, std=0.1 * linear.in_features**-0.5)
    if linear.bias is not None:
        nn.init.constant_(linear.bias, o.log_var_mean if start is None else start)


def _outputs(o: ModelOptions, log_var: bool) -> tuple[int, bool]:
    return (o.log_var_width, o.uncertainty_bias) if log_var else (o.embed_dim, True)


def shape_log_var(o: ModelOptions, predicted: Tensor, shape: torch.Size) -> Tensor:
    """Predictions (…, D or 1) -> log-variances of a shape (…, D), within their range; see `ModelOptions.covariance`."""
    if o.log_var_range is not None:
        predicted = predicted.clamp(*o.log_var_range)
    if o.covariance == "ellipsoidal":
        return predicted
    if o.covariance == "spherical-mean":
        predicted = at_least_float32(predicted).logsumexp(-1, keepdim=True) - math.log(shape[-1])
    return predicted.expand(shape).contiguous()


# -------------------------------------------------------------------------------------------------------------- heads
# Made with the model's options, W, P, and whether they predict the log-variance rather than the mean.


class ClipHead(FullPrecisionLinear):
    """A linear map of the tower's own pooling."""

    def __init__(self, o: ModelOptions, width: int, pooled_width: int, log_var: bool = False):
        out, bias = _outputs(o, log_var)
        super().__init__(pooled_width, out, bias and log_var)
        self.unit_length = log_var and o.unit_features
        _start(self, o, log_var)

    def forward(self, features: Features) -> Tensor:
        x = features.pooled
        return super().forward(F.normalize(at_least_float32(x), dim=-1) if self.unit_length else x)


class GPOHead(nn.Module):
    """A linear map of every token, then GPO. Source: PCME++ §3.3 (COCO)."""

    def __init__(self, o: ModelOptions, width: int, pooled_width: int, log_var: bool = False):
        super().__init__()
        self.linear = (FullPrecisionLinear if log_var else nn.Linear)(width, *_outputs(o, log_var))
        self.pool = GPO(**o.pooling or {})
        _start(self.linear, o, log_var)

    def forward(self, features: Features) -> Tensor:
        return self.pool(self.linear(features.tokens), features.mask)

    embed_tokens = property(lambda self: self.linear)


class PIEHead(nn.Module):
    """PIE-Net: K embeddings of an item. The mean is LayerNorm(p + sigmoid(fc(a))) and the log-variance p + fc(a); a is
    the attention's average of tokens and p the projected pooled features (`project`: False where those are p).

    Of two numbers a LayerNorm would leave the order alone, so there is none. `hidden_dim` is the attention's (W / 2).
    Sources: PVSE (Song and Soleymani 2019) for the mean; PCME (Chun et al. 2021) for the log-variance.
    """

    def __init__(self, o: ModelOptions, width: int, pooled_width: int, log_var: bool = False):
        super().__init__()
        (out, bias), options = _outputs(o, log_var), o.pooling or {}
        self.attention = TokenAttention(width, o.n_embeddings, options.get("hidden_dim") or max(width // 2, 1))
        self.fc = FullPrecisionLinear(width, out, bias)
        project = options.get("project", True) or pooled_width != out
        self.project = FullPrecisionLinear(pooled_width, out, bias) if project else nn.Identity()
        self.bounded = not log_var
        self.norm = FullPrecisionLayerNorm(out) if self.bounded and out > 2 else nn.Identity()
        _start(self.fc, o, log_var)
        if project:
            _start(self.project, o, log_var, 0.0)  # a log-variance's start is in the other map's bias

    def forward(self, features: Features) -> Tensor:
        return self.with_residuals(features)[0]

    def with_residuals(self, features: Features) -> tuple[Tensor, Tensor]:
        """The embeddings, and what the attention adds to the pooled features, (B, K, D)."""
        residual_BKD = self.fc(self.attention(features.tokens, features.mask))
        with full_precision(features.tokens):
            pooled_B1D = at_least_float32(self.project(features.pooled)).unsqueeze(1)
            residual_BKD = residual_BKD.sigmoid() if self.bounded else residual_BKD
            out = self.norm(pooled_B1D + residual_BKD)
            return (out.squeeze(1) if out.shape[1] == 1 else out), residual_BKD

    embed_tokens = property(lambda self: self.fc)


class MaxMeanHead(nn.Module):
    """A linear map of the pooled features and of every channel's maximum over the tokens, side by side."""

    def __init__(self, o: ModelOptions, width: int, pooled_width: int, log_var: bool = False):
        super().__init__()
        self.linear, self.dropout = FullPrecisionLinear(width + pooled_width, *_outputs(o, log_var)), o.dropout
        _start(self.linear, o, log_var)

    def forward(self, features: Features) -> Tensor:
        both = torch.cat([features.pooled, self.maximum(features)[:, 0]], 1)
        return self.linear(F.dropout(both, self.dropout, self.training))

    @staticmethod
    def maximum(features: Features) -> Tensor:
        """(B, 1, W)."""
        tokens, mask = features.tokens, features.mask
        if mask is not None:
            tokens = tokens.masked_fill(~mask[..., None], torch.finfo(tokens.dtype).min)
        return tokens.amax(1, keepdim=True)


class MLPHead(nn.Module):
    """Two layers of width D with a ReLU between them, or one (`layers`). Source: jWAE §4.2."""

    def __init__(self, o: ModelOptions, width: int, pooled_width: int, log_var: bool = False):
        super().__init__()
        two = (o.pooling or {}).get("layers", 2) == 2
        self.hidden = FullPrecisionLinear(pooled_width, o.embed_dim) if two else None
        self.out = FullPrecisionLinear(o.embed_dim if two else pooled_width, *_outputs(o, log_var))
        if two:
            start_mean(self.hidden)
        _start(self.out, o, log_var)

    def forward(self, features: Features) -> Tensor:
        x = features.pooled
        return self.out(x if self.hidden is None else self.hidden(x).relu())


class AverageHead(nn.Module):
    """The average of tokens in the embedding space (SCAN); zero without any."""

    def __init__(self, o: ModelOptions, width: int, pooled_width: int, log_var: bool = False):
        super().__init__()
        self.linear = nn.Identity()
        if log_var or width != o.embed_dim:
            self.linear = FullPrecisionLinear(width, *_outputs(o, log_var))
            _start(self.linear, o, log_var)

    def forward(self, features: Features) -> Tensor:
        x = self.embed_tokens(features.tokens)
        if features.mask is None:
            return x.mean(1)
        return (x * features.mask[..., None]).sum(1) / features.mask.sum(1, keepdim=True).clamp(min=1)

    def embed_tokens(self, tokens_BTW: Tensor) -> Tensor:
        return at_least_float32(self.linear(tokens_BTW))


HEADS = {
    "clip": ClipHead, "gpo": GPOHead, "pie": PIEHead, "mlp": MLPHead, "average": AverageHead, "max-mean": MaxMeanHead,
}  # fmt: skip

# ----------------------------------------------------------------------------------------------------------- poolings


class GPO(nn.Module):
    """Pools (B, T, D) to (B, D): each channel sorted in descending order, then averaged with learned weights, which a
    GRU makes of positional codes, and which depend on the number of valid tokens alone.
    Source: VSE∞ (Chen et al., "Learning the Best Pooling Strategy for Visual Semantic Embedding"); PCME++ §3.3.
    """

    def __init__(self, code_dim: int = 32, hidden_dim: int = 32):
        super().__init__()
        self.code_dim = code_dim
        self.gru = nn.GRU(code_dim, hidden_dim, batch_first=True, bidirectional=True)
        self.linear = nn.Linear(hidden_dim, 1, bias=False)

    def forward(self, features_BTD: Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """(B, D) of the tokens with a mask of True; an item without any pools to zero."""
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
            sorted_BDT = sorted_BDT.masked_fill(~length_mask(lengths_B, n_tokens)[:, None], 0)
            return torch.einsum("bdt,bt->bd", sorted_BDT, weights_BT)

    @torch.compiler.disable  # a compiler unrolls or rejects the GRU, which costs next to nothing
    def weights(self, lengths: list[int]) -> Tensor:
        """Weights of sequences with these lengths (in descending order), (len(lengths), longest), 0 behind the end."""
        longest = lengths[0]
        parameter = self.linear.weight
        codes_TP = positional_codes(longest, self.code_dim, parameter.device).to(parameter.dtype)
        lengths_L = torch.tensor(lengths, device="cpu")  # where packing wants them
        packed = pack_padded_sequence(codes_TP.expand(len(lengths), -1, -1), lengths_L, batch_first=True)
        states_LT2H, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True, total_length=longest)
        forward_LTH, backward_LTH = states_LT2H.chunk(2, dim=-1)
        scores_LT = at_least_float32(self.linear((forward_LTH + backward_LTH) / 2).squeeze(-1))
        valid_LT = length_mask(lengths_L.to(scores_LT.device, non_blocking=True), longest)
        return (scores_LT / TEMPERATURE).masked_fill(~valid_LT, -torch.inf).softmax(dim=-1)


def _sort_tokens(features_BTD: Tensor) -> Tensor:
    """Each channel's values in descending order, (B, D, T); twice as fast with the tokens side by side in memory."""
    return features_BTD.transpose(1, 2).contiguous().sort(dim=-1, descending=True).values


def positional_codes(n: int, code_dim: int, device: torch.device | str = "cpu") -> Tensor:
    """Sinusoidal codes of positions 0 … n−1, (n, code_dim) float32: sine in even, cosine in odd columns."""
    rates = torch.exp(torch.arange(0, code_dim, 2, dtype=torch.float32, device=device) * -(math.log(10000) / code_dim))
    angles = torch.arange(n, dtype=torch.float32, device=device)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


class TokenAttention(nn.Module):
    """K averages of tokens, (B, T, W) -> (B, K, W), weighted by softmax_T(W₂ tanh(W₁ x)) over the unmasked ones."""

    def __init__(self, width: int, n_heads: int, hidden_dim: int):
        super().__init__()
        self.hidden = nn.Linear(width, hidden_dim, bias=False)
        self.scores = FullPrecisionLinear(hidden_dim, n_heads, bias=False)
        start_mean(self.hidden)
        start_mean(self.scores)

    def weights(self, tokens_BTW: Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """Weight of every token in the K averages, (B, T, K); of an item without tokens all are 0."""
        scores_BTK = self.scores(self.hidden(tokens_BTW).tanh())
        if mask_BT is None:
            return scores_BTK.softmax(1)
        hidden_BT1, lowest = ~mask_BT[..., None], torch.finfo(scores_BTK.dtype).min
        return scores_BTK.masked_fill(hidden_BT1, lowest).softmax(1).masked_fill(hidden_BT1, 0)

    def forward(self, tokens_BTW: Tensor, mask_BT: Tensor | None = None) -> Tensor:
        weights_BTK = self.weights(tokens_BTW, mask_BT)
        with full_precision(tokens_BTW):
            return weights_BTK.transpose(1, 2) @ tokens_BTW.to(weights_BTK.dtype)


def length_mask(lengths_B: Tensor, n_tokens: int) -> Tensor:
    """(B,) lengths -> (B, n_tokens) bool, True for the first `length` tokens of each item."""
    return torch.arange(n_tokens, device=lengths_B.device) < lengths_B[:, None]


def size_augment_mask(
    batch: int, n_tokens: int, ratio: float = 0.2, generator: torch.Generator | None = None
) -> Tensor:
    """SizeAugment of image tokens, (batch, n_tokens) bool, True for those that stay. Source: VSE∞; PCME++ §B.2."""
    p_B1 = torch.rand(batch, 1, generator=generator)
    keep_BT = torch.rand(batch, n_tokens, generator=generator) > ratio * p_B1
    return keep_BT | (p_B1 <= ratio)
