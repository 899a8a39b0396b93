"""Weights of the variances in a ranking, chosen on labelled data: is a large variance a distance or a tolerance?

Q queries, G gallery items. A query's own variance is a constant of its ranking, so each direction has one weight, of
its gallery, and both are chosen independently. See `probemb.evaluation.scores.tolerance_scores`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from probemb.evaluation.embed_pairs import EmbeddedPairs
from probemb.evaluation.scores import tolerance_scores
from probemb.gaussian import Gaussian
from probemb.metrics import Positives, mean_metrics, query_metrics, ranking
from probemb.metrics.retrieval import CHUNK_ELEMENTS

GRID = (-4.0, -2.0, -1.5, -1.0, -0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
METRICS = {"map_at_r": "mAP@R", "recall": "mean of R@1, R@5 and R@10"}  # both in [0, 1]
GIVEN, ORACLE = "given", "oracle"


@dataclass(frozen=True)
class Tolerance:
    """The weights of the variances and how they were chosen.

    Attributes:
        i2t, t2i: weights of the captions' u (searched with an image) and of the images' u (searched with a caption): 1
            is CSD, 0 the means, below 0 a tolerance.
        curve: {"lambda": weights, "i2t": metric in [0, 1] at each, "t2i": the same}; None for given weights.
        metric, positives: one of METRICS and the name of its positives, or None.
        chosen: "given", "oracle" (on the data that is scored), or "chosen on ..." other data, which is named.
    """

    i2t: float = 1.0
    t2i: float = 1.0
    curve: dict[str, list[float]] | None = None
    metric: str | None = None
    positives: str | None = None
    chosen: str = GIVEN


CSD = Tolerance()


def choose_tolerance(
    pairs: EmbeddedPairs,
    positives: Positives,
    metric: str = "map_at_r",
    grid: Sequence[float] = GRID,
    chosen: str = ORACLE,
    of: str | None = None,
) -> Tolerance:
    """The weight of each direction that is best on these pairs; of equally good ones the one closest to 0.

    Args:
        positives: of images, (N, M).
        metric: one of METRICS.
        chosen: the label of the choice; of: the name of the positives.

    Raises:
        ValueError: an unknown metric, or no query has a match.
    """
    curve = {
        "lambda": [float(weight) for weight in grid],
        "i2t": sweep(pairs.images, pairs.texts, positives, metric, grid),
        "t2i": sweep(pairs.texts, pairs.images, positives.transposed(), metric, grid),
    }

    def best(values: list[float]) -> float:
        return max(zip(values, curve["lambda"]), key=lambda pair: (pair[0], -abs(pair[1])))[1]

    return Tolerance(best(curve["i2t"]), best(curve["t2i"]), curve, metric, of, chosen)


@torch.no_grad()
def sweep(
    queries: Gaussian, gallery: Gaussian, positives: Positives, metric: str, grid: Sequence[float] = GRID
) -> list[float]:
    """The metric under each weight of the gallery's u, in [0, 1].

    Distances of the means are computed once, a block of queries at a time, and ranked under every weight.

    Args:
        queries, gallery: Gaussians (Q, D) and (G, D).
        positives: of the queries, (Q, G).

    Raises:
        ValueError: an unknown metric, or no query has a match.
    """
    if metric not in METRICS:
        raise ValueError(f"no metric {metric!r}: choose from {', '.join(METRICS)}")
    ks = (1, 5, 10) if metric == "recall" else ()
    names = [f"r@{k}" for k in ks] or [metric]
    means, u = tolerance_scores(queries, gallery, 0, 0), gallery.uncertainty()
    u = (u.double() - u.double().mean()).to(u.dtype)  # what all have in common changes no order, but blurs the scores
    found: list[dict[str, list]] = [{name: [] for name in names} for _ in grid]
    height = max(1, CHUNK_ELEMENTS // len(gallery))
    for start in range(0, len(queries), height):
        stop = min(start + height, len(queries))
        block, part = means(slice(start, stop)), positives.of_queries(start, stop)
        depth = max(1, *ks, int(part.counts.max()))
        for weight, values in zip(grid, found):
            lists = ranking(torch.sub(block, u, alpha=weight), depth).cpu()
            for name, value in query_metrics(lists, part, ks).items():
                if name in values:
                    values[name].append(value)
    means_of = [mean_metrics({name: torch.cat(parts) for name, parts in values.items()}) for values in found]
    return [sum(values.values()) / len(values) for values in means_of]
