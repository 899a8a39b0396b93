"""Normals: PCME++, PCME, ProLIP and probabilistic VSE++."""

import math
from dataclasses import dataclass
from typing import Literal

from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from finetune.methods.base import Batch, Method
from probemb.cli.ranges import Distance
from probemb.losses import LossOutput, infonce_loss, pairwise_match_loss, prolip_loss
from probemb.losses.pcme import pcme_loss
from probemb.losses.triplet import prob_triplet_loss
from probemb.models.options import MATCH_OF_DISTANCE


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


class PCME(Method):
    """PCME: soft contrastive loss of sampled embeddings, information bottleneck, uniformity.

    The defaults are those of PCME++'s comparison; finetune/recipes has the paper's own for COCO and CUB.
    """

    @dataclass(frozen=True)
    class Options:
        """Match probability of samples. Source: PCME++ §B.2 (scale, shift and bottleneck as PCME++'s).

        Args:
            scale: initial a of the match probability; the mean over sample pairs of sigmoid(2 (b - a d)). The 2 is the
                public code's, to which the published a and b belong, and the paper has sigmoid(b - a d).
            shift: initial b.
            samples: drawn of each item.
            vib: weight beta of the information bottleneck.
            vib_form: kl (mean over items and dimensions), sum (PCME's weight), or pcme and pcmepp, the authors' codes.
            uniformity: weight of the uniformity loss of all samples.
        """

        scale: PositiveFloat = 5.0
        shift: NonNegativeFloat = 5.0
        samples: PositiveInt = 8
        vib: NonNegativeFloat = 1e-4
        vib_form: Literal["kl", "sum", "pcme", "pcmepp"] = "kl"
        uniformity: NonNegativeFloat = 0.0

    probabilistic = True
    ranking = "match-probability"
    soft_labels = True
    trains = ("scale", "shift")
    match = "samples"

    def loss(self, batch: Batch, model) -> LossOutput:
        o = self.options
        return pcme_loss(
            batch.image, batch.text, batch.match, samples=o.samples, scale=model.scale, shift=model.shift, vib=o.vib,
            vib_form=o.vib_form, uniformity_weight=o.uniformity, generator=batch.generator,
        )  # fmt: skip


class ProLIP(Method):
    """ProLIP's loss on any probabilistic encoder, as in pretraining; captions of the same image match it too."""

    @dataclass(frozen=True)
    class Options:
        """L_ppcl + vib * L_vib + inclusion * L_inclusion. Source: ProLIP §3.2, §3.3.

        Args:
            vib: weight beta of the information bottleneck.
            inclusion: weight of an image's inclusion in its text.
            inclusion_scale: c of -log sigmoid(c H).
            form: exact, or code; the formulas of the authors' public code.
            logit_scale: initial inverse temperature; at most 100 later, null for that of the run in model.pretrained.
            logit_bias: initial bias of the logits; null as for logit_scale.
            log_var: initial log-variance; of a new head, null for -log D.
        """

        vib: NonNegativeFloat = 1e-4
        inclusion: NonNegativeFloat = 1e-7
        inclusion_scale: PositiveFloat = 1000.0
        form: Literal["exact", "code"] = "exact"
        logit_scale: PositiveFloat | None = 10.0
        logit_bias: float | None = -10.0
        log_var: float | None = -10.0

    probabilistic = True
    trains = ("logit_scale", "logit_bias")
    match = "cosine"

    @classmethod
    def model_options(cls, options) -> dict:
        o = options
        scalars = {"init_logit_scale": o.logit_scale, "init_logit_bias": o.logit_bias, "log_var_start": o.log_var}
        return {**super().model_options(options), **scalars}

    def loss(self, batch: Batch, model) -> LossOutput:
        o, scale = self.options, model.inverse_temperature()
        return prolip_loss(
            batch.image, batch.text, scale, model.logit_bias, match=batch.match, vib=o.vib, inclusion=o.inclusion,
            inclusion_scale=o.inclusion_scale, form=o.form,
        )  # fmt: skip

    def scalars(self, model) -> dict[str, Tensor]:
        return dict(zip(("scale", "shift"), model.match_scalars()))


class ProbVSEPlusPlus(Method):
    """VSE++ with normals in place of points, ranked by the similarity that is trained."""

    @dataclass(frozen=True)
    class Options:
        """Triplet loss of a similarity of normals. Source: Probabilistic VSE++/VSRN Eq. 3 to 8, §4.2.

        Args:
            margin: of the hinges; in units of the similarity.
            warmup_epochs: first epochs, with all negatives; then `negatives`.
            similarity: wasserstein2, min-kl, kl or reverse-kl; kl of the image from the caption. The paper:
                wasserstein2 for COCO, min-kl for VSE++ with a trained image tower, kl on Flickr30k.
            negatives: hardest (Eq. 3), semi-hard (the text) or all; semi-hard is the hardest one farther than the pair.
            covariance: ellipsoidal, spherical-mean or spherical; a variance for each dimension, their mean, one value.
        """

        margin: PositiveFloat = 0.2
        warmup_epochs: NonNegativeInt = 0
        similarity: Literal["wasserstein2", "min-kl", "kl", "reverse-kl"] = "wasserstein2"
        negatives: Literal["hardest", "semi-hard", "all"] = "hardest"
        covariance: Literal["ellipsoidal", "spherical-mean", "spherical"] = "ellipsoidal"

    probabilistic = True

    @classmethod
    def model_options(cls, options) -> dict:
        o = options
        return {
            **super().model_options(o), "ranking": o.similarity, "covariance": o.covariance, "unit_features": True,
            "log_var_range": (math.log(0.1), math.log(10.0)),
        }  # fmt: skip

    def loss(self, batch: Batch, model) -> LossOutput:
        o = self.options
        negatives = o.negatives if batch.epoch >= o.warmup_epochs else "all"
        return prob_triplet_loss(batch.image, batch.text, batch.match, o.similarity, o.margin, negatives)
