"""Split conformal prediction: sets that contain the truth at a promised rate, for classes and for retrieval.

n labelled calibration items give the threshold; for exchangeable items the set of a new one contains its label with
probability 1 - α or more, whatever the model. Letters: n calibration items, N items, K classes or gallery items.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from scipy.stats import betabinom
from torch import Tensor

from probemb.metrics.bootstrap import interval
from probemb.metrics.selective import fit_temperature, tempered

RAPS_PENALTIES = (0.001, 0.01, 0.1, 0.2, 0.5)
TUNING_SHARE = 0.3  # of the calibration items, which the threshold then does not see
ROUNDING = 1e-9  # 10 · (1 - 0.7) is 3.0000000000000004
BAND = 0.95


def threshold(scores: Tensor, alpha: float, groups: Tensor | None = None) -> float:
    """The ceil((n + 1)(1 - α))-th smallest calibration score (n,); infinity where n is too small for α.

    groups: (n,) of scores that depend on each other, such as an image's captions: each group counts as one item, its
    scores as shares of it, and the promise is for a random member of a new group. Source: Dunn et al. 2022.
    """
    ordered, order = scores.double().sort()
    share = torch.ones(len(scores), dtype=torch.float64)
    if groups is not None:
        _, place, counts = groups.unique(return_inverse=True, return_counts=True)
        share = (1 / counts.double())[place]
    enough = share[order].cumsum(0) >= (share.sum() + 1) * (1 - alpha) - ROUNDING
    return ordered[enough.int().argmax()].item() if enough.any() else math.inf


def class_thresholds(scores: Tensor, labels: Tensor, classes: int, alpha: float) -> Tensor:
    """A `threshold` from the items of each class, (K,); infinity for a class with too few."""
    return torch.tensor([threshold(scores[labels == k], alpha) for k in range(classes)], dtype=torch.float64)


@dataclass(frozen=True)
class Score:
    """A nonconformity score: larger is stranger.

    name: lac (1 - p), aps (the mass down to the label), raps (aps with a penalty for each rank after `k_reg`), saps
    (the ranks in place of the mass) or rank (one size for all). penalty: of raps and saps.
    """

    name: str = "lac"
    penalty: float = 0.0
    k_reg: int = 0

    def __call__(self, probability: Tensor, u: Tensor | None = None) -> Tensor:
        """Scores (N, K) of probabilities (N, K). u: (N,) uniform draws that make coverage exact; None: conservative.

        Sources: Sadinle et al. 2019 (LAC); Romano et al. 2020 (APS); Angelopoulos et al. 2021 (RAPS); Huang et al.
        2024 (SAPS).
        """
        ordered, order = probability.sort(dim=1, descending=True, stable=True)
        score = self.of_sorted(ordered, u)
        return torch.empty_like(score).scatter_(1, order, score)

    def of_sorted(self, ordered: Tensor, u: Tensor | None = None) -> Tensor:
        """The same where the probabilities of each row descend already."""
        rank = torch.arange(1, ordered.shape[1] + 1, device=ordered.device)
        draw = ordered.new_zeros(len(ordered), 1) if u is None else u.reshape(len(ordered), -1).to(ordered)
        if self.name == "lac":
            return 1 - ordered
        if self.name == "rank":
            return rank.to(ordered).expand_as(ordered)
        if self.name == "saps":
            top = ordered[:, :1]
            return torch.where(rank == 1, (1 - draw) * top, top + self.penalty * (rank - 1 - draw))
        penalty = self.penalty * (rank - self.k_reg).clamp_min(0) if self.name == "raps" else 0
        return ordered.cumsum(1) - draw * ordered + penalty


def of_labels(scores: Tensor, labels: Tensor) -> Tensor:
    """The score of each item's own label, (N,); labels (N,), or bool (N, K): the least of several true ones."""
    if labels.dtype == torch.bool:
        return scores.masked_fill(~labels, torch.inf).amin(1)
    return scores.gather(1, labels[:, None])[:, 0]


