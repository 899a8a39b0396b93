"""Bootstrap: accuracies over resampled images, average precision and ROC AUC over resampled clusters of pairs.

Figures of the same resamples can be compared one by one, so differences are paired. Pairs of one caption or image
depend on each other, so whole clusters are drawn; of two kinds, a pair counts as the product of both counts (Owen, "The
pigeonhole bootstrap", 2007).

Letters: N images, Q classifiers, C classes or clusters, P pairs, R resamples.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

RESAMPLES, CONFIDENCE = 1000, 0.95
COUNT_ELEMENTS = 1 << 22  # counts of images held at a time
WEIGHT_ELEMENTS = 1 << 21  # weights of pairs held at a time


def interval(values_R: Tensor) -> tuple[float, float]:
    """The quantiles that leave out (1 - CONFIDENCE) / 2 of the resamples on either side; NaN without any."""
    tail = (1 - CONFIDENCE) / 2
    if not len(values_R):
        return math.nan, math.nan
    return tuple(values_R.double().quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist())


def estimate(values_R: Tensor) -> dict[str, float]:
    """{"value", "low", "high"} of values whose first is that of the data; resamples without a value are left out."""
    low, high = interval(values_R[1:][~values_R[1:].isnan()])
    return {"value": float(values_R[0]), "low": low, "high": high}


class Resampled(NamedTuple):
    """Accuracies of every resample, (R, Q) float64 each."""

    accuracy: Tensor
    per_class: Tensor  # mean over the classes that the resample has images of


def resample_accuracy(
    right_NQ: Tensor, labels_N: Tensor, n_classes: int, resamples: int = RESAMPLES, seed: int = 0
) -> Resampled:
    """Draw N of the N images with replacement, R times. right_NQ: bool, whether each classifier is right."""
    generator, hits_NQ, parts = torch.Generator().manual_seed(seed), right_NQ.float(), []

    def by_class(values_RN: Tensor) -> Tensor:
        return torch.zeros(len(values_RN), n_classes).index_add_(1, labels_N, values_RN).double()

    for rows in torch.arange(resamples).split(max(1, COUNT_ELEMENTS // len(labels_N))):
        counts_RN = _counts(len(rows), len(labels_N), generator)
        held_RC = by_class(counts_RN)
        recalls = [(by_class(counts_RN * hits) / held_RC).nanmean(1) for hits in hits_NQ.unbind(1)]
        parts.append(((counts_RN @ hits_NQ).double() / len(labels_N), torch.stack(recalls, 1)))
    return Resampled(*(torch.cat(column) for column in zip(*parts)))


def _counts(n_resamples: int, n: int, generator: torch.Generator) -> Tensor:
    """Draws of each of n items in every resample, (R, n) float32."""
    drawn = torch.randint(n, (n_resamples, n), generator=generator)
    return torch.zeros(n_resamples, n).scatter_add_(1, drawn, torch.ones(1).expand_as(drawn))


class PairMetrics(NamedTuple):
    """Average precision and ROC AUC, (R,) float64 each; NaN where one of the two labels is absent."""

    average_precision: Tensor
    roc_auc: Tensor


def cluster_weights(n_clusters: int, n_resamples: int = RESAMPLES, seed: int = 0) -> Tensor:
    """Draws of each of C clusters, (R + 1, C) float32; row 0 is the data itself, all ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.cat([torch.ones(1, n_clusters), _counts(n_resamples, n_clusters, generator)])


def clusters_of(item_P: Tensor, n_resamples: int = RESAMPLES, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The cluster of each pair, those with the same item, (P,), and `cluster_weights`."""
    cluster = item_P.unique(return_inverse=True)[1]
    return cluster, cluster_weights(int(cluster.max()) + 1, n_resamples, seed)


def pair_metrics(scores_P: Tensor, label_P: Tensor, *clusters: tuple[Tensor, Tensor]) -> PairMetrics:
    """Both metrics under every row of weights, as scikit-learn's sample_weight. clusters: of each kind the pairs'
    clusters (P,) and weights (R, C) of `cluster_weights`. AP is the sum over thresholds of (gain of recall) *
    precision. Raises ValueError: scores that are not finite.
    """
    if not torch.isfinite(scores_P).all():
        raise ValueError("scores hold NaN or infinity: there is no order to measure")
    order, last_T = descending(scores_P)
    parts, step, positive_P = [], max(1, WEIGHT_ELEMENTS // len(scores_P)), label_P.bool()[order]
    places = [place_P[order] for place_P, _ in clusters]
    for block in zip(*(weights_RC.split(step) for _, weights_RC in clusters)):
        weight_RP = math.prod(weights[:, place_P] for weights, place_P in zip(block, places))
        found_RT, false_RT = counts_down(weight_RP, positive_P, last_T)
        precision = (each(found_RT) * (found_RT / (found_RT + false_RT).clamp_min(1e-12))).sum(1) / found_RT[:, -1]
        area = roc_area(found_RT, false_RT)
        parts.append((precision.masked_fill(area.isnan(), torch.nan), area))
    return PairMetrics(*(torch.cat(column) for column in zip(*parts)))


def descending(scores_P: Tensor) -> tuple[Tensor, Tensor]:
    """The order of the pairs from the largest score down, and in it the last place of each of T different ones."""
    ordered, order = scores_P.double().sort(descending=True, stable=True)
    return order, torch.cat([(ordered[1:] != ordered[:-1]).nonzero().flatten(), torch.tensor([len(ordered) - 1])])


def counts_down(weight_RP: Tensor, positive_P: Tensor, last_T: Tensor) -> tuple[Tensor, Tensor]:
    """Of `descending` pairs the weights of the positive ones and of the others down to each score, (R, T) float64."""
    total, found = (x.cumsum(1, dtype=torch.float64)[:, last_T] for x in (weight_RP, weight_RP * positive_P))
    return found, total - found


def each(x_RT: Tensor) -> Tensor:
    """The gain of cumulative counts at each score."""
    return x_RT.diff(dim=1, prepend=x_RT.new_zeros(len(x_RT), 1))


def roc_area(found_RT: Tensor, false_RT: Tensor) -> Tensor:
    """Area under the ROC curve of `counts_down` by trapezia, (R,); NaN where one kind is absent."""
    return (each(false_RT) * (found_RT - each(found_RT) / 2)).sum(1) / (found_RT[:, -1] * false_RT[:, -1])
