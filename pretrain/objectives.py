"""Pretraining objectives, and the masks with which the towers read a batch.

An objective is a dataclass of its options, `loss` in the configuration, and a function of `Pairs`. It exchanges between
the ranks what it needs itself and returns this rank's part: the mean over the ranks is
the loss of one process on the whole batch, in value and gradient. `probabilistic` is False for points, `scalars` are
those of `Pairs` that it logs, `model_options` those of `create_model` that it decides.

Letters: B items of this rank's share of the batch, W ranks, D dimensions.

Masks are the patches and tokens that the towers read in a step: patch dropout is Li et al., "Scaling Language-Image
Pre-training via Masking" (CVPR 2023), masked copies are ProLIP §3.3. Every draw is a function of the seed and of the
sample's position in the run, so neither ranks nor accumulation nor a resumption changes it, and recomputed parts see
the same patches without a random state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from jsonargparse.typing import NonNegativeFloat, PositiveFloat
from torch import Tensor

from probemb import distributed
from probemb.cli.ranges import Distance
from probemb.data.randomness import number_of
from probemb.errors import UserError
from probemb.gaussian import Gaussian
from probemb.losses.clip import clip_loss, ring_clip_loss
from probemb.losses.match import pairwise_match_loss, ring_match_loss
from probemb.losses.output import LossOutput
from probemb.losses.prolip import prolip_loss, siglip_loss
from probemb.models.encoder import chances, draw_parts
from probemb.models.options import MATCH_OF_DISTANCE

if TYPE_CHECKING:
    from pretrain.config import Config
    from probemb.models import DualEncoder

Exchange = Literal["ring", "gather"]
# Gathered, a rank's losses of N rows of all ranks need a few matrices of N^2 / W floats: 1 GiB each at N = 16,384 and
# W = 1, 128 MiB at 8. Beyond, a ring saves memory; with more ranks than these it has too many sequential hops.
GATHERED_ROWS, RING_RANKS = 16_384, 64
MASKED_EVERY = 8  # one item in this many has masked copies
MASKED_SHARE = 0.25  # of patches and tokens that these keep
SCALARS = ("logit_scale", "scale", "shift")


class Pairs(NamedTuple):
    """Embedded images and their texts, item i of one with item i of the other."""

    image: Gaussian  # (B, D) of this rank; every rank has as many
    text: Gaussian
    logit_scale: Tensor  # () the model's inverse temperature
    scale: Tensor  # () a and b of its match probability sigmoid(-a CSD + b)
    shift: Tensor
    masked: tuple[Gaussian, Gaussian] | None = None  # (n, D), of the masked copies of items 0, B / n, 2 B / n, …

    @property
    def sigmoid(self) -> tuple[Tensor, Tensor]:
        """The factor s and the bias of a sigmoid loss's logits, of which a = s / 2 and b = s + bias follow."""
        return 2 * self.scale, self.shift - 2 * self.scale


def in_ring(exchange: Exchange | None, rows: int) -> bool:
    """True if the texts, `rows` on each rank, are passed around a ring of ranks; otherwise all ranks' are gathered."""
    world = distributed.world_size()
    return exchange == "ring" if exchange else world * rows > GATHERED_ROWS and world <= RING_RANKS


