"""Measurements of `tools.claims` on a trained model: retrieval, uncertainty, and zero-shot prompts.

D dimensions, N images, M captions.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from finetune.config import Config
from finetune.methods import METHODS
from probemb.evaluation.embedding import encode_images, encode_texts
from probemb.evaluation.scores import csd_scores, match_probability_scores, mean_scores, wasserstein2_scores
from probemb.gaussian import Gaussian
from probemb.metrics import (
    Positives,
    average_ranks,
    mean_metrics,
    pearson,
    query_metrics,
    rank_both,
    uncertainty_bins,
)
from probemb.models import DualEncoder
from tools.claims.scenes.world import Part, World

BINS = 10


def embed(model: DualEncoder, part: Part) -> tuple[Gaussian, Gaussian]:
    """Gaussians (N, D) of the images and (M, D) of the captions."""
    training = model.training
    model.eval()
    images = encode_images(
        model.encode_image, (part.images(rows) for rows in torch.arange(len(part.pixels)).split(250))
    )
    texts = encode_texts(model.encode_text, part.tokens, cut=model.cut_padding)
    model.train(training)
    return images, texts


def own_scores(model: DualEncoder, config: Config, images: Gaussian, texts: Gaussian):
    """Scores by the distance that the method trains: each ranks in its own way."""
    if config.method == "pcme":
        return match_probability_scores(images, texts, model.scale.item(), model.shift.item(), 8)
    if config.distance == "wasserstein2":
        return wasserstein2_scores(images, texts)
    return csd_scores(images, texts) if METHODS[config.method].probabilistic else mean_scores(images, texts)


def both_ways(model: DualEncoder, config: Config, part: Part) -> dict[str, float]:
    """mAP@R, R-Precision and recalls with the exact positives, mean of both directions."""
    images, texts = embed(model, part)
    i2t, t2i = (mean_metrics(found) for found in per_query(own_scores(model, config, images, texts), part))
    return {name: (i2t[name] + t2i[name]) / 2 for name in i2t}


def per_query(scores, part: Part, match: Positives | None = None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Every metric of every image and of every caption; `match` None takes the exact positives."""
    match = match or part.positives
    back = match.transposed()
    depth = tuple(max(10, int(one.counts.max())) for one in (match, back))
    rows, columns = rank_both(scores, *scores.shape, depth)
    return query_metrics(rows, match), query_metrics(columns, back)


def measure(model: DualEncoder, config: Config, world: World) -> dict:
    """All that the claims need, on the test scenes: plain numbers."""
    part = world.test
    images, texts = embed(model, part)
    rankings = {"own": own_scores(model, config, images, texts)}
    if METHODS[config.method].probabilistic:
        rankings |= {"csd": csd_scores(images, texts), "mean": mean_scores(images, texts)}
    found = {}
    for name, scores in rankings.items():
        i2t, t2i = (mean_metrics(one) for one in per_query(scores, part))
        found[name] = {"i2t": i2t, "t2i": t2i}
    found = {"retrieval": found}
    if METHODS[config.method].probabilistic:
        found["uncertainty"] = uncertainty(rankings["own"], images, texts, part)
    if config.method == "pcmepp" and config.distance == "csd":
        found["prompts"] = prompts(model, world)
    return found


def uncertainty(scores, images: Gaussian, texts: Gaussian, part: Part) -> dict:
    """Captions' u against the share of all images that they fit; u of both sides against recall, in bins."""
    ambiguity = part.ambiguity
    u_text, u_image = texts.uncertainty().double(), images.uncertainty().double()
    owner = torch.tensor(part.dataset.owner())
    own_pairs = Positives.from_pairs(owner, torch.arange(len(owner)), len(part.dataset), len(owner))
    out = {
        "spearman": pearson(average_ranks(u_text), average_ranks(ambiguity)),
        "mean_u": {"images": float(u_image.mean()), "captions": float(u_text.mean())},
    }
    bins = uncertainty_bins(u_text, ambiguity, BINS)
    out["ambiguity"] = vars(bins)
    for name, match in (("exact", None), ("own", own_pairs)):
        i2t, t2i = per_query(scores, part, match)
        for side, u, metrics in (("images", u_image, i2t), ("captions", u_text, t2i)):
            for metric in ("r@1", "map_at_r"):
                bins = uncertainty_bins(u, metrics[metric], BINS)
                out[f"{side} {metric} {name}"] = vars(bins)
    return out


def prompts(model: DualEncoder, world: World, folds: int = 5) -> dict:
    """Zero-shot classification by every filter, K chosen on folds and, as an oracle, on the scored images."""
    from zeroshot.filtering.evaluation import evaluate_embeddings
    from zeroshot.filtering.filters import Selection

    classes = world.classes
    holder = replace(world.test, pixels=classes.pixels, tokens=classes.tokens.flatten(0, 1))
    images, texts = embed(model, holder)
    texts = Gaussian(*(x.view(*classes.tokens.shape[:2], -1) for x in (texts.mean, texts.log_var)))
    found = evaluate_embeddings(
        images.mean, classes.labels, classes.names, texts, ["single", "all", "topk", "best-topk"],
        selection=Selection("folds", folds),
    )  # fmt: skip
    return {"rows": [vars(row) for row in found.rows], "curve": found.curve1.tolist()}
