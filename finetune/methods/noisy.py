"""Methods that classify training pairs as clean or noisy."""

from dataclasses import dataclass
from typing import Literal

import torch
from jsonargparse.typing import NonNegativeInt, PositiveFloat

from finetune.methods.base import Batch, Method
from probemb.losses import LossOutput, noisy
from probemb.losses.output import cosine_similarity


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