@dataclass(frozen=True)
class PCMEPlusPlus:
    """clip * L_clip + match * (L_match + pseudo_positive * L_pp + vib * L_vib).

    Args:
        clip: weight of the CLIP loss.
        match: weight of the PCME++ loss.
        distance: between image and text.
        scale: initial a of the match probability sigmoid(-a d + b); null for that of model.pretrained.
        shift: initial b; null as for scale.
        pseudo_positive: weight alpha of the pseudo-positives; inside the PCME++ loss.
        vib: weight beta of the information bottleneck; inside the PCME++ loss.
        log_var: initial log-variance; null for -log D, so that an item's variances sum to 1.
        exchange: ring, gather, or null: ring for batches over 16,384 on up to 64 ranks; null gathers
            for pseudo-positives and match-probability too. A ring's memory does not grow with the ranks.
    """

    clip: NonNegativeFloat = 1.0
    match: NonNegativeFloat = 1.0
    distance: Distance = "csd"
    scale: float | None = 1.0
    shift: float | None = 1.0
    pseudo_positive: NonNegativeFloat = 0.0
    vib: NonNegativeFloat = 1e-4
    log_var: float | None = None
    exchange: Exchange | None = None

    probabilistic: ClassVar = True
    scalars: ClassVar = SCALARS

    def __post_init__(self):
        if self.exchange == "ring" and self._needs_rows:
            what = "loss.exchange ring does not go with pseudo-positives or match-probability."
            raise UserError(what, "They need all pairs of an item at once: set loss.exchange to gather.")

    @property
    def _needs_rows(self) -> bool:
        return bool(self.pseudo_positive) or self.distance == "match-probability"

    @property
    def model_options(self) -> dict[str, Any]:
        match = MATCH_OF_DISTANCE.get(self.distance, "none")
        return {"log_var_start": self.log_var, "temperature_trained": bool(self.clip), "match": match}

    def __call__(self, pairs: Pairs) -> LossOutput:
        image, text, tau, scale, shift, _ = pairs
        options = {"scale": scale, "shift": shift, "distance": self.distance, "vib": self.vib}
        if in_ring(self.exchange, len(image)) and not self._needs_rows:
            clip = ring_clip_loss(image.mean, text.mean, tau)
            match = ring_match_loss(image, text, **options)
        else:
            all_image, all_text = distributed.gather_pairs(image, text)
            offset = distributed.rank() * len(image)
            clip = clip_loss(image.mean, text.mean, tau, all_image.mean, all_text.mean, offset)
            options |= {"all_image": all_image, "all_text": all_text, "offset": offset}
            match = pairwise_match_loss(image, text, **options, pseudo_positive=self.pseudo_positive)
        return LossOutput(self.clip * clip.loss + self.match * match.loss, {**clip.terms, **match.terms})


@dataclass(frozen=True)
class CLIP:
    """L_clip of points, open_clip's InfoNCE. Source: Radford et al., Learning Transferable Visual Models (ICML 2021).

    Args:
        logit_scale: initial inverse temperature; at most 100 later, null for that of model.pretrained, or of the
            architecture (1 / 0.07).
        exchange: ring, gather, or null: ring for batches over 16,384 on up to 64 ranks.
    """

    logit_scale: PositiveFloat | None = None
    exchange: Exchange | None = None

    probabilistic: ClassVar = False
    scalars: ClassVar = ("logit_scale",)

    @property
    def model_options(self) -> dict[str, Any]:
        return {"init_logit_scale": self.logit_scale}

    def __call__(self, pairs: Pairs) -> LossOutput:
        means = pairs.image.mean, pairs.text.mean
        if in_ring(self.exchange, len(pairs.image)):
            return ring_clip_loss(*means, pairs.logit_scale)
        offset = distributed.rank() * len(pairs.image)
        return clip_loss(*means, pairs.logit_scale, *distributed.gather_together(means), offset)


@dataclass(frozen=True)
class SigLIP:
    """L_siglip of points. Source: Zhai et al., Sigmoid Loss for Language Image Pre-Training (ICCV 2023).

    Args:
        logit_scale: initial inverse temperature; null for that of model.pretrained.
        logit_bias: initial bias of the logits; null for that of model.pretrained.
    """

    logit_scale: PositiveFloat | None = 10.0
    logit_bias: float | None = -10.0

    probabilistic: ClassVar = False
    scalars: ClassVar = SCALARS
    ceiling: ClassVar[float | None] = None

    @property
    def model_options(self) -> dict[str, Any]:
        scalars = {"init_logit_scale": self.logit_scale, "init_logit_bias": self.logit_bias}
        return {**scalars, "max_logit_scale": self.ceiling, "match": "cosine"}

    def __call__(self, pairs: Pairs) -> LossOutput:
        return siglip_loss(pairs.image.mean, pairs.text.mean, *pairs.sigmoid)


