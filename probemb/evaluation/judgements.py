"""Scores of models against people's judgements of single pairs.

The judged pairs are an image and a caption of another image; the label is the majority vote. Intervals resample images
and captions (see `probemb.metrics.judged`). What is chosen or fitted on judgements is cross-fitted: the judged images
fall into two halves by a hash of their names, and what is chosen on one half is measured on the other. Scores of both
halves then differ in scale, so each half is measured alone, and the mean of both is reported, for every ranking.

P judged pairs, I their images, C their captions, R resamples, S seeds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from probemb.data.captions.judgements import Judgements
from probemb.errors import UserError
from probemb.evaluation.embed_pairs import EmbeddedPairs
from probemb.evaluation.rankings import RankingOptions, ScoreRanker, make_ranker, title_of
from probemb.evaluation.scores import SCORES
from probemb.evaluation.tolerance import GRID
from probemb.metrics import PairMetrics, cluster_weights, estimate, pair_metrics
from probemb.metrics.judged import RESAMPLES

TOLERANCE, CROSS_FITTED = "tolerance", "tolerance-cross-fitted"
METRICS = ("average_precision", "roc_auc")
SCORE_ELEMENTS = 1 << 24  # scores of judged images with judged captions held at a time

Resampled = dict[str, Tensor]  # "average_precision", "roc_auc" and "…_halves" -> (R + 1,)


@dataclass(frozen=True, eq=False)
class JudgedPairs:
    """P judged pairs of an image and a caption of another image.

    Attributes:
        image, caption: (P,) int64 rows.
        label: (P,) bool, a majority said yes; share: (P,) float64, of yes.
        half: (P,) int64, 0 or 1, by a hash of the image's name.
        clusters: of images and of captions: (P,) int64, places among those judged, and the bootstrap's weights, (R + 1,
            I) and (R + 1, C), of `probemb.metrics.cluster_weights`.
        names: of each pair.
    """

    image: Tensor
    caption: Tensor
    label: Tensor
    share: Tensor
    half: Tensor
    clusters: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
    names: list[str]

    def __len__(self) -> int:
        return len(self.names)

    @property
    def halves(self) -> list[Tensor]:
        """The pairs' rows of both halves."""
        return [(self.half == h).nonzero().flatten() for h in (0, 1)]

    @property
    def divisible(self) -> bool:
        """True if both halves have pairs of both labels."""
        return all(len(self.label[rows].unique()) == 2 for rows in self.halves)

    def metrics(self, scores: Tensor, rows: Tensor | slice = slice(None), resamples: int | None = None) -> PairMetrics:
        """Of some pairs, (R + 1,) each; resamples: the first so many alone."""
        keep = slice(None if resamples is None else resamples + 1)
        return pair_metrics(scores[rows], self.label[rows], *((place[rows], w[keep]) for place, w in self.clusters))


def judged_pairs(judgements: Judgements, n_resamples: int = RESAMPLES) -> JudgedPairs:
    """The pairs whose caption belongs to another image.

    Raises UserError: there are none, or people agree on all of them.
    """
    others = judgements.only(~judgements.own)
    if len(others.accepted.unique()) < 2:
        raise UserError(
            f"Of the {len(others):,} judged pairs that are not the caption's own image, people accept "
            f"{'all' if others.accepted.any() else 'none'}, so that no order of them is better than another.",
            "Name a file with accepted and refused pairs of the images in the data.",
        )
    half = torch.tensor([hashlib.sha256(name.encode("utf-8", "replace")).digest()[0] & 1 for name in
                         others.image_names()])  # fmt: skip
    places = [rows.unique(return_inverse=True)[1] for rows in (others.image, others.caption)]
    clusters = tuple(
        (place, cluster_weights(int(place.max()) + 1, n_resamples, seed)) for seed, place in enumerate(places)
    )
    return JudgedPairs(others.image, others.caption, others.accepted, others.share, half, clusters, others.names)


