"""Is a confidence worth something: selective risk, detection of errors and of strangers, retrieval by level.

Letters: N items, K classes. Confidence κ: (N,), higher is surer; correct: (N,) bool. Where public codes differ on ties
or thresholds (fd-shifts, CRL, ConfidNet, ViLU), the definitions here are exact: ties in expectation, thresholds that
exist, full coverage.
"""

from __future__ import annotations

import torch
from sklearn.linear_model import LinearRegression
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from probemb.metrics.uncertainty import spearman


def risk_coverage(confidence: Tensor, correct: Tensor) -> Tensor:
    """Selective risk of answering the i surest items, (N,) for i = 1 … N; ties in expectation over their orders."""
    order = confidence.double().argsort(descending=True, stable=True)
    _, group, counts = confidence[order].unique_consecutive(return_inverse=True, return_counts=True)
    errors = (~correct[order].bool()).double()
    share = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, group, errors) / counts
    return share[group].cumsum(0) / torch.arange(1, len(order) + 1)


def aurc(confidence: Tensor, correct: Tensor) -> float:
    """Area under the risk-coverage curve, mean selective risk."""
    return risk_coverage(confidence, correct).mean().item()


def e_aurc(confidence: Tensor, correct: Tensor) -> float:
    """`aurc` above that of the best order of the same errors."""
    return aurc(confidence, correct) - aurc(correct.double(), correct)


def auroc(confidence: Tensor, positive: Tensor) -> float | None:
    """Probability that a positive item (correct, or in distribution) is surer than another; None if all are alike."""
    if positive.bool().all() or not positive.any():
        return None
    return float(roc_auc_score(positive.bool().cpu().numpy(), confidence.double().cpu().numpy()))


def fpr95(confidence: Tensor, positive: Tensor) -> float | None:
    """Share of the others that are as sure as the 95 % surest positive items; None if there are no others."""
    positive = positive.bool()
    if positive.all() or not positive.any():
        return None
    sure = confidence[positive].double().sort(descending=True).values
    threshold = sure[-(-95 * len(sure) // 100) - 1]  # the exact ceiling
    return (confidence[~positive] >= threshold).double().mean().item()


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """The temperature T > 0 with the least cross entropy of logits / T, (N, K) and (N,). Source: Guo et al. 2017."""
    log_t = torch.zeros((), dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS([log_t], max_iter=100, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        solver.zero_grad()
        value = cross_entropy(logits.double() / log_t.exp(), labels)
        value.backward()
        return value

    solver.step(loss)
    return log_t.exp().item()


def free_confidences(cosine: Tensor, scale: float) -> dict[str, Tensor]:
    """Confidences that need no training, of cosines (N, K): name -> (N,).

    All but MCM and max-cosine are of the model's own softmax, at its logit scale. MCM is the largest probability at
    temperature 1. Source: Ming et al. 2022; DOCTOR: Granese et al. 2021.
    """
    p = (scale * cosine).softmax(1)
    two = p.topk(2, dim=1).values
    return {
        "max softmax": two[:, 0],
        "margin": two[:, 0] - two[:, 1],
        "entropy": (p * p.clamp_min(torch.finfo(p.dtype).tiny).log()).sum(1),
        "DOCTOR": -(1 - p.square().sum(1)) / p.square().sum(1),
        "energy": (scale * cosine).logsumexp(1) / scale,
        "max cosine": cosine.amax(1),
        "MCM": cosine.softmax(1).amax(1),
    }


def retrieval_levels(uncertainty: Tensor, hit: Tensor, levels: int = 10) -> dict:
    """R@1 (hit, (N,)) in equal groups of queries from certain to uncertain.

    Returns:
        "r@1" of each level; "spearman" of level and R@1, ideal -1; "r2" of the straight line; "score" = -S R², ideal 1;
        0 where R@1 is the same everywhere. Source: ProbVLM §4; AsymVLM.
    """
    parts = uncertainty.double().argsort(stable=True).tensor_split(min(levels, len(uncertainty)))
    rate = torch.stack([hit[part].double().mean() for part in parts])
    level = torch.arange(len(parts), dtype=torch.float64)
    s = spearman(level, rate)
    if s is None:
        return {"r@1": rate.tolist(), "spearman": None, "r2": None, "score": 0.0}
    r2 = float(LinearRegression().fit(level[:, None].numpy(), rate.numpy()).score(level[:, None].numpy(), rate.numpy()))
    return {"r@1": rate.tolist(), "spearman": s, "r2": r2, "score": -s * r2}


def nearest_is_of_class(embeds: Tensor, labels: Tensor, block: int = 1024) -> Tensor:
    """Whether each item's nearest other item by cosine is of its class, (N,) bool. Source: URL (Kirchhof et al. 2023).

    With `auroc(-u, …)` it is R-AUROC. An item never finds itself, duplicates included.
    """
    unit, hits = normalize(embeds.float(), dim=1), []
    for rows in torch.arange(len(unit)).split(block):
        cosine = unit[rows] @ unit.T
        cosine[torch.arange(len(rows)), rows] = -torch.inf
        hits.append(labels[cosine.argmax(1)] == labels[rows])
    return torch.cat(hits)
