"""The methods that PCME++ is compared with: what each needs of the model, takes from the configuration, and minimises.

All of them see the whole batch of all ranks and share model, data, optimizer and evaluation. N pairs, D dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from finetune.config import Config, given
from probemb.data.captions.find import Captioned
from probemb.errors import UserError
from probemb.gaussian import Gaussian
from probemb.losses import (
    DAALoss,
    DECLLoss,
    InfoNCELoss,
    NCRLoss,
    P2RMLoss,
    TripletLoss,
    clean_probability,
    infonce_loss,
    pairwise_match_loss,
    pcme_loss,
    refine_labels,
    split_clean,
)
from probemb.losses.output import LossOutput
from probemb.models import DualEncoder, Encoded


@dataclass
class Batch:
    """One step's pairs, of all ranks.

    images, texts Encoded (N, D), with tokens if the method wants them; `image` and `text` are their Gaussians
    match         (N, N) in [0, 1], images in rows: same image, mixed and smoothed
    image_index   (N,) on the CPU: which image of the training data
    pair_index    (N,) on the CPU: which caption of the training data
    epoch         from 0
    step          since the start of the run
    generator     on the embeddings' device, seeded alike on every rank
    network       which of the method's networks embedded them, from 0
    by_other      () -> image, text: as the other network embeds the same pairs, without gradient; None without another
    """

    images: Encoded
    texts: Encoded
    match: Tensor
    image_index: Tensor
    pair_index: Tensor
    epoch: int
    step: int
    generator: torch.Generator
    network: int = 0
    by_other: Callable[[], tuple[Encoded, Encoded]] | None = None

    @property
    def image(self) -> Gaussian:
        """(N, D) or (N, K, D)."""
        return self.images.gaussian

    @property
    def text(self) -> Gaussian:
        """(N, D) or (N, K, D)."""
        return self.texts.gaussian


class Method(nn.Module):
    """A loss and what belongs to it.

    `forward(batch, model) -> LossOutput` is the loss of the whole batch; its gradient on every rank is that of the
    whole batch too. A method without it trains nothing.

    Attributes:
        probabilistic: whether log-variances are trained; otherwise the model is a point model.
        soft_labels: whether mixed images and label smoothing make sense.
        options: of `config.loss` that are used; all of them must have a value.
        trains: the model's own scalars that the loss uses; the others stand still.
        wants_tokens: whether the loss reads every token in the embedding space (`Encoded.tokens`).
        networks: how many models are trained, 1 or 2; with 2, a whole epoch of the first, then one of the second.
    """

    networks = 1
    wants_tokens = False
    probabilistic = False
    soft_labels = False
    options: tuple[str, ...] = ()
    trains: tuple[str, ...] = ()

    def __init__(self, config: Config, model: DualEncoder, pairs: Captioned):
        super().__init__()
        self.config = config

    def begin_epoch(self, epoch: int) -> None:
        """Called on all ranks before an epoch."""

    def scalars(self, model: DualEncoder) -> dict[str, Tensor]:
        """What is trained besides the weights and worth a place in the log."""
        return {name: getattr(model, name) for name in self.trains}


class PCMEPlusPlus(Method):
    """PCME++: match loss over all pairs, pseudo-positives, information bottleneck; any distance.

    With `loss.clip` the CLIP loss of the means is added, with the model's own temperature, as in pretraining.
    """

    probabilistic = True
    soft_labels = True
    options = ("scale", "shift", "pseudo_positive", "vib", "clip")
    trains = ("scale", "shift")

    def __init__(self, config: Config, model: DualEncoder, pairs: Captioned):
        super().__init__(config, model, pairs)
        if config.loss.clip:
            self.trains = (*self.trains, "logit_scale")

    def forward(self, batch: Batch, model: DualEncoder) -> LossOutput:
        loss = self.config.loss
        out = pairwise_match_loss(
            batch.image,
            batch.text,
            batch.match,
            scale=model.scale,
            shift=model.shift,
            distance=self.config.distance or "csd",
            pseudo_positive=loss.pseudo_positive,
            vib=loss.vib or 0.0,
        )
        if not loss.clip:
            return out
        temperature = model.logit_scale.exp().clamp(max=100.0)
        clip = infonce_loss(batch.image.mean @ batch.text.mean.T, temperature, batch.match).loss
        return LossOutput(out.loss + loss.clip * clip, {"clip": clip.detach(), **out.terms})

    def scalars(self, model: DualEncoder) -> dict[str, Tensor]:
        return {name: getattr(model, name) for name in ("scale", "shift")}


class PCMEPlusPlusMean(PCMEPlusPlus):
    """PCME++ between means: the point model's variances are practically zero, which leaves CSD the squared distance."""

    probabilistic = False
    options = ("scale", "shift", "pseudo_positive", "clip")

    def forward(self, batch: Batch, model: DualEncoder) -> LossOutput:
        out = super().forward(batch, model)
        del out.terms["vib"]  # of no weight
        return out


