"""DECL: similarities as evidence of a Dirichlet distribution over the batch, robust to noisy correspondences.

Source: Deep Evidential Cross-modal Learning and robust dynamic hinge loss, ACM MM 2022.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from probemb.gaussian import Gaussian
from probemb.losses.output import LossOutput
from probemb.losses.pairs import cosine_similarity
from probemb.losses.triplets.triplet import hinges


def evidence(similarity_NN: Tensor, tau: float = 0.1) -> Tensor:
    """Evidence exp(tanh(similarity) / tau) of every pair, (N, N) float64, positive. Source: DECL, evidence extractor.

    In float64, as the totals reach thousands times N and log gammas of float32 would lose their differences.
    """
    return (similarity_NN.double().tanh() / tau).exp()


def dirichlet_kl(alpha_NM: Tensor) -> Tensor:
    """KL(Dirichlet(alpha) || Dirichlet(1, ..., 1)) of every row in nats, (N,)."""
    m = alpha_NM.shape[1]
    total_N = alpha_NM.sum(1)
    expected_log = alpha_NM.digamma() - total_N.digamma()[:, None]
    log_normaliser = total_N.lgamma() - alpha_NM.lgamma().sum(1) - torch.lgamma(alpha_NM.new_tensor(float(m)))
    return ((alpha_NM - 1) * expected_log).sum(1) + log_normaliser


def evidential_loss(evidence_NM: Tensor, label_NM: Tensor, kl_weight: float = 0.1) -> Tensor:
    """Expected squared error of the matches' probabilities plus kl_weight * misplaced evidence, (N,), rows are queries.

    With alpha = evidence + 1 the expectation over the Dirichlet is (label - mean)^2 plus the variance. The second
    term is the KL to the uniform Dirichlet without the evidence of the query's matches.

    Args:
        label_NM: in [0, 1]. A row of zeros is a query without a match; several matches share the probability.
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
    hardest = row_NN.topk(negatives, 1).values.sum(1) + column_NN.topk(negatives, 0).values.sum(0)
    return hardest / negatives


def n_negatives(batch: int, step: int, eta: float = 0.025, at_least: int = 5) -> int:
    """Number of negatives in the dynamic hinge: the whole batch, eta fewer every step, not below `at_least`."""
    n = max(int(batch - eta * step), at_least)
    return n if n <= batch else max(1, batch - 1)


def decl_correspondence(
    similarity_NN: Tensor, tau: float = 0.1, match_NN: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Pairs classified as clean, (N,) bool, and their uncertainty, (N,). Source: DECL, divergence of data.

    A pair is clean if its evidence, summed over both directions, is its row's largest; what else matches by `match_NN`
    (another caption of the image) does not compete, as batches of the paper have none. The uncertainty is N over the
    total of alpha, summed over both directions.
    """
    e = evidence(similarity_NN, tau)
    n = len(e)
    own = torch.eye(n, dtype=torch.bool, device=e.device)
    rivals = e + e.T
    if match_NN is not None:
        rivals = rivals.masked_fill((match_NN > 0) & ~own, 0)  # evidence is positive
    clean = rivals.argmax(1) == torch.arange(n, device=e.device)
    return clean, n / (e + 1).sum(1) + n / (e.T + 1).sum(1)


def decl_loss(
    similarity_NN: Tensor,
    match_NN: Tensor | None = None,
    clean_N: Tensor | None = None,
    *,
    negatives: int,
    tau: float = 0.1,
    kl_weight: float = 0.1,
    hinge_weight: float = 0.8,
    margin: float = 0.2,
) -> LossOutput:
    """Mean of both directions' evidential losses + hinge_weight * sum of the clean pairs' dynamic hinges. Source: DECL.

    Args:
        similarity_NN: images in rows.
        match_NN: which pairs match; None is the identity.
        clean_N: pairs classified as clean; the texts of the others match nothing, and they have no hinge. None: all
            (warm-up).
        negatives: see `n_negatives`.

    Returns:
        terms "evidential" and "hinge".
    """
    n = len(similarity_NN)
    clean_N = similarity_NN.new_ones(n) if clean_N is None else clean_N.to(similarity_NN.dtype)
    match = torch.eye(n, device=similarity_NN.device) if match_NN is None else match_NN
    label = match.double() * clean_N[None, :]  # one rule for every copy of a text's image in the batch
    e = evidence(similarity_NN, tau)
    evidential = (evidential_loss(e, label, kl_weight) + evidential_loss(e.T, label.T, kl_weight)).mean()
    hinge = (dynamic_hinge(similarity_NN.tanh(), negatives, match_NN, margin) * clean_N).sum()
    loss = evidential.to(hinge.dtype) + hinge_weight * hinge
    return LossOutput(loss, {"evidential": evidential.detach(), "hinge": hinge.detach()})


class DECLLoss(nn.Module):
    """`decl_loss` of the cosines of the means, with the published annealing of the hinge.

    Args:
        tau, kl_weight, hinge_weight, margin: see `decl_loss`.
        eta, min_negatives: see `n_negatives`.
    """

    def __init__(
        self,
        tau: float = 0.1,
        kl_weight: float = 0.1,
        hinge_weight: float = 0.8,
        margin: float = 0.2,
        eta: float = 0.025,
        min_negatives: int = 5,
    ):
        super().__init__()
        self.options = dict(tau=tau, kl_weight=kl_weight, hinge_weight=hinge_weight, margin=margin)
        self.eta, self.min_negatives = eta, min_negatives

    def forward(
        self,
        image: Gaussian,
        text: Gaussian,
        match: Tensor | None = None,
        *,
        clean: Tensor | None = None,
        step: int = 0,
    ) -> LossOutput:
        """N pairs, (N, D) each; `clean` (N,) from `correspondence`, None in the warm-up; `step` since the start."""
        similarity = cosine_similarity(image, text)
        negatives = n_negatives(len(similarity), step, self.eta, self.min_negatives)
        with torch.autocast(similarity.device.type, enabled=False):
            return decl_loss(similarity, match, clean, negatives=negatives, **self.options)

    @torch.no_grad()
    def correspondence(self, image: Gaussian, text: Gaussian, match: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`decl_correspondence` of a batch: clean (N,) bool, uncertainty (N,)."""
        return decl_correspondence(cosine_similarity(image, text), self.options["tau"], match)

    def extra_repr(self) -> str:
        return ", ".join(f"{k}={v}" for k, v in {**self.options, "eta": self.eta}.items())
