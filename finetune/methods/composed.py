"""Composed retrieval: MPC and its rivals. A query of k images and texts is composed to one normal, or to one point."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, PositiveFloat, PositiveInt

from finetune.methods.base import Batch, Method
from probemb.errors import UserError

if TYPE_CHECKING:
    from finetune.config import Config
    from probemb.losses.output import LossOutput
    from probemb.models import DualEncoder


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
    def problems(cls, config: Config) -> Iterator[UserError]:
        from torch.nn import BatchNorm1d

        from probemb.models.composers import create_composer

        yield from super().problems(config)
        if config.swa_epochs and any(isinstance(m, BatchNorm1d) for m in create_composer(cls.composer, 4).modules()):
            yield UserError(
                f"swa_epochs is {config.swa_epochs}, but the composer {cls.composer} has batch norms, whose statistics "
                "cannot be averaged.",
                "Set swa_epochs to 0.",
            )

    @classmethod
    def model_options(cls, config: Config) -> dict:
        return {**super().model_options(config), "composer": cls.composer, "composed_ranking": cls.composed_ranking}

    def correct(self, batch: Batch):
        """(N, N) bool, for losses that leave other correct targets out of the negatives; else None."""
        return batch.match > 0 if self.options.spare_correct else None


class MPC(Composed):
    """Product of densities and the probabilistic similarity."""

    @dataclass(frozen=True)
    class Options:
        """Softmax over targets of how probable they are under the composition. Source: MPC Eq. 2 to 8.

        Args:
            similarity: sampled (Eq. 6), expected (its closed form), or code, the public code's, in which the normaliser
                cancels.
            samples: of every target; J of Eq. 6.
            temperature: divides the similarities. Eq. 7 has none, for means of any length; here they have unit length,
                and the log-densities in nats lie so far apart that nothing is learned at 1.
            reverse: weight of the softmax over queries for every target; the other direction has the rest.
            log_var_l2: weight of the mean squared log-variance (Eq. 8).
            spare_correct: targets of other rows that have all concepts of a query are no negatives; the paper has
                them as negatives.
        """

        similarity: Literal["sampled", "expected", "code"] = "sampled"
        samples: PositiveInt = 7
        temperature: PositiveFloat = 16.0
        reverse: ClosedUnitInterval = 0.0
        log_var_l2: NonNegativeFloat = 1e-3
        spare_correct: bool = False

    probabilistic = True
    composer = "product"
    composed_ranking = "density"

    @classmethod
    def problems(cls, config: Config) -> Iterator[UserError]:
        yield from super().problems(config)
        if config.loss.similarity == "expected":
            yield from cls.unused(config, ["samples"], "loss.similarity is expected", "set loss.similarity to sampled")

    def __init__(self, config: Config, model: DualEncoder, pairs):
        from probemb.losses import MPCLoss

        super().__init__(config, model, pairs)
        o = self.options
        self.criterion = MPCLoss(o.similarity, o.samples, o.temperature, o.reverse, o.log_var_l2)

    def loss(self, batch: Batch, model: DualEncoder) -> LossOutput:
        query = model.composer(batch.parts)
        return self.criterion(batch.parts, query, batch.image, self.correct(batch), batch.generator)


class MPCMLP(MPC):
    """MPC without Eq. 2: a learned map of both normals to one."""

    @dataclass(frozen=True)
    class Options(MPC.Options):
        """Those of `mpc`; the learned map finds the scale of its own variances."""

        temperature: PositiveFloat = 1.0

    composer = "mlp"


class SampledCosine(Composed):
    """Softmax over targets of the mean cosine of samples. Source: MPC Eq. 5."""

    @dataclass(frozen=True)
    class Options:
        """Mean cosine of samples of the composition and of the target. Source: MPC Eq. 5 and 8.

        Args:
            samples: of every composition and every target, J of Eq. 5.
            temperature: divides the cosines; Eq. 7 has none, which is 1.
            reverse: weight of the softmax over queries for every target; the other direction has the rest.
            log_var_l2: weight of the mean squared log-variance (Eq. 8).
            spare_correct: targets of other rows that have all concepts of a query are no negatives.
        """

        samples: PositiveInt = 7
        temperature: PositiveFloat = 0.0625
        reverse: ClosedUnitInterval = 0.0
        log_var_l2: NonNegativeFloat = 1e-3
        spare_correct: bool = False

    probabilistic = True

    def __init__(self, config: Config, model: DualEncoder, pairs):
        from probemb.losses import SampledCosineLoss

        super().__init__(config, model, pairs)
        o = self.options
        self.criterion = SampledCosineLoss(o.samples, o.temperature, o.reverse, o.log_var_l2)

    def loss(self, batch: Batch, model: DualEncoder) -> LossOutput:
        query = model.composer(batch.parts).gaussian
        return self.criterion(batch.parts, query, batch.image, self.correct(batch), batch.generator)


class PCMEAddition(SampledCosine):
    """PCME + addition: the sum of the parts' normals. Source: MPC Eq. 9."""

    composer = "addition"


class MPCCosine(SampledCosine):
    """MPC without Eq. 6: the product of densities, compared by samples' cosines."""

    composer = "product"


class ScaledCosine(Composed):
    """Points, composed by a learned module, under TIRG's loss."""

    @dataclass(frozen=True)
    class Options:
        """Softmax over targets of a scaled cosine. Source: TIRG §3.3 (kernel of a dot product).

        Args:
            scale: of the cosine at the start, before it is squared; trained.
            spare_correct: targets of other rows that have all concepts of a query are no negatives.
        """

        scale: PositiveFloat = 4.0
        spare_correct: bool = False

    def __init__(self, config: Config, model: DualEncoder, pairs):
        from probemb.losses import ScaledCosineLoss

        super().__init__(config, model, pairs)
        self.module.criterion = ScaledCosineLoss(self.options.scale)

    def loss(self, batch: Batch, model: DualEncoder) -> LossOutput:
        query = model.composer(batch.parts).gaussian.mean
        return self.module.criterion(query, batch.image.mean, self.correct(batch))


class Relationship(ScaledCosine):
    """A relation module: an MLP of both parts."""

    composer = "relationship"


class FiLM(ScaledCosine):
    """Feature-wise linear modulation of one part by the other."""

    composer = "film"


class MRN(ScaledCosine):
    """Multimodal residual network."""

    composer = "mrn"


class TIRG(ScaledCosine):
    """Gated residual composition."""

    composer = "tirg"
