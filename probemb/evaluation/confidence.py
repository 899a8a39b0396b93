"""Confidences of answers, compared on the same queries: a model's own, what needs nothing, what is fitted to labels.

A query's answer is the gallery item with the largest cosine of the means: an image for a caption, a class for an image.
Letters: N queries, K gallery items or classes, D dimensions, R resamples.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor
from torch.nn.functional import normalize

from probemb.adapters import prob_cosine, probit_softmax, train_failure_predictor
from probemb.conformal import Variant
from probemb.gaussian import Gaussian
from probemb.metrics.bootstrap import cluster_weights, estimate
from probemb.metrics.selective import (
    calibration_error,
    fit_temperature,
    free_confidences,
    own_log_p,
    rank_correlations,
    retrieval_levels,
    selective_metrics,
    tempered,
)
from probemb.models.encoder import POINT_LOG_VAR
from probemb.models.match import MatchModel

MEASURES = {  # of a confidence: its title, and 1 where more is better
    "auroc": ("AUROC", 1),
    "fpr95": ("FPR95", -1),
    "aurc": ("AURC", -1),
    "e_aurc": ("E-AURC", -1),
    "level_score": ("−S·R²", 1),
    "ambiguity": ("Spearman, ambiguity", 1),
    "acceptance": ("Spearman, people", 1),
    "r_auroc": ("R-AUROC", 1),
    "ood_auroc": ("OOD AUROC", 1),
    "ood_fpr95": ("OOD FPR95", -1),
    "ece": ("ECE", -1),
    "nll": ("NLL", -1),
}
SOFTMAX = {"means": "max softmax", "probit": "probit softmax", "match": "match probability"}
U, SAME = "u", "not told apart"
BASELINES = ("margin", "entropy")  # that every score is compared with, beside the best one
MORE_BASELINES = ("max softmax", "temperature", "logistic regression")  # and in results.json


class Confidence(NamedTuple):
    """Confidences of N answers, higher is surer.

    labels: how many labelled queries it was fitted on; own: it reads the model's variances; probability: it is one of
    being right; nll: (N,) of the truth, where all of the gallery has probabilities.
    """

    values: Tensor
    labels: int = 0
    own: bool = False
    probability: bool = False
    nll: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Task:
    """Queries (N, D) with their gallery (K, D).

    truth: labels (N,), or bool (N, K) where several are true; None: unknown. group: (N,) int64 of queries that depend
    on each other, such as an image's captions. scale: of the cosines in the softmax. temperature: T and k of the
    cosines that the model's adapter has learned; epistemic: its variances of means (N, D), where it knows their part.
    """

    queries: Gaussian
    gallery: Gaussian
    truth: Tensor | None
    group: Tensor
    scale: float
    model: MatchModel
    temperature: tuple[float, float] | None = None
    epistemic: Callable[[Tensor], Tensor] | None = None

    @cached_property
    def cosine(self) -> Tensor:
        return normalize(self.queries.mean.double(), dim=1) @ normalize(self.gallery.mean.double(), dim=1).T

    @cached_property
    def answer(self) -> Tensor:
        return self.cosine.argmax(1)

    @cached_property
    def right(self) -> Tensor:
        return self.are_right(self.answer)

    def are_right(self, answer: Tensor) -> Tensor:
        """(N,) bool, of any answers (N,)."""
        several = self.truth.dtype == torch.bool
        return self.truth.gather(1, answer[:, None])[:, 0] if several else answer == self.truth

    @cached_property
    def half(self) -> Tensor:
        """(N,) bool: a random half of the groups."""
        n = int(self.group.max()) + 1
        return (torch.randperm(n, generator=torch.Generator().manual_seed(0)) % 2 == 0)[self.group]

    @cached_property
    def u(self) -> Tensor | None:
        """(N,); None for points."""
        return None if is_point(self.queries) else self.queries.uncertainty().double()

    @cached_property
    def logits(self) -> dict[str, Tensor]:
        """Of a softmax over the gallery, (N, K) each: of the means, and what the variances make of them."""
        found = {"means": self.scale * self.cosine}
        if not (is_point(self.queries) and is_point(self.gallery)):
            mean, var = prob_cosine(self.queries, self.gallery)
            found["probit"] = probit_softmax(self.scale * mean.double(), self.scale**2 * var.double()).log()
            if self.model.form == "csd":
                found["match"] = self.model.log_odds(self.queries, self.gallery).double()
        return found

    def variants(self) -> dict[str, Variant]:
        """For prediction sets: `logits`, and u in the temperature."""
        found = {name: Variant(logits) for name, logits in self.logits.items()}
        if self.u is not None:
            found["means, temperature by u"] = Variant(self.logits["means"], self.u)
        return found

    def softmax(self, logits: Tensor, **about) -> Confidence:
        """The answer's probability, which is not one of being right where several are true."""
        log_p = logits.log_softmax(1)
        nll = None if self.truth is None else -own_log_p(log_p, self.truth)
        several = self.truth is not None and self.truth.dtype == torch.bool
        return Confidence(log_p.gather(1, self.answer[:, None])[:, 0].exp(), probability=not several, nll=nll, **about)


