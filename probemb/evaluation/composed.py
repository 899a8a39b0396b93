"""Composed retrieval: queries of several parts, their metrics, and the feasibility of combinations (MPC, Fig. 5).

Letters: Q queries of k parts, T items of the gallery, D dimensions; A low and B high scores.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Self

import numpy as np
import torch
from sklearn.metrics import roc_auc_score, roc_curve
from torch import Tensor
from torch.nn import functional as F

from probemb.compose import Composer, Product
from probemb.data.compositions.dataset import KINDS, Compositions, Query, query_parts
from probemb.errors import UserError
from probemb.evaluation.embedding import EmbeddedImages, Embedder
from probemb.evaluation.rankings import Scores, dots
from probemb.gaussian import Gaussian
from probemb.losses.mpc import log_density_factors
from probemb.metrics.retrieval import Positives, score_metrics
from probemb.metrics.uncertainty import average_ranks, cluster_standard_error, mean_estimates

Ranking = Literal["cosine", "density"]
KS = (5, 10)


class ComposedQueries(NamedTuple):
    """Queries whose parts could all be read, their compositions (Q, D), and the embeddings of their parts (Q, k, D)."""

    queries: list[Query]
    composed: Product
    parts: Gaussian

    def only(self, rows: Tensor) -> Self:
        composed = Product(self.composed.gaussian[rows], self.composed.log_normaliser[rows])
        return ComposedQueries([self.queries[row] for row in rows.tolist()], composed, self.parts[rows])


@torch.no_grad()
def composed_scores(query: Product, gallery: Gaussian, by: Ranking = "cosine") -> Scores:
    """Scores (Q, T): cosine of the means, MPC's choice at test time, or `losses.mpc.expected_similarity` in nats."""
    g, gallery = query.gaussian.float(), gallery.float()
    if by == "cosine":
        return dots(F.normalize(g.mean, dim=-1), F.normalize(gallery.mean, dim=-1))
    left, right, row = log_density_factors(g, gallery.mean, gallery.var)
    constant = (row + query.log_normaliser)[:, None]
    return dots(torch.cat([left, constant], 1), torch.cat([right, torch.ones_like(right[:, :1])], 1))


@torch.no_grad()
def embed_queries(embedder: Embedder, data: Compositions, queries: Sequence[Query]) -> ComposedQueries:
    """Embed every different part once, and compose; queries with a part that cannot be read are left out. UserError."""
    composer, (crops, words, rows) = composer_of(embedder.model), query_parts(data.images, queries)
    images = embedder.images(crops, "image queries") if len(crops) else None
    texts = embedder.texts(words, "text queries") if words else None
    rows = torch.from_numpy(rows)
    place = torch.full((len(crops) + len(words),), -1)  # of every part among the embedded ones
    kept = torch.tensor(images.kept if images else [], dtype=torch.int64)
    place[kept] = torch.arange(len(kept))
    place[len(crops) :] = len(kept) + torch.arange(len(words))
    rows = place[torch.where(rows >= 0, rows, len(crops) - 1 - rows)]
    usable = (rows >= 0).all(1)
    given = Gaussian.cat([g for g in (images and images.gaussian, texts) if g is not None])[rows[usable]]  # (Q, k, D)
    product = composer(given.to(embedder.device.name))
    composed = Product(product.gaussian.to("cpu"), product.log_normaliser.cpu())
    return ComposedQueries([query for query, one in zip(queries, usable.tolist()) if one], composed, given)


def composer_of(model) -> Composer:
    if getattr(model, "composer", None) is None:
        what = "This model was not trained to compose queries of several parts."
        raise UserError(what, "Use one that was: `python -m finetune.run --method mpc`.")
    return model.composer


def positives_of(data: Compositions, queries: Sequence[Query], kept: Sequence[int]) -> Positives:
    """The correct targets of every query among the embedded images `kept`."""
    place = torch.full((len(data),), -1)
    place[torch.as_tensor(kept)] = torch.arange(len(kept))
    found = [place[torch.from_numpy(data.targets(query.concepts))] for query in queries]
    rows, items = torch.arange(len(found)).repeat_interleave(torch.tensor([len(x) for x in found])), torch.cat(found)
    return Positives.from_pairs(rows[items >= 0], items[items >= 0], len(queries), len(kept))


