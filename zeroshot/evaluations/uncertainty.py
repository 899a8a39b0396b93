"""`python -m zeroshot.uncertainty`: one table a question, every score on the same items.

N images, C classes, Q queries, G gallery items, R resamples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, interpolate

from probemb.conformal import Score, describe_sets, of_labels, prediction_sets, threshold, tune_raps
from probemb.data.captions.find import CaptionDataset, find_captions
from probemb.data.labelled import find_images, prompt_texts, read_templates, resolve_classes
from probemb.evaluation.classification import normalise
from probemb.evaluation.embedding import EmbeddedPairs, Embedder, centres, embed_pairs, true_ambiguity
from probemb.evaluation.uncertainty import evenly, query_scores
from probemb.gaussian import Gaussian
from probemb.laplace import prob_cosine, probit_softmax
from probemb.metrics.bootstrap import cluster_weights, estimate
from probemb.metrics.selective import fit_temperature, free_confidences, retrieval_levels, selective_metrics
from probemb.metrics.uncertainty import rank_correlation, reliability
from probemb.models.match import MatchModel
from probemb.reports.pages import Figure, Page, Table, line_figure
from probemb.reports.text import between, number, percent
from zeroshot.evaluations import runner
from zeroshot.uncertainty import UncertaintyConfig

CROP = (0.1, 0.75)  # shares of the side
TUNED = 0.3  # of the calibration half
MEASURES = {"auroc": "AUROC", "fpr95": "FPR95", "aurc": "AURC", "e_aurc": "E-AURC"}


def evaluate(config: UncertaintyConfig) -> None:
    """Answer every question that the data allow. Raises UserError."""
    out = runner.claim(config, "uncertainty")
    captions, embedder = runner.open_captions(config), runner.open_model(config)
    pairs = centres(embed_pairs(embedder, captions))
    results: dict[str, Any] = runner.settings(config, embedder, captions.split)
    results["images_left_out"] = runner.left_out(pairs.bad)
    results["retrieval"] = retrieval(config, embedder, captions, pairs)
    results["crop_test"] = crop_test(config, embedder, captions, pairs) if embedder.model.probabilistic else None
    if config.classes:
        results["classification"] = classification(config, embedder)
    runner.finish(out, "uncertainty", results, make_page(config, results))


# ----------------------------------------------------------------------------------------------------------- retrieval


def retrieval(config: UncertaintyConfig, embedder: Embedder, captions: CaptionDataset, pairs: EmbeddedPairs) -> dict:
    """How well each score of a query predicts R@1, and sets of results that hold the own item at the promised rate."""
    model, images, texts = MatchModel.of(embedder.model), pairs.images, pairs.texts
    similarity = texts.mean.float() @ images.mean.float().T  # (captions, images)
    own = pairs.owner
    hits = {"captions": similarity.argmax(1) == own, "images": own[similarity.argmax(0)] == torch.arange(len(images))}
    words = torch.tensor([len(text.split()) for i in pairs.kept for text in captions.captions[i]], dtype=torch.float64)
    truths = {} if captions.truth is None else {"ambiguity": true_ambiguity(captions, pairs.kept)}
    found: dict[str, Any] = {"queries": {}, "sets": None}
    for side, queries, gallery, cluster in (
        ("captions", texts, images, own), ("images", images, texts, torch.arange(len(images))),
    ):  # fmt: skip
        scores = query_scores(queries, gallery, model)
        scores |= {"brevity": -words} if side == "captions" else {}
        weights = cluster_weights(int(cluster.max()) + 1)[:, cluster]
        found["queries"][side] = [
            {
                "score": name,
                **{key: estimate(x) for key, x in selective_metrics(-u, hits[side], weights).items()},
                "levels": retrieval_levels(u, hits[side], config.levels),
                **{key: rank_correlation(u, x, cluster) for key, x in truths.items() if side == "captions"},
            }
            for name, u in scores.items()
        ]
    scale = embedder.model.trained_temperature
    if scale is not None:
        found["sets"] = sets_of(config, set_probabilities(texts, images, scale), own, own)
    return found


def set_probabilities(queries: Gaussian, gallery: Gaussian, scale: float) -> dict[str, Tensor]:
    """Softmax of each query over the gallery, without the variances and, where there are some, with them."""
    found = {"means": (scale * queries.mean @ gallery.mean.T).softmax(1)}
    if float(queries.log_var.max()) > -29:  # no point model
        mean, var = prob_cosine(queries, gallery)
        found["with variances"] = probit_softmax(scale * mean, scale**2 * var)
    return found


def sets_of(
    config: UncertaintyConfig, probabilities: Mapping[str, Tensor], labels: Tensor, groups: Tensor
) -> list[dict]:
    """Prediction sets over random halves of the groups: means over splits, with the least and the largest coverage.

    probabilities: (Q, G) by name; labels: (Q,); groups: (Q,) of queries that stay on one side.
    """
    found: dict[tuple[str, str], list[dict]] = {}
    n = int(groups.max()) + 1
    for split in range(config.splits):
        order = torch.randperm(n, generator=torch.Generator().manual_seed(split))
        tune, calibrate, test = (torch.isin(groups, rows) for rows in order.split(split_sizes(n)))
        for name, p in probabilities.items():
            own = labels[tune | calibrate]
            both = p[tune | calibrate]
            scores = {"LAC": Score(), "APS": Score("aps"), "RAPS": tune_raps(p[tune], labels[tune], config.alpha)}
            for title, score in scores.items():
                seen, truth = (p[calibrate], labels[calibrate]) if title == "RAPS" else (both, own)
                limit = threshold(of_labels(score(seen), truth), config.alpha)
                sets = prediction_sets(score(p[test]), limit)
                found.setdefault((title, name), []).append(describe_sets(sets, labels[test], config.alpha))
    rows = []
    for (title, name), splits in found.items():
        mean = {key: sum(one[key] for one in splits) / len(splits) for key in splits[0]}
        coverages = [one["coverage"] for one in splits]
        rows.append({"score": title, "by": name, **mean, "least": min(coverages), "most": max(coverages)})
    return rows


def split_sizes(n: int) -> list[int]:
    """Items that choose RAPS' penalty, that give the threshold, and that are tested."""
    calibration = n // 2
    tune = round(TUNED * calibration)
    return [tune, calibration - tune, n - calibration]


