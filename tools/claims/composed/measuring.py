"""What is measured of a finished training: retrieval by kind and length, feasibility, and uncertainty against quality.

Q queries of k parts, D dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple

import torch
from torch import Tensor

from probemb.compose import Product
from probemb.data.compositions.queries import KINDS, Query
from probemb.evaluation.composed import (
    KS,
    ComposedQueries,
    composed_scores,
    measure_composed,
    positives_of,
)
from probemb.evaluation.embedding import EmbeddedImages, encode_images, encode_texts
from probemb.gaussian import Gaussian
from probemb.metrics import composed_metrics, uncertainty_bins
from probemb.metrics.composed import roc_auc
from tools.claims.composed.world import INFEASIBLE, SEEN, UNSEEN, Asked, Kept, World

BATCH = 256


class Embedded(NamedTuple):
    """Parts (Q, k, D) of queries and their compositions."""

    parts: Gaussian
    found: ComposedQueries


@torch.no_grad()
def embed(model, tokenizer, kept: Kept, queries: Sequence[Query]) -> Embedded:
    """Embed every different part once, and compose."""
    training = model.training
    model.eval()
    images = sorted({kept.place[part.image, part.box] for q in queries for part in q.parts if part.is_image})
    texts = sorted({part.text for q in queries for part in q.parts if not part.is_image})
    embedded = []
    if images:
        embedded.append(encode_images(model.encode_image, kept.rows[torch.tensor(images)].split(BATCH)))
    if texts:
        embedded.append(encode_texts(model.encode_text, tokenizer(texts), cut=model.cut_padding))
    row = {place: number for number, place in enumerate(images)}
    row |= {text: len(images) + number for number, text in enumerate(texts)}
    index = torch.tensor(
        [[row[kept.place[p.image, p.box] if p.is_image else p.text] for p in query.parts] for query in queries]
    )
    every = Gaussian.cat(embedded)
    parts = Gaussian(every.mean[index], every.log_var[index])
    product = model.composer(parts)
    model.train(training)
    return Embedded(parts, ComposedQueries(list(queries), product))


@torch.no_grad()
def gallery(model, kept: Kept, images: int) -> EmbeddedImages:
    """The targets: whole images."""
    training = model.training
    model.eval()
    found = encode_images(model.encode_image, kept.rows[:images].split(BATCH))
    model.train(training)
    return EmbeddedImages(found, list(range(images)), [])


def retrieval(model, tokenizer, kept: Kept, asked: Asked, which: str) -> dict:
    """R@K and R-Precision by kind of one kind of combination."""
    found = embed(model, tokenizer, kept, asked.queries[which]).found
    return measure_composed(gallery(model, kept, len(asked.data)), asked.data, found)


def measure(model, tokenizer, world: World) -> dict:
    """Plain numbers of the test split.

    "retrieval": "seen 2", "unseen 2", "seen 3", "seen 4" -> kind -> metrics, by the cosine; "density": the same of seen
    pairs ranked by the expected density, of probabilistic models; "feasibility", see `feasibility`; "bins", "spearman":
    of the composition's uncertainty and R-Precision, of seen pairs.
    """
    probabilistic, kept = model.composer.probabilistic, world.test_kept
    items = gallery(model, kept, len(world.test[2].data))
    out: dict = {"retrieval": {}}
    pairs: dict[str, Embedded] = {}
    for k, asked in world.test.items():
        for which in (SEEN, UNSEEN):
            if which in asked.queries:
                one = embed(model, tokenizer, kept, asked.queries[which])
                out["retrieval"][f"{which} {k}"] = measure_composed(items, asked.data, one.found)
                if k == 2:
                    pairs[which] = one
    data = world.test[2].data
    if probabilistic:
        out["density"] = measure_composed(items, data, pairs[SEEN].found, "density")
        out |= quality(items, data, pairs[SEEN].found)
    if UNSEEN in pairs and INFEASIBLE in world.test[2].queries:
        never = embed(model, tokenizer, kept, world.test[2].queries[INFEASIBLE])
        out["feasibility"] = feasibility(pairs[UNSEEN], never, probabilistic)
    return out


def quality(items: EmbeddedImages, data, found: ComposedQueries) -> dict:
    """Uncertainty of the composition against R-Precision: ten bins, and Spearman's correlation by kind of query."""
    positives = positives_of(data, found.queries, items.kept)
    score = composed_metrics(composed_scores(found.composed, items.gaussian), positives, KS)["r_precision"]
    u, kinds = found.composed.gaussian.uncertainty(), [query.kind for query in found.queries]
    out: dict = {"spearman": {}}
    for kind in ("all", *KINDS):
        chosen = torch.tensor([kind in ("all", one) for one in kinds])
        bins = uncertainty_bins(u[chosen], score[chosen])
        out["spearman"][kind] = bins and bins.spearman
        if kind == "all":
            out["bins"] = bins and asdict(bins)
    return out


def feasibility(feasible: Embedded, infeasible: Embedded, probabilistic: bool) -> dict:
    """ROC AUC of telling pairs that occur from pairs that never do, by kind of query and score.

    Scores: "distance" of the parts' means (the paper's for points); of probabilistic models also "uncertainty" of the
    composition, its summed variances (the closed form of what the paper samples, Oh et al.'s self-mismatch), and
    "agreement", the normaliser Z of the parts' product. Feasible pairs are the positives and should be closer, more
    certain, and in better agreement.
    """
    both, out = (feasible, infeasible), {}
    for name, of in _scores(probabilistic).items():
        scores = [of(one) for one in both]
        kinds = [[query.kind for query in one.found.queries] for one in both]
        for kind in ("all", *KINDS):
            chosen = [
                score[torch.tensor([kind in ("all", one) for one in those])] for score, those in zip(scores, kinds)
            ]
            label = torch.cat([torch.full((len(one),), number == 0) for number, one in enumerate(chosen)])
            if all(len(one) for one in chosen):
                out.setdefault(name, {})[kind] = roc_auc(torch.cat(chosen), label)
    return out


def _scores(probabilistic: bool) -> dict:
    named = {"distance": lambda one: -_distance(one.parts.mean)}
    if probabilistic:
        named["uncertainty"] = lambda one: -one.found.composed.gaussian.uncertainty()
        named["agreement"] = lambda one: _agreement(one.parts)
    return named


def _distance(mean_QkD: Tensor) -> Tensor:
    return (mean_QkD[:, 0] - mean_QkD[:, 1]).norm(dim=-1)


def _agreement(parts: Gaussian) -> Tensor:
    from probemb.compose import compose

    product: Product = compose(Gaussian(parts.mean.transpose(0, 1), parts.log_var.transpose(0, 1)))
    return product.log_normaliser


def chance(asked: Asked) -> dict[str, float]:
    """What a random ranking gets for the seen combinations: expected R@K and R-Precision."""
    n, found = len(asked.data), {f"r@{k}": 0.0 for k in KS} | {"r_precision": 0.0}
    queries = asked.queries[SEEN]
    for query in queries:
        r = len(asked.data.targets(query.concepts))
        for k in KS:
            missed = 1.0
            for i in range(k):
                missed *= max(0, n - r - i) / (n - i)
            found[f"r@{k}"] += (1 - missed) / len(queries)
        found["r_precision"] += r / n / len(queries)
    return found