def tune_raps(ordered: Tensor, place: Tensor, alpha: float) -> Score:
    """RAPS with k_reg and the penalty of the smallest sets; the items must not be those of the threshold.

    ordered: (n, K) probabilities that descend; place: (n,), that of the true label. k_reg: the 1 - α quantile of its
    rank, as the authors choose it.
    """
    k_reg = min(threshold(place + 1, alpha), ordered.shape[1])
    scores = [Score("raps", penalty, int(k_reg)) for penalty in RAPS_PENALTIES]

    def size(score: Score) -> float:
        found = score.of_sorted(ordered)
        return (found <= threshold(of_labels(found, place), alpha)).sum(1).double().mean().item()

    return min(scores, key=size)


def prediction_sets(scores: Tensor, limit: float | Tensor) -> Tensor:
    """bool (N, K): the labels whose score is at most the threshold, or its class' (K,)."""
    return scores <= torch.as_tensor(limit, dtype=scores.dtype, device=scores.device)


def describe_sets(sets: Tensor, labels: Tensor, alpha: float, classes: Tensor | None = None) -> dict[str, float]:
    """Coverage and size of prediction sets (N, K) bool and labels (N,); classes: (N,), where the labels are places.

    Returns:
        "coverage", "size", "empty" (share); "macro_coverage" and "class_gap" (mean |coverage - (1 - α)| of the
        classes present); "size_gap": the largest |coverage - (1 - α)| over sets of similar size.
    """
    hit = sets.gather(1, labels[:, None])[:, 0].double()
    size = sets.sum(1)
    _, place, counts = (labels if classes is None else classes).unique(return_inverse=True, return_counts=True)
    by_class = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, place, hit) / counts
    strata = torch.bucketize(size, torch.tensor([1, 3, 10, 100, 1000], device=size.device))
    by_size = torch.stack([hit[strata == s].mean() for s in strata.unique()])
    return {
        "coverage": hit.mean().item(), "size": size.double().mean().item(), "empty": (size == 0).double().mean().item(),
        "macro_coverage": by_class.mean().item(), "class_gap": (by_class - (1 - alpha)).abs().mean().item(),
        "size_gap": (by_size - (1 - alpha)).abs().max().item(),
    }  # fmt: skip


def transported(logits: Tensor, labels: Tensor | None = None, epsilon: float = 1.0, rounds: int = 3) -> Tensor:
    """Class probabilities (n + m, K) of calibration and test items together by Sinkhorn. Source: Conf-OT (2025).

    labels: (n,) of the first items, which give the classes' marginal as in the paper; the promise is then broken, as
    calibration items fit it better than others. None: equal classes. Transductive: it sees the test items.
    """
    classes = torch.ones(logits.shape[1]).to(logits)
    if labels is not None:
        classes = torch.bincount(labels, minlength=logits.shape[1]).to(logits)
    plan = (logits / epsilon - (logits / epsilon).amax()).exp()
    plan = plan / plan.sum()
    for _ in range(rounds):
        plan = plan / plan.sum(0).clamp_min(1e-30) * (classes / classes.sum())
        plan = plan / plan.sum(1, keepdim=True) / len(plan)
    return plan / plan.sum(1, keepdim=True)


def results_to_show(
    ranks: Tensor, u: Tensor, groups: Tensor, percents: Sequence[int], parts: int = 5
) -> tuple[list[float], dict[str, list[int | None]]]:
    """Numbers of results that hold the truth, of known ranks (n,), in so many percent of equally uncertain queries.

    Returns the edges of equal parts of the queries by u (n,), and of each percent the number for each part from certain
    to uncertain; None for more than a rank that is infinite, or if too few are known. groups: as of `threshold`.
    """
    edges = u.double().quantile(torch.arange(1, parts).double() / parts)
    part = torch.bucketize(u.double(), edges)
    rows = [(part == i).nonzero().flatten() for i in range(parts)]
    limits = {str(x): [threshold(ranks[i], 1 - x / 100, groups[i]) for i in rows] for x in percents}
    return edges.tolist(), {x: [None if math.isinf(k) else int(k) for k in row] for x, row in limits.items()}


# ------------------------------------------------------------------------------------------------------ random splits


class Variant(NamedTuple):
    """Logits (N, K) whose softmax makes the scores; u: (N,), used in their temperature."""

    logits: Tensor
    u: Tensor | None = None


