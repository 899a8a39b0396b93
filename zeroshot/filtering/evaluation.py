"""Accuracy under every prompt filter: the whole curve over K, oracle and honest choices of K. Functions on tensors.

N images, C classes, P prompts of a class, K prompts kept, D dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from probemb.evaluation.classification import accuracy, class_accuracy, class_vectors, prefix_vectors, true_ranks
from probemb.gaussian import Gaussian
from probemb.metrics import standard_error
from zeroshot.filtering.filters import (
    FILTERS,
    FilterOptions,
    Selection,
    best_class_k,
    best_common_k,
    stratified_folds,
)

ZERO_SHOT, ORACLE = "zero-shot", "oracle"
SIGNIFICANT = 2  # standard errors of a coloured gain: about 95 % confidence
UPPER_BOUND = "best-topk, rivals at the same K"


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        filter: its name in FILTERS.
        title: its name in tables.
        k: prompts kept, the mean over classes (and folds) where it varies; None for soft weights.
        top1, top5: accuracies in [0, 1].
        top1_se: standard error of top1; None for a single image.
        mean_per_class_recall: mean over classes with images of each class' top-1 accuracy, in [0, 1].
        gain: top1 minus that of `all`.
        gain_se: its standard error, paired over images; None for a single image.
        note: "zero-shot" (nothing chosen on labelled images), "oracle" (chosen on the scored images), or "honest (...)"
            (chosen on other images, which are named).
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

    @property
    def k_text(self) -> str:
        """ "80" for one K, "mean 34.2" where K varies, "soft" for soft weights."""
        if self.k is None:
            return "soft"
        return str(int(self.k)) if float(self.k).is_integer() else f"mean {self.k:.1f}"

    @property
    def top1_text(self) -> str:
        """top1 and its standard error in percent: "71.20 ± 0.45"."""
        return f"{100 * self.top1:.2f}" + ("" if self.top1_se is None else f" ± {100 * self.top1_se:.2f}")

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
        kept: (C,) prompts that each class keeps in the report; kept_by: "oracle" if their number was chosen on the
            evaluation images, else "".
        order: (C, P) prompts of each class from the most to the least certain.
        uncertainty: (C, P) uncertainty of every prompt.
        counts: (C,) images of each class.
        class_all: (C,) accuracy of each class under `all`; NaN without images.
        oracle_best_topk: (C,) the same for `best-topk` as one classifier with `oracle_k`, or None.
        oracle_max_over_k: (C,) max over K of the accuracy under a common K, or None.
        correct: (N,) whether `all` is right.
    """

    rows: list[Row]
    curve1: Tensor | None
    curve5: Tensor | None
    oracle_k: Tensor | None
    kept: Tensor
    kept_by: str
    order: Tensor
    uncertainty: Tensor
    counts: Tensor
    class_all: Tensor
    oracle_best_topk: Tensor | None
    oracle_max_over_k: Tensor | None
    correct: Tensor


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
    """Other images to choose K on: means (M, D) and labels (M,)."""

    mean: Tensor
    labels: Tensor


def evaluate_embeddings(
    image_mean: Tensor,
    labels: Tensor,
    image_names: Sequence[str],
    prompts: Gaussian,
    filters: Sequence[str],
    *,
    options: FilterOptions = FilterOptions(),  # noqa: B008 - frozen
    selection: Selection = Selection("oracle"),  # noqa: B008 - frozen
    select_data: SelectionData | None = None,
    groups: Sequence[int] | None = None,
) -> Evaluation:
    """Accuracy under each filter.

    Args:
        image_mean: (N, D), unit length; labels: (N,) int64; image_names: N names, which decide the folds.
        prompts: Gaussian (C, P, D).
        filters: names in FILTERS.
        options: `k` is the user's K for `topk`, or None.
        selection: images on which K is chosen besides the oracle; "train" needs `select_data`.
        groups: for each image a number that images of the same picture share, which are kept in one fold.

    Raises:
        UserError: folds are not possible, or K is out of range.
    """
    scorer = _Scorer(image_mean, labels.cpu(), prompts, options)
    if "best-topk" in filters or ("topk" in filters and options.k is None):
        scorer.rank_every_k(image_names, selection, select_data, groups)
    rows = [row for name in filters for row in scorer.rows(name)]
    return scorer.evaluation(rows)


@dataclass(frozen=True)
class _Split:
    """Ranks (M, P) and labels (M,) of images to choose K on, and a mask (N,) of the images that this K may score."""

    ranks: Tensor
    labels: Tensor
    scored: Tensor