def ranked_by(
    gallery: EmbeddedImages, found: ComposedQueries, by: Ranking = "cosine", without_own: bool = False
) -> Callable[[slice], Tensor]:
    """Scores of the queries against the gallery. without_own: a query's own images rank last, as in TIRG."""
    score = composed_scores(found.composed, gallery.gaussian, by)
    place = {image: row for row, image in enumerate(gallery.kept)}
    own = [[place[part.image] for part in one.parts if part.image in place] for one in found.queries]

    def without(rows: slice) -> Tensor:
        scores = score(rows)
        for row, images in enumerate(own[rows]):
            scores[row, images] = torch.finfo(scores.dtype).min
        return scores

    return without if without_own else score


def guessed(targets_Q: Tensor, n_gallery: int, ks: Sequence[int] = KS) -> dict[str, Tensor]:
    """R@K and R-Precision that a random order of T images is expected to have for R targets, (Q,) float64 each."""
    r, found = targets_Q.double(), {}
    for k in ks:
        places = torch.arange(min(k, n_gallery))
        found[f"r@{k}"] = 1 - ((n_gallery - r[:, None] - places) / (n_gallery - places)).clamp(min=0).prod(1)
    return {**found, "r_precision": r / n_gallery}


def measure_composed(
    gallery: EmbeddedImages, data: Compositions, found: ComposedQueries, by: Ranking = "cosine",
    ks: Sequence[int] = KS, without_own: bool = False,
) -> dict[str, dict]:  # fmt: skip
    """Of every kind of query that occurs, and of "all": "queries" that have a correct target, how many "targets" they
    have, the mean of each metric, {"value", "se"}, and "guessing", what a random order would reach; see `ranked_by`.
    """
    positives = positives_of(data, found.queries, gallery.kept)
    every, targets = score_metrics(ranked_by(gallery, found, by, without_own), positives, ks), positives.counts
    by_chance, combination, out = guessed(targets, len(gallery.kept), ks), combinations_of(found.queries), {}
    for kind in ("all", *KINDS):
        some = of_kind(found.queries, kind) & (targets > 0)
        if some.any():
            out[kind] = {
                "queries": int(some.sum()),
                "targets": float(targets[some].double().mean()),
                **mean_estimates({name: every[name] for name in by_chance}, combination, some),
                "guessing": {name: float(values[some].mean()) for name, values in by_chance.items()},
            }
    return out


def of_kind(queries: Sequence[Query], kind: str) -> Tensor:
    """(Q,) bool, which queries are of a kind; "all" are."""
    return torch.tensor([kind in ("all", query.kind) for query in queries], dtype=torch.bool)


def combinations_of(queries: Sequence[Query]) -> Tensor:
    """The number of each query's combination of concepts, (Q,) int64."""
    numbers: dict[tuple[int, ...], int] = {}
    return torch.tensor([numbers.setdefault(query.concepts, len(numbers)) for query in queries], dtype=torch.int64)


def disagreement(parts: Gaussian, composed: Product) -> Tensor:
    """The means' part of -2 log Z, (Q,): of two parts the sum of (mu_1 - mu_2)^2 / (var_1 + var_2)."""
    gap = parts.mean - composed.gaussian.mean[:, None]
    return (gap.square() * (-parts.log_var).exp()).sum((1, 2))


def parts_distance(parts: Gaussian, _: Product) -> Tensor:
    """1 - the mean cosine of two different parts' means, (Q,). The paper's for models without variances."""
    mean = F.normalize(parts.mean, dim=-1)
    k = mean.shape[1]
    return 1 - (mean.sum(1).square().sum(-1) - mean.square().sum((1, 2))) / (k * (k - 1))


# Scores of infeasibility: title, what the composer must have, and parts (Q, k, D), compositions -> (Q,).
SCORES: dict[str, tuple[str, str, Callable[[Gaussian, Product], Tensor]]] = {
    "normaliser": ("log-normaliser, -log Z (Eq. 7)", "normaliser", lambda _, one: -one.log_normaliser),
    "disagreement": ("disagreement, the means' share of -log Z", "normaliser", disagreement),
    "variance": ("total variance, sum of σ²", "variance", lambda _, one: one.gaussian.uncertainty()),
    "log-variance": ("mean of log σ²", "variance", lambda _, one: one.gaussian.log_var.mean(-1)),
    "distance": ("distance of the parts, 1 - cosine", "nothing", parts_distance),
}
TITLES = {name: title for name, (title, *_) in SCORES.items()} | {"rarity": "no model: rarity of the parts in training"}

# (scores, combinations) of the feasible and of the infeasible queries, (A,) and (B,) each
Stratum = Sequence[tuple[Tensor, Tensor]]


