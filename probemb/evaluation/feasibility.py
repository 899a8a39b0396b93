"""Does a composition know whether its parts occur together? Scores of infeasibility and their ROC AUC (MPC, Fig. 5).

Q queries of k parts, D dimensions. Every score is larger the less feasible a combination seems.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from probemb.compose import Product
from probemb.data.compositions import KINDS, Query
from probemb.evaluation.composed import ComposedQueries
from probemb.gaussian import Gaussian
from probemb.metrics import average_ranks, roc_auc
from probemb.metrics.prediction import cluster_standard_error
from probemb.models.composers import Composer


@dataclass(frozen=True)
class FeasibilityScore:
    """A score of infeasibility.

    Attributes:
        title: for tables.
        needs: what the composer must have: "normaliser" (the product of densities), "variance", or "nothing".
        of: parts (Q, k, D) and their compositions -> (Q,).
    """

    title: str
    needs: Literal["normaliser", "variance", "nothing"]
    of: Callable[[Gaussian, Product], Tensor]


def disagreement(parts: Gaussian, composed: Product) -> Tensor:
    """Squared distance of the parts' means from the composition's in standard deviations of the parts, summed, (Q,).

    The part of -2 log Z that depends on the means; for two parts (mu_1 - mu_2)^2 / (var_1 + var_2), summed over D.
    """
    gap = parts.mean - composed.gaussian.mean[:, None]
    return (gap.square() * (-parts.log_var).exp()).sum((1, 2))


def parts_distance(parts: Gaussian, composed: Product) -> Tensor:
    """1 - the mean cosine of two different parts' means, (Q,). The paper's for models without variances."""
    mean = F.normalize(parts.mean, dim=-1)
    k = mean.shape[1]
    if k < 2:
        raise ValueError("a single part has no distance to another one")
    cosines = (mean.sum(1).square().sum(-1) - mean.square().sum((1, 2))) / (k * (k - 1))
    return 1 - cosines


SCORES: dict[str, FeasibilityScore] = {
    "normaliser": FeasibilityScore(
        "log-normaliser, -log Z (Eq. 7)", "normaliser", lambda parts, composed: -composed.log_normaliser
    ),
    "disagreement": FeasibilityScore("disagreement, the means' share of -log Z", "normaliser", disagreement),
    "variance": FeasibilityScore(
        "total variance, sum of σ²", "variance", lambda parts, composed: composed.gaussian.uncertainty()
    ),
    "log-variance": FeasibilityScore(
        "mean of log σ²", "variance", lambda parts, composed: composed.gaussian.log_var.mean(-1)
    ),
    "distance": FeasibilityScore("distance of the parts, 1 - cosine", "nothing", parts_distance),
}


TITLES = {name: score.title for name, score in SCORES.items()} | {"rarity": "no model: rarity of the parts in training"}


def scores_for(composer: Composer) -> list[str]:
    """Names of the scores that a composer has; of points the distance of the parts alone."""
    has = {"nothing"}
    if composer.probabilistic:
        has.add("variance")
    if composer.weighs:
        has.add("normaliser")
    return [name for name, score in SCORES.items() if score.needs in has]


def infeasibility(composer: Composer, found: ComposedQueries) -> dict[str, Tensor]:
    """Each score of the queries, (Q,) float64."""
    parts = Gaussian(found.parts.mean.double(), found.parts.log_var.double())
    gaussian, log_normaliser = found.composed
    composed = Product(Gaussian(gaussian.mean.double(), gaussian.log_var.double()), log_normaliser.double())
    return {name: SCORES[name].of(parts, composed) for name in scores_for(composer)}


Stratum = Sequence[tuple[Tensor, Tensor]]  # (scores, groups) of the low and of the high class, (A,) and (B,)


def measure_feasibility(
    composer: Composer, feasible: ComposedQueries, infeasible: ComposedQueries, counts: Sequence[int] | None = None
) -> dict[str, dict[str, dict[str, float]]]:
    """ROC AUC of telling infeasible queries from feasible ones: score -> kind -> {"value", "se"}.

    1: every infeasible query has a larger score than every feasible one; 0.5: chance. Kinds are those of KINDS that
    both sides have, and "all": their mean, each as often as the side with fewer queries of it has them. There too only
    queries of one kind are compared, as variances differ between images and texts, and both sides need not have the
    same share of texts. Standard errors take the queries of one combination for dependent.
    """
    result = {}
    for name, strata in feasibility_strata(composer, feasible, infeasible, counts).items():
        if strata:
            result[name] = {"all": auc_estimate(list(strata.values()))}
            result[name] |= {kind: auc_estimate([stratum]) for kind, stratum in strata.items()}
    return result


def rarity(queries: Sequence[Query], counts: Sequence[int]) -> Tensor:
    """A guess without a model: the sum of -log(1 + training images) of a query's concepts, (Q,) float64.

    Frequent concepts co-occur more often, so an AUC of uncertainty means little unless it is compared with this one.

    Args:
        counts: training images of every concept.
    """
    surprise = -torch.tensor(counts, dtype=torch.float64).log1p()
    return torch.stack([surprise[list(query.concepts)].sum() for query in queries])


def feasibility_strata(
    composer: Composer, feasible: ComposedQueries, infeasible: ComposedQueries, counts: Sequence[int] | None = None
) -> dict[str, dict[str, Stratum]]:
    """Score -> kind that both sides have -> scores and combinations of the feasible and of the infeasible queries.

    With `counts` of `rarity` that one, too.
    """
    sides = feasible, infeasible
    scores = [infeasibility(composer, one) for one in sides]
    if counts is not None:
        scores = [{**found, "rarity": rarity(one.queries, counts)} for found, one in zip(scores, sides)]
    groups = [combinations_of(one.queries) for one in sides]
    rows = {kind: [_of_kind(one.queries, kind) for one in sides] for kind in KINDS}
    common = {kind: both for kind, both in rows.items() if all(bool(some.any()) for some in both)}
    return {
        name: {
            kind: [(one[name][some], group[some]) for one, group, some in zip(scores, groups, both)]
            for kind, both in common.items()
        }
        for name in scores[0]
    }


def auc_estimate(strata: Sequence[Stratum]) -> dict[str, float]:
    """P(high > low), ties half, within strata, and its standard error: {"value", "se"}.

    Args:
        strata: finite scores and int64 groups of both classes; scores of one group are dependent, also in different
            strata; no group is in both classes. A stratum counts by the size of its smaller class.

    Source of the error: Obuchowski, Biometrics 1997 (DeLong's components, by clusters).
    """
    value, influences = 0.0, ([], [])
    for ((low, _), (high, _)), weight in zip(strata, _weights(strata)):
        label = torch.cat([torch.zeros(len(low)), torch.ones(len(high))]).bool()
        area = roc_auc(torch.cat([low, high]), label)
        value += weight * area
        # Of each score the share of the other class on its right side: overall rank less rank in its own class.
        overall = average_ranks(torch.cat([low, high]))
        right = (
            1 - (overall[: len(low)] - average_ranks(low)) / len(high),
            (overall[len(low) :] - average_ranks(high)) / len(low),
        )
        for side, shares in zip(influences, right):
            side.append(weight * (shares - area) / len(shares))
    variance = 0.0
    for place, parts in enumerate(influences):
        of_scores = torch.cat(parts)  # their sum is 0
        group = torch.cat([stratum[place][1] for stratum in strata])
        variance += cluster_standard_error(len(of_scores) * of_scores, group) ** 2
    return {"value": value, "se": variance**0.5}


def _weights(strata: Sequence[Stratum]) -> list[float]:
    smaller = [min(len(low), len(high)) for (low, _), (high, _) in strata]
    return [one / sum(smaller) for one in smaller]


def mean_roc_curve(strata: Sequence[Stratum], points: int = 201) -> tuple[Tensor, Tensor]:
    """False and true positive rates, (points,) each, the true ones as means over strata; see `auc_estimate`."""
    rates = torch.linspace(0, 1, points, dtype=torch.float64)
    mean = torch.zeros_like(rates)
    for ((low, _), (high, _)), weight in zip(strata, _weights(strata)):
        wrong, right = roc_curve(low, high)
        after = torch.searchsorted(wrong, rates, right=True).clamp(max=len(wrong) - 1)
        step = wrong[after] - wrong[after - 1]
        share = torch.where(step > 0, (rates - wrong[after - 1]) / step, 1.0)
        mean += weight * (right[after - 1] + share * (right[after] - right[after - 1]))
    return rates, mean


def roc_curve(low_A: Tensor, high_B: Tensor) -> tuple[Tensor, Tensor]:
    """False and true positive rates from (0, 0) to (1, 1), scores from high to low, float64; ties are one step."""
    thresholds = torch.cat([low_A, high_B]).unique().flip(0)
    rates = []
    for scores in (low_A, high_B):
        passed = len(scores) - torch.searchsorted(scores.sort().values, thresholds)
        rates.append(torch.cat([torch.zeros(1, dtype=torch.float64), passed.double() / len(scores)]))
    return rates[0], rates[1]


def combinations_of(queries: list[Query]) -> Tensor:
    """The number of each query's combination of concepts, (Q,) int64."""
    numbers: dict[tuple[int, ...], int] = {}
    return torch.tensor([numbers.setdefault(query.concepts, len(numbers)) for query in queries], dtype=torch.int64)


def _of_kind(queries: list[Query], kind: str) -> Tensor:
    return torch.tensor([query.kind == kind for query in queries], dtype=torch.bool)