class _Scorer:
    """Ranks of the true class under every classifier, each computed once.

    Attributes:
        base: (N,) ranks under `all`.
        ranks: (N, P) ranks with a common K = 1..P, or None where no filter needs them.
        per_class: (C, P) accuracy of each class, from `ranks`.
    """

    def __init__(self, image_mean: Tensor, labels: Tensor, prompts: Gaussian, options: FilterOptions):
        self.image_mean, self.labels, self.options = image_mean, labels, options
        self.mean, self.u = prompts.mean, prompts.uncertainty()
        self.n_classes, self.n_prompts = self.u.shape
        self.base = self._filtered("all")
        self.ranks = self.per_class = self.prefixes = None
        self.splits: list[_Split] = []
        self.common_k, self.oracle_k, self.oracle_best_topk, self.kept_by = None, None, None, ""

    def rank_every_k(
        self,
        names: Sequence[str],
        selection: Selection,
        select_data: SelectionData | None,
        groups: Sequence[int] | None,
    ) -> None:
        """Compute `ranks`, from which K is chosen, and the splits to choose it on."""
        self.prefixes = prefix_vectors(self.mean, self.u)
        self.ranks = true_ranks(self.image_mean, self.prefixes, self.labels).cpu()
        self.per_class = class_accuracy(self.ranks, self.labels, self.n_classes)
        self.honest = f"honest ({selection.label})"
        if selection.folds:
            folds = stratified_folds(self.labels.tolist(), names, selection.folds, groups)
            held = [folds == fold for fold in range(selection.folds)]
            self.splits = [_Split(self.ranks[~mask], self.labels[~mask], mask) for mask in held]
        elif selection.on == "train":
            elsewhere = true_ranks(select_data.mean, self.prefixes, select_data.labels).cpu()
            self.splits = [_Split(elsewhere, select_data.labels.cpu(), torch.ones(len(self.labels), dtype=torch.bool))]

    def rows(self, name: str) -> list[Row]:
        """The rows of one filter."""
        if name == "best-topk":
            return self._best_topk(name)
        if name == "topk" and self.options.k is None:
            return self._topk(name)
        if name == "topk":
            self.common_k = int(self.options.k)
            return [self._row(name, self.common_k, self._filtered(name, self.common_k), f"{ZERO_SHOT}, K given")]
        k = {"single": 1, "all": self.n_prompts}.get(name)  # the others have soft weights
        return [self._row(name, k, self.base if name == "all" else self._filtered(name), ZERO_SHOT)]

    def evaluation(self, rows: list[Row]) -> Evaluation:
        """Everything together."""
        kept = self.oracle_k
        if kept is None:
            kept = torch.full((self.n_classes,), self.common_k or self.n_prompts)
        return Evaluation(
            rows=rows,
            curve1=None if self.ranks is None else accuracy(self.ranks),
            curve5=None if self.ranks is None else accuracy(self.ranks, 5),
            oracle_k=self.oracle_k,
            kept=kept,
            kept_by=self.kept_by,
            order=self.u.argsort(dim=1, stable=True).cpu(),
            uncertainty=self.u.cpu(),
            counts=torch.bincount(self.labels, minlength=self.n_classes),
            class_all=class_accuracy(self.base, self.labels, self.n_classes),
            oracle_best_topk=self.oracle_best_topk,
            oracle_max_over_k=None if self.oracle_k is None else self.per_class.max(dim=1).values,
            correct=self.base < 1,
        )

    def _row(self, name: str, k: float | None, ranks: Tensor, note: str, title: str | None = None) -> Row:
        right = ranks < 1
        top1, recall = float(accuracy(ranks)), class_accuracy(ranks, self.labels, self.n_classes).nanmean()
        return Row(
            name, title or name, k, top1, float(accuracy(ranks, 5)), standard_error(right), float(recall),
            gain=top1 - float(accuracy(self.base)), gain_se=paired_standard_error(right, self.base < 1), note=note,
        )  # fmt: skip

    def _filtered(self, name: str, k: int | None = None) -> Tensor:
        """(N,) ranks under a filter's weights."""
        weights = FILTERS[name](self.u, FilterOptions(self.options.single, k, self.options.temperature))
        return true_ranks(self.image_mean, class_vectors(self.mean, weights), self.labels).cpu()

    def _with_common_k(self, k: int, images: Tensor) -> Tensor:
        """Ranks of some images (N,) bool where every class keeps K prompts."""
        return self.ranks[images, k - 1]

    def _with_class_k(self, k: Tensor, images: Tensor) -> Tensor:
        """Ranks of some images (N,) bool where class c keeps its k[c] most certain prompts."""
        vectors = self.prefixes[k - 1, torch.arange(self.n_classes)]
        return true_ranks(self.image_mean[images.to(self.image_mean.device)], vectors, self.labels[images]).cpu()

    def _topk(self, name: str) -> list[Row]:
        self.common_k, self.kept_by = best_common_k(self.ranks), ORACLE
        oracle = self._row(name, self.common_k, self.ranks[:, self.common_k - 1], ORACLE)
        return [oracle, *self._honest(name, lambda split: best_common_k(split.ranks), self._with_common_k)]

    def _best_topk(self, name: str) -> list[Row]:
        self.oracle_k, self.kept_by = best_class_k(self.per_class), ORACLE
        own = self._with_class_k(self.oracle_k, torch.ones(len(self.labels), dtype=torch.bool))
        self.oracle_best_topk = class_accuracy(own, self.labels, self.n_classes)
        k_mean = float(self.oracle_k.double().mean())
        best_of_own_class = self.ranks.gather(1, (self.oracle_k[self.labels] - 1).unsqueeze(1)).squeeze(1)
        return [
            self._row(name, k_mean, own, ORACLE),
            self._row(name, k_mean, best_of_own_class, f"{ORACLE}, upper bound", UPPER_BOUND),
            *self._honest(
                name,
                lambda split: best_class_k(class_accuracy(split.ranks, split.labels, self.n_classes)),
                self._with_class_k,
            ),
        ]

    def _honest(self, name: str, choose: Callable, apply: Callable[..., Tensor]) -> list[Row]:
        """The row with K chosen on other images; none without splits."""
        if not self.splits:
            return []
        ranks, chosen = torch.empty_like(self.base), []
        for split in self.splits:
            k = choose(split)
            ranks[split.scored] = apply(k, split.scored)
            chosen.append(float(torch.as_tensor(k).double().mean()))
        return [self._row(name, sum(chosen) / len(chosen), ranks, self.honest)]
