"""Losses with margins over triplets: VSE++, VSE infinity, order embeddings, probabilistic VSE++ and VSRN, PVSE, SCAN.

Letters: N images and texts (M texts where they are not pairs), K embeddings of each, D dimensions. Similarities are
larger for closer pairs, with images in rows. Nothing of size N x M x D is held.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from probemb.cross_attention import CrossAttention, Tokens, attention_scores, pair_scores
from probemb.distances import kl, min_kl, order_similarity, root, squared_euclidean, wasserstein2
from probemb.gaussian import Gaussian, at_least_float32
from probemb.losses.output import LossOutput


def triplet_loss(
    similarity_NN: Tensor, match_NN: Tensor | None = None, margin: float = 0.2, hardest: bool = True,
    reduce: Literal["sum", "mean"] = "sum",
) -> LossOutput:  # fmt: skip
    """Both directions' hinges max(0, margin + s(negative) - s(pair)) of N pairs. Source: VSE++, PVSE (reduce "mean").

    A pair's own similarity is on the diagonal. Other pairs with a match above 0 (another caption of the same image) are
    neither negatives nor positives. `hardest`: the largest hinge of every row and column (VSE++) rather than the sum
    (VSE0; VSE infinity's warm-up). The "mean" is over N hardest hinges of a direction, or over all N x N.
    """
    row_NN, column_NN = hinges(similarity_NN, match_NN, margin)
    loss = sum_of_hardest(row_NN, column_NN) if hardest else row_NN.sum() + column_NN.sum()
    if reduce == "mean":
        loss = loss / (len(row_NN) if hardest else row_NN.numel())
    return LossOutput(loss, {"triplet": loss})


def hinges(
    similarity_NN: Tensor, match_NN: Tensor | None = None, margin: Tensor | float = 0.2,
    column_margin: Tensor | float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Hinges against the row's own pair (image to text) and against the column's (text to image), (N, N) each, 0 for
    positives. Margins are numbers or broadcast to (N, N).
    """
    column_margin = margin if column_margin is None else column_margin
    positive = torch.eye(len(similarity_NN), dtype=torch.bool, device=similarity_NN.device)
    positive = positive if match_NN is None else positive | (match_NN > 0)
    own_N = similarity_NN.diagonal()
    row = (similarity_NN + margin - own_N[:, None]).clamp(min=0).masked_fill(positive, 0)
    column = (similarity_NN + column_margin - own_N[None, :]).clamp(min=0).masked_fill(positive, 0)
    return row, column


def sum_of_hardest(row_NN: Tensor, column_NN: Tensor) -> Tensor:
    return row_NN.max(1).values.sum() + column_NN.max(0).values.sum()


def scan_loss(
    images: Tokens, texts: Tokens, match_NN: Tensor | None = None,
    how: CrossAttention = CrossAttention(),  # noqa: B008 - frozen
    margin: float = 0.2, hardest: bool = True,
) -> LossOutput:  # fmt: skip
    """`triplet_loss` of N images' and N texts' attention scores; tokens have unit length (`unit_tokens`).

    Of the hardest only 3 N scores have a gradient, the pairs' own, and those of every row and column: all N x N are
    computed without one, and these again with it.
    """
    if not hardest:
        return triplet_loss(attention_scores(images, texts, how), match_NN, margin, hardest=False)
    with torch.no_grad():
        row_NN, column_NN = hinges(attention_scores(images, texts, how), match_NN, margin)
        (row_N, text_N), (column_N, image_N) = row_NN.max(1), column_NN.max(0)
    every_N = torch.arange(len(text_N), device=text_N.device)
    pairs = torch.cat([every_N, every_N, image_N]), torch.cat([every_N, text_N, every_N])
    own_N, of_text_N, of_image_N = pair_scores(images, texts, how, pairs).chunk(3)
    i2t = (margin + of_text_N - own_N).clamp(min=0) * (row_N > 0)  # 0: there is no negative, or none within reach
    t2i = (margin + of_image_N - own_N).clamp(min=0) * (column_N > 0)
    loss = i2t.sum() + t2i.sum()
    return LossOutput(loss, {"triplet": loss})


# --------------------------------------------------------------------------------------------- similarities of normals

# The root's slope is unlimited at 0, and float32 resolves squared distances to about this.
SMALLEST_SQUARE = 1e-8

# (N, M) in at least float32. The paper's Eq. 8 prints variances where Eq. 7 has standard deviations; its 2-Wasserstein
# distance is not squared. An image holds more than a caption can say: Eq. 4 has KL(image || caption).
GAUSSIAN_SIMILARITIES = {
    "min-kl": lambda image, text: -min_kl(image, text),
    "kl": lambda image, text: -kl(image, text),
    "reverse-kl": lambda image, text: -kl(text, image).T,
    "wasserstein2": lambda image, text: -wasserstein2(image, text).clamp_min(SMALLEST_SQUARE).sqrt(),
}


def prob_triplet_loss(
    image: Gaussian,
    text: Gaussian,
    match: Tensor | None = None,
    similarity: str = "min-kl",
    margin: float = 0.2,
    negatives: Literal["hardest", "semi-hard", "all"] = "hardest",
) -> LossOutput:
    """`triplet_loss` of one of GAUSSIAN_SIMILARITIES; the margin is in its units: nats, or the distance itself.

    Source: Probabilistic VSE++/VSRN Eq. 3; its text speaks of semi-hard negatives, the hardest of those that are
    farther than the pair itself.
    """
    similarity_NN = GAUSSIAN_SIMILARITIES[similarity](image, text)
    if negatives != "semi-hard":
        return triplet_loss(similarity_NN, match, margin, negatives == "hardest")
    row_NN, column_NN = hinges(similarity_NN, match, margin)
    own_N = similarity_NN.diagonal()
    row_NN = row_NN.masked_fill(similarity_NN >= own_N[:, None], 0)
    loss = sum_of_hardest(row_NN, column_NN.masked_fill(similarity_NN >= own_N[None, :], 0))
    return LossOutput(loss, {"triplet": loss})


# ---------------------------------------------------------------------------------------------------------------- PVSE


def multi_instance_similarity(
    image_NKD: Tensor, text_MKD: Tensor, similarity: Literal["cosine", "order"] = "cosine"
) -> Tensor:
    """The largest of the K x K similarities of every pair, (N, M), in at least float32. Source: PVSE, L_mil.

    (N, D) and (M, D) stand for K = 1. "order" is `order_similarity` without the square, as in the public code.
    """
    image_NKD, text_MKD = _several(image_NKD), _several(text_MKD)
    flat_image, flat_text = image_NKD.flatten(0, 1), text_MKD.flatten(0, 1)  # (N K, D), (M K, D)
    with torch.autocast(image_NKD.device.type, enabled=False):
        order = similarity == "order"
        every = order_similarity(flat_image, flat_text, squared=False) if order else flat_image @ flat_text.T
        return every.view(*image_NKD.shape[:2], *text_MKD.shape[:2]).amax((1, 3))


def diversity(residual_NKD: Tensor) -> Tensor:
    """Mean over items of ||G - I||_F / K^2, G (K, K) the cosines of an item's residuals. Source: PVSE, diversity."""
    with torch.autocast(residual_NKD.device.type, enabled=False):
        unit = F.normalize(at_least_float32(residual_NKD), dim=-1)
        k = unit.shape[1]
        own = torch.eye(k, dtype=torch.bool, device=unit.device)
        gram = (unit @ unit.transpose(1, 2)).masked_fill(own, 0)
        return root(gram.square().sum((1, 2))).mean() / k**2


def mmd(x_PD: Tensor, y_QD: Tensor, gamma: float = 0.5, kernel: Literal["rbf", "unsquared"] = "rbf") -> Tensor:
    """Squared maximum mean discrepancy of two sets of points, mean k(x, x') - 2 mean k(x, y) + mean k(y, y').

    k(x, y) = exp(-gamma |x - y|^2) for "rbf"; "unsquared" is exp(-gamma |x - y|), which PVSE's public code computes.
    """

    def mean(a: Tensor, b: Tensor) -> Tensor:
        squared = squared_euclidean(a, b).clamp(min=0)
        if a is b:  # no rounding errors where the root is steep
            squared = squared.masked_fill(torch.eye(len(a), dtype=torch.bool, device=a.device), 0)
        return (-gamma * (squared if kernel == "rbf" else root(squared))).exp().mean()

    with torch.autocast(x_PD.device.type, enabled=False):
        x, y = at_least_float32(x_PD), at_least_float32(y_QD)
        origin = torch.cat([x.detach(), y.detach()]).mean(0)  # a common origin keeps the squares small
        x, y = x - origin, y - origin
        return mean(x, x) - 2 * mean(x, y) + mean(y, y)


def pvse_loss(
    image: Gaussian, text: Gaussian, match: Tensor | None = None, residuals: tuple[Tensor, Tensor] | None = None, *,
    margin: float = 0.1, hardest: bool = True, diversity_weight: float = 0.1, mmd_weight: float = 0.01,
    gamma: float = 0.5, kernel: Literal["rbf", "unsquared"] = "rbf", reduce: Literal["sum", "mean"] = "mean",
    similarity: Literal["cosine", "order"] = "cosine",
) -> LossOutput:  # fmt: skip
    """Triplet loss of `multi_instance_similarity` + weighted `diversity` of both sides + weighted `mmd`. Source: PVSE.

    Of N pairs, (N, K, D) each, or (N, D) for the triplet loss alone. `residuals`: what attention adds to the images'
    and the texts' features, (N, K, D). With `reduce` "sum" (as the public code may) the regularisers are sums too.
    """
    mean_i, mean_t = _several(image.mean), _several(text.mean)
    n, k, _ = mean_i.shape
    similarity_NN = multi_instance_similarity(mean_i, mean_t, similarity)
    loss = triplet_loss(similarity_NN, match, margin, hardest, reduce).loss
    terms = {"triplet": loss}
    if k > 1 and diversity_weight:
        terms["diversity"] = sum(map(diversity, residuals)) * (n if reduce == "sum" else 1)
        loss = loss + diversity_weight * terms["diversity"]
    if k > 1 and mmd_weight:
        value = mmd(mean_i.flatten(0, 1), mean_t.flatten(0, 1), gamma, kernel)
        terms["mmd"] = value * ((n * k) ** 2 if reduce == "sum" else 1)
        loss = loss + mmd_weight * terms["mmd"]
    return LossOutput(loss, terms)


def _several(mean: Tensor) -> Tensor:
    """(N, K, D) in at least float32; (N, D) becomes (N, 1, D)."""
    return at_least_float32(mean if mean.ndim == 3 else mean.unsqueeze(1))