@dataclass(frozen=True)
class ProLIP(SigLIP):
    """L_ppcl + vib * L_vib + inclusion * L_inclusion + masked_inclusion * L_masked. Source: ProLIP §3.2, §3.3.

    Args:
        vib: weight beta of the information bottleneck.
        inclusion: weight of an image's inclusion in its text.
        masked_inclusion: weight of an item's inclusion in its masked copy; with a quarter of its patches or tokens, of
            every eighth item; 1e-3 as published, for towers that can read parts.
        inclusion_scale: c of -log sigmoid(c H).
        form: exact, or code; the formulas of the authors' public code.
        log_var: initial log-variance; null for -log D.
    """

    vib: NonNegativeFloat = 1e-4
    inclusion: NonNegativeFloat = 1e-7
    masked_inclusion: NonNegativeFloat = 0.0
    inclusion_scale: PositiveFloat = 1000.0
    form: Literal["exact", "code"] = "exact"
    log_var: float | None = -10.0

    probabilistic: ClassVar = True
    ceiling: ClassVar = 100.0  # of open_clip's trainer, which the authors' is

    @property
    def model_options(self) -> dict[str, Any]:
        return {**super().model_options, "log_var_start": self.log_var}

    def __call__(self, pairs: Pairs) -> LossOutput:
        image, text, masked = pairs.image, pairs.text, pairs.masked
        if masked is not None:  # the loss is one of a set of pairs; those that have copies come first
            rows = torch.arange(len(image), device=image.mean.device)
            order = (rows % (len(image) // len(masked[0])) != 0).int().argsort(stable=True)
            image, text = image[order], text[order]
        return prolip_loss(
            image, text, *pairs.sigmoid, masked, vib=self.vib, inclusion=self.inclusion,
            masked_inclusion=self.masked_inclusion, inclusion_scale=self.inclusion_scale, form=self.form,
        )  # fmt: skip


OBJECTIVES: dict[str, type] = {"pcmepp": PCMEPlusPlus, "clip": CLIP, "siglip": SigLIP, "prolip": ProLIP}


class Masks(NamedTuple):
    """Positions of what the towers read, see `probemb.models.encoder`; None for everything, or for no copies."""

    kept: Tensor | None = None  # (B, n) patches of every image
    masked_image: Tensor | None = None  # (B / 8, n) patches of the masked copies of images 0, 8, 16, …
    masked_text: Tensor | None = None  # (B / 8, n) tokens of the masked copies of their texts

    def chunk(self, parts: int) -> list[Masks]:
        """The masks of each accumulation part."""
        columns = [[None] * parts if t is None else t.chunk(parts) for t in self]
        return [Masks(*row) for row in zip(*columns)]


def draw_masks(config: Config, model: DualEncoder, images: Tensor, tokens: Tensor, samples: int) -> Masks:
    """The masks of this rank's B items of the step that follows `samples` samples seen; their shapes follow from those
    of the inputs. Raises UserError: a tower reads its inputs as a whole, and parts of them are asked for."""
    rows = torch.arange(len(images), device=images.device) + samples + distributed.rank() * len(images)

    def draw(what: str, tower, inputs: Tensor, share: float, every: int = 1) -> Tensor:
        return draw_parts(tower, inputs[::every], share, chance=chances(number_of(config.seed, what), rows[::every]))

    kept = masked_image = masked_text = None
    if dropout := config.model.patch_dropout:
        kept = draw("patches", model.image_tower, images, 1 - dropout)
    if getattr(config.loss, "masked_inclusion", 0):
        masked_image = draw("masked image", model.image_tower, images, MASKED_SHARE, MASKED_EVERY)
        masked_text = draw("masked text", model.text_tower, tokens, MASKED_SHARE, MASKED_EVERY)
    return Masks(kept, masked_image, masked_text)
