"""Losses for captions that do not match their images, or match several: NCR, DECL, P2RM and DAA.

Letters: N pairs, D dimensions, C captions, V words. Similarities and labels have images in rows; `match_NN` says which
pairs are no negatives, see `triplet_loss`.
"""

import math
import warnings
from collections.abc import Sequence

import numpy as np
import torch
from scipy.sparse import csr_matrix
from torch import Tensor
from torch.distributions import Dirichlet, kl_divergence

from probemb.distances import in_row_blocks, sum_over_slices
from probemb.gaussian import Gaussian, at_least_float32
from probemb.losses.output import LossOutput, cosine_similarity
from probemb.losses.triplet import hinges, sum_of_hardest, triplet_loss

# ----------------------------------------------------------------------------------------------------------------- NCR
# Noisy Correspondence Rectifier (NeurIPS 2021). After a warm-up, pairs' losses are split by a mixture of two normals
# every epoch, and labels are refined. Two networks are trained, each with the split by the other one's losses.

SOFT_MARGINS = {
    "linear": lambda label: label,
    "exponential": lambda label: (10**label - 1) / 9,
    "sin": lambda label: 0.5 * torch.sin(math.pi * label - 0.5 * math.pi) + 0.5,
}


def ncr_loss(
    similarity_NN: Tensor, label_N: Tensor | None = None, match_NN: Tensor | None = None, *, margin: float = 0.2,
    soft_margin: str = "exponential", hardest: bool = True, published_margins: bool = False,
) -> LossOutput:  # fmt: skip
    """Triplet loss whose margin is SOFT_MARGINS of a pair's label in [0, 1], wherever it is the positive. Source: NCR.

    Not `hardest` (the warm-up) is the mean over all N. `published_margins` broadcasts labels of shape (N,), (N, 1) or
    (N, N) over both hinges, as the authors' code does: (N,) is the margin of the column's pair, (N, 1) of the row's.
    """
    row_margin, column_margin = margin, None
    if label_N is not None:
        row_margin = margin * SOFT_MARGINS[soft_margin](label_N)
        if not published_margins:
            row_margin, column_margin = row_margin[:, None], row_margin[None, :]
    row_NN, column_NN = hinges(similarity_NN, match_NN, row_margin, column_margin)
    loss = sum_of_hardest(row_NN, column_NN) if hardest else row_NN.mean(1).sum() + column_NN.mean(0).sum()
    return LossOutput(loss, {"triplet": loss})


def ncr_pair_losses(similarity_NN: Tensor, match_NN: Tensor | None = None, margin: float = 0.2) -> Tensor:
    """Every pair's mean hinge of both directions, (N,). Source: NCR."""
    row_NN, column_NN = hinges(similarity_NN, match_NN, margin)
    return row_NN.mean(1) + column_NN.mean(0)


