"""Order embeddings (Vendrov et al., ICLR 2016): a caption lies above its image, in a partial order of points.

x is below y where x_d >= y_d in every dimension d; what a caption exceeds its image by is its penalty.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from probemb.gaussian import Gaussian, at_least_float32
from probemb.losses.output import LossOutput
from probemb.losses.pairs import root
from probemb.losses.triplets.triplet import triplet_loss

BLOCK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 25}  # of a block of rows times M x D: a CPU's cache, 128 MiB of a GPU


def order_similarity(image_ND: Tensor, text_MD: Tensor, absolute: bool = True, squared: bool = True) -> Tensor:
    """Minus the penalty ||max(0, text - image)||^2 of every pair, (N, M), at most 0. Source: order embeddings, Eq. 2.

    In at least float32, also under autocast. Nothing of size N x M x D is held.

    Args:
        absolute: of the absolute values of both, as order embeddings define it; VSE++ takes them as they are.
        squared: False for the norm itself, as the public code of VSE++ and PVSE has it.
    """
    with torch.autocast(image_ND.device.type, enabled=False):
        image_ND, text_MD = at_least_float32(image_ND), at_least_float32(text_MD)
        if absolute:
            image_ND, text_MD = image_ND.abs(), text_MD.abs()
        penalty = _Penalty.apply(image_ND, text_MD)
        return -(penalty if squared else root(penalty))


class _Penalty(torch.autograd.Function):
    """sum_d max(0, y_jd - x_id)^2, (N, M), a few rows at a time; the backward pass computes the excess again."""

    @staticmethod
    def forward(ctx, x_ND: Tensor, y_MD: Tensor) -> Tensor:
        ctx.save_for_backward(x_ND, y_MD)
        excess = (_excess(rows, y_MD) for rows in _blocks(x_ND, y_MD))
        return torch.cat([torch.linalg.vecdot(e, e) for e in excess])

    @staticmethod
    def backward(ctx, grad_NM: Tensor) -> tuple[Tensor, Tensor]:
        x_ND, y_MD = ctx.saved_tensors
        grad_x, grad_y = [], torch.zeros_like(y_MD)
        for rows, grad in zip(_blocks(x_ND, y_MD), _blocks(grad_NM, y_MD)):
            excess = _excess(rows, y_MD)
            grad_x.append(torch.einsum("nm,nmd->nd", grad, excess))
            grad_y += excess.mul_(grad[..., None]).sum(0)
        return -2 * torch.cat(grad_x), 2 * grad_y


def _excess(x_ND: Tensor, y_MD: Tensor) -> Tensor:
    return (y_MD[None] - x_ND[:, None]).clamp_(min=0)  # (n, M, D)


def _blocks(x_ND: Tensor, y_MD: Tensor) -> tuple[Tensor, ...]:
    held = BLOCK_ELEMENTS.get(x_ND.device.type, BLOCK_ELEMENTS["cuda"])
    return x_ND.split(max(1, held // max(1, y_MD.numel())))


class OrderLoss(nn.Module):
    """`triplet_loss` of `order_similarity`. Source: order embeddings Eq. 8 (all negatives), VSE++ §4.4 (the hardest).

    Args:
        margin: in the units of the penalty.
        hardest: whether only the hardest negative counts.
        absolute, squared: see `order_similarity`.
    """

    def __init__(self, margin: float = 0.05, hardest: bool = False, absolute: bool = True, squared: bool = True):
        super().__init__()
        self.margin, self.hardest, self.absolute, self.squared = margin, hardest, absolute, squared

    def forward(self, image: Gaussian, text: Gaussian, match: Tensor | None = None) -> LossOutput:
        """N pairs, (N, D) each."""
        similarity = order_similarity(image.mean, text.mean, self.absolute, self.squared)
        return triplet_loss(similarity, match, self.margin, self.hardest)

    def extra_repr(self) -> str:
        names = ("margin", "hardest", "absolute", "squared")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)
