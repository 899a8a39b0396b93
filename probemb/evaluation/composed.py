"""Composed retrieval: embed queries of several parts, and measure. Q queries, T items of the gallery, D dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch.nn import functional as F

from probemb.compose import Product
from probemb.data.compositions.dataset import Compositions
from probemb.data.compositions.queries import KINDS, Query, query_parts
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
    """Queries whose parts could all be read, and their compositions, (Q, D)."""

    queries: list[Query]
    composed: Product


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
    given = Gaussian(found.mean.view(shape), found.log_var.view(shape)).to(embedder.device.name)
    product = composer(given)
    composed = Product(product.gaussian.to("cpu"), product.log_normaliser.cpu())
    return ComposedQueries([query for query, one in zip(queries, usable.tolist()) if one], composed)


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


def measure_composed(
    gallery: EmbeddedImages, data: Compositions, found: ComposedQueries, by: Ranking = "cosine"
) -> dict[str, dict[str, float]]:
    """Mean R@K and R-Precision of the queries of every kind ("images", "mixed", "texts"), and of "all" of them.

    Queries without a correct target in the gallery do not count; a kind without queries is absent. "queries" says how
    many there are.
    """
    positives = positives_of(data, found.queries, gallery.kept)
    per_query = composed_metrics(composed_scores(found.composed, gallery.gaussian, by), positives, KS)
    kinds = [query.kind for query in found.queries]
    out = {}
    for kind in ("all", *KINDS):
        chosen = torch.tensor([kind in ("all", one) for one in kinds]) & (positives.counts > 0)
        if chosen.any():
            means = mean_metrics({name: values[chosen] for name, values in per_query.items()})
            out[kind] = {**means, "queries": int(chosen.sum())}
    return out
