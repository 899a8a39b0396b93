"""Uncertainty against quality: bins, rank correlations, rejection, promised precision, calibration.

Standard errors are linearised (the sum of squared influences) at fixed ranks: exact to first order where there is no
relation, somewhat too wide where there is one. Items of one cluster may depend on each other. Q queries, P pairs.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from scipy.special import betaincinv
from scipy.stats import rankdata
from torch import Tensor

SIGNIFICANT = 1.96  # standard errors
LEAST = 5  # items of a half: the standard error of fewer says nothing


def pearson(a: Tensor, b: Tensor) -> float | None:
    """Pearson's correlation; None if one of the two is constant."""
    if not len(a) or a.min() == a.max() or b.min() == b.max():  # their rounded mean may differ from them
        return None
    a, b = a - a.mean(), b - b.mean()
    scale = float(a.norm() * b.norm())
    return None if scale == 0 or not math.isfinite(scale) else max(-1.0, min(1.0, float(a @ b) / scale))


def average_ranks(x: Tensor) -> Tensor:
    """Ranks from 0; equal values share the mean of their ranks."""
    return torch.from_numpy(rankdata(x.cpu().numpy()) - 1)


def spearman(a: Tensor, b: Tensor) -> float | None:
    """Rank correlation; None if one of the two is constant."""
    return pearson(average_ranks(a.double()), average_ranks(b.double()))


def standard_error(values: Tensor) -> float | None:
    """Of the mean of independent values (n,); None for fewer than two."""
    return float(values.double().std() / len(values) ** 0.5) if len(values) > 1 else None


def cluster_standard_error(values: Tensor, cluster: Tensor) -> float:
    """Standard error of the mean of (Q,) values, those of one cluster being dependent; cluster: (Q,) int64."""
    values = values.double().cpu()
    return _standard_error((values - values.mean()) / len(values), cluster.cpu())


def _standard_error(influence: Tensor, cluster: Tensor) -> float:
    return float(torch.bincount(cluster.unique(return_inverse=True)[1], influence).square().sum().sqrt())


def mean_estimates(
    outcomes: dict[str, Tensor], cluster: Tensor, rows: Tensor | slice = slice(None)
) -> dict[str, dict[str, float]]:
    """Mean of each outcome (Q,) over some rows: name -> {"value", "se"}; cluster: (Q,) int64."""
    return {
        name: {"value": float(x[rows].double().mean()), "se": cluster_standard_error(x[rows], cluster[rows])}
        for name, x in outcomes.items()
    }


def uncertainty_bins(uncertainty: Tensor, score: Tensor, n_bins: int = 10, cut_over_all: bool = False) -> dict | None:
    """Items with a score in bins of (nearly) equal count, from certain to uncertain; None if there are fewer than two.

    score: NaN for an item without one; cut_over_all: cut the bins over these too, as PCME++'s evaluation does although
    ECCV Caption has only some queries. "pearson" is of the bins' means (PCME++ Fig. 3), "spearman" over single items.
    """
    scored = torch.isfinite(score.double())
    keep = torch.isfinite(uncertainty.double()) & (scored | cut_over_all)
    u, s, has = uncertainty[keep].double(), score[keep].double(), scored[keep]
    if int(has.sum()) < 2:
        return None
    parts = [part[has[part]] for part in u.argsort(stable=True).tensor_split(min(n_bins, len(u))) if has[part].any()]
    mean_u, mean_s = (torch.stack([x[part].mean() for part in parts]) for x in (u, s))
    return {
        "uncertainty": mean_u.tolist(), "accuracy": mean_s.tolist(), "counts": [len(part) for part in parts],
        "accuracy_se": [standard_error(s[part]) for part in parts], "pearson": pearson(mean_u, mean_s),
        "spearman": spearman(u[has], s[has]),
    }  # fmt: skip


def rejection_curve(
    uncertainty: Tensor, score: Tensor, refused: Sequence[float] = tuple(i / 20 for i in range(20))
) -> dict | None:
    """Mean "score" of the other queries when shares `refused` of the most uncertain ones are; None without any score.

    Queries of equal uncertainty count with their mean score; those with NaN are left out. "area" is the mean of the
    curve from none refused to all but one; "random" and "oracle": if queries were refused at random, and the worst
    first.
    """
    u, s, _ = _known(uncertainty, score)
    if not len(u):
        return None
    _, group, counts = u.unique(return_inverse=True, return_counts=True)
    shared = torch.bincount(group, s) / counts
    answered = torch.arange(1, len(u) + 1)
    kept_mean = shared.repeat_interleave(counts).cumsum(0) / answered  # over the i + 1 most certain
    best = s.sort(descending=True).values.cumsum(0) / answered
    at = [max(1, len(u) - math.floor(share * len(u) + 1e-9)) for share in refused]
    areas = {name: float(x.mean()) for name, x in (("area", kept_mean), ("random", s), ("oracle", best))}
    return {"refused": list(refused), "score": [float(kept_mean[n - 1]) for n in at]} | areas


