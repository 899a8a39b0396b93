"""Order embeddings (Vendrov et al., ICLR 2016): a caption lies above its image, in a partial order of points.

x is below y where x_d >= y_d in every dimension d; what a caption exceeds its image by is its penalty.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from probemb.distances import sum_over_slices
from probemb.gaussian import Gaussian, at_least_float32
from probemb.losses.output import LossOutput
from probemb.losses.pairs import root
from probemb.losses.triplet import triplet_loss


def order_similarity(image_ND: Tensor, text_MD: Tensor, absolute: bool = True, squared: bool = True) -> Tensor:
    """Minus the penalty ||max(0, text - image)||^2 of every pair, (N, M), at most 0. Source: order embeddings, Eq. 2.

    In at least float32, also under autocast. Nothing of size N x M x D is held.

    Args:
        absolute: of the absolute values of both, as order embeddings define it; VSE++ takes them as they are.
        squared: False for the norm itself, as the public code of VSE++ and PVSE has it.
    """

    def excess(image: Tensor, text: Tensor) -> Tensor:
        return (text - image).clamp(min=0).square()

    with torch.autocast(image_ND.device.type, enabled=False):
        image_ND, text_MD = at_least_float32(image_ND), at_least_float32(text_MD)
        if absolute:
            image_ND, text_MD = image_ND.abs(), text_MD.abs()
        penalty = sum_over_slices(excess, (image_ND,), (text_MD,))
        return -(penalty if squared else root(penalty))


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
