"""Point embeddings: InfoNCE, triplet losses, order embeddings, several embeddings of an item."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jsonargparse.typing import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn

from finetune.methods.base import Batch, Hinge, Method
from probemb.losses import LossOutput, infonce_loss
from probemb.losses.noisy import CaptionSimilarity, daa_loss, p2rm_loss
from probemb.losses.output import cosine_similarity
from probemb.losses.triplet import order_similarity, pvse_loss, triplet_loss

HALF_SIDE = 0.1  # of P2RM's rectangles at the start, times the square root of D


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
        self.module.tau = nn.Parameter(torch.full((1,), float(self.options.temperature)))

    @classmethod
    def model_options(cls, options) -> dict:
        return super().model_options(options) | {"temperature_trained": True}

    def loss(self, batch: Batch, model) -> LossOutput:
        model.logit_scale.data.copy_(self.module.tau.detach().log())  # so that a saved model has it
        return infonce_loss(cosine_similarity(batch.image, batch.text), self.module.tau, batch.match)

    def scalars(self, model) -> dict[str, Tensor]:
        return {"temperature": self.module.tau}


class VSE(Method):
    """Triplet loss of the cosines: VSE0, VSE++ and VSE infinity differ in their options and recipes."""

    Options = Hinge

    def similarity(self, batch: Batch) -> Tensor:
        """(N, N), images in rows."""
        return cosine_similarity(batch.image, batch.text)

    def loss(self, batch: Batch, model) -> LossOutput:
        o = self.options
        return triplet_loss(self.similarity(batch), batch.match, o.margin, o.hardest_in(batch.epoch))


class Order(VSE):
    """Order embeddings: a caption lies above its image. Units of the margin are the penalty's."""

    @dataclass(frozen=True)
    class Options(Hinge):
        """Triplet loss of order penalties. Source: order embeddings (Vendrov et al.) §5.1, VSE++ §4.4.

        Args:
            squared: square the penalty; False for its root, as in VSE++'s public code.
        """

        squared: bool = True

    ranking = "order"

    def similarity(self, batch: Batch) -> Tensor:
        return order_similarity(batch.image.mean, batch.text.mean, squared=self.options.squared)


class P2RM(Method):
    """Point-to-rectangle matching on top of VSE."""

    @dataclass(frozen=True)
    class Options(Hinge):
        """Triplet loss and point-to-rectangle matching.

        Args:
            weight: of the rectangles' triplets; this project's choice, see probemb/losses/noisy.py.
        """

        weight: NonNegativeFloat = 1.0

    def build(self, model, data) -> None:
        start = torch.full((model.embed_dim,), math.log(HALF_SIDE / math.sqrt(model.embed_dim)))
        self.module.log_half_image, self.module.log_half_text = nn.Parameter(start.clone()), nn.Parameter(start)

    def loss(self, batch: Batch, model) -> LossOutput:
        o, half = self.options, (x.exp() for x in self.module.parameters())
        return p2rm_loss(*(batch.image, batch.text, batch.match), *half, o.margin, o.weight, o.hardest_in(batch.epoch))


class DAA(Method):
    """VSE, and ranks that agree with the captions' tf-idf similarity."""

    @dataclass(frozen=True)
    class Options(Hinge):
        """Triplet loss and agreement of ranks. Source: DAA.

        Args:
            weight: of the agreement.
        """

        weight: NonNegativeFloat = 25.0

    def build(self, model, data) -> None:
        self.semantic = CaptionSimilarity(data.flat(), data.owner())

    def loss(self, batch: Batch, model) -> LossOutput:
        o, similarity = self.options, cosine_similarity(batch.image, batch.text)
        semantic = self.semantic(batch.image_index.tolist(), batch.pair_index.tolist()).to(similarity.device)
        options = dict(margin=o.margin, weight=o.weight, hardest=o.hardest_in(batch.epoch))
        return daa_loss(similarity, semantic, batch.match, **options)


class PVSE(Method):
    """PVSE: the closest ones of K embeddings of both, that differ, from one space."""

    @dataclass(frozen=True)
    class Options(Hinge):
        """Multi-instance triplet loss, diversity and discrepancy. Source: PVSE, its public recipe for COCO.

        Args:
            embeddings: K of every item; 1, 2 and 4 in PCME's comparison. With 1 the triplet loss is alone.
            diversity: weight of the diversity; the cosines of an item's residuals.
            mmd: weight of the discrepancy; of images and captions.
            kernel: rbf or unsquared; exp(-|x - y|^2 / 2), or the public code's exp(-|x - y| / 2).
        """

        embeddings: PositiveInt = 2
        diversity: NonNegativeFloat = 0.1
        mmd: NonNegativeFloat = 0.01
        kernel: Literal["rbf", "unsquared"] = "rbf"

    wants_tokens = "residuals"
    heads = ("pie",)
    ranking = "multi-instance"

    @classmethod
    def model_options(cls, options) -> dict:
        ranking = "csd" if options.embeddings == 1 else cls.ranking
        return super().model_options(options) | {"n_embeddings": options.embeddings, "ranking": ranking}

    def loss(self, batch: Batch, model) -> LossOutput:
        o, residuals = self.options, (batch.images.tokens, batch.texts.tokens)
        return pvse_loss(
            batch.image, batch.text, batch.match, residuals, margin=o.margin, hardest=o.hardest_in(batch.epoch),
            diversity_weight=o.diversity, mmd_weight=o.mmd, kernel=o.kernel,
        )  # fmt: skip
