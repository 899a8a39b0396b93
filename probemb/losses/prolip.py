"""ProLIP: pairwise contrastive loss of normals, inclusion of one in another; and SigLIP, which it comes from."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from probemb.distances import inclusion_per_dimension
from probemb.gaussian import Gaussian, at_least_float32
from probemb.losses.match import vib_kl
from probemb.losses.output import LossOutput
from probemb.losses.ring import BLOCK, number, sum_over_pairs

Form = Literal["exact", "code"]


def siglip_loss(
    image_BD: Tensor, text_BD: Tensor, scale: Tensor | float, bias: Tensor | float, block: int = BLOCK
) -> LossOutput:
    """-1/B * sum over pairs of log sigmoid(y l), l = scale * cosine + bias, y = 1 for own pairs and else -1; unit rows.

    With ranks, each passes its own items: the mean over the ranks is the loss of one process on the whole batch, in
    value and gradient. Source: Zhai et al., Sigmoid Loss for Language Image Pre-Training (ICCV 2023).
    """
    none_B = image_BD.new_zeros(len(image_BD))
    loss = _sigmoid_loss(image_BD, none_B, text_BD, none_B, scale, bias, block)
    return LossOutput(loss, {"siglip": loss})


def prolip_loss(
    image: Gaussian, text: Gaussian, scale: Tensor | float, bias: Tensor | float,
    masked: tuple[Gaussian, Gaussian] | None = None, match: Tensor | None = None, *, vib: float = 1e-4,
    inclusion: float = 1e-7, masked_inclusion: float = 1e-3, inclusion_scale: float = 1000.0, form: Form = "exact",
    eps: float = -10.0,
) -> LossOutput:  # fmt: skip
    """Pairwise contrastive loss + vib * L_vib + inclusion of images in texts and of inputs in their masked copies.

    With ranks, each passes its own items, as for `siglip_loss`. Source: ProLIP §3.2 and §3.3.

    Args:
        image, text: (B, D), unit means; item i of one matches item i of the other.
        masked: images and texts (n, D), n <= B: the first n items with most of their patches or words gone.
        match: (B, B) in [0, 1], images in rows; None is the identity. With it the items are the whole batch: other
            ranks are not asked for theirs.
        vib, inclusion, masked_inclusion: weights; inclusion_scale: c of -log sigmoid(c H).
        form: "exact", or "code": the public code's vib, which reads `log_var` as log sigma, and inclusion
            (`inclusion_per_dimension`), with eps.
    """
    image, text = image.float(), text.float()
    u_image, u_text = image.uncertainty(), text.uncertainty()
    loss = _sigmoid_loss(image.mean, u_image, text.mean, u_text, scale, bias, BLOCK, match)
    terms = {"ppcl": loss}
    with torch.autocast(image.mean.device.type, enabled=False):
        of_code = form == "code"
        terms["vib"] = sum(vib_kl(Gaussian(g.mean, 0.5 * g.log_var) if of_code else g) for g in (image, text))
        loss = loss + vib * terms["vib"]
        pairs = {"inclusion": (image, text, inclusion)}
        for name, whole, part in zip(("image_inclusion", "text_inclusion"), (image, text), masked or ()):
            pairs[name] = (whole[: len(part)], part.float(), masked_inclusion)
        for name, (inner, outer, weight) in pairs.items():
            if weight:
                terms[name] = inclusion_loss(inner, outer, inclusion_scale, form, eps)
                loss = loss + weight * terms[name]
    return LossOutput(loss, terms)


def inclusion_loss(
    inner: Gaussian, outer: Gaussian, scale: float = 1000.0, form: Form = "exact", eps: float = -10.0
) -> Tensor:
    """Mean over items and dimensions of -log sigmoid(scale * H), (): small where `inner` lies in `outer`."""
    return F.softplus(-scale * inclusion_per_dimension(inner, outer, form, eps)).mean()


def _sigmoid_loss(image_BD, u_image_B, text_BD, u_text_B, scale, bias, block: int, match_BB=None) -> Tensor:
    with torch.autocast(image_BD.device.type, enabled=False):
        image_BD, u_image_B, text_BD, u_text_B = map(at_least_float32, (image_BD, u_image_B, text_BD, u_text_B))
        scalars = scale, bias = number(scale, image_BD), number(bias, image_BD)
        if match_BB is not None:
            logits = _logits(image_BD, u_image_B, text_BD, u_text_B, *scalars)
            return (F.softplus(logits) - match_BB.to(logits.dtype) * logits).sum() / len(image_BD)
        own = scale * ((image_BD * text_BD).sum(1) - 0.5 * (u_image_B + u_text_B)) + bias
        pairs = sum_over_pairs(_softplus_of_pairs, (image_BD, u_image_B), (text_BD, u_text_B), scalars, block)
        return (pairs - own.sum()) / len(image_BD)


def _logits(image_BD, u_image_B, text_CD, u_text_C, scale, bias) -> Tensor:
    return scale * (image_BD @ text_CD.T - 0.5 * (u_image_B[:, None] + u_text_C[None, :])) + bias


def _softplus_of_pairs(*items_and_scalars) -> Tensor:
    return F.softplus(_logits(*items_and_scalars)).sum()