def random_splits(groups: Tensor, splits: int) -> Iterator[list[Tensor]]:
    """Rows that choose penalty and temperature, that give the threshold, that are tested; groups (N,) stay whole."""
    n = int(groups.max()) + 1
    tune = round(TUNING_SHARE * (n // 2))
    for split in range(splits):
        order = torch.randperm(n, generator=torch.Generator().manual_seed(split))
        parts = order.split([tune, n // 2 - tune, n - n // 2])
        yield [torch.isin(groups, part).nonzero().flatten() for part in parts]


def coverage_band(n: int, m: int, alpha: float) -> tuple[float, float]:
    """The central 95 % of the coverage of m items by the threshold of n others: beta-binomial, if no scores tie."""
    rank = math.ceil((n + 1) * (1 - alpha) - ROUNDING)
    if rank > n:
        return 1.0, 1.0
    return tuple(float(x) / m for x in betabinom(m, rank, n + 1 - rank).ppf([(1 - BAND) / 2, (1 + BAND) / 2]))


def evaluate_sets(
    variants: Mapping[str, Variant], labels: Tensor, groups: Tensor, alpha: float, splits: int = 20,
    by_class: bool = False, transduce: bool = False, advance: Callable[[int], object] = lambda n: None,
) -> list[dict]:  # fmt: skip
    """Prediction sets by every score of every variant, the first of which is what the others' sizes are compared with.

    labels: (N,); groups: (N,) int64, of items that depend on each other; by_class: a threshold for each class. One
    temperature, and RAPS' k_reg and penalty, are fitted in each split on items that its threshold does not see.
    transduce: also LAC of the first variant's `transported` probabilities, for equal classes. advance: is called after
    each split of each variant.

    Returns:
        rows with the means over splits of `describe_sets`, "least" and "most" coverage, its "band" (`coverage_band` of
        the groups) and the share "inside" it, and "smaller": {"value", "low", "high"} over splits.
    """
    found: dict[tuple[str, str], list[dict]] = {}
    plain = next(iter(variants))
    parts = list(random_splits(groups, splits))
    for name, (logits, u) in variants.items():
        ordered, order = logits.double().sort(dim=1, descending=True, stable=True)
        place = (order == labels[:, None]).int().argmax(1)
        by = torch.ones(len(labels), dtype=torch.float64) if u is None else u.double()
        for tune, calibrate, test in parts:
            fitted = fit_temperature(ordered[tune], place[tune], by[tune])
            p = tempered(ordered, fitted, by).softmax(1)
            if transduce and name == plain:
                both, seen = torch.cat([calibrate, test]), len(calibrate)
                s = 1 - transported(logits[both].double() / fitted[0])
                sets = prediction_sets(s[seen:], threshold(of_labels(s[:seen], labels[calibrate]), alpha))
                found.setdefault(("LAC, transported", name), []).append(describe_sets(sets, labels[test], alpha))
            scores = {"LAC": Score(), "APS": Score("aps"), "RAPS": tune_raps(p[tune], place[tune], alpha)}
            scores |= {"top k": Score("rank")} if name == plain else {}
            for title, score in scores.items():
                s = score.of_sorted(p)
                own = of_labels(s, place)
                if by_class:
                    limit = class_thresholds(own[calibrate], labels[calibrate], s.shape[1], alpha)[order[test]]
                else:
                    limit = threshold(own[calibrate], alpha, groups[calibrate])
                sets = prediction_sets(s[test], limit)
                found.setdefault((title, name), []).append(describe_sets(sets, place[test], alpha, labels[test]))
            advance(1)
    band = coverage_band(*(len(groups[rows].unique()) for rows in parts[0][1:]), alpha)
    rows = []
    for (title, name), each in found.items():
        coverage = torch.tensor([one["coverage"] for one in each], dtype=torch.float64)
        row = {"score": title, "by": name} | {key: sum(one[key] for one in each) / splits for key in each[0]}
        row |= {"least": float(coverage.min()), "most": float(coverage.max()), "band": band}
        row["inside"] = float(((coverage >= band[0] - ROUNDING) & (coverage <= band[1] + ROUNDING)).double().mean())
        if name != plain:
            apart = torch.tensor([a["size"] - b["size"] for a, b in zip(found[title, plain], each)])
            low, high = interval(apart)
            row["smaller"] = {"value": float(apart.mean()), "low": low, "high": high}
        rows.append(row)
    return rows
