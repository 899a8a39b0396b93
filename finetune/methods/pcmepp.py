"""PCME++, with or without the CLIP loss beside it, between normals or between means."""

from dataclasses import dataclass

from jsonargparse.typing import NonNegativeFloat, PositiveFloat

from finetune.methods.base import Batch, Method
from probemb.cli.ranges import Distance
from probemb.losses import LossOutput, infonce_loss, pairwise_match_loss


class PCMEPlusPlus(Method):
    """Match loss over all pairs, pseudo-positives, information bottleneck; any distance.

    Between means, a point model's variances are practically zero, which leaves CSD the squared distance.
    """

    @dataclass(frozen=True)
    class Options:
        """Match loss. Source: PCME++ §B.2, Table B.1; with the CLIP loss §C.6 (pretraining).

        Args:
            scale: initial a of the match probability sigmoid(-a d + b); null for that of the run in model.pretrained,
                or 5 without one.
            shift: initial b; null as for scale.
            pseudo_positive: weight alpha of the pseudo-positives.
            clip: weight of the CLIP loss; beside the match loss, as in pretraining.
            vib: weight beta of the information bottleneck.
            distance: between image and text.
        """

        scale: PositiveFloat | None = 5.0
        shift: NonNegativeFloat | None = 5.0
        pseudo_positive: NonNegativeFloat = 0.1
        clip: NonNegativeFloat = 0.0
        vib: NonNegativeFloat = 1e-4
        distance: Distance = "csd"

    probabilistic = True
    soft_labels = True
    match = "distance"

    @classmethod
    def model_options(cls, options) -> dict:
        from probemb.models.options import MATCH_OF_DISTANCE

        match = MATCH_OF_DISTANCE.get(options.distance, "none")
        return super().model_options(options) | {"match": match, "temperature_trained": bool(options.clip)}

    def build(self, model, data) -> None:
        self.trains = ("scale", "shift", *(["logit_scale"] if self.options.clip else []))

    def loss(self, batch: Batch, model) -> LossOutput:
        o = self.options
        out = pairwise_match_loss(
            batch.image, batch.text, batch.match, scale=model.scale, shift=model.shift, distance=o.distance,
            pseudo_positive=o.pseudo_positive, vib=o.vib, generator=batch.generator,
        )  # fmt: skip
        if not self.probabilistic:
            del out.terms["vib"]
        if not o.clip:
            return out
        similarity = batch.image.mean @ batch.text.mean.T
        clip = infonce_loss(similarity, model.inverse_temperature(), batch.match).loss
        return LossOutput(out.loss + o.clip * clip, {"clip": clip, **out.terms})
