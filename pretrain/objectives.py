"""Pretraining objectives by name; each has its own frozen `Options`, which are `loss` in the configuration.

An objective gets this rank's pairs and exchanges what it needs itself: texts in a ring, with memory that does not grow
with the ranks, or (CLIP, PCME++) all embeddings in one collective.
Letters: B items of this rank's share of the batch, W ranks, D dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from jsonargparse.typing import NonNegativeFloat, PositiveFloat
from torch import Tensor

from probemb import distributed
from probemb.cli.ranges import Distance
from probemb.errors import UserError
from probemb.gaussian import Gaussian
from probemb.losses.clip import clip_loss, ring_clip_loss
from probemb.losses.match import pairwise_match_loss, ring_match_loss
from probemb.losses.output import LossOutput
from probemb.losses.prolip import prolip_loss, siglip_loss
from probemb.models.match import OF_DISTANCE

Exchange = Literal["ring", "gather"]
RING_RANKS = 64  # up to this many ranks the ring's sequential hops are worth the memory they save
MASKED_EVERY = 8  # one item in this many has masked copies


class Pairs(NamedTuple):
    """Embedded images and their texts, item i of one with item i of the other.

    image, text   Gaussians (B, D) of this rank; every rank has as many
    logit_scale   () the model's inverse temperature
    scale, shift  () a and b of its match probability sigmoid(-a CSD + b)
    masked        images and texts, Gaussians (n, D), of the masked copies of items 0, B / n, 2 B / n, …; None for none
    """

    image: Gaussian
    text: Gaussian
    logit_scale: Tensor
    scale: Tensor
    shift: Tensor
    masked: tuple[Gaussian, Gaussian] | None = None


class Objective:
    """A pretraining loss: called with `Pairs`, it gives this rank's part; collective.

    The mean of the parts over the ranks is the loss of one process on the whole batch, in value and gradient.

    Attributes:
        probabilistic: whether log-variances are trained; otherwise the model is a point model.
        scalars: those of `Pairs` that the loss reads, for the log.
    """

    @dataclass(frozen=True)
    class Options:
        """No options."""

    probabilistic: ClassVar[bool] = True
    scalars: ClassVar[tuple[str, ...]] = ()

    def __init__(self, options: Any):
        self.options = options

    def ring(self, world: int) -> bool:
        """True if the texts are passed around a ring of `world` ranks; otherwise all ranks' items are gathered."""
        exchange = getattr(self.options, "exchange", "ring")
        return world <= RING_RANKS if exchange is None else exchange == "ring"

    def __call__(self, pairs: Pairs) -> LossOutput:
        raise NotImplementedError

    @classmethod
    def model_options(cls, options: Any) -> dict[str, Any]:
        """Further options of `create_model`: the kind of model, its scalars."""
        return {"probabilistic": cls.probabilistic}

    @classmethod
    def check(cls, options: Any) -> None:
        """Refuse options that do not go together. Raises UserError."""


class PCMEPlusPlus(Objective):
    """The CLIP loss of the means plus the PCME++ match loss."""

    @dataclass(frozen=True)
    class Options:
        """clip * L_clip + match * (L_match + pseudo_positive * L_pp + vib * L_vib).

        Args:
            clip: weight of the CLIP loss.
            match: weight of the PCME++ loss.
            distance: between image and text.
            scale: initial a of the match probability sigmoid(-a d + b).
            shift: initial b.
            pseudo_positive: weight alpha of the pseudo-positives, inside the PCME++ loss.
            vib: weight beta of the information bottleneck, inside the PCME++ loss.
            log_var: initial log-variance; null for -log D, so that an item's variances sum to 1.
            exchange: ring (memory that does not grow with the ranks), gather (one collective), or null: gather with
                more than 64 ranks, and for pseudo-positives and match-probability.
        """

        clip: NonNegativeFloat = 1.0
        match: NonNegativeFloat = 1.0
        distance: Distance = "csd"
        scale: float = 1.0
        shift: float = 1.0
        pseudo_positive: NonNegativeFloat = 0.0
        vib: NonNegativeFloat = 1e-4
        log_var: float | None = None
        exchange: Exchange | None = None

    scalars = ("logit_scale", "scale", "shift")

    @classmethod
    def model_options(cls, options: Options) -> dict[str, Any]:
        own = {"log_var_start": options.log_var, "temperature_trained": bool(options.clip)}
        return super().model_options(options) | own | {"match": OF_DISTANCE.get(options.distance, "none")}

    @classmethod
    def check(cls, options: Options) -> None:
        if not (options.clip or options.match):
            raise UserError("Both losses have weight 0.", "Set loss.clip or loss.match to more than zero.")
        if options.exchange == "ring" and cls._needs_rows(options):
            what = "Pseudo-positives need" if options.pseudo_positive else "The match-probability's samples need"
            raise UserError(f"{what} all pairs of an item at once.", "Set loss.exchange to gather.")

    @staticmethod
    def _needs_rows(options: Options) -> bool:
        return bool(options.pseudo_positive) or options.distance == "match-probability"

    def ring(self, world: int) -> bool:
        return not self._needs_rows(self.options) and super().ring(world)

    def __call__(self, pairs: Pairs) -> LossOutput:
        o, (image, text, tau, scale, shift, _) = self.options, pairs
        match_options = {"scale": scale, "shift": shift, "distance": o.distance, "vib": o.vib}
        if self.ring(distributed.world_size()):
            clip = ring_clip_loss(image.mean, text.mean, tau)
            match = ring_match_loss(image, text, **match_options)
        else:
            all_image, all_text = distributed.gather_pairs(image, text)
            offset = distributed.rank() * len(image)
            clip = clip_loss(image.mean, text.mean, tau, all_image.mean, all_text.mean, offset)
            everything = {"all_image": all_image, "all_text": all_text, "offset": offset}
            match = pairwise_match_loss(image, text, **match_options, pseudo_positive=o.pseudo_positive, **everything)
        return LossOutput(o.clip * clip.loss + o.match * match.loss, {**clip.terms, **match.terms})


