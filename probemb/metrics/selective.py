"""Measures of a confidence: selective risk, detection of errors and of OOD items, retrieval by level.

Letters: N items, K classes. Confidence κ: (N,), higher is surer; correct: (N,) bool. Where public codes differ on ties
or thresholds (fd-shifts, CRL, ConfidNet, ViLU), the definitions here are exact: ties in expectation, thresholds that
exist, full coverage.
"""

import math

import torch
from scipy.stats import rankdata
from torch import Tensor
from torch.nn.functional import normalize

from probemb.metrics.bootstrap import WEIGHT_ELEMENTS, counts_down, descending, each, roc_area
from probemb.metrics.uncertainty import average_ranks

LOG_RANGE = 30.0  # of temperatures


def selective_metrics(confidence: Tensor, positive: Tensor, weights_RN: Tensor | None = None) -> dict[str, Tensor]:
    """Measures of resamples, (R,) float64 each: NaN where one of the two kinds is absent.

    Args:
        confidence: (N,), higher is surer; positive: (N,) bool: right, or in distribution.
        weights_RN: how often each resample drew each item; None: each once, R = 1.

    Returns:
        "aurc", mean selective risk over all coverages; "e_aurc", above that of the best order (Geifman et al. 2019);
        "auroc", ties half; "fpr95", the share of the others that are as sure as the 95 % surest positive ones.
    """
    if weights_RN is None:
        weights_RN = torch.ones(1, len(confidence))
    order, last = descending(confidence)
    step, positive = max(1, WEIGHT_ELEMENTS // len(confidence)), positive.bool()[order]
    parts = [_measures(*counts_down(part[:, order], positive, last)) for part in weights_RN.split(step)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _measures(found: Tensor, false: Tensor) -> dict[str, Tensor]:
    """`selective_metrics` of `counts_down`, (R, T) each."""
    total, others = each(found + false), each(false)
    before, errors = found + false - total, false - others
    n, n_positive, n_other = found[:, -1] + false[:, -1], found[:, -1], false[:, -1]
    # Ties in expectation: of m items with E errors behind i with F, the sum over j = 1 … m of (F + E j / m) / (i + j).
    rate = others / total.clamp_min(1e-12)
    harmonic = torch.digamma(before + total + 1) - torch.digamma(before + 1)
    aurc = (rate * total + (errors - rate * before) * harmonic).sum(1) / n
    best = (n_other - n_positive * (torch.digamma(n + 1) - torch.digamma(n_positive + 1))) / n
    kept = (found >= 0.95 * n_positive[:, None] - 1e-9).double().argmax(1, keepdim=True)
    fpr95 = (false.gather(1, kept)[:, 0] / n_other).masked_fill(n_positive == 0, torch.nan)
    return {"aurc": aurc, "e_aurc": aurc - best, "auroc": roc_area(found, false), "fpr95": fpr95}


def calibration_error(probability: Tensor, right: Tensor, weights_RN: Tensor, n_bins: int = 15) -> Tensor:
    """Expected calibration errors of resamples, (R,), not below 0, centred on that of the data, whose noise resampling
    would double.

    probability, right: (N,); weights_RN: its first row is the data itself. Source: Guo et al. 2017, Eq. 3.
    """
    place = (probability.double() * n_bins).long().clamp(0, n_bins - 1)
    apart, n = probability.double() - right.double(), weights_RN.double().sum(1)
    bins = torch.zeros(len(weights_RN), n_bins, dtype=torch.float64)
    error = bins.index_add_(1, place, weights_RN.double() * apart).abs().sum(1) / n
    return torch.cat([error[:1], error[1:] + error[0] - error[1:].mean()]).clamp(min=0)


def rank_correlations(a: Tensor, b: Tensor, weights_RN: Tensor) -> Tensor:
    """Spearman's correlation of (N,) and (N,) under resamples, (R,), at the ranks of the data."""
    x, y = ((ranks - ranks.mean()) / ranks.std() for ranks in map(average_ranks, (a.double(), b.double())))
    weight = weights_RN.double() / weights_RN.double().sum(1, keepdim=True)
    mean_x, mean_y = weight @ x, weight @ y
    var_x, var_y = weight @ x.square() - mean_x.square(), weight @ y.square() - mean_y.square()
    return (weight @ (x * y) - mean_x * mean_y) / (var_x * var_y).sqrt()


def own_log_p(log_p: Tensor, truth: Tensor) -> Tensor:
    """The log-probability of the truth, (N,), of (N, K): labels (N,), or bool (N, K) where several are true."""
    if truth.dtype == torch.bool:
        return log_p.masked_fill(~truth, -torch.inf).logsumexp(1)
    return log_p.gather(1, truth[:, None])[:, 0]


def fit_temperature(logits: Tensor, truth: Tensor, u: Tensor | None = None) -> tuple[float, float]:
    """T and k of the temperatures T u^k that fit logits (N, K) best, by their likelihood; k = 0 without u (N,).

    A weak prior, k ~ N(0, 1) and log T ~ N(0, 100), keeps both from growing without end: k where u is nearly constant,
    T where the logits say nothing. truth: as of `own_log_p`. Source: Guo et al. 2017 for T.
    """
    logits = logits.double()
    log_u = torch.zeros(1).double() if u is None else u.double().log()
    centre = log_u.mean()
    parameters = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS([parameters], max_iter=100, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        solver.zero_grad()
        log_t, power = parameters
        temperature = (log_t + power * (log_u - centre)).clamp(-LOG_RANGE, LOG_RANGE).exp()
        log_p = own_log_p((logits / temperature[:, None]).log_softmax(1), truth)
        value = ((log_t / 10).square() + power.square() - 2 * log_p.sum()) / (2 * max(1, len(logits)))
        value.backward()
        return value

    with torch.enable_grad():
        solver.step(loss)
    log_t, power = parameters.tolist()
    return math.exp(log_t - power * float(centre)), power


def tempered(logits: Tensor, fitted: tuple[float, float], u: Tensor) -> Tensor:
    """Logits (N, K) over T u^k, of T and k as `fit_temperature` gives them and u (N,)."""
    return logits / (fitted[0] * u[:, None] ** fitted[1])


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


def retrieval_levels(uncertainty: Tensor, hit: Tensor, weights_RN: Tensor, levels: int = 10) -> dict[str, Tensor]:
    """R@1 (hit, (N,)) in equal groups of queries from certain to uncertain; weights_RN: as of `selective_metrics`.

    Returns:
        "r@1" of each level, (R, levels); "spearman" of level and R@1, (R,), ideal -1; "r2" of the straight line;
        "score" = -S R², ideal 1; 0 where R@1 is the same everywhere. Source: ProbVLM §4; AsymVLM.
    """
    parts = uncertainty.double().argsort(stable=True).tensor_split(min(levels, len(uncertainty)))
    rate = torch.stack([(w := weights_RN[:, part].double()) @ hit[part].double() / w.sum(1) for part in parts], 1)
    level = normalize(torch.arange(len(parts)).double() - (len(parts) - 1) / 2, dim=0)
    apart = (x - x.mean(1, keepdim=True) for x in (torch.from_numpy(rankdata(rate, axis=1)), rate))
    s, r = (normalize(x, dim=1) @ level for x in apart)
    return {"r@1": rate, "spearman": s, "r2": r.square(), "score": -s * r.square()}


def nearest_is_of_class(embeds: Tensor, labels: Tensor, block: int = 1024) -> Tensor:
    """True where an item's nearest other item by cosine is of its class, (N,) bool. Source: URL (Kirchhof et al. 2023).

    The AUROC of -u for it is R-AUROC. An item never finds itself, duplicates included.
    """
    unit, hits = normalize(embeds.float(), dim=1), []
    for rows in torch.arange(len(unit)).split(block):
        cosine = unit[rows] @ unit.T
        cosine[torch.arange(len(rows)), rows] = -torch.inf
        hits.append(labels[cosine.argmax(1)] == labels[rows])
    return torch.cat(hits)