# ------------------------------------------------------------------------------------------------------ classification


def classification(config: UncertaintyConfig, embedder: Embedder) -> dict:
    """Errors and strangers by every confidence, calibration before and after a temperature, and prediction sets."""
    images = find_images(config.classes, None, config.exif)
    classes, labels = resolve_classes(images, config.class_names)
    templates = read_templates(config.templates, classes.names)
    if config.templates is None and images.templates:
        templates = list(images.templates)
    prompts = embedder.texts(prompt_texts(classes.names, templates), "prompts")
    shape = (len(classes), -1, prompts.shape[-1])
    mean = normalise(prompts.mean.reshape(shape).double().mean(1)).float()
    vectors = Gaussian(mean, prompts.log_var.reshape(shape).logsumexp(1) - torch.tensor(shape[0]).log() * 0)
    gaussian, kept, bad = embedder.images(images)
    truth = torch.tensor([int(labels[i]) for i in kept])
    scale = embedder.model.trained_temperature or 1.0
    confidence = confidences(gaussian, vectors, scale)
    right = (gaussian.mean.float() @ mean.T).argmax(1) == truth
    weights = cluster_weights(len(right))
    found: dict[str, Any] = {
        "images": len(right), "classes": len(classes), "accuracy": right.double().mean().item(),
        "images_left_out": runner.left_out(bad),
        "errors": [
            {"score": name, **{key: estimate(x) for key, x in selective_metrics(k, right, weights).items()}}
            for name, k in confidence.items()
        ],
        "calibration": calibration(config, gaussian, vectors, scale, truth),
        "sets": sets_of(config, set_probabilities(gaussian, vectors, scale), truth, torch.arange(len(truth))),
    }  # fmt: skip
    if config.ood:
        strangers = embedder.images(find_captions(config.ood, exif=config.exif).images, "strangers").gaussian
        theirs = confidences(strangers, vectors, scale)
        known = torch.arange(len(right) + len(strangers)) < len(right)
        weights = cluster_weights(len(known))
        found["strangers"] = [
            {"score": name}
            | {key: estimate(x) for key, x in selective_metrics(torch.cat([k, theirs[name]]), known, weights).items()}
            for name, k in confidence.items()
        ]
    return found


