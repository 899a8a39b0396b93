"""Joint Wasserstein autoencoders and their baselines. Source: Mahajan et al., jWAE, §4 and §5.1.

Codes are the means before they are l2-normalised, as the prior N(0, I) needs them; the model itself gives unit means,
so its ranking by the distance of the means is the paper's by the cosine. What is reconstructed are the image trunk's
features and the caption: its words where the text tower has weights, its mean word vector where that is the input.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from finetune.methods.base import Batch, Method
from finetune.methods.captions import n_words
from probemb.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from probemb.losses.output import LossOutput
    from probemb.models import DualEncoder


TEXT_DECODER = ("word_dropout", "word_width", "hidden")  # its options


class MSE(Method):
    """Two autoencoders whose codes of a pair are pulled together."""

    @dataclass(frozen=True)
    class Options:
        """Reconstruction. Source: jWAE Eqs. 5-7; weights of jWAE-MSE.

        Args:
            image_weight: of the reconstruction of image features.
            text_weight: of the reconstruction of captions.
            image_norm: of the image features' error, l1 or l2.
            reduce: of both errors: sum (Eq. 6; the codes' distance of Eq. 7 is a mean), or mean (public code).
                With the mean and norm l2 the distance outweighs them, and all codes become one.
            word_dropout: share of the words that the text decoder does not see (public code). Mean word vectors are
                reconstructed by two layers, which none of these three options concerns.
            word_width: of the text decoder's word embeddings.
            hidden: of the text decoder's GRU.
        """

        image_weight: NonNegativeFloat = 1.0
        text_weight: NonNegativeFloat = 1.0
        image_norm: Literal["l1", "l2"] = "l2"
        reduce: Literal["sum", "mean"] = "sum"
        word_dropout: ClosedUnitInterval = 0.2
        word_width: PositiveInt = 300
        hidden: PositiveInt = 512

    wants_features = True
    wants_words = True
    takes_unpaired = True

    def __init__(self, config, model, pairs):
        from torch import nn

        from probemb.models.architectures import reads_vectors
        from probemb.models.autoencoder import FeatureDecoder, WordDecoder

        super().__init__(config, model, pairs)
        d, text = model.embed_dim, model.text_tower
        self.generates_words = self.wants_tokens or not reads_vectors(model.config["architecture"])
        if self.generates_words:
            decoder = WordDecoder(n_words(model), d, self.options.word_width, self.options.hidden)
        else:
            decoder = FeatureDecoder(d, text.target_width(self.wants_tokens), (d,))
        images = FeatureDecoder(d, model.image_tower.target_width(self.wants_tokens), (d,))
        self.module.decoders = nn.ModuleDict({"image": images, "text": decoder})

    def loss(self, batch: Batch, model: DualEncoder) -> LossOutput:
        import torch

        from probemb.losses.jwae import code_statistics

        out = self.weighed(self.parts(batch, model))
        out.terms |= code_statistics(torch.cat(self.codes(batch)))
        return out

    def codes(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """All codes of images and of texts, (…, D) each: those that jWAE holds to the prior."""
        return batch.everything.images.codes, batch.everything.texts.codes

    def parts(self, batch: Batch, model: DualEncoder) -> dict[str, tuple[float, Tensor]]:
        """(weight, value) of every part of the loss, by name."""
        everything = batch.everything
        reconstruction = self.reconstruction(everything, model, *self.decoded(everything))
        return self.supervision(batch, model) | reconstruction

    def supervision(self, batch: Batch, model: DualEncoder) -> dict[str, tuple[float, Tensor]]:
        """Loss terms that pull the codes of a pair together."""
        from probemb.losses.jwae import code_mse

        return {"mse": (1.0, code_mse(batch.images.codes, batch.texts.codes))}

    def decoded(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The codes that images and captions are reconstructed from, (N, D) each."""
        return batch.images.codes, batch.texts.codes

    def reconstruction(
        self, batch: Batch, model: DualEncoder, image: Tensor, text: Tensor
    ) -> dict[str, tuple[float, Tensor]]:
        """Of images and captions from their codes, means; a rank decodes its own rows, and the mean is of all ranks."""
        from probemb import distributed

        n = len(image) // distributed.world_size()
        own = slice(distributed.rank() * n, (distributed.rank() + 1) * n)
        errors = {"image": self.image_error(batch, image, own), "text": self.text_error(batch, model, text, own)}
        items = len(image) if self.options.reduce == "sum" else 1
        weights = {"image": items * self.options.image_weight, "text": items * self.options.text_weight}
        return {side: (weights[side], distributed.gather(error[None]).mean()) for side, error in errors.items()}

    def image_error(self, batch: Batch, image: Tensor, own: slice) -> Tensor:
        """Mean over a rank's own images, (); codes of all ranks' images."""
        from probemb.losses.jwae import reconstruction

        mask = None if batch.images.mask is None else batch.images.mask[own]
        decoded = self.module.decoders["image"](image[own])
        return reconstruction(batch.images.features[own], decoded, self.options.image_norm, mask)

    def text_error(self, batch: Batch, model: DualEncoder, text: Tensor, own: slice) -> Tensor:
        """Mean over a rank's own captions, (); codes of all ranks' captions."""
        from probemb.losses.jwae import drop_words, reconstruction

        decoder = self.module.decoders["text"]
        if not self.generates_words:
            return reconstruction(batch.texts.features[own], decoder(text[own]), "squared")
        words = model.cut_padding(batch.words)
        seen = drop_words(words, self.options.word_dropout, batch.generator)  # drawn for the batch of all ranks
        return decoder.nll(text[own], words[own], seen[own]).mean()

    @staticmethod
    def weighed(parts: dict[str, tuple[float, Tensor]]) -> LossOutput:
        """The sum of all parts with their weights; the terms are without."""
        from probemb.losses.output import LossOutput

        loss = sum(weight * value for weight, value in parts.values())
        return LossOutput(loss, {name: value.detach() for name, (_, value) in parts.items()})

    @classmethod
    def problems(cls, config) -> Iterator[UserError]:
        yield from super().problems(config)
        if config.size_augment:
            yield UserError(
                f"{config.method} reconstructs whole captions, and SizeAugment changes them.", "Set size_augment to 0."
            )
        o = config.loss
        if not o.image_weight:
            yield from cls.unused(config, ["image_norm"], "loss.image_weight is 0", "set loss.image_weight above 0")
        if not o.image_weight and not o.text_weight:
            yield from cls.unused(config, ["reduce"], "loss.image_weight and loss.text_weight are 0", "set one above 0")
        if not o.text_weight:
            because = "loss.text_weight is 0, so no captions are generated"
            yield from cls.unused(config, TEXT_DECODER, because, "set loss.text_weight above 0")
        from probemb.models.architectures import read_architecture, reads_vectors

        if not cls.wants_tokens and reads_vectors(read_architecture(config.model.name)):
            yield from cls.unused(
                config,
                TEXT_DECODER,
                f"{config.model.name} has mean word vectors as text, and they are reconstructed without words",
                "choose a model that reads words one by one, such as resnet152-bigru",
            )


class MMDMSE(MSE):
    """`mse`, and the discrepancy of the image codes' from the text codes' distribution."""

    @dataclass(frozen=True)
    class Options(MSE.Options):
        """Reconstruction and MMD. The paper names no weight, and neither kernel nor widths.

        Args:
            mmd_weight: of the discrepancy.
            kernel: rbf or imq, see `probemb.losses.jwae.mmd`.
        """

        mmd_weight: NonNegativeFloat = 0.2
        kernel: Literal["rbf", "imq"] = "rbf"

    def parts(self, batch: Batch, model: DualEncoder) -> dict[str, tuple[float, Tensor]]:
        from probemb.losses.jwae import mmd

        found = mmd(*self.codes(batch), self.options.kernel)
        return super().parts(batch, model) | {"mmd": (self.options.mmd_weight, found)}

    @classmethod
    def problems(cls, config) -> Iterator[UserError]:
        yield from super().problems(config)
        if not config.loss.mmd_weight:
            yield from cls.unused(config, ["kernel"], "loss.mmd_weight is 0", "set loss.mmd_weight above 0")


class JWAEMSE(MSE):
    """jWAE-MSE: both codes' distributions are also held to N(0, I) by one discriminator."""

    @dataclass(frozen=True)
    class Options(MSE.Options):
        """Gaussian regularisation. Source: jWAE Eq. 6, §5.1.

        Args:
            image_prior: weight of the image codes' divergence from the prior.
            text_prior: weight of the text codes'.
            discriminator_lr: Adam's.
            discriminator_hidden: width of its layers (public code).
        """

        image_prior: NonNegativeFloat = 0.2
        text_prior: NonNegativeFloat = 0.2
        discriminator_lr: PositiveFloat = 5e-5
        discriminator_hidden: PositiveInt = 256

    def __init__(self, config, model, pairs):
        import torch

        from probemb.models.autoencoder import Discriminator

        super().__init__(config, model, pairs)
        self.aside.discriminator = Discriminator(model.embed_dim, self.options.discriminator_hidden)
        self.aside_optimizer = torch.optim.Adam(self.aside.parameters(), self.options.discriminator_lr)

    @classmethod
    def problems(cls, config) -> Iterator[UserError]:
        yield from super().problems(config)
        if not (config.loss.image_prior or config.loss.text_prior):
            yield from cls.unused(
                config,
                ("discriminator_lr", "discriminator_hidden"),
                "loss.image_prior and loss.text_prior are 0",
                "set one of them above 0",
            )

    def parts(self, batch: Batch, model: DualEncoder) -> dict[str, tuple[float, Tensor]]:
        image, text = self.codes(batch)
        prior = {
            "image_prior": (self.options.image_prior, self.prior_loss(image)),
            "text_prior": (self.options.text_prior, self.prior_loss(text)),
        }
        return super().parts(batch, model) | prior

    def prior_loss(self, codes: Tensor) -> Tensor:
        """Loss of the encoders, ()."""
        return self.aside.discriminator.judge(codes)

    def after_step(self, batch: Batch, model: DualEncoder) -> dict[str, Tensor]:
        """A step of the discriminator; js is the bound on the codes' divergence from the prior that it found."""
        import torch

        from probemb.losses.jwae import js_bound

        loss = self.aside.discriminator.loss(torch.cat(self.codes(batch)), batch.generator)
        loss.backward()
        self.keep_gradients()
        self.aside_optimizer.step()
        self.aside_optimizer.zero_grad(set_to_none=True)
        return {"discriminator": loss.detach(), "js": js_bound(loss)}

    def keep_gradients(self) -> None:
        """Called before the discriminator's step; its gradients are those of its own loss."""


@dataclass(frozen=True)
class Hinge:
    """Options of the max-margin hinge.

    Args:
        margin: of the hinges, in units of the similarity.
        warmup_epochs: first epochs, with all negatives; then the hardest.
    """

    margin: PositiveFloat = 0.2
    warmup_epochs: NonNegativeInt = 1


class JWAEMH(JWAEMSE):
    """jWAE-MH: pairs are told from others by the triplet loss of the codes' cosines."""

    @dataclass(frozen=True)
    class Options(Hinge, JWAEMSE.Options):
        """Triplet loss and Gaussian regularisation. Source: jWAE Eqs. 1 and 9, §5.1.

        Args:
            reduce: of the reconstructions' errors: mean (public code, with weight 0.05 of the images' l1 error), or
                sum (Eq. 6).
        """

        reduce: Literal["sum", "mean"] = "mean"
        image_weight: NonNegativeFloat = 0.5
        text_weight: NonNegativeFloat = 0.005
        image_prior: NonNegativeFloat = 0.01
        text_prior: NonNegativeFloat = 0.01

    def supervision(self, batch: Batch, model: DualEncoder) -> dict[str, tuple[float, Tensor]]:
        return {"triplet": (1.0, hinge_of_cosines(batch, batch.image.mean, batch.text.mean, self.options))}


class VAEMH(MSE):
    """VAE-MH: variational autoencoders; the triplet loss is of one sample of every item."""

    @dataclass(frozen=True)
    class Options(Hinge, MSE.Options):
        """Triplet loss and KL divergence of every item. Source: jWAE Eq. 2, Table 4; weights as of jWAE-MH.

        Args:
            image_prior: weight of the images' KL divergence from the prior.
            text_prior: weight of the captions'.
            reduce: of the reconstructions' errors: mean, as in jWAE-MH, or sum.
        """

        reduce: Literal["sum", "mean"] = "mean"
        image_weight: NonNegativeFloat = 0.5
        text_weight: NonNegativeFloat = 0.005
        image_prior: NonNegativeFloat = 0.01
        text_prior: NonNegativeFloat = 0.01

    probabilistic = True
    ranking = "mean"  # variances are those of codes, not of unit means

    def parts(self, batch: Batch, model: DualEncoder) -> dict[str, tuple[float, Tensor]]:
        import torch

        from probemb import Gaussian
        from probemb.losses.jwae import vae_kl

        drawn, parts, everything = [], {}, batch.everything
        for side, encoded in (("image", everything.images), ("text", everything.texts)):
            codes = Gaussian(encoded.codes, encoded.gaussian.log_var)
            noise = torch.randn(
                codes.mean.shape, generator=batch.generator, device=codes.mean.device, dtype=codes.mean.dtype
            )
            drawn.append(codes.mean + (0.5 * codes.log_var).exp() * noise)
            parts[f"{side}_prior"] = (getattr(self.options, f"{side}_prior"), vae_kl(codes))
        triplet = hinge_of_cosines(batch, *(codes[: len(batch.images)] for codes in drawn), self.options)
        return {"triplet": (1.0, triplet)} | self.reconstruction(everything, model, *drawn) | parts


def hinge_of_cosines(batch: Batch, image_ND: Tensor, text_ND: Tensor, options: Hinge) -> Tensor:
    """The triplet loss of the codes' cosines, summed over pairs, ()."""
    import torch
    from torch.nn import functional as F

    from probemb.losses.triplet import triplet_loss

    with torch.autocast(image_ND.device.type, enabled=False):
        similarity = F.normalize(image_ND, dim=-1) @ F.normalize(text_ND, dim=-1).T
        hardest = batch.epoch >= options.warmup_epochs
        return triplet_loss(similarity, batch.match, options.margin, hardest).loss