def _known(score: Tensor, outcome: Tensor, cluster: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Items that are finite in both; without clusters every item is its own."""
    score, outcome = score.double().cpu(), outcome.double().cpu()
    cluster = torch.arange(len(score)) if cluster is None else cluster
    keep = torch.isfinite(score) & torch.isfinite(outcome)
    return score[keep], outcome[keep], cluster[keep]


def rank_correlation(score: Tensor, outcome: Tensor, cluster: Tensor | None = None) -> dict[str, float] | None:
    """Spearman's correlation; None if fewer than three items are finite in both, or one side is constant."""
    score, outcome, cluster = _known(score, outcome, cluster)
    value = spearman(score, outcome)
    if len(score) < 3 or value is None:
        return None
    ranks = (average_ranks(score), average_ranks(outcome))
    x, y = ((one - one.mean()) / one.std(correction=0) for one in ranks)
    return {"value": value, "se": _standard_error((x * y - value / 2 * (x.square() + y.square())) / len(x), cluster)}


def halves(score: Tensor, outcome: Tensor, cluster: Tensor | None = None) -> dict | None:
    """Mean outcomes below and above the median score: {"certain", "rest", "difference": {"value", "se"}}; queries at
    the median belong to neither. None if one half has fewer than LEAST items.
    """
    score, outcome, cluster = _known(score, outcome, cluster)
    ranks = average_ranks(score)
    middle = (len(ranks) - 1) / 2
    low, high = ranks < middle, ranks > middle
    if min(int(low.sum()), int(high.sum())) < LEAST:
        return None
    certain, rest = float(outcome[low].mean()), float(outcome[high].mean())
    influence = low * (outcome - certain) / low.sum() - high * (outcome - rest) / high.sum()
    difference = {"value": certain - rest, "se": _standard_error(influence, cluster)}
    return {"certain": certain, "rest": rest, "difference": difference}


class PrecisionCurve(NamedTuple):
    """Coverage and precision of answering only queries with an uncertainty up to a threshold, thresholds ascending;
    `at_least`: lower bounds of the precision on new queries of the same kind, for all thresholds at once.
    """

    threshold: list[float]
    coverage: list[float]
    precision: list[float]
    at_least: list[float]
    queries: int


def precision_curve(uncertainty: Tensor, correct: Tensor, points: int = 20, confidence: float = 0.95) -> PrecisionCurve:
    """Thresholds that answer equal steps of the (Q,) queries, with exact binomial bounds (Clopper and Pearson) whose
    error is divided among the points (Bonferroni), so that one may choose among them. Queries are taken as independent.
    """
    n = len(correct)
    u, order = uncertainty.double().sort(stable=True)
    right = correct[order].double().cumsum(0)
    ends = {max(1, round(n * step / points)) - 1 for step in range(1, points + 1)}
    ends = sorted({int(torch.searchsorted(u, u[end], right=True)) - 1 for end in ends})  # equal uncertainties together
    counts = [(int(right[end]), end + 1) for end in ends]
    alpha = (1 - confidence) / len(ends)
    return PrecisionCurve(
        threshold=[float(u[end]) for end in ends],
        coverage=[m / n for _, m in counts],
        precision=[hits / m for hits, m in counts],
        at_least=[float(betaincinv(hits, m - hits + 1, alpha)) if hits else 0.0 for hits, m in counts],
        queries=n,
    )


def highest_threshold(curve: PrecisionCurve, precision: float) -> float | None:
    """The largest threshold at which the precision is at least the wanted one, by its lower bound."""
    return max((u for u, bound in zip(curve.threshold, curve.at_least) if bound >= precision), default=None)


def reliability(probability: Tensor, share: Tensor, n_bins: int = 15) -> dict:
    """Predicted probabilities against observed shares, (P,) in [0, 1], in bins of equal width that hold any item; "ece"
    is Guo et al. 2017, Eq. 3, "brier" the mean squared difference of single items.
    """
    p, s = probability.double(), share.double()
    _, place, counts = (p * n_bins).long().clamp_max(n_bins - 1).unique(return_inverse=True, return_counts=True)
    predicted, observed = (torch.bincount(place, x) / counts for x in (p, s))
    error = ((predicted - observed).abs() * counts).sum() / len(p)
    return {
        "predicted": predicted.tolist(), "observed": observed.tolist(), "counts": counts.tolist(),
        "ece": float(error), "brier": float((p - s).square().mean()),
    }  # fmt: skip


def fit_logistic(x: Tensor, share: Tensor) -> tuple[float, float]:
    """a and b of sigmoid(a x + b) with the least cross entropy against shares, (P,) each, not all 0 nor all 1."""
    x, share = x.double(), share.double()
    centre, spread = x.mean(), x.std(correction=0).clamp_min(1e-12)
    both = ((x - centre) / spread).repeat(2)[:, None].numpy()  # each item once as a match and once as none, weighted
    labels = torch.arange(2).flip(0).repeat_interleave(len(x)).numpy()
    from sklearn.linear_model import LogisticRegression  # sklearn costs --help more than a second

    fitted = LogisticRegression(C=1e8, tol=1e-8, max_iter=1000)
    fitted.fit(both, labels, sample_weight=torch.cat([share, 1 - share]).numpy())
    a = float(fitted.coef_[0, 0]) / float(spread)
    return a, float(fitted.intercept_[0]) - a * float(centre)
