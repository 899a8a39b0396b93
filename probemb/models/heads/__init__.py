"""Heads: from a tower's features to the mean and the log-variance of an embedding.

A head is a module from `Features` to (B, D), or to (B, K, D) for K embeddings an item. With `reads_tokens` it looks at
the tokens, takes part in SizeAugment, and has `embed_tokens`: (B, T, W) -> (B, T, D).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from torch import nn

from probemb.errors import UserError, nearest
from probemb.models.heads.average import AverageHead
from probemb.models.heads.clip import ClipHead
from probemb.models.heads.covariance import Covariance
from probemb.models.heads.gpo import GPOHead
from probemb.models.heads.mlp import MLPHead
from probemb.models.heads.pie import PIEHead

Uncertainty = Literal["branch", "token", "prolip-code"]
HEADS = {"clip": ClipHead, "gpo": GPOHead, "pie": PIEHead, "mlp": MLPHead, "average": AverageHead}


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
