"""The triplet loss on a similarity of normals: probabilistic VSE++ and VSRN. N pairs, D dimensions.

Every similarity is a few matrix products; nothing of size N x N x D is held.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from probemb.distances import kl, min_kl, wasserstein2
from probemb.gaussian import Gaussian
from probemb.losses.output import LossOutput
from probemb.losses.triplets.triplet import hinges

Similarity = Literal["min-kl", "kl", "reverse-kl", "wasserstein2"]
Negatives = Literal["hardest", "semi-hard", "all"]
# The root's slope is unlimited at 0, and float32 resolves squared distances to about this.
SMALLEST_SQUARE = 1e-8


def gaussian_similarity(image: Gaussian, text: Gaussian, kind: Similarity = "min-kl") -> Tensor:
    """Similarities (N, M) of Gaussians (N, D) and (M, D) in at least float32; larger is closer.

    Args:
        kind: "min-kl", the negative of the smaller of both KL divergences (Eq. 6); "kl", -KL(image || caption), since
            an image holds more than a caption can say (Eq. 4); "reverse-kl", -KL(caption || image) (Table 6);
            "wasserstein2", the negative 2-Wasserstein distance
            itself, not its square (Eq. 7; of standard deviations, where the paper's Eq. 8 prints variances).
    """
    if kind == "kl":
        return -kl(image, text)
    if kind == "reverse-kl":
        return -kl(text, image).T
    if kind == "min-kl":
        return -min_kl(image, text)
    if kind != "wasserstein2":
        raise ValueError(f"there is no similarity '{kind}'")
    return -wasserstein2(image, text).clamp_min(SMALLEST_SQUARE).sqrt()


def prob_triplet_loss(
    image: Gaussian,
    text: Gaussian,
    match: Tensor | None = None,
    similarity: Similarity = "min-kl",
    margin: float = 0.2,
    negatives: Negatives = "hardest",
) -> LossOutput:
    """Sum over the N pairs of both directions' hinges, max(0, margin + s(negative) - s(pair)).

    Source: Probabilistic VSE++/VSRN Eq. 3, which takes the largest hinge of every row and column; its text speaks of
    semi-hard negatives. Other pairs with a match above 0 are neither negatives nor positives.

    Args:
        match: (N, N), which pairs match; None is the identity.
        similarity: see `gaussian_similarity`.
        margin: in the units of the similarity: nats, or the distance itself.
        negatives: "hardest"; "semi-hard", the hardest of those that are farther than the pair itself; or "all".
    """
    similarity_NN = gaussian_similarity(image, text, similarity)
    with torch.autocast(similarity_NN.device.type, enabled=False):
        row_NN, column_NN = hinges(similarity_NN, match, margin)
        if negatives == "semi-hard":
            own_N = similarity_NN.diagonal()
            row_NN = row_NN.masked_fill(similarity_NN >= own_N[:, None], 0)
            column_NN = column_NN.masked_fill(similarity_NN >= own_N[None, :], 0)
        if negatives == "all":
            loss = row_NN.sum() + column_NN.sum()
        else:
            loss = row_NN.amax(1).sum() + column_NN.amax(0).sum()
    return LossOutput(loss, {"triplet": loss.detach()})
