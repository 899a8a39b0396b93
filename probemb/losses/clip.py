"""The CLIP loss (symmetric InfoNCE over the batch), and InfoNCE with a plain multiplier and any labels."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from probemb.gaussian import Gaussian
from probemb.losses.output import LossOutput
from probemb.losses.pairs import cosine_similarity


def clip_loss(
    image_BD: Tensor,
    text_BD: Tensor,
    logit_scale: Tensor | float,
    all_image_ND: Tensor | None = None,
    all_text_ND: Tensor | None = None,
    offset: int = 0,
) -> LossOutput:
    """Mean of both directions' cross entropies of logit_scale * cosine.

    With ranks, pass the gathered means and the row at which this rank's items start: the mean over the ranks is the
    loss of one process on the whole batch, in value and gradient.

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
    """`clip_loss` with a learnable inverse temperature, stored as its logarithm."""

    def __init__(self, init_scale: float = 1 / 0.07):
        super().__init__()
        self.log_scale = nn.Parameter(torch.full((1,), math.log(init_scale)))

    def forward(self, image_BD: Tensor, text_BD: Tensor) -> LossOutput:
        """Unit rows (B, D) and (B, D)."""
        return clip_loss(image_BD, text_BD, self.log_scale.exp())


def infonce_loss(similarity_NM: Tensor, tau: Tensor | float = 1.0, match_NM: Tensor | None = None) -> LossOutput:
    """Mean of both directions' cross entropies of tau * similarity against the labels. Source: PCME++, rival InfoNCE.

    The target of a row or column is its labels divided by their sum: two captions of one image share the mass equally,
    a mixed image keeps lam and 1 - lam. A row or column without any match is left out of the mean.

    Args:
        similarity_NM: cosines, images in rows; N = M unless `match_NM` is given.
        tau: the multiplier itself, an inverse temperature, not its logarithm.
        match_NM: in [0, 1]; None is the identity.

    Returns:
        loss, and both directions as terms "i2t" and "t2i".

    Raises:
        ValueError: labels whose shape does not fit the similarities.
    """
    with torch.autocast(similarity_NM.device.type, enabled=False):
        logits = tau * similarity_NM
        if match_NM is None:
            if logits.shape[0] != logits.shape[1]:
                raise ValueError(f"{tuple(logits.shape)} pairs have no identity; pass match")
            target = torch.arange(len(logits), device=logits.device)
            i2t, t2i = F.cross_entropy(logits, target), F.cross_entropy(logits.T, target)
        elif match_NM.shape != logits.shape:
            raise ValueError(f"match is {tuple(match_NM.shape)}, the pairs are {tuple(logits.shape)}")
        else:
            match_NM = match_NM.to(logits.dtype)
            i2t, t2i = _cross_entropy_of_labels(logits, match_NM), _cross_entropy_of_labels(logits.T, match_NM.T)
    return LossOutput(0.5 * (i2t + t2i), {"i2t": i2t.detach(), "t2i": t2i.detach()})


def _cross_entropy_of_labels(logits: Tensor, match: Tensor) -> Tensor:
    """Cross entropy against every row's normalised labels, mean over the rows with labels."""
    mass = match.sum(1, keepdim=True)
    target = match / torch.where(mass > 0, mass, torch.ones_like(mass))
    return -(target * logits.log_softmax(1)).sum() / (mass > 0).sum().clamp(min=1)


class InfoNCELoss(nn.Module):
    """`infonce_loss` of the cosines of the means, with a learnable multiplier `tau`."""

    def __init__(self, init_tau: float = 1.0):
        super().__init__()
        self.tau = nn.Parameter(torch.full((1,), float(init_tau)))

    def forward(self, image: Gaussian, text: Gaussian, match: Tensor | None = None) -> LossOutput:
        """Gaussians (N, D) and (M, D), match (N, M) in [0, 1] or None for the identity."""
        return infonce_loss(cosine_similarity(image, text), self.tau, match)
