"""Results of an evaluation of prompt filters: the rows of its table, and everything else that a report shows.

N images, C classes, P prompts of a class, K prompts kept, D dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from probemb.metrics import standard_error
from zeroshot.filtering.reweighting import Reweighting

ZERO_SHOT, FEW_SHOT, UNLABELLED, TRANSDUCTIVE, ORACLE = "zero-shot", "few-shot", "unlabelled", "transductive", "oracle"
SIGNIFICANT = 2  # standard errors of a coloured gain: about 95 % confidence
UPPER_BOUND = "best-topk, rivals at the same K"


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        filter: its name in FILTERS or REWEIGHTED.
        title: its name in tables.
        k: prompts kept, the mean over classes (and folds) where it varies; None for soft weights.
        top1, top5: accuracies in [0, 1].
        top1_se: standard error of top1; None for a single image.
        mean_per_class_recall: mean over classes with images of each class' top-1 accuracy, in [0, 1].
        gain: top1 minus that of `all`.
        gain_se: its standard error, paired over images; None for a single image.
        note: "zero-shot" (nothing chosen on images); "few-shot (...)" (chosen on, or fitted to, other images with their
            labels, which are named) or "unlabelled (...)" (without their labels); "oracle" (the scored images and their
            labels) or "transductive" (without their labels).
        setting: of a threshold filter; the mean over folds where it was chosen.
        intervals: (low, high) of "top1", "top5", "mean_per_class_recall" and "gain" (paired), 95 %, by bootstrap over
            the images; empty for a single image.
        k_varies: whether K differs between classes or folds.
        shots: of `reweighted`, see `count_shots`.
    """

    filter: str
    title: str
    k: float | None
    top1: float
    top5: float
    top1_se: float | None
    mean_per_class_recall: float
    gain: float
    gain_se: float | None
    note: str
    setting: float | None = None
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    k_varies: bool = False
    shots: dict[str, float] | None = None

    @property
    def k_text(self) -> str:
        """ "80" for one K, "mean 34.2" where K varies, "soft" for soft weights."""
        if self.k is None:
            return "soft"
        return f"mean {self.k:.1f}" if self.k_varies else str(int(self.k))

    @property
    def top1_text(self) -> str:
        """top1 and its standard error in percent: "71.20 ± 0.45"."""
        return f"{100 * self.top1:.2f}" + ("" if self.top1_se is None else f" ± {100 * self.top1_se:.2f}")

    @property
    def interval_text(self) -> str:
        """The interval of top1 in percent: "70.3–72.1"; empty for a single image."""
        return self.text_of("top1")

    def text_of(self, metric: str) -> str:
        """The interval of a metric in percent."""
        if metric not in self.intervals:
            return ""
        low, high = self.intervals[metric]
        return f"{100 * low:.1f}–{100 * high:.1f}"

    @property
    def gain_text(self) -> str:
        """The gain and its standard error in points: "+1.20 ± 0.35"; empty for `all`."""
        if self.filter == "all":
            return ""
        return f"{100 * self.gain:+.2f}" + ("" if self.gain_se is None else f" ± {100 * self.gain_se:.2f}")

    @property
    def verdict(self) -> str:
        """ "up" or "down" for a gain beyond SIGNIFICANT standard errors, "" for one that may be chance."""
        if self.gain_se is None or abs(self.gain) <= SIGNIFICANT * self.gain_se:
            return ""
        return "up" if self.gain > 0 else "down"


@dataclass(frozen=True)
class Evaluation:
    """All results.

    Attributes:
        rows: the table.
        curve1, curve5: (P,) accuracy with a common K = 1..P, or None if no filter needs it.
        oracle_k: (C,) K of each class, chosen on the evaluation images, or None.
        kept: (C,) prompts that each class keeps in the report, the most certain ones, or None where no filter keeps a
            number of them; kept_by: "oracle" if their number was chosen on the evaluation images, else "".
        order: (C, P) prompts of each class from the most to the least certain.
        uncertainty: (C, P) uncertainty of every prompt.
        counts: (C,) images of each class.
        class_all: (C,) accuracy of each class under `all`; NaN without images.
        oracle_best_topk: (C,) the same for `best-topk` as one classifier with `oracle_k`, or None.
        oracle_max_over_k: (C,) max over K of the accuracy under a common K, or None.
        correct: (N,) whether `all` is right; confidence: (N,) its probability of the class that it says, or None where
            the model has no temperature.
        reweighted: what EM found, by filter and note.
    """

    rows: list[Row]
    curve1: Tensor | None
    curve5: Tensor | None
    oracle_k: Tensor | None
    kept: Tensor | None
    kept_by: str
    order: Tensor
    uncertainty: Tensor
    counts: Tensor
    class_all: Tensor
    oracle_best_topk: Tensor | None
    oracle_max_over_k: Tensor | None
    correct: Tensor
    confidence: Tensor | None
    reweighted: dict[str, Reweighting]


def count_shots(asked: int, counts: Sequence[Tensor]) -> dict[str, float]:
    """Numbers of labelled images of a class that `reweighted` had, over the classes of every fit.

    Args:
        asked: --shots, which no class has more of; counts: (C,) of each fit, several where folds were.

    Returns:
        "asked", "mean", "fewest" and "most" images of a class, and the "classes_without", on average over the fits.
    """
    of_class = torch.stack(list(counts))
    return {
        "asked": asked, "mean": float(of_class.double().mean()), "fewest": int(of_class.min()),
        "most": int(of_class.max()), "classes_without": float((of_class == 0).sum(1).double().mean()),
    }  # fmt: skip


def shots_text(shots: dict[str, float]) -> str:
    """ "16 shots", or "up to 16 shots (mean 2.5)" where a class had fewer."""
    if shots["fewest"] == shots["asked"]:
        return f"{shots['asked']} shots"
    return f"up to {shots['asked']} shots (mean {shots['mean']:.1f})"


def shots_notice(rows: Sequence[Row]) -> str | None:
    """A sentence on the classes that had fewer labelled images than --shots; None if none had."""
    few = [row for row in rows if row.shots is not None and row.shots["fewest"] < row.shots["asked"]]
    if not few:
        return None
    found = "; ".join(
        f"{row.note} {row.shots['fewest']:,} to {row.shots['most']:,}, mean {row.shots['mean']:.1f}"
        + (f", {row.shots['classes_without']:.4g} without any" if row.shots["classes_without"] else "")
        for row in few
    )
    return f"--shots {few[0].shots['asked']:,} is more than there are images of every class: {found}"


def paired_standard_error(correct: Tensor, reference: Tensor) -> float | None:
    """Standard error of the difference of two accuracies on the same images.

    Args:
        correct, reference: (N,) bool, whether each image is classified correctly.

    Returns:
        Standard deviation of the per-image differences (-1, 0 or 1) over sqrt(N); None for fewer than two images.
    """
    return standard_error(correct.double() - reference.double())


@dataclass(frozen=True)
class SelectionData:
    """Other images to choose on: means (M, D), labels (M,) and names, which decide the few that are taken."""

    mean: Tensor
    labels: Tensor
    names: Sequence[str]
