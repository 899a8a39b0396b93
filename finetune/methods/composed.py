"""Composed retrieval: MPC and its rivals. A query of k images and texts is composed to one normal, or to one point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, PositiveFloat, PositiveInt

from finetune.methods.base import Batch, Method
from probemb.losses import LossOutput, MPCLoss, SampledCosineLoss, ScaledCosineLoss


class Composed(Method):
    """Base of MPC and its baselines: the model has a composer, and the loss is a softmax over targets.

    Attributes:
        composer: its name in `probemb.models.composers`.
        composed_ranking: what the loss compares, and so the validation unless `compose.ranking` says otherwise.
    """

    composes = True
    ranking = "mean"
    composer: ClassVar[str]
    composed_ranking: ClassVar[Literal["cosine", "density"]] = "cosine"

    @classmethod
    def model_options(cls, options) -> dict:
        return {**super().model_options(options), "composer": cls.composer, "composed_ranking": cls.composed_ranking}

    def correct(self, batch: Batch):
        """(N, N) bool, for losses that leave other correct targets out of the negatives; else None."""
        return batch.match > 0 if self.options.spare_correct else None


@dataclass(frozen=True)
class Softmax:
    """Options of a softmax over targets.

    Args:
        samples: of every target, J of Eq. 5 and 6; of Eq. 5 of every composition too.
        temperature: divides the similarities; Eq. 7 has none, which is 1, for means of any length. Here they have unit
            length, and the log-densities of Eq. 6, in nats, lie so far apart that nothing is learned at 1.
        reverse: weight of the softmax over queries for every target; the other direction has the rest.
        log_var_l2: weight of the mean squared log-variance (Eq. 8).
        spare_correct: targets of other rows that have all concepts of a query are no negatives; the paper has them as
            negatives.
    """

    samples: PositiveInt = 7
    temperature: PositiveFloat = 16.0
    reverse: ClosedUnitInterval = 0.0
    log_var_l2: NonNegativeFloat = 1e-3
    spare_correct: bool = False


class MPC(Composed):
    """Product of densities and the probabilistic similarity."""

    @dataclass(frozen=True)
    class Options(Softmax):
        """Softmax over targets of how probable they are under the composition. Source: MPC Eq. 2 to 8.

        Args:
            similarity: sampled (Eq. 6), expected (its closed form), or code, the public code's, in which the normaliser
                cancels.
        """

        similarity: Literal["sampled", "expected", "code"] = "sampled"

    probabilistic = True
    composer = "product"
    composed_ranking = "density"

    def build(self, model, data) -> None:
        o = self.options
        self.criterion = MPCLoss(o.similarity, o.samples, o.temperature, o.reverse, o.log_var_l2)

    def loss(self, batch: Batch, model) -> LossOutput:
        query = model.composer(batch.parts)
        return self.criterion(batch.parts, query, batch.image, self.correct(batch), batch.generator)


class MPCMLP(MPC):
    """MPC without Eq. 2: a learned map of both normals to one."""

    @dataclass(frozen=True)
    class Options(MPC.Options):
        """Those of `mpc`; the learned map finds the scale of its own variances."""

        temperature: PositiveFloat = 1.0

    composer = "mlp"


class PCMEAddition(Composed):
    """PCME + addition: the sum of the parts' normals (MPC Eq. 9), under a softmax of the mean cosine of samples."""

    @dataclass(frozen=True)
    class Options(Softmax):
        """Mean cosine of samples of the composition and of the target. Source: MPC Eq. 5 and 8."""

        temperature: PositiveFloat = 0.0625

    probabilistic = True
    composer = "addition"

    def build(self, model, data) -> None:
        o = self.options
        self.criterion = SampledCosineLoss(o.samples, o.temperature, o.reverse, o.log_var_l2)

    def loss(self, batch: Batch, model) -> LossOutput:
        query = model.composer(batch.parts).gaussian
        return self.criterion(batch.parts, query, batch.image, self.correct(batch), batch.generator)


class TIRG(Composed):
    """Gated residual composition of points, under TIRG's loss; its rivals differ in the composer alone."""

    @dataclass(frozen=True)
    class Options:
        """Softmax over targets of a scaled cosine. Source: TIRG §3.3 (kernel of a dot product).

        Args:
            scale: of the cosine at the start, before it is squared; trained.
            spare_correct: targets of other rows that have all concepts of a query are no negatives.
        """

        scale: PositiveFloat = 4.0
        spare_correct: bool = False

    composer = "tirg"

    def build(self, model, data) -> None:
        self.module.criterion = ScaledCosineLoss(self.options.scale)

    def loss(self, batch: Batch, model) -> LossOutput:
        query = model.composer(batch.parts).gaussian.mean
        return self.module.criterion(query, batch.image.mean, self.correct(batch))


def with_composer(method: type[Composed], composer: str) -> type[Composed]:
    """The same method with another composer."""
    return type(method.__name__, (method,), {"composer": composer})
