"""Composed retrieval: embed queries of several parts, and measure. Q queries, T items of the gallery, D dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from probemb.compose import Product
from probemb.data.compositions import KINDS, Compositions, Query, query_parts
from probemb.errors import UserError
from probemb.evaluation.embedding import EmbeddedImages, Embedder
from probemb.evaluation.scores import DotScores
from probemb.gaussian import Gaussian
from probemb.losses.mpc import log_density_factors
from probemb.metrics import Positives, composed_metrics, mean_metrics
from probemb.models.composers import Composer

Ranking = Literal["cosine", "density"]
KS = (5, 10)


class ComposedQueries(NamedTuple):
    """Queries whose parts could all be read, their compositions (Q, D), and the embeddings of their parts (Q, k, D)."""

    queries: list[Query]
    composed: Product
    parts: Gaussian

    def only(self, rows: Tensor) -> ComposedQueries:
        """Some of the queries; rows: int64."""
        composed = Product(self.composed.gaussian[rows], self.composed.log_normaliser[rows])
        return ComposedQueries([self.queries[row] for row in rows.tolist()], composed, self.parts[rows])


class ComposedOutcomes(NamedTuple):
    """Results of Q queries.

    Attributes:
        per_query: "r@K", "r_precision" and "map_at_r" -> (Q,) float64; NaN where the gallery has no correct target.
        targets: (Q,) int64, how many correct targets the gallery has.
    """

    per_query: dict[str, Tensor]
    targets: Tensor


@torch.no_grad()
def composed_scores(query: Product, gallery: Gaussian, by: Ranking = "cosine") -> DotScores:
    """Scores (Q, T), larger is closer, as one matrix product a block of queries; nothing of size Q x T x D is made.

    Args:
        query: compositions (Q, D); gallery: (T, D).
        by: "cosine" of the means, MPC's choice at test time; or "density", the expected log-density of the item under
            the composition with its normaliser, in nats (`losses.mpc.expected_similarity`). The normaliser changes no
            ranking of one query.

    Raises:
        ValueError: another ranking.
    """
    if by not in ("cosine", "density"):
        raise ValueError(f"compositions are ranked by cosine or density, not by {by!r}")
    g, gallery = query.gaussian.float(), gallery.float()
    if by == "cosine":
        return DotScores(F.normalize(g.mean, dim=-1), F.normalize(gallery.mean, dim=-1))
    with torch.autocast(g.mean.device.type, enabled=False):
        left, right, row = log_density_factors(g, gallery.mean, gallery.var)
    constant = (row + query.log_normaliser)[:, None]
    return DotScores(torch.cat([left, constant], 1), torch.cat([right, torch.ones_like(right[:, :1])], 1))


@torch.no_grad()
def embed_queries(embedder: Embedder, data: Compositions, queries: Sequence[Query]) -> ComposedQueries:
    """Embed every different part once, and compose; queries with a part that cannot be read are left out.

    Raises:
        UserError: the model has no composer, or too many parts cannot be read.
    """
    composer, parts = composer_of(embedder.model), query_parts(data.images, queries)
    images = embedder.images(parts.images, "image queries") if len(parts.images) else None
    texts = embedder.texts(parts.texts, "text queries") if parts.texts else None
    rows = torch.from_numpy(parts.rows)
    place = torch.full((len(parts.images) + len(parts.texts),), -1)  # of every part among the embedded ones
    kept = torch.tensor(images.kept if images else [], dtype=torch.int64)
    place[kept] = torch.arange(len(kept))
    place[len(parts.images) :] = len(kept) + torch.arange(len(parts.texts))
    rows = place[torch.where(rows >= 0, rows, len(parts.images) - 1 - rows)]
    usable = (rows >= 0).all(1)
    found = Gaussian.cat([g for g in (images and images.gaussian, texts) if g is not None])[rows[usable].flatten()]
    shape = int(usable.sum()), rows.shape[1], -1
    given = Gaussian(found.mean.view(shape), found.log_var.view(shape))
    product = composer(given.to(embedder.device.name))
    composed = Product(product.gaussian.to("cpu"), product.log_normaliser.cpu())
    return ComposedQueries([query for query, one in zip(queries, usable.tolist()) if one], composed, given)


def composer_of(model) -> Composer:
    """The model's composer. Raises UserError: it has none."""
    if getattr(model, "composer", None) is None:
        raise UserError(
            "This model was not trained to compose queries of several parts.",
            "Use one that was: `python -m finetune.run --method mpc`.",
        )
    return model.composer


