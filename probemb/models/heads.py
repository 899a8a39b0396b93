"""Heads: from a tower's features to the mean and the log-variance of an embedding.

A head is a module from `Features` to (B, D), or to (B, K, D) for K embeddings an item. With `reads_tokens` it looks at
the tokens, takes part in SizeAugment, and has `embed_tokens`: (B, T, W) -> (B, T, D). `for_mean` and `for_log_var` make
it for a tower with tokens (B, T, width) and pooled features (B, pooled_width).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from probemb.errors import UserError, nearest
from probemb.gaussian import at_least_float32
from probemb.models.features import Features
from probemb.models.pooling import (
    GPO,
    FullPrecisionLayerNorm,
    FullPrecisionLinear,
    TokenAttention,
    full_precision,
    start_log_var,
    start_mean,
)

COVARIANCES = ("ellipsoidal", "spherical-mean", "spherical")
Uncertainty = Literal["branch", "token", "prolip-code"]


@dataclass(frozen=True)
class Covariance:
    """The shape and the range of predicted covariances. Source: Probabilistic VSE++/VSRN §4.2.

    Attributes:
        kind: "ellipsoidal" (a variance for each dimension), "spherical-mean" (the mean of D predicted variances, for
            every dimension) or "spherical" (one predicted value).
        log_var_range: bounds of the predicted log-variances, None for none. A value beyond them has no gradient.
        log_var_start: where they start in a new model; None for the default of `start`.
    """

    kind: str = "ellipsoidal"
    log_var_range: tuple[float, float] | None = None
    log_var_start: float | None = None

    def width(self, embed_dim: int) -> int:
        """Number of log-variances that the head predicts per embedding."""
        return 1 if self.kind == "spherical" else embed_dim

    def start(self, embed_dim: int) -> float:
        """`log_var_start`, or −log D (see `add_heads`), or the middle of a range that leaves that out.

        The middle of [log 0.1, log 10] is 0, where a duplicate of the mean's own layers starts too.
        """
        start = -math.log(embed_dim) if self.log_var_start is None else self.log_var_start
        if self.log_var_range is None or self.log_var_range[0] < start < self.log_var_range[1]:
            return start
        return sum(self.log_var_range) / 2

    def __call__(self, predicted: Tensor, shape: torch.Size) -> Tensor:
        """(B, width) or (B, K, width) predictions -> log-variances of a shape, (B, D) or (B, K, D)."""
        if self.log_var_range is not None:
            predicted = predicted.clamp(*self.log_var_range)
        if self.kind == "ellipsoidal":
            return predicted
        if self.kind == "spherical-mean":
            predicted = at_least_float32(predicted).logsumexp(-1, keepdim=True) - math.log(shape[-1])
        return predicted.expand(shape).contiguous()


def make_covariance(kind: str, log_var_range: Sequence[float] | None, log_var_start: float | None = None) -> Covariance:
    """A `Covariance` of a configuration's values.

    Raises:
        UserError: an unknown kind, a range that is none, or a start that is no number.
    """
    if log_var_start is not None and not math.isfinite(log_var_start):
        raise UserError(f"log_var_start is {log_var_start}.", "Give a number, such as -10 (ProLIP), or leave it out.")
    if kind not in COVARIANCES:
        raise UserError(
            f"There is no covariance '{kind}'.{nearest(kind, COVARIANCES)}", f"Choose one of {', '.join(COVARIANCES)}."
        )
    if log_var_range is None:
        return Covariance(kind, None, log_var_start)
    ends = tuple(float(end) for end in log_var_range)
    if len(ends) != 2 or not all(map(math.isfinite, ends)) or ends[0] >= ends[1]:
        raise UserError(
            f"log_var_range is {list(log_var_range)}.",
            "Give two numbers in ascending order, such as [-2.303, 2.303] for variances from 0.1 to 10.",
        )
    return Covariance(kind, ends, log_var_start)


@dataclass(frozen=True)
class HeadConfig:
    """Both heads of a tower.

    Attributes:
        kind: a key of HEADS.
        embed_dim: D.
        probabilistic: whether there is a head for the log-variance.
        bias: whether that head has a bias.
        n_embeddings: K; more than 1 for kinds that give several embeddings an item.
        options: of the kind, such as GPO's sizes.
        covariance: what becomes of the predicted log-variances.
        uncertainty: what the log-variance is read from: "branch", a branch of blocks (PCME++); "token", an uncertainty
            token (ProLIP); or "prolip-code", the same with the public code's deviations from the paper, which its
            published weights need: a text's log-variance is a map of its mean before that is normalised, the image's
            class token passes its last norm twice, and padding takes part in texts.
        unit_features: kind "clip" reads the log-variance from features of unit length, as the mean does in effect
            (probabilistic VSE++); otherwise from the features as they are (PCME++ and its published weights).
    """

    kind: str
    embed_dim: int
    probabilistic: bool = True
    bias: bool = True
    n_embeddings: int = 1
    options: dict = field(default_factory=dict)
    covariance: Covariance = field(default_factory=Covariance)
    uncertainty: Uncertainty = "branch"
    unit_features: bool = False

    @property
    def log_var_width(self) -> int:
        """Number of log-variances that are predicted per embedding: D, or 1."""
        return self.covariance.width(self.embed_dim)

    @property
    def log_var_start(self) -> float:
        """Log-variance of a new model."""
        return self.covariance.start(self.embed_dim)


class ClipHead(FullPrecisionLinear):
    """A linear map of the tower's own pooling; the log-variance may read it at unit length."""

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
        head = cls(pooled_width, config.log_var_width, config.bias)
        head.unit_length = config.unit_features
        start_log_var(head, config.log_var_start)
        return head

    def forward(self, features: Features) -> Tensor:
        x = features.pooled
        return super().forward(F.normalize(at_least_float32(x), dim=-1) if self.unit_length else x)


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
        head = cls(width, config.embed_dim, **config.options)
        start_mean(head.linear)
        return head

    @classmethod
    def for_log_var(cls, config: HeadConfig, width: int, pooled_width: int) -> GPOHead:
        head = cls(width, config.log_var_width, config.bias, **config.options)
        start_log_var(head.linear, config.log_var_start)
        return head

    def forward(self, features: Features) -> Tensor:
        return self.pool(self.linear(features.tokens), features.mask)

    def embed_tokens(self, tokens_BTW: Tensor) -> Tensor:
        """(B, T, W) -> (B, T, D), before pooling."""
        return self.linear(tokens_BTW)


