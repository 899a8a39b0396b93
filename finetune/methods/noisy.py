"""Methods that classify training pairs as clean or noisy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jsonargparse.typing import NonNegativeInt, PositiveFloat

from finetune.methods.base import Batch, Method
from probemb.gaussian import Gaussian
from probemb.losses import DECLLoss, LossOutput, NCRLoss, clean_probability, refine_labels, split_clean


@dataclass(frozen=True)
class Clean:
    """Options of both.

    Args:
        margin: largest margin of the hinges, in units of the cosine.
        warmup_epochs: first epochs, in which all pairs count as clean.
    """

    margin: PositiveFloat = 0.2
    warmup_epochs: NonNegativeInt = 1


class NCR(Method):
    """NCR: two networks; each one's losses of the last epoch classify pairs as clean for the other.

    A row of the buffers belongs to the network whose losses it comes from. Losses are kept from the steps of the epoch;
    the published code measures all of them again between epochs. Noisy pairs train only in the second half of the
    epochs.
    """

    @dataclass(frozen=True)
    class Options(Clean):
        """Triplet loss with a margin for each pair. Source: NCR.

        Args:
            soft_margin: how the margin follows the estimated correctness of a pair.
        """

        soft_margin: Literal["linear", "exponential", "sin"] = "exponential"

    networks = 2

    def build(self, model, data) -> None:
        module, shape = self.module, (self.networks, data.n_captions)
        module.loss = NCRLoss(self.options.margin, self.options.soft_margin)
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
                probability[seen] = clean_probability(losses[seen]).to(seen.device)
                clean.copy_(split_clean(probability))

    def loss(self, batch: Batch, model) -> LossOutput:
        image, text, match, module = batch.image, batch.text, batch.match, self.module
        loss, pairs = module.loss, batch.pair_index.to(match.device)
        module.last_loss[batch.network, pairs] = loss.pair_losses(image, text, match).to(module.last_loss.dtype)
        if batch.epoch < self.options.warmup_epochs:
            return loss(image, text, match, hardest=False)
        other = 1 - batch.network
        probability, clean = module.clean_probability[other, pairs], module.clean[other, pairs]
        clean_only = 2 * batch.epoch < self.epochs
        label = refine_labels(
            loss.predict(image, text, match),
            probability.to(match.dtype),
            clean,
            None if clean_only else loss.predict(*(side.gaussian for side in batch.by_other()), match),
        )
        if clean_only:
            # At least two pairs: a single one has no negative.
            kept = clean.nonzero().flatten() if clean.sum() > 1 else probability.topk(2).indices
            image, text = (Gaussian(g.mean[kept], g.log_var[kept]) for g in (image, text))
            match, label = match[kept][:, kept], label[kept]
        out = loss(image, text, match, label=label)
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
        self.module.loss = DECLLoss(margin=self.options.margin, tau=self.options.tau)
        for name in ("now_clean", "last_clean"):  # classified in this epoch, and in the last one
            self.module.register_buffer(name, torch.ones(data.n_captions, dtype=torch.bool))

    def begin_epoch(self, epoch: int) -> None:
        self.module.last_clean.copy_(self.module.now_clean)

    def loss(self, batch: Batch, model) -> LossOutput:
        module, pairs = self.module, batch.pair_index.to(batch.match.device)
        module.now_clean[pairs] = module.loss.correspondence(batch.image, batch.text, batch.match)[0]
        clean = module.last_clean[pairs] if batch.epoch >= self.options.warmup_epochs else None
        out = module.loss(batch.image, batch.text, batch.match, clean=clean, step=batch.step)
        if clean is not None:
            out.terms["clean"] = clean.float().mean()
        return out
