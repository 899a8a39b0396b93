"""NCR: noisy correspondences found by their losses, and a margin that shrinks with a pair's estimated label.

One epoch of warm-up; then, every epoch, the pairs' losses are split by a mixture of two normals, labels are refined,
and the triplet loss is minimised with a margin per pair. Two networks are trained, each with the split by the other
one's losses. Source: Noisy Correspondence Rectifier, NeurIPS 2021.
"""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor, nn

from probemb.gaussian import Gaussian
from probemb.losses.output import LossOutput
from probemb.losses.pairs import cosine_similarity
from probemb.losses.triplets.triplet import hinges

SOFT_MARGINS = {
    "linear": lambda label: label,
    "exponential": lambda label: (10**label - 1) / 9,
    "sin": lambda label: 0.5 * torch.sin(math.pi * label - 0.5 * math.pi) + 0.5,
}


def ncr_loss(
    similarity_NN: Tensor,
    label_N: Tensor | None = None,
    match_NN: Tensor | None = None,
    *,
    margin: float = 0.2,
    soft_margin: str = "exponential",
    hardest: bool = True,
    published_margins: bool = False,
) -> LossOutput:
    """Triplet loss whose margin is a function of every pair's label. Source: NCR, soft margin.

    A pair's margin is margin * y for "linear", margin * (10^y - 1) / 9 for "exponential", and
    margin * (sin(pi y - pi / 2) + 1) / 2 for "sin", in both hinges in which the pair is the positive.

    Args:
        similarity_NN: images in rows, a pair's own similarity on the diagonal.
        label_N: estimated labels y in [0, 1]; None is the full margin for all.
        match_NN: pairs that are not negatives, see `triplet_loss`.
        hardest: the largest hinge of every row and column; False (the warm-up) is the mean over all N.
        published_margins: broadcast labels of shape (N,), (N, 1) or (N, N) over both hinges, as the authors' code
            does: (N,) is then the margin of the column's pair and (N, 1) of the row's, whichever is the positive.
    """
    row_margin, column_margin = margin, None
    if label_N is not None:
        row_margin = margin * SOFT_MARGINS[soft_margin](label_N)
        if not published_margins:
            if label_N.shape != (len(similarity_NN),):
                raise ValueError(f"{len(similarity_NN)} pairs have as many labels, these are {tuple(label_N.shape)}")
            row_margin, column_margin = row_margin[:, None], row_margin[None, :]
    row_NN, column_NN = hinges(similarity_NN, match_NN, row_margin, column_margin)
    if hardest:
        loss = row_NN.max(1).values.sum() + column_NN.max(0).values.sum()
    else:
        loss = row_NN.mean(1).sum() + column_NN.mean(0).sum()
    return LossOutput(loss, {"triplet": loss.detach()})


def ncr_pair_losses(similarity_NN: Tensor, match_NN: Tensor | None = None, margin: float = 0.2) -> Tensor:
    """Every pair's mean hinge of both directions, (N,): what `clean_probability` splits. Source: NCR."""
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
    """Labels for training, (N,): w + (1 - w) p for pairs classified as clean, the mean of p and q for the others.

    p is the network's own prediction; the probability w of being clean and the classification come from the other
    network's losses; q is the other network's prediction, by default p. Source: NCR.
    """
    p, q = predicted_N, predicted_N if predicted_by_other_N is None else predicted_by_other_N
    return torch.where(clean_N, clean_probability_N + (1 - clean_probability_N) * p, (p + q) / 2)


def clean_probability(
    losses_N: Tensor, max_iterations: int = 10, tolerance: float = 1e-2, variance_floor: float = 5e-4
) -> Tensor:
    """Posterior probability that a pair belongs to the normal with the lower mean, (N,) float64 on the CPU.

    The losses of the whole training set, scaled to [0, 1], are fitted by scikit-learn's mixture of two normals, with
    the published settings. Losses that are all equal are all clean: probability 1. Source: NCR.

    Args:
        max_iterations, tolerance: of the expectation maximisation, in the mean log-likelihood.
        variance_floor: added to both variances.

    Raises:
        ValueError: losses that are not finite, or none.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture

    x = losses_N.detach().double().flatten().cpu()
    if not len(x) or not torch.isfinite(x).all():
        raise ValueError("a mixture is fitted to finite losses, at least one")
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
    """Pairs classified as clean, (N,) bool: more probable than the threshold.

    If all of two pairs or more are, the N // 100 + 1 least probable ones (of equal ones the first) are not, so that
    neither part is empty.
    """
    clean = clean_probability_N > threshold
    if clean.all() and len(clean) > 1:
        clean[clean_probability_N.argsort(stable=True)[: len(clean) // 100 + 1]] = False
    return clean


class NCRLoss(nn.Module):
    """`ncr_loss` of the cosines of the means, its pair losses and its predictions."""

    def __init__(self, margin: float = 0.2, soft_margin: str = "exponential", published_margins: bool = False):
        super().__init__()
        if soft_margin not in SOFT_MARGINS:
            raise ValueError(f"soft_margin is one of {', '.join(SOFT_MARGINS)}, not {soft_margin!r}")
        self.margin, self.soft_margin, self.published_margins = margin, soft_margin, published_margins

    def forward(
        self,
        image: Gaussian,
        text: Gaussian,
        match: Tensor | None = None,
        *,
        label: Tensor | None = None,
        hardest: bool = True,
    ) -> LossOutput:
        """N pairs, (N, D) each, and their estimated labels (N,). The warm-up has `hardest=False` and no labels."""
        similarity = cosine_similarity(image, text)
        options = dict(margin=self.margin, soft_margin=self.soft_margin, published_margins=self.published_margins)
        with torch.autocast(similarity.device.type, enabled=False):
            return ncr_loss(similarity, label, match, hardest=hardest, **options)

    @torch.no_grad()
    def pair_losses(self, image: Gaussian, text: Gaussian, match: Tensor | None = None) -> Tensor:
        """`ncr_pair_losses` of a batch, (N,)."""
        return ncr_pair_losses(cosine_similarity(image, text), match, self.margin)

    @torch.no_grad()
    def predict(self, image: Gaussian, text: Gaussian, match: Tensor | None = None) -> Tensor:
        """`ncr_predict` of a batch, (N,)."""
        return ncr_predict(cosine_similarity(image, text), match, self.margin)

    def extra_repr(self) -> str:
        return f"margin={self.margin}, soft_margin={self.soft_margin}, published_margins={self.published_margins}"
