"""Encoder: the protocol of a tower, and Encoded: what a tower gives.

    inputs ── trunk ─┬─ last blocks ──────────── Features ── mean head ───── mean, l2-normalised
                     └─ the branch's own blocks ─ Features ── log_var head ── log_var

Shapes: B items, T tokens, W width of the tower, P width of its own pooling, D embedding, K embeddings an item.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from probemb import distributed
from probemb.data.images import normalize
from probemb.errors import UserError
from probemb.gaussian import Gaussian, at_least_float32
from probemb.models.heads import HEADS, ClipHead, Features, MaxMeanHead, shape_log_var
from probemb.models.options import ModelOptions

# log_var of a point model: a variance of 1e-13, with which CSD is the squared distance of the means to float32's
# precision, and which still has a finite inverse and logarithm.
POINT_LOG_VAR = -30.0
LONGEST = 2**16  # parts of an input

BothFeatures = tuple[Features, Features | None]  # of the mean and of the log-variance; None for a point model


class Encoded(NamedTuple):
    """A batch of images or texts behind their tower: a tuple of tensors, as engines hook those of no other object."""

    mean: Tensor  # (B, D), or (B, K, D) for K embeddings an item
    log_var: Tensor  # of the same shape; what follows is for methods that ask for it
    # Every token in the embedding space (B, T, D); or what a PIE head's attention adds to each embedding (B, K, D); or
    # the trunk's tokens (B, T, W); and which of them take part, (B, T) bool.
    tokens: Tensor | None = None
    mask: Tensor | None = None
    features: Tensor | None = None  # (B, P), the trunk's own summary; with tokens, theirs (B, T, W)
    codes: Tensor | None = None  # (B, D), the mean before it is l2-normalised

    @property
    def gaussian(self) -> Gaussian:
        return Gaussian(self.mean, self.log_var)

    def each(self, change: Callable[[Tensor], Tensor]) -> Encoded:
        return Encoded(*(x if x is None else change(x) for x in self))


class Place(NamedTuple):
    """Place of a parameter in its tower: "trunk" is what a deterministic model has, "branch" the branch's blocks, or
    its token; and its block, counted from 1 for the part's last one, 0 for what is in none. The model adds the tower.
    """

    part: Literal["trunk", "branch", "head", "composer", "scalar"]
    depth: int = 0
    tower: Literal["image", "text", "neither"] = "neither"
    in_stem: bool = False  # before all blocks
    pretrained: bool = False  # it starts from published weights, where anything does


class FeatureLayout(NamedTuple):
    """A frozen trunk's features as rows: tokens (T, W), (1, W) for their maximum, (0, W) where no head reads them;
    numbers of tokens, pooled, and those of the log-variance, 0 where they are the mean's. `masked`: tokens that take no
    part are zeros.
    """

    tokens: tuple[int, int]
    sizes: tuple[int, int, int, int]
    masked: bool

    def pack(self, mean: Features, unc: Features | None) -> Tensor:
        """(B, sum of the sizes)."""
        unc = unc or mean
        parts = self._tokens(mean), mean.pooled, self._tokens(unc), unc.pooled
        return torch.cat([part[:, :size] for part, size in zip(parts, self.sizes)], 1)

    def _tokens(self, features: Features) -> Tensor:
        if self.tokens[0] == 1:
            return MaxMeanHead.maximum(features).flatten(1)
        tokens = features.tokens
        if self.masked:
            tokens = F.pad(tokens * features.mask[..., None], (0, 0, 0, self.tokens[0] - tokens.shape[1]))
        return tokens.flatten(1)

    def unpack(self, rows: Tensor) -> BothFeatures:
        """The inverse of `pack`, in at least float32."""
        tokens, pooled, unc_tokens, unc_pooled = rows.float().split(self.sizes, 1)
        unc_tokens = (unc_tokens if self.sizes[2] else tokens).view(len(rows), *self.tokens)
        tokens = tokens.view(len(rows), *self.tokens)
        mask = tokens.any(-1) if self.masked else None
        return Features(tokens, pooled, mask), Features(unc_tokens, unc_pooled if self.sizes[3] else pooled, mask)


class Encoder(nn.Module):
    """A tower with its heads. A subclass defines `features`, names its blocks, and calls `add_heads` at the end of its
    constructor. Everything runs inside `forward`: engines that shard parameters (ZeRO-3, FSDP) gather them there.

    Image towers also have `image_size` (height, width) and `n_tokens` (T), text towers `context_length`. `mean_head` is
    None where the tower projects its own pooling (`project`), `log_var_head` in a point model.
    """

    blocks: Sequence[str] = ()  # names of the modules that are the trunk's blocks, in order
    branch_blocks: Sequence[str] = ()  # and the uncertainty branch's
    stem_prefixes: tuple[str, ...] = ()  # of names of parameters before all blocks: embeddings, the first convolution
    normalization: tuple[Sequence[float], Sequence[float]] | None = None  # mean and deviation of uint8 pixels' channels
    feature_layout: FeatureLayout | None = None  # set where features that were computed before come in place of inputs
    pad_id: int | None = None  # of the tokens behind a text
    grad_checkpointing: bool = False
    batch_statistics: bool = False  # batch norms use the batch's in training
    _updating: bool = False

    def add_heads(
        self, o: ModelOptions, width: int, pooled_width: int, own_projection: bool = False,
        unc_widths: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        """Make the heads; with `own_projection`, the tower has one that head "clip" keeps instead of a mean head."""
        self.options, self.token_width, self.pooled_width = o, width, pooled_width
        keep = own_projection and o.head == "clip"
        self.mean_head = None if keep else HEADS[o.head](o, width, pooled_width)
        unc_head = HEADS[o.head] if o.uncertainty == "branch" else ClipHead  # of one token: a linear map
        unc_widths = unc_widths or (width, pooled_width)
        self.log_var_head = unc_head(o, *unc_widths, log_var=True) if o.probabilistic else None

    @abstractmethod
    def features(self, inputs: Tensor, kept: Tensor | None = None) -> BothFeatures:
        """The mean's and the log-variance's features; of towers with `parts`, of the parts `kept`, (B, n) int64."""

    def parts(self, inputs: Tensor) -> tuple[Tensor, Tensor, int]:
        """Parts of inputs, (B, P) bool: those that may be dropped, those that may not; and the most of the latter."""
        raise UserError(
            f"{type(self).__name__} reads its inputs as a whole: they have no parts that could be left out.",
            "Set patch_dropout and masked_inclusion to 0, or choose an open_clip transformer such as ViT-B-16.",
        )

    def place(self, name: str) -> Place:
        if name.startswith(("mean_head.", "log_var_head.")):
            return Place("head")
        for part, blocks in (("branch", self.branch_blocks), ("trunk", self.blocks)):
            for depth, block in enumerate(reversed(blocks), 1):
                if name.startswith(f"{block}."):
                    return Place(part, depth, pretrained=part == "trunk")
        return Place("trunk", in_stem=name.startswith(self.stem_prefixes), pretrained=True)

    def targets(self, inputs: Tensor, features: Features, of_tokens: bool) -> Tensor:
        """An autoencoder reconstructs these from the codes of inputs: (B, P), or (B, T, W) for every token."""
        return features.tokens if of_tokens else features.pooled

    def target_width(self, of_tokens: bool) -> int:
        return self.token_width if of_tokens else self.pooled_width

    def project(self, pooled: Tensor) -> Tensor:
        """The tower's own projection to (B, D), where `mean_head` is None; here it is part of `features`."""
        return at_least_float32(pooled)

    def normalized(self, pixels: Tensor, dtype: torch.dtype) -> Tensor:
        if pixels.dtype == torch.uint8:
            pixels = normalize(pixels, *self.normalization)
        return pixels.to(dtype)

    def trim(self, inputs: Tensor) -> Tensor:
        """A batch without what no output depends on: common padding at the end of texts."""
        return inputs if self.pad_id is None else used_columns(inputs, inputs != self.pad_id)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute blocks in the backward pass; CNNs and towers of words and regions do not."""
        self.grad_checkpointing = enable

    def forward(
        self, inputs: Tensor, token_mask: Tensor | None = None,
        want_tokens: bool | Literal["residuals", "trunk"] = False, want_features: bool = False,
        kept: Tensor | None = None,
    ) -> Encoded:  # fmt: skip
        """Embed a batch.

        Args:
            inputs: (B, 3, H, W) pixels (uint8, or normalised floats) or (B, L) int64 tokens; (B, F) features with a
                `feature_layout`.
            token_mask: (B, T) bool, tokens that the heads look at (SizeAugment), in place of the tower's own choice.
            want_tokens: which of `Encoded.tokens` to give; "residuals" are a PIE head's.
            kept: (B, n) int64, the patches or tokens that the tower reads, see `draw_parts`; None for all.
        """
        head, (mean_features, unc_features) = self.mean_head, self._features(inputs, kept)
        if token_mask is not None:
            mean_features = mean_features._replace(mask=token_mask)
            unc_features = unc_features and unc_features._replace(mask=token_mask)
        tokens, mask = mean_features.tokens, mean_features.mask
        if head is None:
            code = self.project(mean_features.pooled)
        elif want_tokens == "residuals":
            (code, tokens), mask = head.with_residuals(mean_features), None
        else:
            code = head(mean_features)
        mean = F.normalize(code, dim=-1) if head is None else l2_normalize(code)
        if self.log_var_head is None:
            log_var = torch.full_like(mean, POINT_LOG_VAR)
        else:
            log_var = shape_log_var(self.options, self.log_var_head(unc_features), mean.shape)
        encoded = Encoded(mean, log_var)
        if want_features:
            targets = self.targets(inputs, mean_features, want_tokens is True)
            encoded = encoded._replace(features=targets, codes=code)
        if want_tokens:
            tokens = head.embed_tokens(tokens) if want_tokens is True else tokens
            mask = tokens.new_ones(tokens.shape[:2], dtype=torch.bool) if mask is None else mask
            encoded = encoded._replace(tokens=tokens, mask=mask)
        return encoded

    def _features(self, inputs: Tensor, kept: Tensor | None) -> BothFeatures:
        if self.feature_layout is not None:
            return self.feature_layout.unpack(inputs)
        self._updating = True
        try:
            return self.features(inputs) if kept is None else self.features(inputs, kept)
        finally:
            self._updating = False

    @torch.no_grad()
    def layout(self, inputs: Tensor) -> FeatureLayout:
        """Storage layout of the features of such inputs. Raises UserError: more than heads would train."""
        names = [name for name, _ in self.named_parameters() if self.place(name).part != "head"]
        if trained := next((name for name in names if not self.place(name).pretrained), None):
            raise UserError(
                f"A locked tower's features change, as {trained} trains (blocks of its own for uncertainty, or a GRU).",
                "Set model.uncertainty to branch and model.n_unc_layers to 0, or to two numbers such as [0, 1], or "
                "leave data.cache_features out.",
            )
        mean, unc = self.features(inputs)
        width, every = mean.tokens.shape[2], hasattr(self.mean_head, "embed_tokens")
        n_tokens = mean.tokens.shape[1] if every else int(isinstance(self.mean_head, MaxMeanHead))
        n, unc = n_tokens * width, unc or mean
        of_unc = 0 if mean.tokens.equal(unc.tokens) else n, 0 if mean.pooled.equal(unc.pooled) else unc.pooled.shape[1]
        return FeatureLayout((n_tokens, width), (n, mean.pooled.shape[1], *of_unc), every and mean.mask is not None)

    # ----------------------------------------------------------------------------------------------------- batch norms

    def train(self, mode: bool = True) -> Encoder:
        """Batch norms always use their stored statistics, but see `use_batch_statistics`."""
        super().train(mode)
        for norm in batch_norms(self):
            norm.eval()
        return self

    def use_batch_statistics(self) -> None:
        """For random weights: normalise by the whole batch of all ranks in training, and update the statistics."""
        for norm in batch_norms(self):
            norm.register_forward_pre_hook(self._normalize_by_batch)
            self.batch_statistics = True

    def _normalize_by_batch(self, norm: nn.Module, inputs: tuple[Tensor]) -> Tensor | None:
        """The input of a norm in evaluation mode, scaled and shifted so that the batch's statistics normalise it.

        The stored ones are updated in `forward` alone, not in recomputed blocks, and never by NaN or Inf.
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