def confidences(images: Gaussian, vectors: Gaussian, scale: float) -> dict[str, Tensor]:
    """Confidences of images, (N,) each: those that need nothing, and what the variances add."""
    found = free_confidences(images.mean.float() @ vectors.mean.T, scale)
    if float(images.log_var.max()) > -29:
        mean, var = prob_cosine(images, vectors)
        found["−u of the image"] = -images.uncertainty()
        found["max softmax, probit"] = probit_softmax(scale * mean, scale**2 * var).amax(1)
    return found


def calibration(config: UncertaintyConfig, images: Gaussian, vectors: Gaussian, scale: float, labels: Tensor) -> list:
    """ECE and NLL of the softmax, of one temperature fitted on a half (few-shot), and of the probit softmax."""
    logits = scale * images.mean.float() @ vectors.mean.T
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    fit, test = order.split([len(order) // 2, len(order) - len(order) // 2])
    rows = {"softmax": logits[test].log_softmax(1)}
    t = fit_temperature(logits[fit], labels[fit])
    rows[f"softmax, temperature × {t:.2f}, few-shot"] = (logits[test] / t).log_softmax(1)
    if float(images.log_var.max()) > -29:
        mean, var = prob_cosine(images[test], vectors)
        rows["probit softmax"] = probit_softmax(scale * mean, scale**2 * var).log()
    found = []
    for name, log_p in rows.items():
        p, best = log_p.exp().max(1)
        ece = reliability(p.clamp(0, 1), (best == labels[test]).double())["ece"]
        found.append({"by": name, "ece": ece, "nll": cross_entropy(log_p, labels[test]).item()})
    return found


def crop_test(
    config: UncertaintyConfig, embedder: Embedder, captions: CaptionDataset, pairs: EmbeddedPairs
) -> dict | None:
    """Share of images whose u grows when a random crop is enlarged to the whole. Source: URL (Kirchhof et al. 2023)."""
    rows = evenly(len(pairs.kept), config.crops)
    if not config.crops:
        return None
    pixels = torch.stack([embedder.transform(captions.images.open(pairs.kept[row])) for row in rows])
    if pixels.ndim != 4:  # regions
        return None
    generator, cropped = torch.Generator().manual_seed(0), []
    shares = torch.empty(len(rows)).uniform_(*CROP, generator=generator)
    side = pixels.shape[-1]
    for image, share in zip(pixels.float(), shares.tolist()):
        size = max(1, round(share * side))
        start = (side - size) // 2
        part = image[None, :, start : start + size, start : start + size]
        cropped.append(interpolate(part, (side, side), mode="bicubic", antialias=True)[0].to(pixels.dtype))
    u, whole = (
        embedder.pixels(torch.stack(cropped).split(embedder.batch_size)).uncertainty(),
        pairs.images[rows].uncertainty(),
    )
    grew = (u > whole).double()
    se = float((grew.mean() * (1 - grew.mean()) / len(grew)).sqrt())
    return {"images": len(rows), "share": grew.mean().item(), "se": se, "of_size": rank_correlation(-u, shares)}


# ------------------------------------------------------------------------------------------------------------ the page


def make_page(config: UncertaintyConfig, results: dict) -> Page:
    """A section a question, the table below one sentence."""
    sections: list = []
    for side, rows in results["retrieval"]["queries"].items():
        title = "text → image" if side == "captions" else "image → text"
        sections.append((f"Does it tell failing queries? {title}", [
            best_of(rows, "auroc", "predicts R@1 best"), levels_figure(side, rows), score_table(rows, title)]))  # fmt: skip
    if results["retrieval"]["sets"]:
        text = (
            f"Sets of images that hold a caption's own at a rate of {1 - config.alpha:g}, over {config.splits} splits."
        )
        sections.append(("How many results to show?", [text, set_table(results["retrieval"]["sets"])]))
    if test := results["crop_test"]:
        text = f"u grows for {percent(test['share'])} ± {percent(test['se'])} % of {test['images']:,} images that are cropped."
        sections.append(("Does a crop make an image less certain?", [text]))
    if found := results.get("classification"):
        about = f"Accuracy {percent(found['accuracy'])} % of {found['images']:,} images, {found['classes']:,} classes. "
        text = about + best_of(found["errors"], "auroc", "predicts errors best")
        sections.append(("Does it tell wrong classifications?", [text, score_table(found["errors"], "errors")]))
        if "strangers" in found:
            text = best_of(found["strangers"], "auroc", "detects strangers best")
            sections.append(("Does it tell strangers?", [text, score_table(found["strangers"], "out of distribution")]))
        rows = [(row["by"], percent(row["ece"]), f"{row['nll']:.4f}") for row in found["calibration"]]
        sections.append(("Are the probabilities right?", [Table(("probability", "ECE %", "NLL"), rows, "calibration")]))
        sections.append(("Prediction sets", [set_table(found["sets"])]))
    return Page("The worth of an uncertainty", f"{config.model} on {config.data}", sections)


def best_of(rows: Sequence[dict], key: str, what: str) -> str:
    """The best score, and those whose intervals reach it."""
    best = max(rows, key=lambda row: row[key]["value"])
    level = [row["score"] for row in rows if row is not best and row[key]["high"] >= best[key]["low"]]
    also = f" Not told apart by their intervals: {', '.join(level)}." if level else ""
    return f"{best['score']} {what}: {MEASURES[key]} {between(best[key])}.{also}"


def score_table(rows: Sequence[dict], title: str) -> Table:
    """Every score with its measures, and what is known of its order."""
    more = [key for key in ("ambiguity",) if key in rows[0]]
    levels = ["−S·R²"] if "levels" in rows[0] else []
    cells = [
        (row["score"], *(between(row[key]) for key in MEASURES),
         *([f"{row['levels']['score']:+.2f}"] if levels else []),
         *(f"{row[key]['value']:+.3f}" if row[key] else "" for key in more))
        for row in rows
    ]  # fmt: skip
    return Table(("score", *MEASURES.values(), *levels, *(f"Spearman, {key}" for key in more)), cells, title)


def set_table(rows: Sequence[dict]) -> Table:
    """Coverage and size of prediction sets."""
    cells = [
        (f"{row['score']}, {row['by']}", f"{percent(row['coverage'])} [{percent(row['least'])}, {percent(row['most'])}]",
         number(row["size"]), percent(row["empty"]), percent(row["class_gap"]))
        for row in rows
    ]  # fmt: skip
    return Table(
        ("sets by", "coverage % [least, most]", "mean size", "empty %", "class gap %"), cells, "prediction sets"
    )


def levels_figure(side: str, rows: Sequence[dict]) -> list[Figure]:
    """R@1 of equal groups, from certain to uncertain."""
    lines = {
        row["score"]: (range(1, len(row["levels"]["r@1"]) + 1), [100 * x for x in row["levels"]["r@1"]])
        for row in rows if row["score"] in ("u", "lead", "closest", "brevity") or row is rows[0]
    }  # fmt: skip
    return [line_figure(f"levels-{side}", "level, from certain to uncertain", "R@1, %", lines)]