class PCME(Method):
    """PCME: soft contrastive loss of sampled embeddings, with the information bottleneck."""

    probabilistic = True
    soft_labels = True
    options = ("scale", "shift", "samples", "vib")
    trains = ("scale", "shift")

    def forward(self, batch: Batch, model: DualEncoder) -> LossOutput:
        return pcme_loss(
            batch.image,
            batch.text,
            batch.match,
            n_samples=self.config.loss.samples,
            scale=model.scale,
            shift=model.shift,
            vib=self.config.loss.vib,
            generator=batch.generator,
        )


class InfoNCE(Method):
    """CLIP's loss with a multiplier of its own, its target shared among the captions of an image."""

    soft_labels = True
    options = ("temperature",)

    def __init__(self, config: Config, model: DualEncoder, pairs: Captioned):
        super().__init__(config, model, pairs)
        self.loss = InfoNCELoss(config.loss.temperature)

    def forward(self, batch: Batch, model: DualEncoder) -> LossOutput:
        return self.loss(batch.image, batch.text, batch.match)

    def scalars(self, model: DualEncoder) -> dict[str, Tensor]:
        return {"temperature": self.loss.tau}


class VSE(Method):
    """VSE infinity: triplet loss, all negatives during the warm-up, then the hardest."""

    options = ("margin", "warmup_epochs")

    def __init__(self, config: Config, model: DualEncoder, pairs: Captioned):
        super().__init__(config, model, pairs)
        self.loss = self.make_loss(config, model)

    def make_loss(self, config: Config, model: DualEncoder) -> nn.Module:
        return TripletLoss(config.loss.margin)

    def hardest(self, batch: Batch) -> bool:
        return batch.epoch >= self.config.loss.warmup_epochs

    def forward(self, batch: Batch, model: DualEncoder) -> LossOutput:
        return self.loss(batch.image, batch.text, batch.match, hardest=self.hardest(batch))


class P2RM(VSE):
    """Point-to-rectangle matching on top of VSE."""

    options = ("margin", "warmup_epochs", "weight")

    def make_loss(self, config: Config, model: DualEncoder) -> nn.Module:
        return P2RMLoss(model.embed_dim, config.loss.margin, config.loss.weight)


class DAA(VSE):
    """VSE, and ranks that agree with the captions' tf-idf similarity."""

    options = ("margin", "warmup_epochs", "weight")

    def __init__(self, config: Config, model: DualEncoder, pairs: Captioned):
        from probemb.losses import CaptionSimilarity

        super().__init__(config, model, pairs)
        self.semantic = CaptionSimilarity(pairs.flat(), pairs.owner())

    def make_loss(self, config: Config, model: DualEncoder) -> nn.Module:
        return DAALoss(config.loss.margin, config.loss.weight)

    def forward(self, batch: Batch, model: DualEncoder) -> LossOutput:
        semantic = self.semantic(batch.image_index.tolist(), batch.pair_index.tolist()).to(batch.match.device)
        return self.loss(batch.image, batch.text, batch.match, semantic=semantic, hardest=self.hardest(batch))