def is_point(g: Gaussian) -> bool:
    """True if no item has a variance."""
    return bool(g.log_var.max() < POINT_LOG_VAR + 1)


def unlabelled_confidences(task: Task) -> dict[str, Confidence]:
    """Those that no labelled query is needed for, by their names."""
    found = {name: Confidence(values) for name, values in free_confidences(task.cosine, task.scale).items()}
    for name, logits in task.logits.items():
        found[SOFTMAX[name]] = task.softmax(logits, own=name != "means")
    if task.temperature is not None:
        u = torch.ones_like(task.cosine[:, 0]) if task.u is None else task.u
        found["adapter's softmax"] = task.softmax(tempered(task.cosine, task.temperature, u), own=True)
    if task.epistemic is not None:
        with torch.random.fork_rng(devices=()):  # passes with dropout
            torch.manual_seed(0)
            u = [task.epistemic(means).sum(1).double() for means in task.queries.mean.split(4096)]
        found["u, epistemic"] = Confidence(-torch.cat(u), own=True)
    return found if task.u is None else {U: Confidence(-task.u, own=True)} | found


def fitted_confidences(task: Task, known: Mapping[str, Confidence], steps: int) -> dict[str, Confidence]:
    """Those that are fitted on the queries of one half and given to the other's, both ways round, so that all count.

    One temperature; logistic regression on (max softmax, entropy, margin), also with log u; and ViLU for a gallery with
    one true item each, trained for so many steps. Nothing if a half has only right or only wrong answers.
    """
    right, logits = task.right, task.logits["means"]
    if any(len(right[some].unique()) < 2 for some in (task.half, ~task.half)):
        return {}

    def by_temperature(u: Tensor, **about) -> Confidence:
        def fit(rows: Tensor, others: Tensor) -> Tensor:
            return tempered(logits[others], fit_temperature(logits[rows], task.truth[rows], u[rows]), u[others])

        return task.softmax(_cross_fitted(task, fit), labels=len(right) // 2, **about)

    def logistic(features: Tensor, **about) -> Confidence:
        def fit(rows: Tensor, others: Tensor) -> Tensor:
            x = (features - features[rows].mean(0)) / features[rows].std(0).clamp_min(1e-12)
            fitted = LogisticRegression(max_iter=1000).fit(x[rows].numpy(), right[rows].numpy())
            return torch.from_numpy(fitted.predict_proba(x[others].numpy())[:, 1])

        return Confidence(_cross_fitted(task, fit), len(right) // 2, probability=True, **about)

    def vilu(rows: Tensor, others: Tensor) -> Tensor:
        queries, gallery = (normalize(g.mean.float(), dim=1) for g in (task.queries, task.gallery))
        predictor = train_failure_predictor(queries[rows], gallery, task.scale, right[rows], steps)
        with torch.no_grad():
            return predictor(queries[others], gallery, task.scale).double()

    features = torch.stack([known[name].values for name in ("max softmax", "entropy", "margin")], 1)
    found = {"temperature": by_temperature(torch.ones(len(right))), "logistic regression": logistic(features)}
    if task.u is not None:
        found["temperature by u"] = by_temperature(task.u, own=True)
        features = torch.cat([features, task.u.log()[:, None]], 1)
        found["logistic regression with u"] = logistic(features, own=True)
    if steps and task.truth.dtype != torch.bool:
        found["vilu"] = Confidence(_cross_fitted(task, vilu), len(right) // 2)
    return found


def _cross_fitted(task: Task, fit: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """`fit` (rows to fit on, the other rows) gives values of the others: those of both ways round, in their order."""
    some, others = (half.nonzero().flatten() for half in (task.half, ~task.half))
    return torch.cat([fit(others, some), fit(some, others)])[torch.cat([some, others]).argsort()]


# ---------------------------------------------------------------------------------------------------------- comparison


def measure(
    task: Task, scores: Mapping[str, Confidence], outcomes: Mapping[str, Tensor], levels: int, nearest: Tensor | None,
    ood: Mapping[str, Confidence] | None, advance: Callable[[int], object],
) -> dict[str, dict[str, Tensor]]:  # fmt: skip
    """score -> key of MEASURES -> (R,), the first of the data and the others of the same resamples for all scores.

    outcomes: "ambiguity" or "acceptance" -> (N,), NaN where unknown; nearest: (N,) bool, `nearest_is_of_class`;
    ood: confidences of items that the gallery has no answer for.
    """
    found = {}
    weights = cluster_weights(int(task.group.max()) + 1)[:, task.group]
    if ood is not None:
        known = torch.arange(len(weights[0]) + len(next(iter(ood.values())).values)) < len(weights[0])
        both = torch.cat([weights, cluster_weights(int((~known).sum()), seed=1)], 1)
    for name, one in scores.items():
        measured = found[name] = selective_metrics(one.values, task.right, weights)
        measured["level_score"] = retrieval_levels(-one.values, task.right, weights, levels)["score"]
        for key, outcome in outcomes.items():
            there = outcome.isfinite()
            measured[key] = rank_correlations(-one.values[there], outcome[there], weights[:, there])
        if nearest is not None:
            measured["r_auroc"] = selective_metrics(one.values, nearest, weights)["auroc"]
        if one.probability:
            measured["ece"] = calibration_error(one.values, task.right, weights)
        if one.nll is not None:
            measured["nll"] = weights.double() @ one.nll / weights.double().sum(1)
        if ood is not None and name in ood:
            told = selective_metrics(torch.cat([one.values, ood[name].values]), known, both)
            measured |= {f"ood_{key}": told[key] for key in ("auroc", "fpr95")}
        advance(1)
    return found


def compare(measured: Mapping[str, dict[str, Tensor]], scores: Mapping[str, Confidence]) -> list[dict]:
    """A row for each score: its measures with intervals, and the paired "differences" of each to the best one that
    needs neither labels nor variances ("to"), and to all baselines.
    """
    rows = {name: {"score": name, "labels": one.labels, "own": one.own} for name, one in scores.items()}
    for key, (_, sign) in MEASURES.items():
        values = {name: one[key] for name, one in measured.items() if key in one and not one[key][0].isnan()}
        free = [name for name in values if not scores[name].labels and not scores[name].own]
        best = max(free, key=lambda name: sign * float(values[name][0]), default=None)
        for name, x in values.items():
            every = dict.fromkeys((best, *BASELINES, *MORE_BASELINES))
            apart = {one: estimate(x - values[one]) for one in every if one in values and one != name}
            rows[name][key] = estimate(x) | {"to": best, "differences": apart}
    return list(rows.values())


def verdict(row: Mapping, key: str, than: str | None = None) -> str:
    """ "better" or "worse" than a score, by default the best free one, by a paired interval that excludes zero, else
    "not told apart".
    """
    apart, sign = row[key]["differences"].get(than or row[key]["to"]), MEASURES[key][1]
    if apart is None or apart["low"] <= 0 <= apart["high"]:
        return SAME
    return "better" if sign * apart["value"] > 0 else "worse"
