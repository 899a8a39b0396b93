"""Scores of models against human judgements of single pairs: an image and a caption of another image.

The label is the majority vote. Intervals resample images and captions (`probemb.metrics.bootstrap`). What is chosen or
fitted is cross-fitted: the judged images fall into two halves by a hash of their names, and what is chosen on one is
measured on the other. Scores of both halves then differ in scale, so the mean of both halves is reported.

P judged pairs, I their images, C their captions, R resamples, N images, M captions.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from probemb.data.captions.judgements import Judgements
from probemb.errors import UserError
from probemb.evaluation.embedding import EmbeddedPairs
from probemb.evaluation.rankings import RANKINGS, RankingOptions, scores_of, title_of
from probemb.evaluation.retrieval import GRID
from probemb.metrics.bootstrap import RESAMPLES, PairMetrics, clusters_of, estimate, pair_metrics
from probemb.metrics.retrieval import blocks
from probemb.metrics.uncertainty import fit_logistic, reliability, spearman

TOLERANCE, CROSS_FITTED = "tolerance", "tolerance-cross-fitted"
SCORE_ELEMENTS = 1 << 24  # scores of judged images with judged captions held at a time
LEAST = 10  # judged images of a caption whose acceptance is counted

Resampled = dict[str, Tensor]  # "average_precision", "roc_auc" and "…_halves" -> (R + 1,)


@dataclass(frozen=True, eq=False)
class JudgedPairs:
    """P judged pairs: rows, label (the majority's), share of yes, half (0 or 1), clusters of images and of captions."""

    image: Tensor
    caption: Tensor
    label: Tensor
    share: Tensor
    half: Tensor
    clusters: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]

    @property
    def halves(self) -> list[Tensor]:
        return [(self.half == h).nonzero().flatten() for h in (0, 1)]

    @property
    def divisible(self) -> bool:
        """Both halves have pairs of both labels."""
        return all(len(self.label[rows].unique()) == 2 for rows in self.halves)

    def metrics(self, scores: Tensor, rows: Tensor | slice = slice(None), resamples: int = RESAMPLES) -> PairMetrics:
        clusters = ((place[rows], weights[: resamples + 1]) for place, weights in self.clusters)
        return pair_metrics(scores[rows], self.label[rows], *clusters)


def judged_pairs(judgements: Judgements, n_resamples: int = RESAMPLES) -> JudgedPairs:
    """The pairs whose caption belongs to another image. Raises UserError: none, or people agree on all of them."""
    others = judgements.only(~judgements.own)
    if len(others.accepted.unique()) < 2:
        some = "all" if others.accepted.any() else "none"
        what = f"Of the {len(others):,} judged pairs with another image's caption, people accept {some}."
        raise UserError(what, "Name a file with accepted and refused pairs of the images in the data.")
    hashed = (hashlib.sha256(name.encode("utf-8", "replace")).digest() for name in others.names)
    half = torch.tensor([digest[0] & 1 for digest in hashed])
    clusters = tuple(clusters_of(rows, n_resamples, seed) for seed, rows in enumerate((others.image, others.caption)))
    return JudgedPairs(others.image, others.caption, others.accepted, others.share, half, clusters)


def judged_scores(pairs: EmbeddedPairs, judged: JudgedPairs, ranking: str, options: RankingOptions) -> Tensor:
    """(P,) scores of the judged pairs, larger is closer; float64 where float32 would blur them."""
    images, captions = judged.image.unique(), judged.caption.unique()  # in the order of their clusters
    (row, _), (column, _) = judged.clusters
    part = scores_of(ranking, pairs.images, pairs.texts, options).only(images, captions)
    found = torch.empty(len(judged.label), dtype=part(slice(0, 1)).dtype)
    for rows in blocks(len(images), len(captions), SCORE_ELEMENTS):
        here = ((row >= rows.start) & (row < rows.stop)).nonzero().flatten()
        found[here] = part(rows).cpu()[row[here] - rows.start, column[here]]
    return found


def judged_metrics(scores: Tensor, judged: JudgedPairs) -> Resampled:
    """Both metrics over all pairs and as the mean of both halves, of the data and of every resample."""
    overall = judged.metrics(scores)
    halves = [judged.metrics(scores, rows) for rows in judged.halves] if judged.divisible else [[torch.nan] * 2] * 2
    means = {f"{name}_halves": (a + b) / 2 + 0 * overall[0] for name, a, b in zip(overall._fields, *halves)}
    return overall._asdict() | means


def evaluate_rankings_of_pairs(
    pairs: EmbeddedPairs, judged: JudgedPairs, rankings: Sequence[str], options: RankingOptions
) -> tuple[dict, dict[str, Tensor]]:
    """Both metrics of every ranking that scores pairs, with paired differences to the "reference", and the scores (P,)
    of each. Those of CROSS_FITTED have no common scale: only means of halves count.
    """
    names = [name for name in rankings if RANKINGS[name].scores] or ["mean"]  # others only search faster
    scores = {name: judged_scores(pairs, judged, name, options) for name in names}
    metrics = {name: judged_metrics(each, judged) for name, each in scores.items()}
    titles, weights = {name: RANKINGS[name].title for name in names}, None
    if TOLERANCE in names:
        titles[TOLERANCE] = title_of({"ranking": TOLERANCE, "chosen": options.tolerance.chosen})
        if judged.divisible:
            scores[CROSS_FITTED], weights = cross_fitted(pairs, judged)
            titles[CROSS_FITTED] = title_of({"ranking": TOLERANCE, "chosen": "cross-fitted"})
            halves = judged_metrics(scores[CROSS_FITTED], judged)
            metrics[CROSS_FITTED] = {name: x for name, x in halves.items() if name.endswith("_halves")}
    reference = "mean" if "mean" in metrics else names[0]
    rows = [
        {"ranking": name, "title": titles[name]}
        | {metric: estimate(values) for metric, values in own.items()}
        | {"difference": {metric: estimate(own[metric] - metrics[reference][metric]) for metric in own}}
        for name, own in metrics.items()
    ]
    return {"rows": rows, "reference": reference, "tolerance": weights}, scores


