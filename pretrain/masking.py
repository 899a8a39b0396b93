"""Patch dropout and ProLIP's masked copies: which patches and tokens the towers read in a step.

Every draw is a function of the seed and of the sample's position in the run, so neither ranks nor accumulation nor a
resumption changes it, and recomputed parts see the same patches without a random state.

Sources: patch dropout is Li et al., "Scaling Language-Image Pre-training via Masking" (CVPR 2023); masked copies are
ProLIP §3.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pretrain.objectives import MASKED_EVERY
from probemb import distributed
from probemb.data.randomness import number_of
from probemb.models.encoder import chances, draw_parts

if TYPE_CHECKING:
    from pretrain.config import Config
    from probemb.models import DualEncoder

MASKED_SHARE = 0.25  # of patches and tokens that these keep


class Masks(NamedTuple):
    """Positions of what the towers read, see `probemb.models.towers`; None for everything, or for no copies."""

    kept: Tensor | None = None  # (B, n) patches of every image
    masked_image: Tensor | None = None  # (B / 8, n) patches of the masked copies of images 0, 8, 16, …
    masked_text: Tensor | None = None  # (B / 8, n) tokens of the masked copies of their texts

    def chunk(self, parts: int) -> list[Masks]:
        """The masks of each accumulation part."""
        columns = [[None] * parts if t is None else t.chunk(parts) for t in self]
        return [Masks(*row) for row in zip(*columns)]


def draw_masks(config: Config, model: DualEncoder, images: Tensor, tokens: Tensor, samples: int) -> Masks:
    """The masks of this rank's B items of the step that follows `samples` samples seen; their shapes follow from those
    of the inputs. Raises UserError: a tower reads its inputs as a whole, and parts of them are asked for."""
    rows = torch.arange(len(images), device=images.device) + samples + distributed.rank() * len(images)

    def draw(what: str, tower, inputs: Tensor, share: float, every: int = 1) -> Tensor:
        return draw_parts(tower, inputs[::every], share, chance=chances(number_of(config.seed, what), rows[::every]))

    kept = masked_image = masked_text = None
    if dropout := config.model.patch_dropout:
        kept = draw("patches", model.image_tower, images, 1 - dropout)
    if getattr(config.loss, "masked_inclusion", 0):
        masked_image = draw("masked image", model.image_tower, images, MASKED_SHARE, MASKED_EVERY)
        masked_text = draw("masked text", model.text_tower, tokens, MASKED_SHARE, MASKED_EVERY)
    return Masks(kept, masked_image, masked_text)
