"""Captions generated from an image's regions, the loss that VSRN (Li et al., ICCV 2019) has beside its triplets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jsonargparse.typing import NonNegativeFloat, PositiveInt

from finetune.methods.base import Batch, Method
from probemb.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from finetune.config import Config
    from probemb.losses.output import LossOutput
    from probemb.models import DualEncoder


@dataclass(frozen=True)
class CaptionOptions:
    """Options of the decoder that generates captions from regions.

    Args:
        caption_weight: of the captions' negative log-likelihood, a mean over captions; 0 for no decoder.
        word_width: of the decoder's word embeddings.
        hidden: of the GRUs that read the regions and generate the words.
    """

    caption_weight: NonNegativeFloat = 1.0
    word_width: PositiveInt = 300
    hidden: PositiveInt = 512


class Captioned(Method):
    """Adds the decoder's loss to that of the class behind it; the decoder attends to the regions before every word."""

    over_regions = True

    def __init__(self, config, model, pairs):
        super().__init__(config, model, pairs)
        if not self.options.caption_weight:
            return
        from torch import nn

        from probemb.models.autoencoder import RegionDecoder

        self.wants_tokens, self.wants_words = "trunk", True
        width, options = model.image_tower.token_width, self.options
        decoder = RegionDecoder(n_words(model), width, options.word_width, options.hidden)
        self.module.decoders = nn.ModuleDict({"caption": decoder})

    @classmethod
    def problems(cls, config: Config) -> Iterator[UserError]:
        yield from super().problems(config)
        if not config.loss.caption_weight:
            yield from cls.unused(
                config,
                ("word_width", "hidden"),
                "loss.caption_weight is 0, so no captions are generated",
                "set loss.caption_weight above 0",
            )

    def loss(self, batch: Batch, model: DualEncoder) -> LossOutput:
        from probemb.losses.output import LossOutput

        out = super().loss(batch, model)
        if not self.options.caption_weight:
            return out
        caption = self.caption_loss(batch, model)
        loss = out.loss + self.options.caption_weight * caption
        return LossOutput(loss, {"triplet": out.loss.detach(), **out.terms, "caption": caption.detach()})

    def caption_loss(self, batch: Batch, model: DualEncoder) -> Tensor:
        """Mean −log p of all ranks' captions, (); a rank decodes its own."""
        from probemb import distributed
        from probemb.cross_attention import Tokens

        words = model.cut_padding(batch.words)
        n = len(words) // distributed.world_size()
        own = slice(distributed.rank() * n, (distributed.rank() + 1) * n)
        regions = Tokens(batch.images.tokens[own], batch.images.mask[own])
        each = self.module.decoders["caption"].nll(regions, words[own], words[own])
        return distributed.gather(each.mean()[None]).mean()


def n_words(model: DualEncoder) -> int:
    """Number of token ids of a model. Raises UserError: the text tower does not tell."""
    from probemb.models.word_tokenizer import FIRST_WORD

    text = model.config["architecture"]["text_cfg"]
    if "vocabulary" in text:
        return FIRST_WORD + len(text["vocabulary"])
    if text.get("hf_model_name"):
        raise UserError(
            f"The text tower of {model.config['name']} is from Hugging Face, and a decoder of captions needs the "
            "number of its words.",
            "Choose another model, such as resnet152-bigru.",
        )
    return text.get("vocab_size", 49408)
