"""Methods over an image's regions: SCAN, which compares them with words one by one; VSRN, which reasons over them."""

from dataclasses import asdict, dataclass

from jsonargparse.typing import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import nn

from finetune.methods.base import Batch, Hinge, Method
from finetune.methods.points import VSE
from finetune.methods.probabilistic import ProbVSEPlusPlus
from probemb import distributed
from probemb.cross_attention import CrossAttention, Tokens, unit_tokens
from probemb.losses import LossOutput
from probemb.losses.jwae import RegionDecoder
from probemb.losses.triplet import scan_loss
from probemb.models.options import Aggregation, Direction, Norm

LAMBDAS = {"t2i": (9.0, 6.0), "i2t": (4.0, 5.0)}  # of the softmax and of "lse", of the published models (Flickr30k)


class SCAN(Method):
    """Stacked cross attention: every token of one side attends to the other side's."""

    @dataclass(frozen=True)
    class Options(Hinge):
        """Triplet loss of attention scores. Source: SCAN §3, §4.2.

        Args:
            direction: t2i (words attend to regions) or i2t.
            aggregation: of cosines: lse, mean, sum or max.
            norm: of the products over the tokens that attend.
            lambda_softmax: inverse temperature of the attention; empty for 9 (t2i) or 4 (i2t).
            lambda_lse: of the aggregation lse; empty for 6 (t2i) or 5 (i2t).
        """

        direction: Direction = "t2i"
        aggregation: Aggregation = "lse"
        norm: Norm = "clipped-l2norm"
        lambda_softmax: PositiveFloat | None = None
        lambda_lse: PositiveFloat | None = None

    wants_tokens = True
    whole_items = True
    heads = ("average",)  # others pool tokens by what would not be trained
    ranking = "attention"

    @classmethod
    def model_options(cls, options) -> dict:
        return {**super().model_options(options), "attention": asdict(cross_attention(options))}

    def loss(self, batch: Batch, model) -> LossOutput:
        images, texts = (unit_tokens(side.tokens, side.mask) for side in (batch.images, batch.texts))
        o = self.options
        return scan_loss(images, texts, batch.match, cross_attention(o), o.margin, o.hardest_in(batch.epoch))


def cross_attention(options: SCAN.Options) -> CrossAttention:
    softmax, lse = LAMBDAS[options.direction]
    lambdas = options.lambda_softmax or softmax, options.lambda_lse or lse
    return CrossAttention(options.direction, options.aggregation, options.norm, *lambdas)


class Captioned(Method):
    """Adds captions generated from regions to the loss of the class behind it. Source: VSRN (Li et al., ICCV 2019)."""

    @dataclass(frozen=True)
    class Options:
        """Captions generated from regions.

        Args:
            caption_weight: of the captions' negative log-likelihood; a mean over captions, in VSRN 1. 0 for no decoder.
            word_width: of the decoder's word embeddings.
            hidden: units of the GRUs; these read the regions and generate the words.
        """

        caption_weight: NonNegativeFloat = 1.0
        word_width: PositiveInt = 300
        hidden: PositiveInt = 512

    over_regions = True
    wants_words = True

    def build(self, model, data) -> None:
        if not self.options.caption_weight:
            return
        self.wants_tokens = "trunk"
        width, o = model.image_tower.token_width, self.options
        decoder = RegionDecoder(n_words(model), width, o.word_width, o.hidden)
        self.module.decoders = nn.ModuleDict({"caption": decoder})

    def loss(self, batch: Batch, model) -> LossOutput:
        out = super().loss(batch, model)
        if not self.options.caption_weight:
            return out
        words = model.cut_padding(batch.words)
        own = own_rows(len(words))  # a rank decodes its own
        regions = Tokens(batch.images.tokens[own], batch.images.mask[own])
        each = self.module.decoders["caption"].nll(regions, words[own], words[own])
        caption = distributed.gather(each.mean()[None]).mean()
        loss = out.loss + self.options.caption_weight * caption
        return LossOutput(loss, {"triplet": out.loss, **out.terms, "caption": caption})


class VSRN(Captioned, VSE):
    """Graph reasoning over regions and a GRU, with VSE++'s hardest negatives and captions generated from regions."""

    @dataclass(frozen=True)
    class Options(Captioned.Options, Hinge):
        """Triplet loss, and captions generated from regions. Source: VSRN, joint matching and generation."""


class ProbVSRN(Captioned, ProbVSEPlusPlus):
    """VSRN with normals in place of points."""

    @dataclass(frozen=True)
    class Options(Captioned.Options, ProbVSEPlusPlus.Options):
        """Triplet loss of a similarity of normals; the paper names no other."""


def own_rows(n: int) -> slice:
    """This rank's rows among those of all ranks: it decodes these, and the mean of all ranks' errors is the loss."""
    each = n // distributed.world_size()
    return slice(distributed.rank() * each, (distributed.rank() + 1) * each)


def n_words(model) -> int:
    """Number of token ids: rows of the text tower's first table."""
    return next(module.num_embeddings for module in model.text_tower.modules() if isinstance(module, nn.Embedding))
