"""Point embeddings compared by the cosine: InfoNCE, triplet losses, and pretrained CLIP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat

from finetune.methods.base import Batch, Method
from probemb.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from finetune.config import Config
    from probemb.losses.output import LossOutput
    from probemb.models import DualEncoder


class InfoNCE(Method):
    """CLIP's loss with a separate multiplier; the target is shared among the captions of an image."""

    @dataclass(frozen=True)
    class Options:
        """Cross entropy of the cosines. Source: PCME++ §B.2.

        Args:
            temperature: initial multiplier of the cosines.
        """

        temperature: PositiveFloat = 1.0

    soft_labels = True

    def __init__(self, config, model, pairs):
        from probemb.losses import InfoNCELoss

        super().__init__(config, model, pairs)
        self.module.loss = InfoNCELoss(self.options.temperature)

    @classmethod
    def model_options(cls, config):
        return super().model_options(config) | {"temperature_trained": True}

    def loss(self, batch: Batch, model: DualEncoder) -> LossOutput:
        model.logit_scale.data.copy_(self.module.loss.tau.detach().log())  # so that a saved model has it
        return self.module.loss(batch.image, batch.text, batch.match)

    def scalars(self, model: DualEncoder) -> dict[str, Tensor]:
        return {"temperature": self.module.loss.tau}


class VSE(Method):
    """VSE infinity: triplet loss, all negatives during the warm-up, then the hardest."""

    @dataclass(frozen=True)
    class Options:
        """Triplet loss. Source: PCME++ §B.2.

        Args:
            margin: of the hinges, in units of the cosine.
            warmup_epochs: first epochs, with all negatives.
        """

        margin: PositiveFloat = 0.2
        warmup_epochs: NonNegativeInt = 1

    def __init__(self, config, model, pairs):
        super().__init__(config, model, pairs)
        self.module.loss = self.make_loss(model)

    def make_loss(self, model: DualEncoder):
        from probemb.losses import TripletLoss

        return TripletLoss(self.options.margin)

    def loss(self, batch: Batch, model: DualEncoder, **more: Tensor) -> LossOutput:
        hardest = batch.epoch >= self.options.warmup_epochs
        return self.module.loss(batch.image, batch.text, batch.match, hardest=hardest, **more)


class P2RM(VSE):
    """Point-to-rectangle matching on top of VSE."""

    @dataclass(frozen=True)
    class Options(VSE.Options):
        """Triplet loss and point-to-rectangle matching.

        Args:
            weight: of point-to-rectangle matching (this project's choice, see probemb/losses/noisy.py).
        """

        weight: NonNegativeFloat = 1.0

    def make_loss(self, model: DualEncoder):
        from probemb.losses import P2RMLoss

        return P2RMLoss(model.embed_dim, self.options.margin, self.options.weight)


class DAA(VSE):
    """VSE, and ranks that agree with the captions' tf-idf similarity."""

    @dataclass(frozen=True)
    class Options(VSE.Options):
        """Triplet loss and agreement of ranks. Source: DAA.

        Args:
            weight: of the agreement.
        """

        weight: NonNegativeFloat = 25.0

    def __init__(self, config, model, pairs):
        from probemb.losses import CaptionSimilarity

        super().__init__(config, model, pairs)
        self.semantic = CaptionSimilarity(pairs.flat(), pairs.owner())

    def make_loss(self, model: DualEncoder):
        from probemb.losses import DAALoss

        return DAALoss(self.options.margin, self.options.weight)

    def loss(self, batch: Batch, model: DualEncoder) -> LossOutput:
        semantic = self.semantic(batch.image_index.tolist(), batch.pair_index.tolist())
        return super().loss(batch, model, semantic=semantic.to(batch.match.device))


class ZeroShot(Method):
    """Pretrained CLIP: nothing is trained."""

    trained = False

    @classmethod
    def problems(cls, config: Config) -> Iterator[UserError]:
        yield from super().problems(config)
        for name in ("epochs", "noise_ratio", "swa_epochs", "stop_after_epochs"):
            if value := getattr(config, name):
                yield UserError(f"clip-zs trains nothing, and {name} is {value}.", f"Leave {name} out.")
        if config.model.head != "clip":
            yield UserError("clip-zs measures CLIP's own head.", "Set model.head to clip.")
