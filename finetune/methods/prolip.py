"""ProLIP: the sigmoid loss of pairs with CSD, the information bottleneck, and inclusion of images in their texts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from jsonargparse.typing import NonNegativeFloat, PositiveFloat

from finetune.methods.base import Batch, Method
from probemb.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from finetune.config import Config
    from probemb.losses.output import LossOutput
    from probemb.models import DualEncoder


class ProLIP(Method):
    """ProLIP's loss on any probabilistic encoder, as in pretraining; captions of the same image match it too."""

    @dataclass(frozen=True)
    class Options:
        """L_ppcl + vib * L_vib + inclusion * L_inclusion. Source: ProLIP §3.2, §3.3.

        Args:
            vib: weight of the information bottleneck.
            inclusion: weight of an image's inclusion in its text.
            inclusion_scale: c of -log sigmoid(c H).
            form: exact, or code, the formulas of the authors' public code.
            logit_scale: initial inverse temperature, at most 100 later; null for that of the run in model.pretrained.
            logit_bias: initial bias of the logits, or null.
            log_var: initial log-variance of a new head; null for -log D.
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
    def problems(cls, config: Config) -> Iterator[UserError]:
        yield from super().problems(config)
        if not config.loss.inclusion:
            yield from cls.unused(config, ["inclusion_scale"], "loss.inclusion is 0", "set loss.inclusion above 0")
        if not config.loss.inclusion and not config.loss.vib:
            yield from cls.unused(config, ["form"], "loss.inclusion and loss.vib are 0", "set one above 0")

    def __init__(self, config, model, pairs):
        from probemb.losses import ProLIPLoss

        super().__init__(config, model, pairs)
        o = self.options
        self.criterion = ProLIPLoss(o.vib, o.inclusion, inclusion_scale=o.inclusion_scale, form=o.form)

    @classmethod
    def model_options(cls, config: Config) -> dict:
        o = config.loss
        scalars = {"init_logit_scale": o.logit_scale, "init_logit_bias": o.logit_bias, "log_var_start": o.log_var}
        return {**super().model_options(config), **scalars}

    def loss(self, batch: Batch, model: DualEncoder) -> LossOutput:
        scale = model.inverse_temperature()
        return self.criterion(batch.image, batch.text, scale, model.logit_bias, match=batch.match)

    def scalars(self, model: DualEncoder) -> dict[str, Tensor]:
        """a and b of the match probability that follows."""
        return dict(zip(("scale", "shift"), model.match_scalars()))
