"""Point embeddings with a triplet loss, from VSE++ on: all negatives or the hardest, an order, several of an item."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from finetune.methods.base import Batch, Method
from probemb.errors import UserError

if TYPE_CHECKING:
    from finetune.config import Config
    from probemb.losses.output import LossOutput
    from probemb.models import DualEncoder


class VSE0(Method):
    """The sum of all negatives' hinges."""

    @dataclass(frozen=True)
    class Options:
        """Triplet loss of cosines. Source: VSE++ §4.

        Args:
            margin: of the hinges, in units of the cosine.
        """

        margin: PositiveFloat = 0.2

    def __init__(self, config, model, pairs):
        from probemb.losses import TripletLoss

        super().__init__(config, model, pairs)
        self.module.loss = TripletLoss(self.options.margin)

    def loss(self, batch: Batch, model: DualEncoder) -> LossOutput:
        return self.module.loss(batch.image, batch.text, batch.match, hardest=False)


class VSEPlusPlus(VSE0):
    """The hinge of the hardest negative."""

    @dataclass(frozen=True)
    class Options(VSE0.Options):
        """Triplet loss of cosines, hardest negative. Source: VSE++ §3.

        Args:
            warmup_epochs: first epochs, with all negatives; towers from random weights collapse with the hardest alone.
        """

        warmup_epochs: NonNegativeInt = 0

    def loss(self, batch: Batch, model: DualEncoder) -> LossOutput:
        hardest = batch.epoch >= self.options.warmup_epochs
        return self.module.loss(batch.image, batch.text, batch.match, hardest=hardest)


class Order(Method):
    """Order embeddings: a caption lies above its image."""

    @dataclass(frozen=True)
    class Options:
        """Triplet loss of order penalties. Source: order embeddings (Vendrov et al.) §5.1, VSE++ §4.4.

        Args:
            margin: of the hinges, in units of the penalty.
            hardest: the hardest negative alone, as Order++ of VSE++.
            squared: the squared penalty; False for its root, as in VSE++'s public code.
        """

        margin: PositiveFloat = 0.05
        hardest: bool = False
        squared: bool = True

    ranking = "order"

    def __init__(self, config, model, pairs):
        from probemb.losses import OrderLoss

        super().__init__(config, model, pairs)
        o = self.options
        self.module.loss = OrderLoss(o.margin, o.hardest, squared=o.squared)

    def loss(self, batch: Batch, model: DualEncoder) -> LossOutput:
        return self.module.loss(batch.image, batch.text, batch.match)


class PVSE(Method):
    """PVSE: the closest ones of K embeddings of both, that differ, from one space."""

    @dataclass(frozen=True)
    class Options:
        """Multi-instance triplet loss, diversity and discrepancy. Source: PVSE, its public recipe for COCO.

        Args:
            embeddings: K of every item; 1, 2 and 4 in PCME's comparison. With 1 the triplet loss is alone.
            margin: of the hinges, in units of the cosine.
            hardest: the hardest negative alone.
            warmup_epochs: first epochs, with all negatives; towers from random weights collapse with the hardest alone.
            diversity: weight of the cosines of an item's residuals.
            mmd: weight of the discrepancy of images and captions.
            gamma: of its kernel exp(-gamma |x - y|^2).
            kernel: rbf, or unsquared for the public code's exp(-gamma |x - y|).
        """

        embeddings: PositiveInt = 2
        margin: PositiveFloat = 0.1
        hardest: bool = True
        warmup_epochs: NonNegativeInt = 0
        diversity: NonNegativeFloat = 0.1
        mmd: NonNegativeFloat = 0.01
        gamma: PositiveFloat = 0.5
        kernel: Literal["rbf", "unsquared"] = "rbf"

    wants_tokens = "residuals"
    ranking = "multi-instance"

    def __init__(self, config, model, pairs):
        from probemb.losses import PVSELoss

        super().__init__(config, model, pairs)
        o = self.options
        self.module.loss = PVSELoss(o.margin, o.hardest, o.diversity, o.mmd, o.gamma, o.kernel)

    @classmethod
    def model_options(cls, config: Config) -> dict:
        n = config.loss.embeddings
        more = {"ranking": "csd"} if n == 1 else {}
        return {**super().model_options(config), "n_embeddings": n, **more}

    def loss(self, batch: Batch, model: DualEncoder) -> LossOutput:
        tokens = batch.images.tokens, batch.texts.tokens
        hardest = self.options.hardest and batch.epoch >= self.options.warmup_epochs
        return self.module.loss(batch.image, batch.text, batch.match, tokens, hardest=hardest)

    @classmethod
    def problems(cls, config: Config) -> Iterator[UserError]:
        yield from super().problems(config)
        if config.model.head != "pie":
            yield UserError(
                f"The method pvse trains PIE-Net's several embeddings, and model.head is {config.model.head}.",
                "Set --model.head pie, or choose another method.",
            )
        if config.loss.embeddings == 1:
            yield from cls.unused(
                config,
                ("diversity", "mmd", "gamma", "kernel"),
                "with one embedding of an item the triplet loss is alone",
                "set loss.embeddings to 2 or more",
            )
        elif not config.loss.mmd:
            yield from cls.unused(config, ("gamma", "kernel"), "loss.mmd is 0", "set loss.mmd above 0")
        if not config.loss.hardest:
            yield from cls.unused(config, ["warmup_epochs"], "loss.hardest is false", "set loss.hardest to true")