def batch_norms(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]


def batch_moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and number of elements (C,) of (B, C, …) over the batches of all ranks, with gradient."""
    var, mean = torch.var_mean(x, [0, *range(2, x.ndim)], correction=0)
    n = torch.full_like(mean, x.numel() // len(mean))
    mean_WC, var_WC, n_WC = distributed.gather(torch.stack([mean, var, n])[None]).unbind(1)
    share_WC = n_WC / n_WC.sum(0)
    mean = (share_WC * mean_WC).sum(0)
    return mean, (share_WC * (var_WC + (mean_WC - mean).square())).sum(0), n_WC.sum(0)


def l2_normalize(x: Tensor) -> Tensor:
    """x / (‖x‖ + 1e-8) along the last dimension, as VSE∞ and PCME++ define it behind GPO."""
    return x / (x.norm(dim=-1, keepdim=True) + 1e-8)


# ----------------------------------------------------------------------------------------------------------- branches
# A branch is a tower's last blocks again, with weights of their own, behind the blocks that both share.


def last_blocks(blocks: Sequence[nn.Module], n: int) -> list[nn.Module]:
    """The last n blocks of a tower. Raises UserError: it has fewer."""
    if not 0 <= n <= len(blocks):
        raise UserError(
            f"n_unc_layers is {n}, but a tower has {len(blocks)} blocks.",
            f"Set it to a number from 0 to {len(blocks)}; two numbers are for image and text.",
        )
    return list(blocks[len(blocks) - n :])


def run_both(
    blocks: Sequence[nn.Module], own: Sequence[nn.Module] | None, x: Tensor, *more: Tensor, recompute: bool = False,
    **options,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The outputs of all blocks, and of the branch: `own` in place of as many last ones; None without a branch."""

    def run(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
        for block in blocks:
            call = partial(checkpoint, block, use_reentrant=False) if recompute else block
            x = call(x, *more, **options)
        return x

    shared = len(blocks) - len(own or ())
    x = run(blocks[:shared], x)
    return run(blocks[shared:], x), None if own is None else run(own, x)


class Branch(nn.ModuleList):
    """The blocks of a branch whose trunk is computed by a library: they continue from the input of its last n blocks,
    which hooks note with all other arguments of a block (attention masks, rotary positions).
    """

    def __init__(self, own: Sequence[nn.Module], trunk_blocks: Sequence[nn.Module]):
        super().__init__(own)
        self.heard: list[tuple[tuple, dict]] | None = None  # not while checkpointed blocks are recomputed
        for block in last_blocks(trunk_blocks, len(own)):
            # Checkpointing may call what is inside a Sequential one by one, and then never the Sequential itself.
            while isinstance(block, nn.Sequential) and len(block):
                block = block[0]
            block.register_forward_pre_hook(self._note_input, with_kwargs=True)

    def _note_input(self, block: nn.Module, args: tuple, kwargs: dict) -> None:
        if self.heard is not None:
            self.heard.append((args, kwargs))

    def forward(self, recompute: bool) -> Tensor:
        heard, self.heard = self.heard, None
        (x, *_), _ = heard[0]
        for block, (args, kwargs) in zip(self, heard):
            call = partial(checkpoint, block, use_reentrant=False) if recompute else block
            x = call(x, *args[1:], **kwargs)
            x = x[0] if isinstance(x, tuple) else x
        return x


def run_with(branch: Branch | None, run: Callable[[], Any], recompute: bool) -> tuple[Any, Tensor | None]:
    """`run()`, a trunk's forward pass, and the output of the branch behind it."""
    if branch is None:
        return run(), None
    branch.heard = []
    return run(), branch(recompute)


# -------------------------------------------------------------------------------------------------------------- parts
# Patches or tokens that a tower reads, for masked inclusion and patch dropout:
#
#     kept = draw_parts(model.visual, pixels, share=0.25, generator=generator)   # (B, n) patches of each image
#     masked = model.encode_image(pixels, kept=kept)                             # Gaussian (B, D)
#
# `kept` is (B, n) int64: rows of increasing positions, filled with -1 behind those of a row that keeps fewer. They keep
# their positions, and the others cost nothing. Class and uncertainty tokens are no parts, and are always there.


def chances(key: int, rows: Tensor) -> Callable[[int], Tensor]:
    """Uniform numbers for `draw_parts`, a function of P that gives (B, P) float64 in [0, 1): SplitMix64 of a key of 64
    bits, the row's number (rows: (B,) int64) and the position, as int64 with the same bits, on every device.
    """

    def shifted(z: Tensor, bits: int) -> Tensor:
        return (z >> bits) & ((1 << (64 - bits)) - 1)  # as if it had no sign

    def draw(n_parts: int) -> Tensor:
        z = rows[:, None] * LONGEST + torch.arange(n_parts, device=rows.device)
        z = z * -0x61C8864680B583EB + (key - ((key >> 63) << 64))
        z = (z ^ shifted(z, 30)) * -0x40A7B892E31B1A47
        z = (z ^ shifted(z, 27)) * -0x6B2FB644ECCEEE15
        return shifted(z ^ shifted(z, 31), 11).double() / 2**53

    return draw


def draw_parts(
    tower, inputs: Tensor, share: float, generator: torch.Generator | None = None,
    chance: Callable[[int], Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Random parts of every input, (B, n) int64: all that are required, and a share of the others, at least one.

    n follows from the shape. Numbers are those of `chance` (see `chances`), or of a generator on the CPU.
    """
    optional, required, always = tower.parts(inputs)
    n_parts = optional.shape[1]
    drawn = chance(n_parts) if chance else torch.rand(optional.shape, generator=generator).to(inputs.device)
    rank = drawn.masked_fill(required, -1.0).masked_fill(~(optional | required), 2.0).argsort(1).argsort(1)
    n_optional = optional.sum(1)
    n_drawn = (share * n_optional.double()).round().long().clamp(min=1)  # as `round` below, half to even
    n_kept = torch.minimum(n_drawn, n_optional) + required.sum(1)
    position = torch.arange(n_parts, device=inputs.device).expand_as(rank)
    kept = torch.where(rank < n_kept[:, None], position, n_parts).sort(1).values
    most = max(n_parts - always, 0)
    kept = kept[:, : min(most, max(1, round(share * most))) + always]
    return torch.where(kept == n_parts, -1, kept)


def used_columns(tokens: Tensor, used: Tensor) -> Tensor:
    """(B, L) tokens without the columns behind the last one that is used, (B, L) bool; at least one."""
    position = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    return tokens[:, : max(1, int((position * used.any(0)).max()))]


def take_parts(x: Tensor, kept: Tensor) -> Tensor:
    """(B, P, W) or (B, P) -> (B, n, W) or (B, n); what stands for -1 is the first part."""
    return x[torch.arange(len(x), device=x.device)[:, None], kept.clamp(min=0)]
