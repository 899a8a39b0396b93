"""Composed retrieval: MPC and its baselines. A query of k images and texts becomes one normal, or one point."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import nn

from finetune.methods.base import Batch, Method
from probemb.losses import LossOutput
from probemb.losses.mpc import mpc_loss, sampled_cosine_loss, scaled_cosine_loss


class Composed(Method):
    """Base of MPC and its baselines: the model has a composer, and the loss is a softmax over targets."""

    composes = True
    ranking = "mean"
    composer: ClassVar[str]  # its name in `probemb.compose`
    composed_ranking: ClassVar[str] = "cosine"  # what the loss compares, and so the validation by default

    @classmethod
    def model_options(cls, options) -> dict:
        return {**super().model_options(options), "composer": cls.composer, "composed_ranking": cls.composed_ranking}

    def correct(self, batch: Batch):
        """(N, N) bool, for losses that leave other correct targets out of the negatives; else None."""
        return batch.match > 0 if self.options.spare_correct else None


class PCMEAddition(Composed):
    """PCME + addition: the sum of the parts' normals (MPC Eq. 9), under a softmax of the mean cosine of samples."""

    @dataclass(frozen=True)
    class Options:
        """Softmax over targets of a similarity of samples. Source: MPC Eq. 5 to 8.

        Args:
            samples: of every target, J; of Eq. 5 and 6, and of Eq. 5 of every composition too.
            temperature: divides the similarities; Eq. 7 has none, which is 1, for means of any length. Here they have
                unit length, and the log-densities of Eq. 6, in nats, lie so far apart that nothing is learned at 1.
            reverse: weight of the softmax over queries; the other direction has the rest.
            log_var_l2: weight of the mean squared log-variance (Eq. 8).
            spare_correct: other targets that fit a query are no negatives; the paper has them as negatives.
        """

        samples: PositiveInt = 7
        temperature: PositiveFloat = 16.0
        reverse: ClosedUnitInterval = 0.0
        log_var_l2: NonNegativeFloat = 1e-3
        spare_correct: bool = False

    probabilistic = True
    composer = "addition"

    def softmax(self) -> dict:
        """The options of the losses."""
        o = self.options
        return dict(n_samples=o.samples, temperature=o.temperature, reverse=o.reverse, log_var_l2=o.log_var_l2)

    def loss(self, batch: Batch, model) -> LossOutput:
        query, noise = model.composer(batch.parts).gaussian, batch.generator
        return sampled_cosine_loss(batch.parts, query, batch.image, self.correct(batch), noise, **self.softmax())


class MPC(PCMEAddition):
    """Product of densities and the probabilistic similarity."""

    @dataclass(frozen=True)
    class Options(PCMEAddition.Options):
        """Softmax over targets of how probable they are under the composition. Source: MPC Eq. 2 to 8.

        Args:
            similarity: sampled (Eq. 6), expected (in closed form) or code; the public code's. In the last one the
                normaliser cancels.
        """

        similarity: Literal["sampled", "expected", "code"] = "sampled"

    composer = "product"
    composed_ranking = "density"

    def loss(self, batch: Batch, model) -> LossOutput:
        options = self.softmax() | {"form": self.options.similarity}
        query = model.composer(batch.parts)
        return mpc_loss(batch.parts, query, batch.image, self.correct(batch), batch.generator, **options)


class TIRG(Composed):
    """Gated residual composition of points, under TIRG's loss; the other baselines differ in the composer alone."""

    @dataclass(frozen=True)
    class Options:
        """Softmax over targets of a scaled cosine. Source: TIRG §3.3 (kernel of a dot product).

        Args:
            scale: initial factor of the cosine; trained, before the cosine is squared.
            spare_correct: other targets that fit a query are no negatives.
        """

        scale: PositiveFloat = 4.0
        spare_correct: bool = False

    composer = "tirg"

    def build(self, model, data) -> None:
        self.module.scale = nn.Parameter(torch.full((1,), float(self.options.scale)))

    def loss(self, batch: Batch, model) -> LossOutput:
        query = model.composer(batch.parts).gaussian.mean
        return scaled_cosine_loss(query, batch.image.mean, self.module.scale, self.correct(batch))
