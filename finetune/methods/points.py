"""Point embeddings: InfoNCE, triplet losses, order embeddings, several embeddings of an item, and pretrained CLIP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from finetune.methods.base import Batch, HardestHinge, Hinge, Method
from probemb import losses
from probemb.losses import LossOutput


class ZeroShot(Method):
    """Pretrained CLIP: nothing is trained."""

    trained = False
    heads = ("clip",)


class InfoNCE(Method):
    """CLIP's loss with a separate multiplier; the target is shared among the captions of an image."""

    @dataclass(frozen=True)
    class Options:
        """Cross entropy of the cosines. Source: PCME++ §B.2.

        Args:
            temperature: initial multiplier of the cosines.
        """

        temperature: PositiveFloat = 1.0

    soft_labels = True

    def build(self, model, data) -> None:
        self.module.loss = losses.InfoNCELoss(self.options.temperature)

    @classmethod
    def model_options(cls, options) -> dict:
        return super().model_options(options) | {"temperature_trained": True}

    def loss(self, batch: Batch, model) -> LossOutput:
        model.logit_scale.data.copy_(self.module.loss.tau.detach().log())  # so that a saved model has it
        return self.module.loss(batch.image, batch.text, batch.match)

    def scalars(self, model) -> dict[str, Tensor]:
        return {"temperature": self.module.loss.tau}


class VSE(Method):
    """VSE infinity: triplet loss, all negatives during the warm-up, then the hardest."""

    @dataclass(frozen=True)
    class Options(Hinge):
        """Triplet loss of cosines. Source: PCME++ §B.2; VSE++ §3."""

    def build(self, model, data) -> None:
        self.module.loss = losses.TripletLoss(self.options.margin)

    def loss(self, batch: Batch, model, **more: Tensor) -> LossOutput:
        hardest = batch.epoch >= self.options.warmup_epochs
        return self.module.loss(batch.image, batch.text, batch.match, hardest=hardest, **more)


class VSEPlusPlus(VSE):
    """The hinge of the hardest negative."""

    @dataclass(frozen=True)
    class Options(VSE.Options):
        """Triplet loss of cosines, hardest negative. Source: VSE++ §3."""

        warmup_epochs: NonNegativeInt = 0


class VSE0(VSE):
    """The sum of all negatives' hinges."""

    @dataclass(frozen=True)
    class Options:
        """Triplet loss of cosines. Source: VSE++ §4.

        Args:
            margin: of the hinges, in units of the cosine.
        """

        margin: PositiveFloat = 0.2

    def loss(self, batch: Batch, model) -> LossOutput:
        return self.module.loss(batch.image, batch.text, batch.match, hardest=False)


class P2RM(VSE):
    """Point-to-rectangle matching on top of VSE."""

    @dataclass(frozen=True)
    class Options(VSE.Options):
        """Triplet loss and point-to-rectangle matching.

        Args:
            weight: of point-to-rectangle matching (this project's choice, see probemb/losses/noisy.py).
        """

        weight: NonNegativeFloat = 1.0

    def build(self, model, data) -> None:
        self.module.loss = losses.P2RMLoss(model.embed_dim, self.options.margin, self.options.weight)


class DAA(VSE):
    """VSE, and ranks that agree with the captions' tf-idf similarity."""

    @dataclass(frozen=True)
    class Options(VSE.Options):
        """Triplet loss and agreement of ranks. Source: DAA.

        Args:
            weight: of the agreement.
        """

        weight: NonNegativeFloat = 25.0

    def build(self, model, data) -> None:
        self.module.loss = losses.DAALoss(self.options.margin, self.options.weight)
        self.semantic = losses.CaptionSimilarity(data.flat(), data.owner())

    def loss(self, batch: Batch, model) -> LossOutput:
        semantic = self.semantic(batch.image_index.tolist(), batch.pair_index.tolist())
        return super().loss(batch, model, semantic=semantic.to(batch.match.device))


class Order(VSE):
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

    def build(self, model, data) -> None:
        self.module.loss = losses.OrderLoss(self.options.margin, self.options.hardest, squared=self.options.squared)

    def loss(self, batch: Batch, model) -> LossOutput:
        return self.module.loss(batch.image, batch.text, batch.match)


class PVSE(VSE):
    """PVSE: the closest ones of K embeddings of both, that differ, from one space."""

    @dataclass(frozen=True)
    class Options(HardestHinge):
        """Multi-instance triplet loss, diversity and discrepancy. Source: PVSE, its public recipe for COCO.

        Args:
            embeddings: K of every item; 1, 2 and 4 in PCME's comparison. With 1 the triplet loss is alone.
            diversity: weight of the cosines of an item's residuals.
            mmd: weight of the discrepancy of images and captions.
            kernel: rbf, exp(-|x - y|^2 / 2), or unsquared for the public code's exp(-|x - y| / 2).
        """

        embeddings: PositiveInt = 2
        margin: PositiveFloat = 0.1
        diversity: NonNegativeFloat = 0.1
        mmd: NonNegativeFloat = 0.01
        kernel: Literal["rbf", "unsquared"] = "rbf"

    wants_tokens = "residuals"
    heads = ("pie",)
    ranking = "multi-instance"

    def build(self, model, data) -> None:
        o = self.options
        self.module.loss = losses.PVSELoss(o.margin, o.hardest, o.diversity, o.mmd, kernel=o.kernel)

    @classmethod
    def model_options(cls, options) -> dict:
        more = {"ranking": "csd"} if options.embeddings == 1 else {}
        return {**super().model_options(options), "n_embeddings": options.embeddings, **more}

    def loss(self, batch: Batch, model) -> LossOutput:
        tokens = batch.images.tokens, batch.texts.tokens
        hardest = self.options.hardest and batch.epoch >= self.options.warmup_epochs
        return self.module.loss(batch.image, batch.text, batch.match, tokens, hardest=hardest)