def cross_fitted(pairs: EmbeddedPairs, judged: JudgedPairs, grid: Sequence[float] = GRID) -> tuple[Tensor, dict]:
    """Scores -(|mu_i - mu_c|^2 + t2i u_i + i2t u_c), (P,), whose weights were chosen by AP on the other half's images,
    and what was "chosen" on each half.
    """
    squared = torch.cat([
        (pairs.images.mean[image] - pairs.texts.mean[caption]).double().square().sum(1)
        for image, caption in zip(judged.image.split(4096), judged.caption.split(4096))
    ])  # fmt: skip
    u_image = pairs.images.uncertainty().double()[judged.image]
    u_caption = pairs.texts.uncertainty().double()[judged.caption]

    def score(weights: tuple[float, float]) -> Tensor:
        return -(squared + weights[0] * u_caption + weights[1] * u_image).float()

    def best(rows: Tensor) -> tuple[float, float]:
        def precision(w: tuple[float, float]) -> float:
            return float(judged.metrics(score(w), rows, 0).average_precision)

        return max(product(grid, grid), key=lambda w: (precision(w), -abs(w[0]) - abs(w[1])))

    chosen = [best(rows) for rows in judged.halves[::-1]]
    told = [
        {"i2t": w[0], "t2i": w[1], "images": len(judged.image[rows].unique())} for w, rows in zip(chosen, judged.halves)
    ]
    return torch.where(judged.half == 0, score(chosen[0]), score(chosen[1])), {"chosen": told}


def match_calibration(
    pairs: EmbeddedPairs, judged: JudgedPairs, options: RankingOptions, sampled: Tensor | None = None,
    closed: bool = True,
) -> dict:  # fmt: skip
    """Match probabilities against the share of people who say yes: "raw", and "refitted" with the "parameters" of the
    other half; "constant", the mean share. The closed form is sigmoid(-a CSD + b) (PCME++ Eq. 2), unless a and b were
    trained on samples (not `closed`); `sampled`: (P,), PCME's match probabilities, if known.
    """
    logits, mean = {}, judged.share.mean()
    if closed:
        logits["closed form"] = options.shift + options.scale * judged_scores(pairs, judged, "csd", options).double()
    if sampled is not None:
        logits["sampled"] = torch.logit(sampled.double(), eps=1e-6)
    found: dict = {}
    for name, logit in logits.items():
        found[name] = {"raw": reliability(logit.sigmoid(), judged.share), "refitted": None, "parameters": None}
        if judged.divisible:
            probability, parameters = torch.empty_like(logit), []
            for here, other in zip(judged.halves, judged.halves[::-1]):
                slope, intercept = fit_logistic(logit[other], judged.share[other])
                probability[here] = torch.sigmoid(slope * logit[here] + intercept)
                parameters.append({"slope": slope, "intercept": intercept})
            found[name] |= {"refitted": reliability(probability, judged.share), "parameters": parameters}
    found["constant"] = {"share": float(mean), "brier": float((judged.share - mean).square().mean())}
    return found


def accepted_shares(judged: JudgedPairs, n_captions: int, least: int = LEAST) -> Tensor:
    """(M,) float64, the share of each caption's judged images that a majority accepts, NaN for fewer than `least`."""
    n_judged = torch.bincount(judged.caption, minlength=n_captions).double()
    share = torch.bincount(judged.caption, weights=judged.label.double(), minlength=n_captions) / n_judged
    return share.masked_fill(n_judged < least, torch.nan)


def caption_acceptance(pairs: EmbeddedPairs, judged: JudgedPairs, least: int = LEAST) -> dict | None:
    """Spearman of a caption's u with the share of its judged images that a majority accepts, with an interval by
    resampling images and captions, centred on the value; None for fewer than three captions.
    """
    u, known = pairs.texts.uncertainty().double(), accepted_shares(judged, len(pairs.texts), least).isfinite()
    if known.sum() < 3:
        return None
    (image, of_images), (caption, of_captions) = judged.clusters
    captions, values = judged.caption.unique(), []
    for image_weight, caption_weight in zip(of_images.double(), of_captions):
        weight = image_weight[image]
        share = torch.bincount(caption, weight * judged.label) / torch.bincount(caption, weight)
        counted = (caption_weight * (known[captions] & share.isfinite())).long()
        value = spearman(*(x.repeat_interleave(counted) for x in (u[captions], share)))
        values.append(torch.nan if value is None else value)
    values_R = torch.tensor(values, dtype=torch.float64)
    # Drawing images makes the shares noisier than they are, and so every correlation weaker.
    values_R[1:] += values_R[0] - values_R[1:].nanmean()
    return {"spearman": estimate(values_R), "captions": int(known.sum()), "least": least}
