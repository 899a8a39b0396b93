"""SCAN, which compares regions and words one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from jsonargparse.typing import NonNegativeInt, PositiveFloat

from finetune.methods.base import Batch, Method
from probemb.errors import UserError

if TYPE_CHECKING:
    from finetune.config import Config
    from probemb.cross_attention import CrossAttention
    from probemb.losses.output import LossOutput
    from probemb.models import DualEncoder

LAMBDAS = {"t2i": (9.0, 6.0), "i2t": (4.0, 5.0)}  # of the softmax and of "lse", of the published models (Flickr30k)


class SCAN(Method):
    """Stacked cross attention: every token of one side attends to the other side's."""

    @dataclass(frozen=True)
    class Options:
        """Triplet loss of attention scores. Source: SCAN §3, §4.2.

        Args:
            direction: t2i, words attend to regions, or i2t, regions to words.
            aggregation: of the cosines of a pair: lse, mean, sum or max.
            norm: of the products over the tokens that attend.
            lambda_softmax: inverse temperature of the attention; empty for 9 (t2i) or 4 (i2t).
            lambda_lse: of the aggregation lse; empty for 6 (t2i) or 5 (i2t).
            margin: of the hinges, in units of the score.
            hardest: the hardest negative's hinge rather than the sum of all.
            warmup_epochs: first epochs, with all negatives; then the hardest.
        """

        direction: Literal["t2i", "i2t"] = "t2i"
        aggregation: Literal["lse", "mean", "sum", "max"] = "lse"
        norm: Literal["clipped-l2norm", "l2norm", "clipped-l1norm", "l1norm", "softmax", "clipped", "none"] = (
            "clipped-l2norm"
        )
        lambda_softmax: PositiveFloat | None = None
        lambda_lse: PositiveFloat | None = None
        margin: PositiveFloat = 0.2
        hardest: bool = True
        warmup_epochs: NonNegativeInt = 0

    wants_tokens = True
    ranking = "attention"

    @classmethod
    def model_options(cls, config: Config) -> dict:
        return {**super().model_options(config), "attention": asdict(cross_attention(config.loss))}

    def loss(self, batch: Batch, model: DualEncoder) -> LossOutput:
        from probemb.cross_attention import unit_tokens
        from probemb.losses import scan_loss

        images, texts = (unit_tokens(side.tokens, side.mask) for side in (batch.images, batch.texts))
        how, options = cross_attention(self.options), self.options
        hardest = options.hardest and batch.epoch >= options.warmup_epochs
        return scan_loss(images, texts, batch.match, how, options.margin, hardest)

    @classmethod
    def problems(cls, config: Config) -> Iterator[UserError]:
        yield from super().problems(config)
        if config.model.head != "average":
            yield UserError(
                f"The method {config.method} compares tokens, and head {config.model.head} pools them by what would "
                "not be trained.",
                "Set model.head to average, which works with every image and text tower.",
            )
        if config.size_augment:
            yield UserError(
                f"The method {config.method} compares the tokens that there are, and SizeAugment has others.",
                "Set size_augment to 0.",
            )
        if config.loss.aggregation != "lse":
            yield from cls.unused(
                config,
                ["lambda_lse"],
                f"loss.aggregation is {config.loss.aggregation}",
                "set loss.aggregation to lse",
            )
        if not config.loss.hardest:
            yield from cls.unused(config, ["warmup_epochs"], "loss.hardest is false", "set loss.hardest to true")


def cross_attention(options: SCAN.Options) -> CrossAttention:
    """The options with the direction's own lambdas where none are given."""
    from probemb.cross_attention import CrossAttention

    softmax, lse = LAMBDAS[options.direction]
    return CrossAttention(
        options.direction,
        options.aggregation,
        options.norm,
        options.lambda_softmax or softmax,
        options.lambda_lse or lse,
    )