def judged_scores(pairs: EmbeddedPairs, judged: JudgedPairs, ranking: str, options: RankingOptions) -> Tensor:
    """(P,) scores of the judged pairs, larger is closer; float64 where float32 would blur them."""
    images, captions = judged.image.unique(), judged.caption.unique()  # in the order of their clusters
    (row, _), (column, _) = judged.clusters
    ranker = make_ranker(ranking, pairs.images, pairs.texts, options)
    if not isinstance(ranker, ScoreRanker):
        raise ValueError(f"{ranking} has no scores of single pairs")
    part = ranker.scores.only(images, captions)
    found, step = torch.empty(len(judged), dtype=part(slice(0, 1)).dtype), max(1, SCORE_ELEMENTS // len(captions))
    for start in range(0, len(images), step):
        block = part(slice(start, start + step)).cpu()
        here = ((row >= start) & (row < start + step)).nonzero().flatten()
        found[here] = block[row[here] - start, column[here]]
    return found


def judged_metrics(scores: Tensor, judged: JudgedPairs) -> Resampled:
    """Both metrics over all pairs and as the mean of both halves, of the data and of every resample.

    Args:
        scores: (P,), or (S, P) of several seeds, whose metrics are averaged.
    """
    if scores.dim() == 2:
        every = [judged_metrics(one, judged) for one in scores]
        return {name: torch.stack([one[name] for one in every]).mean(0) for name in every[0]}
    whole = judged.metrics(scores)
    found = dict(zip(METRICS, whole))
    if not judged.divisible:
        return found | {f"{name}_halves": torch.full_like(whole[0], torch.nan) for name in METRICS}
    halves = [judged.metrics(scores, rows) for rows in judged.halves]
    return found | {f"{name}_halves": (a + b) / 2 for name, a, b in zip(METRICS, *halves)}


def differences(a: Resampled, b: Resampled) -> dict[str, dict[str, float]]:
    """a - b of every metric that both have, by the paired bootstrap: metric -> {"value", "low", "high"}."""
    return {name: estimate(a[name] - b[name]) for name in a if name in b}


def ranking_metrics(ranking: str, scores: Tensor, judged: JudgedPairs) -> Resampled:
    """`judged_metrics` of a ranking; of cross-fitted scores, which have no common scale, only those of the halves."""
    found = judged_metrics(scores, judged)
    return {name: x for name, x in found.items() if name.endswith("_halves")} if ranking == CROSS_FITTED else found


def evaluate_rankings_of_pairs(
    pairs: EmbeddedPairs, judged: JudgedPairs, rankings: Sequence[str], options: RankingOptions
) -> tuple[dict, dict[str, Tensor]]:
    """Average precision and ROC AUC of every ranking that scores pairs.

    "tolerance" has the weights of `options`; beside it stands CROSS_FITTED, with weights chosen by judgements.

    Returns:
        results: "rows": {"ranking", "title", metric -> {"value", "low", "high"}, "difference": metric -> the same, to
            "reference"}; "tolerance": of `cross_fitted`, or None.
        scores: ranking -> (P,).
    """
    names = [name for name in rankings if name in SCORES] or ["mean"]  # others only search faster
    scores = {name: judged_scores(pairs, judged, name, options) for name in names}
    found = None
    if TOLERANCE in names and judged.divisible:
        scores[CROSS_FITTED], found = cross_fitted(pairs, judged)
    metrics = {name: ranking_metrics(name, each, judged) for name, each in scores.items()}
    reference = "mean" if "mean" in metrics else next(iter(metrics))
    rows = [
        {
            "ranking": name,
            "title": _title(name, options),
            **{metric: estimate(values) for metric, values in mine.items()},
            "difference": differences(mine, metrics[reference]),
        }
        for name, mine in metrics.items()
    ]
    return {"rows": rows, "reference": reference, "tolerance": found}, scores


def _title(ranking: str, options: RankingOptions) -> str:
    if ranking == CROSS_FITTED:
        return title_of({"ranking": TOLERANCE, "chosen": "cross-fitted"})
    return title_of({"ranking": ranking} | ({"chosen": options.tolerance.chosen} if ranking == TOLERANCE else {}))


def cross_fitted(pairs: EmbeddedPairs, judged: JudgedPairs, grid: Sequence[float] = GRID) -> tuple[Tensor, dict]:
    """Scores -(|mu_i - mu_c|^2 + t2i u_i + i2t u_c) whose weights were chosen by AP on the other half's images.

    Returns:
        scores: (P,); those of the two halves have no common scale.
        found: "chosen": for each half the weights that it was scored with, from the other; "oracle": "lambda", the
            AP over all pairs at [i2t][t2i], chosen nowhere else, and its "best".
    """
    squared = torch.cat([
        (pairs.images.mean[image] - pairs.texts.mean[caption]).double().square().sum(1)
        for image, caption in zip(judged.image.split(4096), judged.caption.split(4096))
    ])  # fmt: skip
    u_image = pairs.images.uncertainty().double()[judged.image]
    u_caption = pairs.texts.uncertainty().double()[judged.caption]

    def score(weights: tuple[float, float]) -> Tensor:
        return -(squared + weights[0] * u_caption + weights[1] * u_image).float()

    def precision(weights: tuple[float, float], rows: Tensor) -> float:
        return float(judged.metrics(score(weights), rows, resamples=0).average_precision)

    def best(table: dict[tuple[float, float], float]) -> tuple[float, float]:
        return max(table, key=lambda weights: (table[weights], -abs(weights[0]) - abs(weights[1])))

    cells, every = [(i2t, t2i) for i2t in grid for t2i in grid], torch.arange(len(judged))
    chosen = [best({weights: precision(weights, rows) for weights in cells}) for rows in judged.halves[::-1]]
    oracle = {weights: precision(weights, every) for weights in cells}
    top = best(oracle)
    halves = zip(chosen, judged.halves)
    return torch.where(judged.half == 0, score(chosen[0]), score(chosen[1])), {
        "chosen": [{"i2t": w[0], "t2i": w[1], "images": len(judged.image[rows].unique())} for w, rows in halves],
        "oracle": {
            "lambda": list(grid),
            "average_precision": [[oracle[i2t, t2i] for t2i in grid] for i2t in grid],
            "best": {"i2t": top[0], "t2i": top[1], "average_precision": oracle[top]},
        },
    }
