"""Bootstrap over images: accuracies of several classifiers on the same resamples, so that differences are paired.

N images, Q classifiers, R resamples, C classes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

RESAMPLES, CONFIDENCE = 1000, 0.95
BLOCK_ELEMENTS = 1 << 22  # counts of images held at a time


class Resampled(NamedTuple):
    """Accuracies of every resample, (R, Q) float64 each."""

    accuracy: Tensor
    per_class: Tensor  # mean over the classes that the resample has images of


def resample_accuracy(
    right_NQ: Tensor, labels_N: Tensor, n_classes: int, resamples: int = RESAMPLES, seed: int = 0
) -> Resampled:
    """Draw N of the N images with replacement, R times.

    Args:
        right_NQ: bool, whether each classifier is right; labels_N: int64 in [0, C).

    Raises:
        ValueError: no images, or shapes that differ.
    """
    n = len(labels_N)
    if right_NQ.dim() != 2 or len(right_NQ) != n or not n:
        raise ValueError(f"right {tuple(right_NQ.shape)} and labels {tuple(labels_N.shape)}: give (N, Q) and (N,)")
    generator = torch.Generator().manual_seed(seed)
    hits_NQ, parts = right_NQ.float(), []
    for rows in torch.arange(resamples).split(max(1, BLOCK_ELEMENTS // n)):
        drawn = torch.randint(n, (len(rows), n), generator=generator)
        counts_RN = torch.zeros(len(rows), n).scatter_add_(1, drawn, torch.ones(1).expand_as(drawn))
        held_RC = _by_class(counts_RN, labels_N, n_classes)
        recalls = [
            (_by_class(counts_RN * hits, labels_N, n_classes) / held_RC).nanmean(1) for hits in hits_NQ.unbind(1)
        ]
        parts.append(((counts_RN @ hits_NQ).double() / n, torch.stack(recalls, 1)))
    return Resampled(*(torch.cat(column) for column in zip(*parts)))


def _by_class(values_RN: Tensor, labels_N: Tensor, n_classes: int) -> Tensor:
    return torch.zeros(len(values_RN), n_classes).index_add_(1, labels_N, values_RN).double()


def interval(values_R: Tensor, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The quantiles that leave out (1 - confidence) / 2 of the resamples on either side."""
    tail = (1 - confidence) / 2
    low, high = values_R.double().quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64))
    return float(low), float(high)
