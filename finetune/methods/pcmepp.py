"""PCME++, the same with the CLIP loss beside it, and the same between means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jsonargparse.typing import NonNegativeFloat, PositiveFloat

from finetune.methods.base import Batch, Method

if TYPE_CHECKING:
    from torch import Tensor

    from finetune.config import Config
    from probemb.losses.output import LossOutput
    from probemb.models import DualEncoder


class PCMEPlusPlusMean(Method):
    """PCME++ between means: the point model's variances are practically zero, which leaves CSD the squared distance."""

    @dataclass(frozen=True)
    class Options:
        """Match loss between means. Source: PCME++ §B.2, Table 1 ("mu only").

        Args:
            scale: initial a of the match probability sigmoid(-a d + b); null for that of the run in model.pretrained,
                or 5 without one.
            shift: initial b, or null.
            pseudo_positive: weight alpha of the pseudo-positives.
            clip: weight of the CLIP loss beside the match loss, as in pretraining.
        """

        scale: PositiveFloat | None = 5.0
        shift: NonNegativeFloat | None = 5.0
        pseudo_positive: NonNegativeFloat = 0.1
        clip: NonNegativeFloat = 0.0

    soft_labels = True
    match = "distance"

    @classmethod
    def model_options(cls, config: Config) -> dict:
        from probemb.models.match import OF_DISTANCE

        own = {"match": OF_DISTANCE.get(config.distance or "csd", "none")}
        return super().model_options(config) | own | {"temperature_trained": bool(config.loss.clip)}

    def __init__(self, config, model, pairs):
        super().__init__(config, model, pairs)
        self.trains = ("scale", "shift", *(["logit_scale"] if self.options.clip else []))

    def loss(self, batch: Batch, model: DualEncoder) -> LossOutput:
        out = self.match_loss(batch, model)
        del out.terms["vib"]  # of no weight
        return out

    def match_loss(self, batch: Batch, model: DualEncoder, vib: float = 0.0) -> LossOutput:
        from probemb.losses import LossOutput, infonce_loss, pairwise_match_loss

        options = self.options
        out = pairwise_match_loss(
            batch.image,
            batch.text,
            batch.match,
            scale=model.scale,
            shift=model.shift,
            distance=self.config.distance or "csd",
            pseudo_positive=options.pseudo_positive,
            vib=vib,
            generator=batch.generator,
        )
        if not options.clip:
            return out
        similarity = batch.image.mean @ batch.text.mean.T
        clip = infonce_loss(similarity, model.inverse_temperature(), batch.match).loss
        return LossOutput(out.loss + options.clip * clip, {"clip": clip.detach(), **out.terms})

    def scalars(self, model: DualEncoder) -> dict[str, Tensor]:
        return {name: getattr(model, name) for name in ("scale", "shift")}


class PCMEPlusPlus(PCMEPlusPlusMean):
    """PCME++: match loss over all pairs, pseudo-positives, information bottleneck; any distance.

    With `loss.clip` the CLIP loss of the means is added, with the model's own temperature, as in pretraining.
    """

    @dataclass(frozen=True)
    class Options(PCMEPlusPlusMean.Options):
        """Match loss. Source: PCME++ §B.2, Table B.1.

        Args:
            vib: weight beta of the information bottleneck.
        """

        vib: NonNegativeFloat = 1e-4

    probabilistic = True
    distances = True

    def loss(self, batch: Batch, model: DualEncoder) -> LossOutput:
        return self.match_loss(batch, model, self.options.vib)


class PCMEPlusPlusCLIP(PCMEPlusPlus):
    """PCME++ with the loss of pretraining: the CLIP loss beside the match loss, and no pseudo-positives.

    A caption that fits many images then keeps a large variance (docs/finetune.md). a and b go on from the run in
    model.pretrained.
    """

    @dataclass(frozen=True)
    class Options(PCMEPlusPlus.Options):
        """Match loss and CLIP loss. Source: PCME++ §C.6 (pretraining).

        Args:
            scale, shift: as in `PCMEPlusPlusMean.Options`.
            clip: weight of the CLIP loss.
            pseudo_positive: weight alpha of the pseudo-positives.
        """

        scale: PositiveFloat | None = None
        shift: NonNegativeFloat | None = None
        clip: NonNegativeFloat = 1.0
        pseudo_positive: NonNegativeFloat = 0.0
