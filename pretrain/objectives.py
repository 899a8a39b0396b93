"""Pretraining objectives by name; each has its own frozen `Options`, which are `loss` in the configuration.

torch and the losses are imported inside functions: `--help` reads the options of an objective and nothing else.
Letters: B items of this rank's share of the batch, N of all ranks, D dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jsonargparse.typing import NonNegativeFloat

from probemb.cli.ranges import Distance
from probemb.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from probemb.gaussian import Gaussian
    from probemb.losses import LossOutput


@dataclass
class Pairs:
    """Embedded images and their texts, item i of one with item i of the other.

    image, text       Gaussians (B, D) of this rank
    all_image, all_text  (N, D) of all ranks, with gradient
    offset            row of this rank's first item among all
    logit_scale, scale, shift  the model's scalars
    """

    image: Gaussian
    text: Gaussian
    all_image: Gaussian
    all_text: Gaussian
    offset: int
    logit_scale: Tensor
    scale: Tensor
    shift: Tensor


class Objective:
    """A pretraining loss: called with `Pairs`, it gives this rank's part.

    The mean of the parts over the ranks is the loss of one process on the whole batch, in value and gradient.
    """

    @dataclass(frozen=True)
    class Options:
        """No options."""

    def __init__(self, options: Any):
        self.options = options

    def __call__(self, pairs: Pairs) -> LossOutput:
        raise NotImplementedError

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
        """

        clip: NonNegativeFloat = 1.0
        match: NonNegativeFloat = 1.0
        distance: Distance = "csd"
        scale: float = 1.0
        shift: float = 1.0
        pseudo_positive: NonNegativeFloat = 0.0
        vib: NonNegativeFloat = 1e-4

    @classmethod
    def check(cls, options: Any) -> None:
        if not (options.clip or options.match):
            raise UserError("Both losses have weight 0.", "Set loss.clip or loss.match to more than zero.")

    def __call__(self, pairs: Pairs) -> LossOutput:
        from probemb.losses import LossOutput, clip_loss, pairwise_match_loss

        weights, means = self.options, (pairs.image.mean, pairs.text.mean)
        clip = clip_loss(*means, pairs.logit_scale, pairs.all_image.mean, pairs.all_text.mean, pairs.offset)
        match = pairwise_match_loss(
            pairs.image,
            pairs.text,
            scale=pairs.scale,
            shift=pairs.shift,
            distance=weights.distance,
            pseudo_positive=weights.pseudo_positive,
            vib=weights.vib,
            all_image=pairs.all_image,
            all_text=pairs.all_text,
            offset=pairs.offset,
        )
        return LossOutput(weights.clip * clip.loss + weights.match * match.loss, {**clip.terms, **match.terms})


OBJECTIVES: dict[str, type[Objective]] = {"pcmepp": PCMEPlusPlus}
