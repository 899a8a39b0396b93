"""The CLIP loss (symmetric InfoNCE over the batch)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from probemb.losses.output import LossOutput


def clip_loss(
    image_BD: Tensor,
    text_BD: Tensor,
    logit_scale: Tensor | float,
    all_image_ND: Tensor | None = None,
    all_text_ND: Tensor | None = None,
    offset: int = 0,
) -> LossOutput:
    """Mean of both directions' cross entropies of logit_scale * cosine.

    With ranks, pass the gathered means and the row at which this rank's items start: the mean of the results over
    the ranks is the loss of one process on the whole batch, and the mean of the gradients is its gradient.

    Args:
        image_BD, text_BD: unit rows; item i of one matches item i of the other.
        logit_scale: the inverse temperature itself, not its logarithm.
        all_image_ND, all_text_ND: unit rows of all ranks, N = W * B.
    """
    all_image_ND = image_BD if all_image_ND is None else all_image_ND
    all_text_ND = text_BD if all_text_ND is None else all_text_ND
    target = torch.arange(len(image_BD), device=image_BD.device) + offset
    with torch.autocast(image_BD.device.type, enabled=False):
        scaled_image, scaled_text = logit_scale * image_BD, logit_scale * text_BD
        i2t = F.cross_entropy(scaled_image @ all_text_ND.T, target)
        t2i = F.cross_entropy(scaled_text @ all_image_ND.T, target)
    loss = 0.5 * (i2t + t2i)
    return LossOutput(loss, {"clip": loss.detach()})


class ClipLoss(nn.Module):
    """`clip_loss` with its own temperature, kept as the logarithm of its inverse; starts at 1 / 0.07."""

    def __init__(self, init_scale: float = 1 / 0.07):
        super().__init__()
        self.log_scale = nn.Parameter(torch.full((1,), math.log(init_scale)))

    def forward(self, image_BD: Tensor, text_BD: Tensor) -> LossOutput:
        """Unit rows (B, D) and (B, D)."""
        return clip_loss(image_BD, text_BD, self.log_scale.exp())
