"""Encoder: the protocol of a tower, and Encoded: what a tower gives.

A tower turns a batch of inputs into `Features`, and heads turn features into a mean and a log-variance:

    inputs ── trunk ─┬─ last blocks ──────────── Features ── mean head ───── mean, l2-normalised
                     └─ the branch's own blocks ─ Features ── log_var head ── log_var

Stages ask a tower the questions that `Encoder` answers, and never look inside; `towers/` and `heads/` hold the insides.
Shapes: B items, T tokens, W width of the tower, P width of its own pooling, D embedding, K embeddings an item.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from probemb import distributed
from probemb.data.pixels import normalize
from probemb.errors import UserError
from probemb.gaussian import Gaussian, at_least_float32
from probemb.models.features import FeatureLayout, Features
from probemb.models.heads import Covariance

if TYPE_CHECKING:
    from probemb.models.towers.parts import Parts

# log_var of a point model: a variance of 1e-13, with which CSD is the squared distance of the means to float32's
# precision, and which still has a finite inverse and logarithm.
POINT_LOG_VAR = -30.0

WantTokens = bool | Literal["residuals", "trunk"]


@dataclass(frozen=True, eq=False)
class Encoded:
    """A batch of images or texts behind their tower.

    Attributes:
        gaussian: (B, D), or (B, K, D) for K embeddings an item.
        tokens: (B, T, D), every token in the embedding space, for methods that ask for it; else None. Or, where asked
            for, a PIE head's residuals (B, K, D): what its attention adds to each embedding; or the trunk's tokens
            (B, T, W) before any head.
        mask: (B, T) bool, True for tokens that take part; None together with tokens.
        features: `Encoder.targets`: (B, P), the trunk's own summary, which heads read, for methods that ask for it;
            else None. With tokens they are the tokens', (B, T, W).
        codes: (B, D), the mean before it is l2-normalised; None without features.
    """

    gaussian: Gaussian
    tokens: Tensor | None = None
    mask: Tensor | None = None
    features: Tensor | None = None
    codes: Tensor | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        """(mean, log_var, [features, codes], [tokens, mask]): the form that engines can hook and gather."""
        features = () if self.features is None else (self.features, self.codes)
        tokens = () if self.tokens is None else (self.tokens, self.mask)
        return self.gaussian.mean, self.gaussian.log_var, *features, *tokens

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> Encoded:
        """The inverse of `tensors`."""
        mean, log_var, *more = tensors
        has_tokens = bool(more) and more[-1].dtype == torch.bool
        tokens, features = (more[-2:], more[:-2]) if has_tokens else ((), more)
        return Encoded(Gaussian(mean, log_var), *tokens, **dict(zip(("features", "codes"), features)))

    def float(self) -> Encoded:
        """In at least float32."""
        held = (None if x is None else at_least_float32(x) for x in (self.tokens, self.features, self.codes))
        tokens, features, codes = held
        return Encoded(self.gaussian.float(), tokens, self.mask, features, codes)

    def __getitem__(self, rows) -> Encoded:
        return Encoded.of([tensor[rows] for tensor in self.tensors()])

    def __len__(self) -> int:
        return len(self.gaussian)


class Place(NamedTuple):
    """Position of a parameter in its tower.

    Attributes:
        part: "trunk" (pretrained, where anything is), "branch" (the uncertainty branch's own blocks, or the
            uncertainty token), or "head".
        depth: blocks from the end of its part, the parameter's own one included, so 1 for the last block; 0 for what is
            in no block. Learning rates by layer are lr · decay^depth.
    """

    part: Literal["trunk", "branch", "head"]
    depth: int = 0


class Encoder(nn.Module):
    """A tower with its heads.

    A subclass defines `features`, `place` and the attributes below; `heads.add_heads` makes its heads.
    Everything runs inside `forward`: engines that shard parameters (ZeRO-3, FSDP) gather a module's parameters when its
    forward starts, and compute wrongly or not at all where a parameter is used from outside.

    Attributes:
        mean_head: from Features to (B, D) or (B, K, D); None where the tower projects its own pooling (`project`).
        log_var_head: the same for the log-variance; None in a point model, whose log_var is POINT_LOG_VAR.
        token_width, pooled_width: W and P; `add_heads` sets them.
        image_size: (height, width) in pixels; image towers only.
        normalization: (mean, std) of each channel, for uint8 pixels; image towers only, set by their model.
        n_tokens: T of an image of that size; image towers only.
        context_length: largest L; text towers only.
        covariance: what becomes of the predicted log-variances.
        feature_layout: set where features that were computed before come in place of inputs; see `features.py`.
        required_parts: at most so many of an input's parts may not be dropped; see `parts.py`.
        batch_statistics: whether batch norms normalise by the batch in training, see `use_batch_statistics`.
    """

    mean_head: nn.Module | None
    log_var_head: nn.Module | None
    token_width: int
    pooled_width: int
    feature_layout: FeatureLayout | None = None
    required_parts: int = 0
    batch_statistics: bool = False
    _updating: bool = False
    covariance: Covariance = Covariance()
    normalization: tuple[Sequence[float], Sequence[float]] | None = None

    @abstractmethod
    def features(self, inputs: Tensor) -> tuple[Features, Features | None]:
        """The mean's and the log-variance's features; None for the second in a point model."""

    def parts(self, inputs: Tensor) -> Parts:
        """The patches or tokens that inputs can be reduced to, see `parts.py`.

        Raises:
            UserError: the tower reads its inputs as a whole.
        """
        raise UserError(
            f"{type(self).__name__} reads its inputs as a whole: they have no parts that could be left out.",
            "Set patch_dropout and masked_inclusion to 0, or choose an open_clip transformer such as ViT-B-16.",
        )

    def features_of_parts(self, inputs: Tensor, kept: Tensor) -> tuple[Features, Features | None]:
        """`features` of inputs reduced to `kept`, (B, n) int64, with as many tokens. Raises UserError as `parts`."""
        self.parts(inputs)
        raise NotImplementedError

    @abstractmethod
    def place(self, name: str) -> Place:
        """Position of the parameter of that name (in `named_parameters` of this tower)."""

    def in_stem(self, name: str) -> bool:
        """True if the parameter of that name lies before all blocks: embeddings, the first convolution."""
        return False

    def is_pretrained(self, name: str) -> bool:
        """True if the parameter of that name belongs to what starts from published weights, where anything does."""
        return self.place(name).part == "trunk"

    def targets(self, inputs: Tensor, features: Features, of_tokens: bool) -> Tensor:
        """Targets that an autoencoder reconstructs from the codes of inputs: (B, P), or (B, T, W) for every token."""
        return features.tokens if of_tokens else features.pooled

    def target_width(self, of_tokens: bool) -> int:
        """The size of each of the `targets`."""
        return self.token_width if of_tokens else self.pooled_width

    def project(self, pooled_BP: Tensor) -> Tensor:
        """The tower's own projection to (B, D), where `mean_head` is None."""
        return at_least_float32(pooled_BP)

    def train(self, mode: bool = True) -> Encoder:
        """Training or evaluation mode, except for batch norms, which use their stored statistics; their weights and
        biases do train. See `use_batch_statistics` for the other kind of training.
        """
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
        return self

    def use_batch_statistics(self) -> None:
        """Normalise by the whole batch of all ranks in training, and update the stored statistics from it.

        For towers with random weights, whose stored statistics (0 and 1) are of no data. Frozen norms keep theirs.
        """
        for module in self.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.register_forward_pre_hook(self._normalize_by_batch)
                self.batch_statistics = True

    def _normalize_by_batch(self, norm: nn.Module, inputs: tuple[Tensor]) -> Tensor | None:
        """The input of a norm in evaluation mode, scaled and shifted so that the batch's statistics normalise it.

        The stored ones are updated in `forward` alone, not when blocks are computed again for their gradient, and never
        by NaN or Inf, which a skipped step must not leave behind.
        """
        if not (self.training and all(p.requires_grad for p in norm.parameters())):
            return None
        (x,) = inputs
        mean, var, n = batch_moments(at_least_float32(x))
        if self._updating:
            with torch.no_grad():
                norm.num_batches_tracked += 1
                for name, new in (("running_mean", mean), ("running_var", var * n / (n - 1))):
                    stored = getattr(norm, name)  # not changed in place: an earlier call may need it for its gradient
                    setattr(norm, name, stored.lerp(torch.where(new.isfinite(), new, stored), norm.momentum))
        scale = ((norm.running_var + norm.eps) / (var + norm.eps)).sqrt()
        shift = norm.running_mean - mean * scale
        shape = (-1, *[1] * (x.ndim - 2))
        return (x * scale.view(shape) + shift.view(shape)).to(x.dtype)

    def normalized(self, pixels: Tensor, dtype: torch.dtype) -> Tensor:
        """(B, 3, H, W) as the trunk reads them, in its `dtype`: uint8 is normalised here, floats already are."""
        if pixels.dtype == torch.uint8:
            pixels = normalize(pixels, *self.normalization)
        return pixels.to(dtype)

    def trim(self, inputs: Tensor) -> Tensor:
        """A batch without what no output depends on, such as common padding at the end of texts."""
        return inputs

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute blocks in the backward pass instead of keeping their activations; towers without it do nothing."""

    def forward(
        self,
        inputs: Tensor,
        token_mask: Tensor | None = None,
        want_tokens: WantTokens = False,
        want_features: bool = False,
        kept: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """The tensors of `Encoded`, flat, because engines hook tensors in tuples only; `encode` gives the object.

        Args:
            inputs: (B, 3, H, W) pixels (uint8, or normalised floats) or (B, L) int64 tokens; (B, width) features with
                a `feature_layout`.
            token_mask: (B, T) bool, tokens that the heads look at (SizeAugment), in place of the tower's own choice.
            want_tokens: also give every token in the embedding space; "residuals" gives those of a PIE head instead,
                "trunk" the trunk's tokens before any head.
            want_features: also give the trunk's features, those of the mean, and the mean as it is before its l2 norm.
            kept: (B, n) int64, the patches or tokens that the tower reads, see `parts.py`; None for all.

        Raises:
            ValueError: a token mask, or tokens, from heads that read the pooled features alone; residuals from another
                head than PIE; parts of cached features.
            UserError: parts of inputs that the tower reads as a whole.
        """
        self._updating = True
        try:
            mean_features, unc_features = self._features(inputs, kept)
        finally:
            self._updating = False
        if token_mask is not None:
            if not getattr(self.mean_head, "reads_tokens", False):
                raise ValueError("these heads read the pooled features alone, so they take no token_mask")
            mean_features = mean_features._replace(mask=token_mask)
            unc_features = unc_features and unc_features._replace(mask=token_mask)
        if self.mean_head is None:
            code = self.project(mean_features.pooled)
            mean = F.normalize(code, dim=-1)
        elif want_tokens == "residuals" and hasattr(self.mean_head, "with_residuals"):
            code, residuals = self.mean_head.with_residuals(mean_features)
            mean = l2_normalize(code)
        else:
            code = self.mean_head(mean_features)
            mean = l2_normalize(code)
        if unc_features is None:
            log_var = torch.full_like(mean, POINT_LOG_VAR)
        else:
            log_var = self.covariance(self.log_var_head(unc_features), mean.shape)
        found = (mean, log_var)
        if want_features:
            found = (*found, self.targets(inputs, mean_features, want_tokens is True), code)
        if not want_tokens:
            return found
        if want_tokens == "residuals":
            if not hasattr(self.mean_head, "with_residuals"):
                raise ValueError("these heads add nothing to their pooled features, so there are no residuals to give")
            return *found, residuals, residuals.new_ones(residuals.shape[:2], dtype=torch.bool)
        if want_tokens is True and not getattr(self.mean_head, "reads_tokens", False):
            raise ValueError("these heads read the pooled features alone, so there are no tokens to give")
        tokens, mask = mean_features.tokens, mean_features.mask
        if mask is None:
            mask = tokens.new_ones(tokens.shape[:2], dtype=torch.bool)
        return *found, tokens if want_tokens == "trunk" else self.mean_head.embed_tokens(tokens), mask

    def _features(self, inputs: Tensor, kept: Tensor | None) -> tuple[Features, Features | None]:
        """Of whole inputs, of their parts, or as they were computed before."""
        if self.feature_layout is not None:
            if kept is not None:
                raise ValueError("cached features are of whole inputs, so they have no parts")
            return self.feature_layout.unpack(inputs)
        return self.features(inputs) if kept is None else self.features_of_parts(inputs, kept)

    @torch.no_grad()
    def layout(self, inputs: Tensor) -> FeatureLayout:
        """Storage layout of the features of such inputs.

        Raises:
            UserError: the uncertainty branch has blocks of its own, which would have to be trained.
        """
        if any(self.place(name).part == "branch" for name, _ in self.named_parameters()):
            raise UserError(
                "The image tower's uncertainty has blocks of its own, or a token: its features change while it trains.",
                "Set model.uncertainty to branch and model.n_unc_layers to 0, or to two numbers such as [0, 1], or "
                "leave data.cache_features out.",
            )
        return FeatureLayout.of(*self.features(inputs), with_tokens=getattr(self.mean_head, "reads_tokens", False))

    def encode(
        self,
        inputs: Tensor,
        token_mask: Tensor | None = None,
        want_tokens: WantTokens = False,
        want_features: bool = False,
        kept: Tensor | None = None,
    ) -> Encoded:
        """`forward`, as an `Encoded`."""
        return Encoded.of(self(inputs, token_mask, want_tokens, want_features, kept))


def batch_moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance (C,) of every channel of (B, C, …) over the batches of all ranks, with gradient, and the number
    of elements of a channel. Ranks may have different numbers of items.
    """
    var, mean = torch.var_mean(x, [0, *range(2, x.ndim)], correction=0)
    n = torch.full_like(mean, x.numel() // len(mean))
    mean_WC, var_WC, n_WC = distributed.gather(torch.stack([mean, var, n])[None]).unbind(1)
    share_WC = n_WC / n_WC.sum(0)
    mean = (share_WC * mean_WC).sum(0)
    return mean, (share_WC * (var_WC + (mean_WC - mean).square())).sum(0), n_WC.sum(0)


def l2_normalize(x: Tensor) -> Tensor:
    """x / (‖x‖ + 1e-8) along the last dimension, as VSE∞ and PCME++ define it behind GPO."""
    return x / (x.norm(dim=-1, keepdim=True) + 1e-8)
