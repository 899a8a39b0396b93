"""jWAE on top of SCAN: codes of regions and words, compared by stacked cross attention. Source: jWAE §5.1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from jsonargparse.typing import NonNegativeFloat

from finetune.methods.base import Batch
from finetune.methods.captions import n_words
from finetune.methods.jwae import JWAEMH, JWAEMSE
from finetune.methods.scan import SCAN

if TYPE_CHECKING:
    from torch import Tensor

    from probemb.models import DualEncoder


class JWAESCAN(JWAEMH, SCAN):
    """jWAE-MH with SCAN's scores: every region and word has a code, reconstructed and held to the prior.

    A caption is generated from the mean of its words' codes.
    """

    @dataclass(frozen=True)
    class Options(SCAN.Options, JWAEMSE.Options):
        """SCAN and Gaussian regularisation. Source: jWAE §5.1; SCAN.

        Args:
            reduce: of the reconstructions' errors: mean (public code), or sum (Eq. 6).
            published: as in the public code: unit codes of one region and one word of each item before the
                discriminator, which has two layers and keeps all gradients, also the encoders'; each word predicted
                from its own code and from itself.
        """

        reduce: Literal["sum", "mean"] = "mean"
        image_weight: NonNegativeFloat = 0.5
        text_weight: NonNegativeFloat = 0.005
        image_prior: NonNegativeFloat = 0.01
        text_prior: NonNegativeFloat = 0.01
        published: bool = False

    def __init__(self, config, model, pairs):
        super().__init__(config, model, pairs)
        if self.options.published:
            self._rebuild_as_published(model)

    def _rebuild_as_published(self, model: DualEncoder) -> None:
        import torch

        from probemb.models.autoencoder import Discriminator, FeatureDecoder, WordDecoder

        d, o = model.embed_dim, self.options
        self.module.decoders["image"] = FeatureDecoder(d, model.image_tower.target_width(True), (d, d))
        self.module.decoders["text"] = WordDecoder(n_words(model), d, o.word_width, o.hidden, published=True)
        self.aside.discriminator = Discriminator(d, o.discriminator_hidden, published=True)
        for i, parameter in enumerate(self.aside.discriminator.parameters()):
            self.aside.register_buffer(f"gradient_{i}", torch.zeros_like(parameter))
        self.aside_optimizer = torch.optim.Adam(self.aside.parameters(), o.discriminator_lr)

    def supervision(self, batch: Batch, model: DualEncoder) -> dict[str, tuple[float, Tensor]]:
        return {"triplet": (1.0, SCAN.loss(self, batch, model).loss)}

    def decoded(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Codes of regions (N, R, D), and of captions (N, D); published, of words (N, L, D)."""
        if self.options.published:
            return _unit(batch.images.tokens), _unit(batch.texts.tokens)
        return batch.images.tokens, batch.texts.codes

    def codes(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Codes of all regions and of all words, (…, D); published, of one place in each item, (N, D)."""
        batch = batch.everything
        sides = batch.images, batch.texts
        if self.options.published:
            there = (side.tokens * side.mask[..., None] for side in sides)  # 0 behind a caption's end, as there
            return tuple(_unit(tokens[:, place]) for tokens, place in zip(there, self.places(batch)))
        return tuple(side.tokens[side.mask] for side in sides)

    def places(self, batch: Batch) -> tuple[int, int]:
        """The region and the word that the public code shows the discriminator in a step: any but the last one."""
        import torch

        # Of the run's seed and the step; the same for the encoders' step and the discriminator's.
        generator = torch.Generator().manual_seed(batch.generator.initial_seed())
        last = (max(1, side.tokens.shape[1] - 1) for side in (batch.images, batch.texts))
        return tuple(int(torch.randint(n, (), generator=generator)) for n in last)

    def prior_loss(self, codes: Tensor) -> Tensor:
        """Loss of the encoders, (); published, its gradient is the discriminator's too."""
        if not self.options.published:
            return super().prior_loss(codes)
        from probemb.losses.jwae import encoder_loss

        return encoder_loss(self.aside.discriminator(codes))

    def keep_gradients(self) -> None:
        """Published: the gradients become the sum over all steps, of the encoders' loss and of its own."""
        for i, parameter in enumerate(self.aside.discriminator.parameters() if self.options.published else ()):
            held = getattr(self.aside, f"gradient_{i}")
            held += parameter.grad
            parameter.grad = held.clone()


def _unit(codes: Tensor) -> Tensor:
    from torch.nn import functional as F

    return F.normalize(codes, dim=-1)
