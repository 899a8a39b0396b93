"""Joint Wasserstein autoencoders and their baselines. Source: Mahajan et al., jWAE, §4 and §5.1.

Codes are the means before they are l2-normalised, as the prior N(0, I) needs them; the model itself gives unit means,
so its ranking by the distance of the means is the paper's by the cosine. What is reconstructed are the image trunk's
features and the caption: its words where the text tower has weights, its mean word vector where that is the input.
A loss is a sum of parts, {name: (weight, value)}: `supervision` by pairs, `reconstruction`, and a prior on the codes.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from finetune.methods.base import Batch, Hinge, Method
from finetune.methods.regions import SCAN, n_words, own_rows
from probemb import distributed
from probemb.gaussian import Gaussian
from probemb.losses import LossOutput, jwae
from probemb.losses.jwae import Discriminator, FeatureDecoder, WordDecoder
from probemb.losses.triplet import triplet_loss

Parts = dict[str, tuple[float, Tensor]]


class MSE(Method):
    """Two autoencoders whose codes of a pair are pulled together."""

    @dataclass(frozen=True)
    class Options:
        """Reconstruction. Source: jWAE Eqs. 5-7; weights of jWAE-MSE.

        Args:
            image_weight: of the images' reconstruction.
            text_weight: of the captions' reconstruction.
            image_norm: l1 or l2; of the image features' error.
            reduce: of both errors: sum (Eq. 6), or mean (public code); the codes' distance of Eq. 7 is a mean. With the
                mean and norm l2 the distance outweighs them, and all codes become one.
            word_dropout: share of words hidden from the text decoder; as in the public code.
            word_width: of the decoder's word embeddings.
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
    whole_items = True
    takes_unpaired = True

    def build(self, model, data) -> None:
        from probemb.models.towers.words import WordMean

        d, of_tokens = model.embed_dim, bool(self.wants_tokens)
        self.generates_words = of_tokens or not isinstance(model.text_tower, WordMean)
        if self.generates_words:
            decoder = WordDecoder(n_words(model), d, self.options.word_width, self.options.hidden)
        else:
            decoder = FeatureDecoder(d, model.text_tower.target_width(of_tokens), (d,))
        images = FeatureDecoder(d, model.image_tower.target_width(of_tokens), (d,))
        self.module.decoders = nn.ModuleDict({"image": images, "text": decoder})

    def loss(self, batch: Batch, model) -> LossOutput:
        parts = self.parts(batch, model)
        loss = sum(weight * value for weight, value in parts.values())
        terms = {name: value for name, (_, value) in parts.items()}
        return LossOutput(loss, terms | jwae.code_statistics(torch.cat(self.codes(batch))))

    def codes(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """All codes of images and of texts, (…, D) each: those that jWAE holds to the prior."""
        return batch.everything.images.codes, batch.everything.texts.codes

    def parts(self, batch: Batch, model) -> Parts:
        """The loss, summed in this order."""
        everything = batch.everything
        reconstruction = self.reconstruction(everything, model, *self.decoded(everything))
        return self.supervision(batch, model) | reconstruction

    def supervision(self, batch: Batch, model) -> Parts:
        return {"mse": (1.0, jwae.code_mse(batch.images.codes, batch.texts.codes))}

    def decoded(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The codes that images and captions are reconstructed from, (N, D) each."""
        return batch.images.codes, batch.texts.codes

    def reconstruction(self, batch: Batch, model, image: Tensor, text: Tensor) -> Parts:
        """Errors of images and captions, means; a rank decodes its own rows, and the mean is of all ranks."""
        own, o, decoders, mask = own_rows(len(image)), self.options, self.module.decoders, batch.images.mask
        mask, features = None if mask is None else mask[own], batch.images.features[own]
        of_images = jwae.reconstruction(features, decoders["image"](image[own]), o.image_norm, mask)
        if self.generates_words:
            words = model.cut_padding(batch.words)
            seen = jwae.drop_words(words, o.word_dropout, batch.generator)  # drawn for the batch of all ranks
            of_texts = decoders["text"].nll(text[own], words[own], seen[own]).mean()
        else:
            of_texts = jwae.reconstruction(batch.texts.features[own], decoders["text"](text[own]), "squared")
        items = len(image) if o.reduce == "sum" else 1
        errors = {"image": (o.image_weight, of_images), "text": (o.text_weight, of_texts)}
        return {side: (items * weight, distributed.gather(x[None]).mean()) for side, (weight, x) in errors.items()}


class MMDMSE(MSE):
    """`mse`, and the discrepancy of the image codes' from the text codes' distribution."""

    @dataclass(frozen=True)
    class Options(MSE.Options):
        """Reconstruction and MMD. The paper names no weight, and neither kernel nor widths.

        Args:
            mmd_weight: of the discrepancy.
            kernel: rbf or imq; see `probemb.losses.jwae.mmd`.
        """

        mmd_weight: NonNegativeFloat = 0.2
        kernel: Literal["rbf", "imq"] = "rbf"

    def parts(self, batch: Batch, model) -> Parts:
        discrepancy = jwae.mmd(*self.codes(batch), self.options.kernel)
        return super().parts(batch, model) | {"mmd": (self.options.mmd_weight, discrepancy)}


@dataclass(frozen=True)
class Prior(MSE.Options):
    """Reconstruction, and a prior on the codes.

    Args:
        image_prior: weight of the image codes' divergence from the prior.
        text_prior: weight of the text codes'.
    """

    image_prior: NonNegativeFloat = 0.2
    text_prior: NonNegativeFloat = 0.2


class JWAEMSE(MSE):
    """jWAE-MSE: both codes' distributions are also held to N(0, I) by one discriminator."""

    @dataclass(frozen=True)
    class Options(Prior):
        """Gaussian regularisation. Source: jWAE Eq. 6, §5.1.

        Args:
            discriminator_lr: Adam's.
        """

        discriminator_lr: PositiveFloat = 5e-5

    def build(self, model, data) -> None:
        super().build(model, data)
        self.make_discriminator(model.embed_dim)

    def make_discriminator(self, d: int, **more) -> None:
        self.aside.discriminator = Discriminator(d, **more)
        self.aside_optimizer = torch.optim.Adam(self.aside.parameters(), self.options.discriminator_lr)

    def parts(self, batch: Batch, model) -> Parts:
        o, (image, text) = self.options, map(self.prior_loss, self.codes(batch))
        return super().parts(batch, model) | {"image_prior": (o.image_prior, image), "text_prior": (o.text_prior, text)}

    def prior_loss(self, codes: Tensor) -> Tensor:
        """Loss of the encoders, ()."""
        return self.aside.discriminator.encoder_loss(codes)

    def after_step(self, batch: Batch, model) -> dict[str, Tensor]:
        """A step of the discriminator; js is the bound on the codes' divergence from the prior that it found."""
        loss = self.aside.discriminator.loss(torch.cat(self.codes(batch)), batch.generator)
        loss.backward()
        for held, parameter in zip(self.aside.buffers(recurse=False), self.aside.parameters()):  # published ones
            held += parameter.grad
            parameter.grad = held.clone()
        self.aside_optimizer.step()
        self.aside_optimizer.zero_grad(set_to_none=True)
        return {"discriminator": loss.detach(), "js": jwae.js_bound(loss)}


def hinge_of_cosines(batch: Batch, image_ND: Tensor, text_ND: Tensor, options: Hinge) -> Parts:
    """The triplet loss of the codes' cosines, summed over pairs."""
    with torch.autocast(image_ND.device.type, enabled=False):
        similarity = F.normalize(image_ND, dim=-1) @ F.normalize(text_ND, dim=-1).T
        hardest = options.hardest_in(batch.epoch)
        return {"triplet": (1.0, triplet_loss(similarity, batch.match, options.margin, hardest).loss)}


class JWAEMH(JWAEMSE):
    """jWAE-MH: pairs are told from others by the triplet loss of the codes' cosines."""

    @dataclass(frozen=True)
    class Options(Hinge, JWAEMSE.Options):
        """Triplet loss and Gaussian regularisation. Source: jWAE Eqs. 1 and 9, §5.1."""

    def supervision(self, batch: Batch, model) -> Parts:
        return hinge_of_cosines(batch, batch.image.mean, batch.text.mean, self.options)


class VAEMH(MSE):
    """VAE-MH: variational autoencoders; the triplet loss is of one sample of every item."""

    @dataclass(frozen=True)
    class Options(Hinge, Prior):
        """Triplet loss and KL divergence of every item. Source: jWAE Eq. 2, Table 4; weights as of jWAE-MH."""

    probabilistic = True
    ranking = "mean"  # variances are those of codes, not of unit means

    def parts(self, batch: Batch, model) -> Parts:
        o, everything, drawn, kl = self.options, batch.everything, [], []
        for side in (everything.images, everything.texts):
            codes = Gaussian(side.codes, side.gaussian.log_var)
            drawn.append(codes.sample(1, batch.generator)[..., 0, :])
            kl.append(jwae.vae_kl(codes))
        prior = {"image_prior": (o.image_prior, kl[0]), "text_prior": (o.text_prior, kl[1])}
        triplet = hinge_of_cosines(batch, *(codes[: len(batch.match)] for codes in drawn), o)
        return triplet | self.reconstruction(everything, model, *drawn) | prior


class JWAESCAN(JWAEMH, SCAN):
    """jWAE-MH with SCAN's scores: every region and word has a code; a caption is generated from its words' mean."""

    @dataclass(frozen=True)
    class Options(SCAN.Options, JWAEMSE.Options):
        """SCAN and Gaussian regularisation. Source: jWAE §5.1; SCAN.

        Args:
            published: as in the public code; unit codes of one region and one word of each item before the
                discriminator, which has two layers and keeps all gradients, also the encoders'; each word predicted
                from its own code and from itself.
        """

        published: bool = False

    def build(self, model, data) -> None:
        super().build(model, data)
        d, o = model.embed_dim, self.options
        if not o.published:
            return
        self.module.decoders["image"] = FeatureDecoder(d, model.image_tower.target_width(True), (d, d))
        self.module.decoders["text"] = WordDecoder(n_words(model), d, o.word_width, o.hidden, published=True)
        self.make_discriminator(d, published=True)
        for i, parameter in enumerate(self.aside.parameters()):  # sums over all steps, of both losses
            self.aside.register_buffer(f"gradient_{i}", torch.zeros_like(parameter))

    def supervision(self, batch: Batch, model) -> Parts:
        return {"triplet": (1.0, SCAN.loss(self, batch, model).loss)}

    def decoded(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Codes of regions (N, R, D), and of captions (N, D); published, of words (N, L, D)."""
        if self.options.published:
            return F.normalize(batch.images.tokens, dim=-1), F.normalize(batch.texts.tokens, dim=-1)
        return batch.images.tokens, batch.texts.codes

    def codes(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Codes of all regions and of all words, (…, D); published, of one place in each item, (N, D)."""
        batch = batch.everything
        sides = batch.images, batch.texts
        if self.options.published:
            there = (side.tokens * side.mask[..., None] for side in sides)  # 0 behind a caption's end, as there
            return tuple(F.normalize(tokens[:, at], dim=-1) for tokens, at in zip(there, self.places(batch)))
        return tuple(side.tokens[side.mask] for side in sides)

    def places(self, batch: Batch) -> tuple[int, int]:
        """The region and the word that the public code shows the discriminator in a step: any but the last one."""
        # The same for the encoders' step and the discriminator's.
        generator = torch.Generator().manual_seed(batch.generator.initial_seed())
        last = (max(1, side.tokens.shape[1] - 1) for side in (batch.images, batch.texts))
        return tuple(int(torch.randint(n, (), generator=generator, device="cpu")) for n in last)

    def prior_loss(self, codes: Tensor) -> Tensor:
        """Loss of the encoders, (); published, its gradient is the discriminator's too."""
        published, discriminator = self.options.published, self.aside.discriminator
        return jwae.encoder_loss(discriminator(codes)) if published else super().prior_loss(codes)
