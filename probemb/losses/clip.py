"""The CLIP loss (symmetric InfoNCE over the batch), and InfoNCE with a plain multiplier and any labels."""

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from probemb.gaussian import at_least_float32
from probemb.losses.output import LossOutput, identity
from probemb.losses.ring import BLOCK, blocks, number, pass_on, round_trip


def clip_loss(
    image_BD: Tensor, text_BD: Tensor, logit_scale: Tensor | float, all_image_ND: Tensor | None = None,
    all_text_ND: Tensor | None = None, offset: int = 0,
) -> LossOutput:  # fmt: skip
    """Mean of both directions' cross entropies of logit_scale * cosine, of unit rows; item i of one matches that of the
    other. `logit_scale` is the inverse temperature itself, not its logarithm.

    With ranks, pass the gathered rows, N = W * B, and the row at which this rank's items start: the mean over the ranks
    is the loss of one process on the whole batch, in value and gradient.
    """
    image_BD, text_BD = at_least_float32(image_BD), at_least_float32(text_BD)
    all_image_ND = image_BD if all_image_ND is None else at_least_float32(all_image_ND)
    all_text_ND = text_BD if all_text_ND is None else at_least_float32(all_text_ND)
    target = torch.arange(len(image_BD), device=image_BD.device) + offset
    with torch.autocast(image_BD.device.type, enabled=False):
        scaled_image, scaled_text = logit_scale * image_BD, logit_scale * text_BD
        i2t = F.cross_entropy(scaled_image @ all_text_ND.T, target)
        t2i = F.cross_entropy(scaled_text @ all_image_ND.T, target)
    loss = 0.5 * (i2t + t2i)
    return LossOutput(loss, {"clip": loss})


def ring_clip_loss(image_BD: Tensor, text_BD: Tensor, logit_scale: Tensor | float, block: int = BLOCK) -> LossOutput:
    """`clip_loss` over all ranks' items, B on each: texts pass around a ring, `block` are compared at a time.

    Memory is O(B * block + B D). A text's gradient is the sum over the ranks; there are none of second order.
    """
    with torch.autocast(image_BD.device.type, enabled=False):
        image_BD, text_BD = at_least_float32(image_BD), at_least_float32(text_BD)
        scale = number(logit_scale, image_BD)
        wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (image_BD, text_BD, scale))
        loss = _RingCrossEntropy.apply(block, wanted, image_BD, text_BD, scale)
    return LossOutput(loss, {"clip": loss})


class _RingCrossEntropy(torch.autograd.Function):
    """Two rounds: the log-normalisers, and with these, from logits computed again, the gradients."""

    @staticmethod
    def forward(ctx, block: int, wanted: bool, image_BD: Tensor, text_BD: Tensor, scale: Tensor) -> Tensor:
        image_BD, text_BD, scale = image_BD.detach(), text_BD.detach(), scale.detach()
        n, scaled_BD, own_B = len(image_BD), scale * image_BD, (image_BD * text_BD).sum(1)
        # Log-normalisers of this rank's images over all texts, and of its texts over all images.
        row_B, column_B = (image_BD.new_full((n,), -math.inf) for _ in range(2))
        for (visitor_BD,) in round_trip([text_BD]):
            for rows in blocks(n, block):
                logits = scaled_BD @ visitor_BD[rows].T  # (B, block)
                row_B = torch.logaddexp(row_B, logits.logsumexp(1))
                column_B[rows] = torch.logaddexp(column_B[rows], logits.logsumexp(0))
            (column_B,) = pass_on([column_B])  # the last hop brings them back
        loss = 0.5 * (row_B + column_B).mean() - scale * own_B.mean()
        if not wanted:
            return loss
        # Of images and of the scale by this rank's images, of this rank's texts by all ranks.
        of_image, of_text, of_scale = -scale * text_BD / n, -scale * image_BD / n, -own_B.mean()
        for visitor_BD, visitor_B in round_trip([text_BD, column_B]):
            for rows in blocks(n, block):
                cosine = image_BD @ visitor_BD[rows].T  # (B, block)
                logits = scale * cosine
                weight = (logits - row_B[:, None]).exp_()
                weight += logits.sub_(visitor_B[None, rows]).exp_()
                weight /= 2 * n  # of each logit in the sum of all ranks' losses
                of_scale = of_scale + cosine.mul_(weight).sum()
                weight *= scale
                of_image.addmm_(weight, visitor_BD[rows])
                of_text[rows] += weight.T @ image_BD
            (of_text,) = pass_on([of_text])
        ctx.save_for_backward(of_image, of_text, of_scale)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return None, None, *(grad * kept for kept in ctx.saved_tensors)


def infonce_loss(similarity_NM: Tensor, tau: Tensor | float = 1.0, match_NM: Tensor | None = None) -> LossOutput:
    """Mean of both directions' cross entropies of tau * similarity against the labels. Source: PCME++, InfoNCE.

    `match_NM` is in [0, 1], images in rows; None is the identity. The target of a row or column is its labels divided
    by their sum: two captions of one image share the mass equally. One without any match is left out of the mean.
    """
    with torch.autocast(similarity_NM.device.type, enabled=False):
        logits = tau * at_least_float32(similarity_NM)
        match_NM = identity(*logits.shape, device=logits.device) if match_NM is None else match_NM
        i2t, t2i = _cross_entropy_of_labels(logits, match_NM), _cross_entropy_of_labels(logits.T, match_NM.T)
    return LossOutput(0.5 * (i2t + t2i), {"i2t": i2t, "t2i": t2i})


def _cross_entropy_of_labels(logits: Tensor, match: Tensor) -> Tensor:
    match = match.to(logits.dtype)
    mass = match.sum(1, keepdim=True)
    target = match / torch.where(mass > 0, mass, torch.ones_like(mass))
    return -(target * logits.log_softmax(1)).sum() / (mass > 0).sum().clamp(min=1)
