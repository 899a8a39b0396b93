"""Probabilistic VSE++: a triplet loss on a similarity of normals."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from jsonargparse.typing import NonNegativeInt, PositiveFloat

from finetune.methods.base import Batch, Method
from probemb.errors import UserError

if TYPE_CHECKING:
    from finetune.config import Config
    from probemb.losses.output import LossOutput
    from probemb.models import DualEncoder


class ProbVSEPlusPlus(Method):
    """VSE++ with normals in place of points, ranked by the similarity that is trained."""

    @dataclass(frozen=True)
    class Options:
        """Triplet loss of a similarity of normals. Source: Probabilistic VSE++/VSRN Eq. 3 to 8, §4.2.

        Args:
            similarity: wasserstein2 (the paper's choice for COCO), min-kl (VSE++ with a trained image tower), kl, of
                the image from the caption (VSE++ on Flickr30k), or reverse-kl, of the caption from the image (Table 6).
            margin: of the hinges, in units of the similarity.
            negatives: hardest (the paper's Eq. 3), semi-hard (its text: the hardest one that is farther than the pair)
                or all.
            warmup_epochs: first epochs, with all negatives; towers from random weights collapse with the hardest alone.
            covariance: ellipsoidal (a variance for each dimension), spherical-mean (their mean), or spherical (one
                predicted value).
            smallest: bound of the variances.
            largest: the other bound.
        """

        similarity: Literal["wasserstein2", "min-kl", "kl", "reverse-kl"] = "wasserstein2"
        margin: PositiveFloat = 0.2
        negatives: Literal["hardest", "semi-hard", "all"] = "hardest"
        warmup_epochs: NonNegativeInt = 0
        covariance: Literal["ellipsoidal", "spherical-mean", "spherical"] = "ellipsoidal"
        smallest: PositiveFloat = 0.1
        largest: PositiveFloat = 10.0

    probabilistic = True

    @classmethod
    def model_options(cls, config: Config) -> dict:
        o = config.loss
        return {
            **super().model_options(config),
            "ranking": o.similarity,
            "covariance": o.covariance,
            "unit_features": True,
            "log_var_range": (math.log(o.smallest), math.log(o.largest)),
        }

    def loss(self, batch: Batch, model: DualEncoder) -> LossOutput:
        from probemb.losses import prob_triplet_loss

        o = self.options
        negatives = o.negatives if batch.epoch >= o.warmup_epochs else "all"
        return prob_triplet_loss(batch.image, batch.text, batch.match, o.similarity, o.margin, negatives)

    @classmethod
    def problems(cls, config: Config) -> Iterator[UserError]:
        yield from super().problems(config)
        o = config.loss
        if o.smallest >= o.largest:
            yield UserError(
                f"The variances are to lie between loss.smallest {o.smallest:g} and loss.largest {o.largest:g}.",
                "Set loss.smallest below loss.largest.",
            )
        if o.negatives == "all":
            yield from cls.unused(
                config,
                ["warmup_epochs"],
                "loss.negatives is all in every epoch",
                "set loss.negatives to hardest or semi-hard",
            )
