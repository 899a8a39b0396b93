"""PCME: match probabilities of sampled embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from jsonargparse.typing import NonNegativeFloat, PositiveFloat, PositiveInt

from finetune.methods.base import Batch, Method
from probemb.errors import UserError

if TYPE_CHECKING:
    from finetune.config import Config
    from probemb.losses.output import LossOutput
    from probemb.models import DualEncoder


class PCME(Method):
    """PCME: soft contrastive loss of sampled embeddings, information bottleneck, uniformity.

    finetune/recipes/pcme-cub.yaml and pcme-coco.yaml are the paper's own recipe; the defaults are those of PCME++'s
    comparison, on CLIP's towers.
    """

    @dataclass(frozen=True)
    class Options:
        """Match probability of samples. Source: PCME++ §B.2 (scale, shift and bottleneck as PCME++'s).

        Args:
            scale: initial a of the match probability, the mean over sample pairs of sigmoid(2 (b - a d)). The 2 is the
                public code's, to which the published a and b belong; the paper has sigmoid(b - a d).
            shift: initial b.
            samples: drawn of each item.
            vib: weight beta of the information bottleneck.
            vib_form: kl (mean over items and dimensions), sum (their sum, as PCME weighs it), or pcme and pcmepp, the
                authors' codes, which take log sigma for log sigma^2.
            uniformity: weight of the uniformity loss of all samples.
        """

        scale: PositiveFloat = 5.0
        shift: NonNegativeFloat = 5.0
        samples: PositiveInt = 8
        vib: NonNegativeFloat = 1e-4
        vib_form: Literal["kl", "sum", "pcme", "pcmepp"] = "kl"
        uniformity: NonNegativeFloat = 0.0

    note = "PCME's own recipe: --config finetune/recipes/pcme-coco.yaml or pcme-cub.yaml"
    probabilistic = True
    ranking = "match-probability"
    soft_labels = True
    trains = ("scale", "shift")
    match = "samples"

    @classmethod
    def problems(cls, config: Config) -> Iterator[UserError]:
        yield from super().problems(config)
        if not config.loss.vib:
            yield from cls.unused(config, ["vib_form"], "loss.vib is 0", "set loss.vib above 0")

    def loss(self, batch: Batch, model: DualEncoder) -> LossOutput:
        from probemb.losses import pcme_loss

        return pcme_loss(
            batch.image,
            batch.text,
            batch.match,
            n_samples=self.options.samples,
            scale=model.scale,
            shift=model.shift,
            vib=self.options.vib,
            vib_form=self.options.vib_form,
            uniformity_weight=self.options.uniformity,
            generator=batch.generator,
        )
