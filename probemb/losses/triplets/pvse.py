"""PVSE (Song and Soleymani, CVPR 2019): a triplet loss of the closest of K x K embeddings, with two regularisers.

Letters: N images, M texts, K embeddings of each, D dimensions.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from probemb.distances import squared_euclidean
from probemb.gaussian import Gaussian, at_least_float32
from probemb.losses.output import LossOutput
from probemb.losses.pairs import in_row_blocks, root
from probemb.losses.triplets.order import order_similarity
from probemb.losses.triplets.triplet import Reduce, triplet_loss

Similarity = Literal["cosine", "order"]
MMDKernel = Literal["rbf", "unsquared"]


def multi_instance_similarity(image_NKD: Tensor, text_MKD: Tensor, similarity: Similarity = "cosine") -> Tensor:
    """The largest of the K x K similarities of every pair, (N, M), in at least float32. Source: PVSE, L_mil.

    (N, D) and (M, D) stand for K = 1. Cosines are of unit embeddings. Beyond a few million products of embeddings a
    block of images is computed at a time, and again in the backward pass.

    Args:
        similarity: "cosine", or "order" (`order_similarity` without the square, as in the public code).
    """
    image_NKD, text_MKD = _several(image_NKD), _several(text_MKD)
    m, k = text_MKD.shape[:2]
    flat_text = text_MKD.flatten(0, 1)  # (M K, D)

    def of_rows(image: Tensor) -> Tensor:
        flat = image.flatten(0, 1)
        if similarity == "order":
            every = order_similarity(flat, flat_text, squared=False)
        else:
            every = flat @ flat_text.T
        return every.view(len(image), -1, m, k).amax((1, 3))

    with torch.autocast(image_NKD.device.type, enabled=False):
        return torch.cat(in_row_blocks(of_rows, image_NKD, image_NKD.shape[1] * m * k))


def diversity(residual_NKD: Tensor) -> Tensor:
    """Similarity of an item's K residuals: mean over items of ||G - I||_F / K^2. Source: PVSE, diversity loss.

    G (K, K) has the cosines of an item's residuals: what the attention adds to its pooled features.
    """
    with torch.autocast(residual_NKD.device.type, enabled=False):
        unit = F.normalize(at_least_float32(residual_NKD), dim=-1)
        k = unit.shape[1]
        own = torch.eye(k, dtype=torch.bool, device=unit.device)
        gram = (unit @ unit.transpose(1, 2)).masked_fill(own, 0)
        return root(gram.square().sum((1, 2))).mean() / k**2


def mmd(x_PD: Tensor, y_QD: Tensor, gamma: float = 0.5, kernel: MMDKernel = "rbf") -> Tensor:
    """Squared maximum mean discrepancy of two sets of points, mean k(x, x') - 2 mean k(x, y) + mean k(y, y').

    Args:
        gamma: of k(x, y) = exp(-gamma |x - y|^2).
        kernel: "rbf", or "unsquared" for exp(-gamma |x - y|), which PVSE's public code computes.
    """

    def mean(a: Tensor, b: Tensor) -> Tensor:
        def of_rows(index: Tensor) -> Tensor:
            squared = squared_euclidean(a[index], b).clamp(min=0)
            if a is b:  # no rounding errors where the root is steep
                squared = squared.masked_fill(index[:, None] == torch.arange(len(b), device=b.device), 0)
            return (-gamma * (squared if kernel == "rbf" else root(squared))).exp().sum()

        rows = torch.arange(len(a), device=a.device)
        return torch.stack(in_row_blocks(of_rows, rows, len(b))).sum() / (len(a) * len(b))

    with torch.autocast(x_PD.device.type, enabled=False):
        x, y = at_least_float32(x_PD), at_least_float32(y_QD)
        origin = torch.cat([x.detach(), y.detach()]).mean(0)  # a common origin keeps the squares small
        x, y = x - origin, y - origin
        return mean(x, x) - 2 * mean(x, y) + mean(y, y)


class PVSELoss(nn.Module):
    """Triplet loss of `multi_instance_similarity` + weighted `diversity` of both sides + weighted `mmd`. Source: PVSE.

    With K = 1 it is the triplet loss alone.

    Args:
        margin, hardest, reduce: of the triplet loss; with "sum" the regularisers are sums over the batch too (the
            public code's other choice).
        diversity, mmd: weights.
        gamma, kernel: see `mmd`.
        similarity: see `multi_instance_similarity`.
    """

    def __init__(
        self,
        margin: float = 0.1,
        hardest: bool = True,
        diversity: float = 0.1,
        mmd: float = 0.01,
        gamma: float = 0.5,
        kernel: MMDKernel = "rbf",
        reduce: Reduce = "mean",
        similarity: Similarity = "cosine",
    ):
        super().__init__()
        self.margin, self.hardest, self.reduce, self.similarity = margin, hardest, reduce, similarity
        self.diversity, self.mmd, self.gamma, self.kernel = diversity, mmd, gamma, kernel

    def forward(
        self,
        image: Gaussian,
        text: Gaussian,
        match: Tensor | None = None,
        residuals: tuple[Tensor, Tensor] | None = None,
        *,
        hardest: bool | None = None,
    ) -> LossOutput:
        """N pairs, (N, K, D) each, or (N, D) for K = 1. Terms "triplet", and "diversity" and "mmd" where they count.

        Args:
            residuals: what the attention adds to the images' and the texts' features, (N, K, D) each; needed where
                K > 1 and diversity has a weight.
            hardest: in place of the loss' own, as in the first epochs.

        Raises:
            ValueError: residuals are missing.
        """
        mean_i, mean_t = _several(image.mean), _several(text.mean)
        n, k, _ = mean_i.shape
        similarity = multi_instance_similarity(mean_i, mean_t, self.similarity)
        hardest = self.hardest if hardest is None else hardest
        terms = {"triplet": triplet_loss(similarity, match, self.margin, hardest, self.reduce).loss}
        loss = terms["triplet"]
        if k > 1 and self.diversity:
            if residuals is None:
                raise ValueError("the diversity of K > 1 embeddings is measured on their residuals, and there are none")
            terms["diversity"] = sum(map(diversity, residuals)) * (n if self.reduce == "sum" else 1)
            loss = loss + self.diversity * terms["diversity"]
        if k > 1 and self.mmd:
            value = mmd(mean_i.flatten(0, 1), mean_t.flatten(0, 1), self.gamma, self.kernel)
            terms["mmd"] = value * ((n * k) ** 2 if self.reduce == "sum" else 1)
            loss = loss + self.mmd * terms["mmd"]
        return LossOutput(loss, {name: value.detach() for name, value in terms.items()})

    def extra_repr(self) -> str:
        names = ("margin", "hardest", "diversity", "mmd", "gamma", "kernel", "reduce", "similarity")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


def _several(mean: Tensor) -> Tensor:
    """(N, K, D) in at least float32; (N, D) becomes (N, 1, D)."""
    return at_least_float32(mean if mean.ndim == 3 else mean.unsqueeze(1))