def infeasibility(composer: Composer, found: ComposedQueries) -> dict[str, Tensor]:
    """Each score that a composer has, of the queries, (Q,) float64; of points the distance of the parts alone."""
    (gaussian, log_normaliser), parts = found.composed, found.parts.to(torch.float64)
    composed = Product(gaussian.to(torch.float64), log_normaliser.double())
    has = {"nothing": True, "variance": composer.probabilistic, "normaliser": composer.weighs}
    return {name: score(parts, composed) for name, (_, needs, score) in SCORES.items() if has[needs]}


def rarity(queries: Sequence[Query], counts: Sequence[int]) -> Tensor:
    """A guess without a model: the sum of -log(1 + training images) of a query's concepts, (Q,) float64. Frequent
    concepts co-occur more often, so an AUC of uncertainty has to be compared with this one.
    """
    surprise = -torch.tensor(counts, dtype=torch.float64).log1p()
    return torch.stack([surprise[list(query.concepts)].sum() for query in queries])


def feasibility_strata(
    composer: Composer, feasible: ComposedQueries, infeasible: ComposedQueries, counts: Sequence[int] | None = None
) -> dict[str, dict[str, Stratum]]:
    """Score -> kind that both sides have -> `Stratum`; with `counts` of `rarity` that one, too."""
    sides = feasible, infeasible
    scores = [infeasibility(composer, one) for one in sides]
    if counts is not None:
        scores = [{**found, "rarity": rarity(one.queries, counts)} for found, one in zip(scores, sides)]
    groups = [combinations_of(one.queries) for one in sides]
    rows = {kind: [of_kind(one.queries, kind) for one in sides] for kind in KINDS}
    common = {kind: both for kind, both in rows.items() if all(bool(some.any()) for some in both)}
    every = {kind: list(zip(scores, groups, both)) for kind, both in common.items()}
    return {
        name: {kind: [(one[name][some], group[some]) for one, group, some in of] for kind, of in every.items()}
        for name in scores[0]
    }


def measure_feasibility(
    composer: Composer, feasible: ComposedQueries, infeasible: ComposedQueries, counts: Sequence[int] | None = None
) -> dict[str, dict[str, dict[str, float]]]:
    """ROC AUC of infeasible queries against feasible ones of the same kind: score -> kind -> {"value", "se"}."""
    strata = feasibility_strata(composer, feasible, infeasible, counts).items()
    return {
        name: {"all": auc_estimate(list(kinds.values()))} | {kind: auc_estimate([one]) for kind, one in kinds.items()}
        for name, kinds in strata
        if kinds
    }


def auc_estimate(strata: Sequence[Stratum]) -> dict[str, float]:
    """P(high > low), ties half, within strata that count by the size of their smaller class: {"value", "se"}. Scores of
    one group are dependent, also in different strata; no group is in both classes. Source of the error: Obuchowski,
    Biometrics 1997 (DeLong's components, by clusters).
    """
    value, influences, variance = 0.0, ([], []), 0.0
    for ((low, _), (high, _)), weight in zip(strata, _weights(strata)):
        area = roc_auc_score(*_labelled(low, high))
        value += weight * area
        # Of each score the share of the other class on its right side: overall rank less rank in its own class.
        overall = average_ranks(torch.cat([low, high])).split([len(low), len(high)])
        right = (
            1 - (overall[0] - average_ranks(low)) / len(high), (overall[1] - average_ranks(high)) / len(low),
        )  # fmt: skip
        for side, shares in zip(influences, right):
            side.append(weight * (shares - area) / len(shares))
    for place, parts in enumerate(influences):
        of_scores, group = torch.cat(parts), torch.cat([stratum[place][1] for stratum in strata])
        variance += cluster_standard_error(len(of_scores) * of_scores, group) ** 2  # their sum is 0
    return {"value": value, "se": variance**0.5}


def mean_roc_curve(strata: Sequence[Stratum], points: int = 201) -> tuple[np.ndarray, np.ndarray]:
    """False and true positive rates, (points,) each, the true ones as means over strata; see `auc_estimate`."""
    rates, mean = np.linspace(0, 1, points), np.zeros(points)
    for ((low, _), (high, _)), weight in zip(strata, _weights(strata)):
        wrong, right, _ = roc_curve(*_labelled(low, high), drop_intermediate=False)
        mean += weight * np.interp(rates, wrong, right)
    return rates, mean


def _labelled(low_A: Tensor, high_B: Tensor) -> tuple[np.ndarray, np.ndarray]:
    return np.repeat([0, 1], [len(low_A), len(high_B)]), torch.cat([low_A, high_B]).numpy()


def _weights(strata: Sequence[Stratum]) -> list[float]:
    smaller = [min(len(low), len(high)) for (low, _), (high, _) in strata]
    return [one / sum(smaller) for one in smaller]