class PIEHead(nn.Module):
    """PIE-Net: K embeddings of an item, each its pooled features with what one attention over its tokens adds. Sources:
    PVSE (Song and Soleymani 2019) for the mean; PCME (Chun et al. 2021) for the log-variance.

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
        head = cls(width, pooled_width, config.embed_dim, config.n_embeddings, **config.options)
        start_mean(head.fc)
        if isinstance(head.project, nn.Linear):
            start_mean(head.project)
        return head

    @classmethod
    def for_log_var(cls, config: HeadConfig, width: int, pooled_width: int) -> PIEHead:
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


class MLPHead(nn.Module):
    """Layers with a ReLU between them over the tower's own pooling. Source: jWAE §4.2.

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
        head = cls(pooled_width, config.embed_dim, config.embed_dim, **config.options)
        start_mean(head.out)
        return head

    @classmethod
    def for_log_var(cls, config: HeadConfig, width: int, pooled_width: int) -> MLPHead:
        head = cls(pooled_width, config.embed_dim, config.log_var_width, config.bias, **config.options)
        start_log_var(head.out, config.log_var_start)
        return head

    def forward(self, features: Features) -> Tensor:
        x = features.pooled
        return self.out(x if self.hidden is None else self.hidden(x).relu())


class AverageHead(nn.Module):
    """The average in the embedding space, of methods that compare tokens, such as SCAN.

    Each token is mapped linearly where W is not D; for log-variances always.
    """

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


HEADS = {"clip": ClipHead, "gpo": GPOHead, "pie": PIEHead, "mlp": MLPHead, "average": AverageHead}


def add_heads(
    tower: nn.Module,
    config: HeadConfig,
    width: int,
    pooled_width: int,
    own_projection: bool = False,
    unc_widths: tuple[int, int] | None = None,
) -> None:
    """Set `mean_head` and `log_var_head` of a tower with tokens (B, T, width) and pooled features (B, pooled_width).

    The tower's attributes `token_width` and `pooled_width` are set too.

    The log-variance starts at −log D: each item's summed variance is about 1, so that distances start near
    ‖μ_v − μ_t‖² ≤ 4 for every D. At log_var = 0 they would start at 2D, and the match loss far in its linear range.
    `Covariance.start` says where they start under bounds that leave −log D out.

    Args:
        own_projection: the tower has a projection of its own, which kind "clip" keeps instead of a mean head.
        unc_widths: of the branch's tokens and pooled features, if not those of the mean.
    """
    head = HEADS[config.kind]
    keep = own_projection and config.kind == "clip"
    tower.token_width, tower.pooled_width = width, pooled_width
    tower.mean_head = None if keep else head.for_mean(config, width, pooled_width)
    unc_head = head if config.uncertainty == "branch" else ClipHead  # of one token: a linear map
    unc_widths = unc_widths or (width, pooled_width)
    tower.log_var_head = unc_head.for_log_var(config, *unc_widths) if config.probabilistic else None
    tower.covariance = config.covariance


def check_head(kind: str, n_embeddings: int = 1) -> None:
    """Raise UserError for an unknown kind of head, or one that does not give several embeddings."""
    if kind not in HEADS:
        names = [f"'{name}'" for name in HEADS]
        raise UserError(
            f"There is no head '{kind}'.{nearest(kind, tuple(HEADS))}",
            f"Choose {', '.join(names[:-1])} or {names[-1]}.",
        )
    if n_embeddings < 1 or (n_embeddings > 1 and not getattr(HEADS[kind], "several", False)):
        raise UserError(
            f"n_embeddings is {n_embeddings}, which head '{kind}' does not give.",
            "Set it to 1, or choose head 'pie' for several embeddings of every item.",
        )


def check_uncertainty(uncertainty: str, head: str, probabilistic: bool) -> None:
    """Raise UserError for an unknown form of the uncertainty, or one that the head or a point model cannot have."""
    if uncertainty not in get_args(Uncertainty):
        raise UserError(
            f"There is no uncertainty '{uncertainty}'.{nearest(uncertainty, get_args(Uncertainty))}",
            f"Choose {', '.join(get_args(Uncertainty))}.",
        )
    if uncertainty != "branch" and not probabilistic:
        raise UserError("A point model has no uncertainty token.", "Leave uncertainty out.")
    if uncertainty == "prolip-code" and head != "clip":
        raise UserError(
            f"ProLIP's public code has the head 'clip', and the model has '{head}'.",
            "Choose head clip, or uncertainty token.",
        )