class CLIP(Objective):
    """The CLIP loss of points: open_clip's InfoNCE over the whole batch, with its gradient through all embeddings."""

    @dataclass(frozen=True)
    class Options:
        """L_clip. Source: Radford et al., Learning Transferable Visual Models (ICML 2021).

        Args:
            logit_scale: initial inverse temperature, at most 100 later; null for that of model.pretrained, or of the
                architecture (1 / 0.07).
            exchange: ring (memory that does not grow with the ranks), gather (one collective), or null: gather with
                more than 64 ranks.
        """

        logit_scale: PositiveFloat | None = None
        exchange: Exchange | None = None

    probabilistic = False
    scalars = ("logit_scale",)

    @classmethod
    def model_options(cls, options: Any) -> dict[str, Any]:
        return super().model_options(options) | {"init_logit_scale": options.logit_scale}

    def __call__(self, pairs: Pairs) -> LossOutput:
        means = pairs.image.mean, pairs.text.mean
        if self.ring(distributed.world_size()):
            return ring_clip_loss(*means, pairs.logit_scale)
        offset = distributed.rank() * len(pairs.image)
        return clip_loss(*means, pairs.logit_scale, *distributed.gather_together(means), offset)


class _Sigmoid(Objective):
    """A sigmoid loss of every pair's logit s (cosine - u / 2) + bias; s is the inverse temperature.

    The model has logit_scale = log s and logit_bias as parameters, of which a = s / 2 and b = s + bias follow.
    """

    scalars = ("logit_scale", "scale", "shift")
    max_logit_scale: ClassVar[float | None] = None

    @classmethod
    def model_options(cls, options: Any) -> dict[str, Any]:
        own = {"init_logit_scale": options.logit_scale, "init_logit_bias": options.logit_bias}
        return super().model_options(options) | own | {"match": "cosine", "max_logit_scale": cls.max_logit_scale}

    @staticmethod
    def scale_and_bias(pairs: Pairs) -> tuple[Tensor, Tensor]:
        """s and bias."""
        return 2 * pairs.scale, pairs.shift - 2 * pairs.scale


class SigLIP(_Sigmoid):
    """SigLIP's sigmoid loss of points."""

    @dataclass(frozen=True)
    class Options:
        """L_siglip. Source: Zhai et al., Sigmoid Loss for Language Image Pre-Training (ICCV 2023).

        Args:
            logit_scale: initial inverse temperature, without a ceiling; null for that of model.pretrained.
            logit_bias: initial bias of the logits; null for that of model.pretrained.
        """

        logit_scale: PositiveFloat | None = 10.0
        logit_bias: float | None = -10.0

    probabilistic = False

    def __call__(self, pairs: Pairs) -> LossOutput:
        return siglip_loss(pairs.image.mean, pairs.text.mean, *self.scale_and_bias(pairs))


class ProLIP(_Sigmoid):
    """ProLIP: the sigmoid loss with CSD, information bottleneck, and inclusion: of images in their texts, and of items
    in their masked copies."""

    @dataclass(frozen=True)
    class Options:
        """L_ppcl + vib * L_vib + inclusion * L_inclusion + masked_inclusion * L_masked. Source: ProLIP §3.2, §3.3.

        Args:
            vib: weight of the information bottleneck.
            inclusion: weight of an image's inclusion in its text.
            masked_inclusion: weight of the inclusion of an item in its copy with a quarter of its patches or tokens, of
                every eighth item; 1e-3 as published, for towers that can read parts.
            inclusion_scale: c of -log sigmoid(c H).
            form: exact, or code, the formulas of the authors' public code.
            logit_scale: initial inverse temperature, at most 100 later; null for that of model.pretrained.
            logit_bias: initial bias of the logits; null for that of model.pretrained.
            log_var: initial log-variance; null for -log D.
        """

        vib: NonNegativeFloat = 1e-4
        inclusion: NonNegativeFloat = 1e-7
        masked_inclusion: NonNegativeFloat = 0.0
        inclusion_scale: PositiveFloat = 1000.0
        form: Literal["exact", "code"] = "exact"
        logit_scale: PositiveFloat | None = 10.0
        logit_bias: float | None = -10.0
        log_var: float | None = -10.0

    max_logit_scale = 100.0  # as in open_clip's trainer, which the authors' is

    @classmethod
    def model_options(cls, options: Any) -> dict[str, Any]:
        return {**super().model_options(options), "log_var_start": options.log_var}

    def __call__(self, pairs: Pairs) -> LossOutput:
        image, text, o = pairs.image, pairs.text, self.options
        weights = {"vib": o.vib, "inclusion": o.inclusion, "masked_inclusion": o.masked_inclusion}
        options = {**weights, "inclusion_scale": o.inclusion_scale, "form": o.form}
        if pairs.masked is None:
            return prolip_loss(image, text, *self.scale_and_bias(pairs), **options)
        # The loss is one of a set of pairs; those that have copies come first.
        rows = torch.arange(len(image), device=image.mean.device)
        order = (rows % (len(image) // len(pairs.masked[0])) != 0).int().argsort(stable=True)
        return prolip_loss(image[order], text[order], *self.scale_and_bias(pairs), pairs.masked, **options)


OBJECTIVES: dict[str, type[Objective]] = {"pcmepp": PCMEPlusPlus, "clip": CLIP, "siglip": SigLIP, "prolip": ProLIP}