def positives_of(data: Compositions, queries: Sequence[Query], kept: Sequence[int]) -> Positives:
    """The correct targets of every query among the embedded images `kept`."""
    place = torch.full((len(data),), -1)
    place[torch.as_tensor(kept)] = torch.arange(len(kept))
    found = [place[torch.from_numpy(data.targets(query.concepts))] for query in queries]
    rows = torch.arange(len(found)).repeat_interleave(torch.tensor([len(one) for one in found]))
    items = torch.cat(found)
    return Positives.from_pairs(rows[items >= 0], items[items >= 0], len(queries), len(kept))


def ranked_by(
    gallery: EmbeddedImages, found: ComposedQueries, by: Ranking = "cosine", without_own: bool = False
) -> Callable[[slice], Tensor]:
    """Scores of the queries, a block at a time, against the gallery.

    Args:
        without_own: the images that a query is made of rank last, as TIRG's evaluation of Fashion200k has it.
    """
    score = composed_scores(found.composed, gallery.gaussian, by)
    if not without_own:
        return score
    place = {image: row for row, image in enumerate(gallery.kept)}
    own = [[place[part.image] for part in one.parts if part.is_image and part.image in place] for one in found.queries]

    def without(rows: slice) -> Tensor:
        scores = score(rows).clone()
        for row, images in enumerate(own[rows]):
            scores[row, images] = torch.finfo(scores.dtype).min
        return scores

    return without


def composed_outcomes(
    gallery: EmbeddedImages, data: Compositions, found: ComposedQueries, by: Ranking = "cosine",
    ks: Sequence[int] = KS, without_own: bool = False,
) -> ComposedOutcomes:  # fmt: skip
    """R@K, R-Precision and mAP@R of every query; see `ranked_by`."""
    positives = positives_of(data, found.queries, gallery.kept)
    per_query = composed_metrics(ranked_by(gallery, found, by, without_own), positives, ks)
    return ComposedOutcomes(per_query, positives.counts)


def guessed(targets_Q: Tensor, n_gallery: int, ks: Sequence[int] = KS) -> dict[str, Tensor]:
    """R@K and R-Precision that a random order of T images is expected to have for R targets, (Q,) float64 each."""
    r, found = targets_Q.double(), {}
    for k in ks:
        places = torch.arange(min(k, n_gallery))
        found[f"r@{k}"] = 1 - ((n_gallery - r[:, None] - places) / (n_gallery - places)).clamp(min=0).prod(1)
    return {**found, "r_precision": r / n_gallery}


def measure_composed(
    gallery: EmbeddedImages, data: Compositions, found: ComposedQueries, by: Ranking = "cosine"
) -> dict[str, dict[str, float]]:
    """Mean R@K and R-Precision of the queries of every kind ("images", "mixed", "texts"), and of "all" of them.

    Queries without a correct target in the gallery do not count; a kind without queries is absent. "queries" says how
    many there are.
    """
    per_query, targets = composed_outcomes(gallery, data, found, by)
    out = {}
    for kind in ("all", *KINDS):
        chosen = torch.tensor([kind in ("all", query.kind) for query in found.queries]) & (targets > 0)
        if chosen.any():
            means = mean_metrics({name: values[chosen] for name, values in per_query.items()})
            out[kind] = {**means, "queries": int(chosen.sum())}
    return out
