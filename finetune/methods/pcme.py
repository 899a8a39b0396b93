"""PCME."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jsonargparse.typing import NonNegativeFloat, PositiveFloat, PositiveInt

from finetune.methods.base import Batch, Method

if TYPE_CHECKING:
    from probemb.losses.output import LossOutput
    from probemb.models import DualEncoder


class PCME(Method):
    """PCME: soft contrastive loss of sampled embeddings, with the information bottleneck."""

    @dataclass(frozen=True)
    class Options:
        """Match probability of samples. Source: PCME++ §B.2 (scale, shift and bottleneck as PCME++'s).

        Args:
            scale: initial a of the match probability sigmoid(-a d + b).
            shift: initial b.
            samples: drawn of each item.
            vib: weight beta of the information bottleneck.
        """

        scale: PositiveFloat = 5.0
        shift: NonNegativeFloat = 5.0
        samples: PositiveInt = 8
        vib: NonNegativeFloat = 1e-4

    probabilistic = True
    soft_labels = True
    trains = ("scale", "shift")

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
            generator=batch.generator,
        )
