"""Measurements of a finished training: retrieval by kind and length, feasibility, and uncertainty against quality.

Q queries of k parts, D dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict

import torch

from probemb.data.compositions.queries import KINDS, Query
from probemb.evaluation.composed import (
    KS,
    ComposedQueries,
    composed_scores,
    guessed,
    measure_composed,
    positives_of,
)
from probemb.evaluation.embedding import EmbeddedImages, encode_images, encode_texts
from probemb.evaluation.feasibility import auc_estimate, combinations_of, measure_feasibility
from probemb.gaussian import Gaussian
from probemb.metrics import composed_metrics, uncertainty_bins
from tools.claims.composed.variants import SEEN, UNSEEN, Training
from tools.claims.composed.world import INFEASIBLE, Asked, Kept, World

BATCH = 256


@torch.no_grad()
def embed(model, tokenizer, kept: Kept, queries: Sequence[Query]) -> ComposedQueries:
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
    return ComposedQueries(list(queries), product, parts)


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
    found = embed(model, tokenizer, kept, asked.queries[which])
    return measure_composed(gallery(model, kept, len(asked.data)), asked.data, found)


def measure(model, tokenizer, world: World, training: Training) -> dict:
    """Plain numbers of the test split.

    "retrieval": "seen 2", "unseen 2", "seen 3", "seen 4" -> kind -> metrics, by the cosine; "density": the same by the
    expected density, of probabilistic models; "chance": by number of parts; "feasibility": ROC AUC by score and kind,
    and by "rarity", for which no model is needed;
    "bins", "spearman": of the composition's uncertainty and R-Precision, of seen pairs. Trainings of the setup "unseen"
    have the first three alone, of "apart 2".
    """
    kept, items = world.test_kept, gallery(model, world.test_kept, len(world.test[2].data))
    tests = {"apart": {2: world.apart.test}} if training.setup == UNSEEN else {SEEN: world.test, UNSEEN: world.test}
    asked = {
        f"{name} {k}": (one.data, one.queries[which])
        for name, tested in tests.items()
        for k, one in tested.items()
        if (which := UNSEEN if name == UNSEEN else SEEN) in one.queries
    }
    composed = {where: embed(model, tokenizer, kept, queries) for where, (_, queries) in asked.items()}
    rankings = {"retrieval": "cosine"} | ({"density": "density"} if model.composer.probabilistic else {})
    out: dict = {
        name: {where: measure_composed(items, data, composed[where], by) for where, (data, _) in asked.items()}
        for name, by in rankings.items()
    }
    out["chance"] = {str(k): chance(one) for tested in tests.values() for k, one in tested.items()}
    data = world.test[2].data
    if model.composer.probabilistic and f"{SEEN} 2" in composed:
        out |= quality(items, data, composed[f"{SEEN} 2"])
    if f"{UNSEEN} 2" in composed and INFEASIBLE in world.test[2].queries:
        never = embed(model, tokenizer, kept, world.test[2].queries[INFEASIBLE])
        measured = measure_feasibility(model.composer, composed[f"{UNSEEN} 2"], never)
        out["feasibility"] = {
            score: {kind: one["value"] for kind, one in kinds.items()} for score, kinds in measured.items()
        }
        out["feasibility"]["rarity"] = {"all": rarity_auc(world, composed[f"{UNSEEN} 2"].queries, never.queries)}
    return out


def rarity_auc(world: World, feasible: Sequence[Query], infeasible: Sequence[Query]) -> float:
    """ROC AUC of a guess from how few training images have each concept: the sum of their negative logarithms."""
    train, tested = world.train[2], world.test[2].data
    number = {name: index for index, name in enumerate(train.concepts)}

    def rarity(query: Query) -> float:
        counts = [len(train.targets([number[tested.concepts[concept]]])) for concept in query.concepts]
        return -sum(math.log(1 + count) for count in counts)

    sides = [
        (torch.tensor([rarity(query) for query in some]), combinations_of(some)) for some in (feasible, infeasible)
    ]
    return auc_estimate([sides])["value"]


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


def chance(asked: Asked) -> dict[str, float]:
    """Expected result of a random ranking for the seen combinations: R@K and R-Precision."""
    targets = torch.tensor([len(asked.data.targets(query.concepts)) for query in asked.queries[SEEN]])
    return {name: float(values.mean()) for name, values in guessed(targets, len(asked.data)).items()}
