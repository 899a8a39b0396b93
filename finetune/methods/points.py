"""Point embeddings: InfoNCE, triplet losses, order embeddings, several embeddings of an item, noisy captions."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn

from finetune.methods.base import Batch, Hinge, Method
from probemb.losses import LossOutput, infonce_loss, noisy
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
        o, pairs = self.options, (batch.image, batch.text, batch.match)
        half = (x.exp() for x in self.module.parameters())
        return noisy.p2rm_loss(*pairs, *half, o.margin, o.weight, o.hardest_in(batch.epoch))


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
        self.semantic = noisy.CaptionSimilarity(data.flat(), data.owner())

    def loss(self, batch: Batch, model) -> LossOutput:
        o, similarity = self.options, cosine_similarity(batch.image, batch.text)
        semantic = self.semantic(batch.image_index.tolist(), batch.pair_index.tolist()).to(similarity.device)
        options = dict(margin=o.margin, weight=o.weight, hardest=o.hardest_in(batch.epoch))
        return noisy.daa_loss(similarity, semantic, batch.match, **options)


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


@dataclass(frozen=True)
class Clean:
    """Options of both.

    Args:
        margin: largest margin of the hinges; in units of the cosine.
        warmup_epochs: first epochs, in which all pairs count as clean.
    """

    margin: PositiveFloat = 0.2
    warmup_epochs: NonNegativeInt = 1


class NCR(Method):
    """NCR: two networks; each one's losses of the last epoch classify pairs as clean for the other.

    A row of the buffers belongs to the network whose losses it comes from. Losses are those of the epoch's steps (the
    published code measures them again between epochs). Noisy pairs train only in the second half of the epochs.
    """

    @dataclass(frozen=True)
    class Options(Clean):
        """Triplet loss with a margin for each pair. Source: NCR.

        Args:
            soft_margin: how margins follow a pair's estimated correctness.
        """

        soft_margin: Literal["linear", "exponential", "sin"] = "exponential"

    networks = 2

    def build(self, model, data) -> None:
        module, shape = self.module, (self.networks, data.n_captions)
        module.register_buffer("last_loss", torch.full(shape, float("nan")))
        module.register_buffer("clean_probability", torch.ones(shape, dtype=torch.float64))
        module.register_buffer("clean", torch.ones(shape, dtype=torch.bool))

    def begin_epoch(self, epoch: int) -> None:
        if epoch < self.options.warmup_epochs:
            return
        module = self.module
        for losses, probability, clean in zip(module.last_loss, module.clean_probability, module.clean):
            seen = losses.isfinite()
            if seen.any():
                probability[seen] = noisy.clean_probability(losses[seen]).to(seen.device)
                clean.copy_(noisy.split_clean(probability))

    def loss(self, batch: Batch, model) -> LossOutput:
        o, match, module = self.options, batch.match, self.module
        pairs, similarity = batch.pair_index.to(match.device), cosine_similarity(batch.image, batch.text)
        seen = noisy.ncr_pair_losses(similarity.detach(), match, o.margin)
        module.last_loss[batch.network, pairs] = seen.to(module.last_loss.dtype)
        if batch.epoch < o.warmup_epochs:
            return noisy.ncr_loss(similarity, None, match, margin=o.margin, hardest=False)
        other, clean_only = 1 - batch.network, 2 * batch.epoch < self.epochs
        probability, clean = module.clean_probability[other, pairs], module.clean[other, pairs]
        predicted, by_other = noisy.ncr_predict(similarity.detach(), match, o.margin), None
        if not clean_only:
            theirs = cosine_similarity(*(side.gaussian for side in batch.by_other()))
            by_other = noisy.ncr_predict(theirs, match, o.margin)
        label = noisy.refine_labels(predicted, probability.to(match.dtype), clean, by_other)
        if clean_only:
            # At least two pairs: a single one has no negative.
            kept = clean.nonzero().flatten() if clean.sum() > 1 else probability.topk(2).indices
            similarity = cosine_similarity(batch.image[kept], batch.text[kept])
            match, label = match[kept][:, kept], label[kept]
        out = noisy.ncr_loss(similarity, label, match, margin=o.margin, soft_margin=o.soft_margin)
        out.terms["clean"] = clean.float().mean()
        return out


class DECL(Method):
    """DECL: evidential loss for all pairs, the dynamic hinge for those classified as clean in the last epoch."""

    @dataclass(frozen=True)
    class Options(Clean):
        """Evidential loss and dynamic hinge. Source: DECL.

        Args:
            tau: temperature of the evidence.
        """

        tau: PositiveFloat = 0.1

    def build(self, model, data) -> None:
        for name in ("now_clean", "last_clean"):  # classified in this epoch, and in the last one
            self.module.register_buffer(name, torch.ones(data.n_captions, dtype=torch.bool))

    def begin_epoch(self, epoch: int) -> None:
        self.module.last_clean.copy_(self.module.now_clean)

    def loss(self, batch: Batch, model) -> LossOutput:
        o, module, match = self.options, self.module, batch.match
        pairs, similarity = batch.pair_index.to(match.device), cosine_similarity(batch.image, batch.text)
        module.now_clean[pairs] = noisy.decl_correspondence(similarity.detach(), o.tau, match)[0]
        clean = module.last_clean[pairs] if batch.epoch >= o.warmup_epochs else None
        negatives = noisy.n_negatives(len(similarity), batch.step)
        out = noisy.decl_loss(similarity, match, clean, negatives=negatives, tau=o.tau, margin=o.margin)
        if clean is not None:
            out.terms["clean"] = clean.float().mean()
        return out