class NCR(Method):
    """NCR: two networks, and each one's losses of the epoch before tell the other which pairs are clean.

    A row of the buffers belongs to the network whose losses it comes from. The losses are kept from the steps of the
    epoch; published, all are measured anew between epochs. Noisy pairs train in the second half of the epochs alone.
    """

    networks = 2
    options = ("margin", "warmup_epochs", "soft_margin")

    def __init__(self, config: Config, model: DualEncoder, pairs: Captioned):
        super().__init__(config, model, pairs)
        self.loss = NCRLoss(config.loss.margin, config.loss.soft_margin)
        shape = (self.networks, pairs.n_captions)
        self.register_buffer("last_loss", torch.full(shape, float("nan")))
        self.register_buffer("clean_probability", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("clean", torch.ones(shape, dtype=torch.bool))

    def begin_epoch(self, epoch: int) -> None:
        if epoch < self.config.loss.warmup_epochs:
            return
        for losses, probability, clean in zip(self.last_loss, self.clean_probability, self.clean):
            seen = losses.isfinite()
            if seen.any():
                probability[seen] = clean_probability(losses[seen]).to(seen.device)
                clean.copy_(split_clean(probability))

    def forward(self, batch: Batch, model: DualEncoder) -> LossOutput:
        image, text, match = batch.image, batch.text, batch.match
        pairs = batch.pair_index.to(match.device)
        self.last_loss[batch.network, pairs] = self.loss.pair_losses(image, text, match).to(self.last_loss.dtype)
        if batch.epoch < self.config.loss.warmup_epochs:
            return self.loss(image, text, match, hardest=False)
        other = 1 - batch.network
        probability, clean = self.clean_probability[other, pairs], self.clean[other, pairs]
        noisy_wait = 2 * batch.epoch < self.config.epochs
        label = refine_labels(
            self.loss.predict(image, text, match),
            probability.to(match.dtype),
            clean,
            None if noisy_wait else self.loss.predict(*(g.gaussian for g in batch.by_other()), match),
        )
        if noisy_wait:
            # Two pairs at least: one alone has no negative.
            kept = clean.nonzero().flatten() if clean.sum() > 1 else probability.topk(2).indices
            image, text = (Gaussian(g.mean[kept], g.log_var[kept]) for g in (image, text))
            match, label = match[kept][:, kept], label[kept]
        out = self.loss(image, text, match, label=label)
        out.terms["clean"] = clean.float().mean()
        return out


class DECL(Method):
    """DECL: evidential loss for all pairs, the dynamic hinge for those that were held for clean an epoch before."""

    options = ("margin", "warmup_epochs", "tau")

    def __init__(self, config: Config, model: DualEncoder, pairs: Captioned):
        super().__init__(config, model, pairs)
        self.loss = DECLLoss(margin=config.loss.margin, tau=config.loss.tau)
        self.register_buffer("now_clean", torch.ones(pairs.n_captions, dtype=torch.bool))
        self.register_buffer("held_clean", torch.ones(pairs.n_captions, dtype=torch.bool))

    def begin_epoch(self, epoch: int) -> None:
        self.held_clean.copy_(self.now_clean)

    def forward(self, batch: Batch, model: DualEncoder) -> LossOutput:
        pairs = batch.pair_index.to(batch.match.device)
        self.now_clean[pairs] = self.loss.correspondence(batch.image, batch.text)[0]
        clean = self.held_clean[pairs] if batch.epoch >= self.config.loss.warmup_epochs else None
        out = self.loss(batch.image, batch.text, batch.match, clean=clean, step=batch.step)
        if clean is not None:
            out.terms["clean"] = clean.float().mean()
        return out


class ZeroShot(Method):
    """A CLIP as it comes."""


METHODS: dict[str, type[Method]] = {
    "pcmepp": PCMEPlusPlus,
    "pcmepp-mu": PCMEPlusPlusMean,
    "infonce": InfoNCE,
    "vse": VSE,
    "pcme": PCME,
    "daa": DAA,
    "p2rm": P2RM,
    "ncr": NCR,
    "decl": DECL,
    "clip-zs": ZeroShot,
}


def check_method(config: Config) -> None:
    """Refuse options that the method does not use, and values of its own that are missing or out of range.

    Raises:
        UserError: names the option.
    """
    method, loss = METHODS[config.method], config.loss
    for name in given(loss):
        if name not in method.options:
            users = ", ".join(key for key, other in METHODS.items() if name in other.options)
            raise UserError(
                f"The method {config.method} does not use loss.{name}.", f"Leave it out, or choose one of {users}."
            )
    for name in method.options:
        value = getattr(loss, name)
        if value is None:
            raise UserError(f"The method {config.method} needs loss.{name}.", "Give it a value.")
        if isinstance(value, str):
            continue
        low, above = (1, False) if name == "samples" else (0, name in ("scale", "temperature", "margin", "tau"))
        if not low <= value < float("inf") or (above and value == low):
            raise UserError(f"loss.{name} is {value}.", f"Set it to a number {'above' if above else 'from'} {low}.")
    if loss.soft_margin not in (None, "linear", "exponential", "sin"):
        raise UserError(f"loss.soft_margin is '{loss.soft_margin}'.", "Choose linear, exponential or sin.")
    if config.distance is not None and method is not PCMEPlusPlus:
        raise UserError(
            f"The method {config.method} has no choice of distance.", "Leave --distance out, or choose --method pcmepp."
        )
    if not method.soft_labels and (config.mix.ratio or config.mix.smoothing):
        what = "mixed images (mix.ratio)" if config.mix.ratio else "label smoothing (mix.smoothing)"
        takers = ", ".join(key for key, other in METHODS.items() if other.soft_labels)
        raise UserError(
            f"The method {config.method} cannot learn from {what}: its loss needs pairs that match or do not.",
            f"Set it to 0, or choose one of {takers}.",
        )
    if not method.probabilistic and config.model.n_unc_layers:
        raise UserError(
            f"The method {config.method} predicts no uncertainty, and model.n_unc_layers is "
            f"{config.model.n_unc_layers}.",
            "Leave model.n_unc_layers out.",
        )
    if config.size_augment and config.model.head == "clip":
        raise UserError(
            "SizeAugment drops tokens, and head clip pools one alone.", "Set size_augment to 0, or model.head to gpo."
        )
    if config.epochs < 1 and method is not ZeroShot:
        raise UserError("epochs is 0: nothing would be trained.", "Set it to 1 or more, or choose --method clip-zs.")
    if method is ZeroShot:
        for name in ("epochs", "noise_ratio", "swa_epochs", "stop_after_epochs"):
            if value := getattr(config, name):
                raise UserError(f"clip-zs trains nothing, and {name} is {value}.", f"Leave {name} out.")
        if config.model.head != "clip":
            raise UserError("clip-zs measures CLIP's own head.", "Set model.head to clip.")