def ncr_predict(similarity_NN: Tensor, match_NN: Tensor | None = None, margin: float = 0.2) -> Tensor:
    """Every pair's label as the network sees it, (N,) in [0, 1]. Source: NCR.

    The margin less the mean hinge of both directions, over its mean among the N // 10 + 1 best pairs of the batch.
    """
    p = (margin - 0.5 * ncr_pair_losses(similarity_NN, match_NN, margin)).clamp(0, margin)
    best = p.topk(len(p) // 10 + 1).values.mean()
    return (p / best.clamp(min=torch.finfo(p.dtype).tiny)).clamp(0, 1)


def refine_labels(
    predicted_N: Tensor, clean_probability_N: Tensor, clean_N: Tensor, predicted_by_other_N: Tensor | None = None
) -> Tensor:
    """Labels for training, (N,): w + (1 - w) p for clean pairs, the mean of p and q for the others. Source: NCR.

    p is the network's own prediction, q the other's, by default p; w is the probability of being clean.
    """
    p, q = predicted_N, predicted_N if predicted_by_other_N is None else predicted_by_other_N
    return torch.where(clean_N, clean_probability_N + (1 - clean_probability_N) * p, (p + q) / 2)


def clean_probability(
    losses_N: Tensor, max_iterations: int = 10, tolerance: float = 1e-2, variance_floor: float = 5e-4
) -> Tensor:
    """Probability that a pair belongs to the lower normal of a mixture of two, fitted to the losses of the training
    set, scaled to [0, 1], (N,) float64 on the CPU. Losses that are all equal are all clean. Source: NCR.
    """
    from sklearn.exceptions import ConvergenceWarning  # sklearn costs --help more than a second
    from sklearn.mixture import GaussianMixture

    x = losses_N.detach().double().flatten().cpu()
    low, high = x.min(), x.max()
    if low == high:
        return torch.ones_like(x)
    x_N1 = ((x - low) / (high - low)).numpy()[:, None]
    mixture = GaussianMixture(2, max_iter=max_iterations, tol=tolerance, reg_covar=variance_floor, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # ten iterations, as published
        mixture.fit(x_N1)
    return torch.from_numpy(mixture.predict_proba(x_N1)[:, mixture.means_[:, 0].argmin()].copy())


def split_clean(clean_probability_N: Tensor, threshold: float = 0.5) -> Tensor:
    """Pairs more probable than the threshold, (N,) bool; never all: then the N // 100 + 1 least probable are not."""
    clean = clean_probability_N > threshold
    if clean.all() and len(clean) > 1:
        clean[clean_probability_N.argsort(stable=True)[: len(clean) // 100 + 1]] = False
    return clean


# ---------------------------------------------------------------------------------------------------------------- DECL
# Deep Evidential Cross-modal Learning (ACM MM 2022): similarities as evidence of a Dirichlet distribution.


def evidence(similarity_NN: Tensor, tau: float = 0.1) -> Tensor:
    """Evidence exp(tanh(similarity) / tau) of every pair, (N, N), positive. Source: DECL, evidence extractor.

    In float64, as the totals reach thousands times N and log gammas of float32 would lose their differences.
    """
    return (similarity_NN.double().tanh() / tau).exp()


def dirichlet_kl(alpha_NM: Tensor) -> Tensor:
    """KL(Dirichlet(alpha) || Dirichlet(1, ..., 1)) of every row in nats, (N,)."""
    # Unchecked: NaN is the trainer's to report, and a check would wait for the GPU.
    given, uniform = (Dirichlet(alpha, validate_args=False) for alpha in (alpha_NM, torch.ones_like(alpha_NM)))
    return kl_divergence(given, uniform)


def evidential_loss(evidence_NM: Tensor, label_NM: Tensor, kl_weight: float = 0.1) -> Tensor:
    """Expected squared error of the matches' probabilities plus kl_weight * misplaced evidence, (N,), rows are queries.

    With alpha = evidence + 1 the expectation over the Dirichlet is (label - mean)^2 plus the variance. The second
    term is the KL to the uniform Dirichlet without the evidence of the query's matches, which share the probability.
    """
    alpha = evidence_NM + 1
    total = alpha.sum(1, keepdim=True)
    mean = alpha / total
    target = label_NM / label_NM.sum(1, keepdim=True).clamp(min=1)
    error = (target - mean).square() + mean * (1 - mean) / (total + 1)
    return error.sum(1) + kl_weight * dirichlet_kl(evidence_NM * (1 - label_NM) + 1)


def dynamic_hinge(similarity_NN: Tensor, negatives: int, match_NN: Tensor | None = None, margin: float = 0.2) -> Tensor:
    """Robust dynamic hinge: mean of the `negatives` largest hinges, both directions added, (N,). Source: DECL."""
    row_NN, column_NN = hinges(similarity_NN, match_NN, margin)
    return (row_NN.topk(negatives, 1).values.sum(1) + column_NN.topk(negatives, 0).values.sum(0)) / negatives


def n_negatives(batch: int, step: int, eta: float = 0.025, at_least: int = 5) -> int:
    """Number of negatives in the dynamic hinge: the whole batch, eta fewer every step, not below `at_least`."""
    n = max(int(batch - eta * step), at_least)
    return n if n <= batch else max(1, batch - 1)


def decl_correspondence(
    similarity_NN: Tensor, tau: float = 0.1, match_NN: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Pairs classified as clean, (N,) bool, and their uncertainty, (N,). Source: DECL, divergence of data.

    A pair is clean if its evidence, summed over both directions, is its row's largest; others that match by `match_NN`
    do not compete. The uncertainty is N over the total of alpha, summed likewise.
    """
    e = evidence(similarity_NN, tau)
    n = len(e)
    mutual = e + e.T
    if match_NN is not None:
        own = torch.eye(n, dtype=torch.bool, device=e.device)
        mutual = mutual.masked_fill((match_NN > 0) & ~own, 0)  # evidence is positive
    clean = mutual.argmax(1) == torch.arange(n, device=e.device)
    return clean, n / (e + 1).sum(1) + n / (e.T + 1).sum(1)


def decl_loss(
    similarity_NN: Tensor, match_NN: Tensor | None = None, clean_N: Tensor | None = None, *, negatives: int,
    tau: float = 0.1, kl_weight: float = 0.1, hinge_weight: float = 0.8, margin: float = 0.2,
) -> LossOutput:  # fmt: skip
    """Mean of both directions' evidential losses + hinge_weight * sum of the clean pairs' dynamic hinges. Source: DECL.

    Texts of pairs not in `clean_N` match nothing; None: all are clean (warm-up).
    """
    n = len(similarity_NN)
    clean_N = similarity_NN.new_ones(n) if clean_N is None else clean_N.to(similarity_NN.dtype)
    match = torch.eye(n, device=similarity_NN.device) if match_NN is None else match_NN
    label = match.double() * clean_N[None, :]  # one rule for every copy of a text's image in the batch
    e = evidence(similarity_NN, tau)
    evidential = (evidential_loss(e, label, kl_weight) + evidential_loss(e.T, label.T, kl_weight)).mean()
    hinge = (dynamic_hinge(similarity_NN.tanh(), negatives, match_NN, margin) * clean_N).sum()
    loss = evidential.to(hinge.dtype) + hinge_weight * hinge
    return LossOutput(loss, {"evidential": evidential, "hinge": hinge})


# ---------------------------------------------------------------------------------------------------------------- P2RM
# Point-to-rectangle matching (Wang et al., ACM Multimedia 2022) as a regulariser of VSE's triplet loss, without public
# code: an item's rectangle stands for its possible matches (the abstract; PCME++ §3.2). Assumed: it is axis-aligned
# around the unit mean, with one learned vector of half-sides per modality; its similarity to a point is minus half the
# squared distance, cosine - 1 for half-sides of 0, so that margins keep their meaning; weight and start.


def point_to_rectangle(point_ND: Tensor, centre_MD: Tensor, half_side_D: Tensor) -> Tensor:
    """Squared Euclidean distance from points to axis-aligned rectangles, (N, M)."""

    def outside(point: Tensor, centre: Tensor, half_side: Tensor) -> Tensor:
        return ((point - centre).abs() - half_side).clamp(min=0).square()

    return sum_over_slices(outside, (point_ND,), (centre_MD, half_side_D.expand_as(centre_MD)))


def p2rm_loss(
    image: Gaussian, text: Gaussian, match: Tensor | None, half_image_D: Tensor, half_text_D: Tensor,
    margin: float = 0.2, weight: float = 1.0, hardest: bool = True,
) -> LossOutput:  # fmt: skip
    """Triplet loss of the cosines of the means + weight * triplet loss of point-to-rectangle similarities."""
    point_i, point_t = at_least_float32(image.mean), at_least_float32(text.mean)
    with torch.autocast(point_i.device.type, enabled=False):
        triplet = triplet_loss(cosine_similarity(image, text), match, margin, hardest).loss
        i2t = -0.5 * point_to_rectangle(point_i, point_t, half_text_D)
        t2i = -0.5 * point_to_rectangle(point_t, point_i, half_image_D).T
        rectangle = 0.5 * sum(triplet_loss(x, match, margin, hardest).loss for x in (i2t, t2i))
    return LossOutput(triplet + weight * rectangle, {"triplet": triplet, "rectangle": rectangle})


# ----------------------------------------------------------------------------------------------------------------- DAA
# A triplet loss, and agreement of the ranks by similarity with the ranks by the captions' tf-idf.


def soft_rank(values_NM: Tensor, temperature: float = 0.001, published: bool = False) -> Tensor:
    """Differentiable rank of every element within its row, 1 for the largest, (N, M). Source: DAA, after SmoothAP.

    rank(b, c) = 1 + the sum over a other than c of sigmoid((s_ba - s_bc) / temperature). `published` reproduces the
    authors' code, whose rank is not the paper's: it compares s_bc with column b, s_ab, instead of row b; N = M only.
    """
    values_NM = values_NM / temperature

    def of_rows(others: Tensor, values: Tensor) -> Tensor:
        above = torch.sigmoid(others[:, :, None] - values[:, None, :]).sum(1)  # of (rows, a, c)
        return above + 1 - torch.sigmoid(others - values)  # without a = c

    others_NM = values_NM.T if published else values_NM
    return in_row_blocks(of_rows, (others_NM, values_NM), values_NM.shape[1] ** 2)


def daa_regulariser(
    similarity_NM: Tensor, semantic_NM: Tensor, temperature: float = 0.001, published: bool = False
) -> Tensor:
    """1 - average semantic precision of one direction, queries in rows, in [0, 1). Source: DAA.

    The precision is the mean over all pairs of min / max of the two ranks within the row, see `soft_rank`.
    """
    rank = soft_rank(similarity_NM, temperature, published)
    with torch.no_grad():
        wanted = soft_rank(semantic_NM.to(similarity_NM), temperature, published)
    return 1 - (torch.minimum(rank, wanted) / torch.maximum(rank, wanted)).mean()


def daa_loss(
    similarity_NN: Tensor, semantic_NN: Tensor, match_NN: Tensor | None = None, *, margin: float = 0.2,
    weight: float = 25.0, temperature: float = 0.001, hardest: bool = True, published: bool = False,
) -> LossOutput:  # fmt: skip
    """Triplet loss + weight * (both directions' `daa_regulariser` by `CaptionSimilarity` of the batch). Source: DAA."""
    triplet = triplet_loss(similarity_NN, match_NN, margin, hardest).loss
    i2t = daa_regulariser(similarity_NN, semantic_NN, temperature, published)
    t2i = daa_regulariser(similarity_NN.T, semantic_NN.T, temperature, published)
    return LossOutput(triplet + weight * (i2t + t2i), {"triplet": triplet, "daa": (i2t + t2i)})


def caption_tfidf(captions: Sequence[str]) -> csr_matrix:
    """Unit rows of tf-idf, (C, V) in float32; zeros for a caption without words (of two letters or digits or more)."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    return TfidfVectorizer().fit_transform(captions).astype(np.float32)


class CaptionSimilarity:
    """Mean tf-idf cosine of a caption with all captions of an image, one at least. Source: DAA, CIDEr."""

    def __init__(self, captions: Sequence[str], image_of_caption: Sequence[int]):
        """All training captions, and the index of the image of each."""
        self.tfidf, owner = caption_tfidf(captions), np.asarray(image_of_caption)
        share = (1 / np.bincount(owner).clip(1))[owner].astype(np.float32)
        self.of_image = csr_matrix((share, (owner, np.arange(len(owner))))) @ self.tfidf

    def __call__(self, image_index: Sequence[int], caption_index: Sequence[int]) -> Tensor:
        """(N,) images and (M,) captions to their similarities (N, M) in [0, 1], float32."""
        return torch.from_numpy((self.of_image[image_index] @ self.tfidf[caption_index].T).toarray())
