"""From embeddings to numbers: every filter, the whole curve over K, oracle and honest choices of K. Pure functions on
tensors.

N images, C classes, P prompts of a class, K prompts kept, D dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from probemb.evaluation.classification import accuracy, class_accuracy, class_vectors, prefix_vectors, true_ranks
from probemb.gaussian import Gaussian
from zeroshot.filters import (
    CHOSEN_ON_DATA,
    FILTERS,
    FilterOptions,
    Selection,
    best_class_k,
    best_common_k,
    stratified_folds,
)

ZERO_SHOT, ORACLE = "zero-shot", "oracle"
SIGNIFICANT = 2  # standard errors that a gain must exceed to be coloured: about 95 % confidence
UPPER_BOUND = "best-topk, rivals at the same K"


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        filter: its name in FILTERS.
        title: how it is called in tables.
        k: prompts kept, the mean over classes (and folds) where it varies; None for soft weights.
        top1, top5: accuracies in [0, 1].
        gain: top1 minus that of `all`.
        gain_se: its standard error, paired over images; None for a single image.
        note: "zero-shot" (nothing was chosen on labelled images), "oracle" (chosen on the images that are scored),
            or "honest (...)" (chosen on other images, which are named).
    """

    filter: str
    title: str
    k: float | None
    top1: float
    top5: float
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
    """All that was measured.

    Attributes:
        rows: the table.
        curve1, curve5: (P,) accuracy with a common K = 1..P, or None where no filter asked for it.
        class_k: (C,) K of each class, chosen on the evaluation images (oracle), or None.
        kept: (C,) prompts that each class keeps in the report.
        order: (C, P) prompts of each class from the most to the least certain.
        uncertainty: (C, P) uncertainty of every prompt.
        counts: (C,) images of each class.
        class_all: (C,) accuracy of each class under `all`; NaN without images.
        class_best: (C,) the same for `best-topk` as one classifier, or None.
        class_max: (C,) max over K of the accuracy under a common K, or None.
        correct: (N,) whether `all` is right.
    """

    rows: list[Row]
    curve1: Tensor | None
    curve5: Tensor | None
    class_k: Tensor | None
    kept: Tensor
    order: Tensor
    uncertainty: Tensor
    counts: Tensor
    class_all: Tensor
    class_best: Tensor | None
    class_max: Tensor | None
    correct: Tensor


def paired_standard_error(correct: Tensor, reference: Tensor) -> float | None:
    """Standard error of the difference of two accuracies on the same images.

    Args:
        correct, reference: (N,) bool, whether each image is classified correctly.

    Returns:
        Standard deviation of the per-image differences (-1, 0 or 1) over sqrt(N); None for fewer than two images.
    """
    if len(correct) < 2:
        return None
    difference = correct.double() - reference.double()
    return float(difference.std() / len(difference) ** 0.5)


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
) -> Evaluation:
    """Accuracy under each filter.

    Args:
        image_mean: (N, D), unit length; labels: (N,) int64; image_names: N names, which decide the folds.
        prompts: Gaussian (C, P, D).
        filters: names in FILTERS.
        options: `k` is the K of `topk` where the user fixed it.
        selection: where K is chosen besides the oracle; "train" needs `select_data`.

    Raises:
        UserError: folds are not possible, or K is out of range.
    """
    mean, u = prompts.mean, prompts.uncertainty()
    n_classes, n_prompts = u.shape
    fixed_k = options.k
    curve_wanted = "best-topk" in filters or ("topk" in filters and fixed_k is None)
    labels = labels.cpu()

    def ranks_of(name: str, k=None) -> Tensor:
        chosen = FilterOptions(options.single, k, options.temperature)
        return true_ranks(image_mean, class_vectors(mean, FILTERS[name](u, chosen)), labels).cpu()

    base = ranks_of("all")
    base1 = float(accuracy(base))

    def scored(name: str, title: str, k: float | None, ranks: Tensor, note: str) -> Row:
        top1 = float(accuracy(ranks))
        se = paired_standard_error(ranks < 1, base < 1)
        return Row(name, title, k, top1, float(accuracy(ranks, 5)), top1 - base1, se, note)

    def with_own_k(k: Tensor, images: Tensor) -> Tensor:
        """Ranks under the classifier in which class c keeps its k[c] most certain prompts."""
        return true_ranks(image_mean[images.to(image_mean.device)], prefixes[k - 1, every_class], labels[images]).cpu()

    prefixes, ranks, splits = None, None, []
    if curve_wanted:
        prefixes = prefix_vectors(mean, u)
        ranks = true_ranks(image_mean, prefixes, labels).cpu()  # (N, P): everything below follows from it
        splits = _splits(ranks, labels, image_names, prefixes, selection, select_data)
    per_class = class_accuracy(ranks, labels, n_classes) if curve_wanted else None
    every_class, every_image = torch.arange(n_classes), torch.ones(len(labels), dtype=torch.bool)
    honest = f"honest ({selection.label})"
    oracle_k, common_k, class_best = None, None, None
    rows: list[Row] = []
    for name in filters:
        if name == "single":
            rows.append(scored(name, name, 1, ranks_of(name), ZERO_SHOT))
        elif name == "all":
            rows.append(scored(name, name, n_prompts, base, ZERO_SHOT))
        elif name not in CHOSEN_ON_DATA:
            rows.append(scored(name, name, None, ranks_of(name), ZERO_SHOT))
        elif name == "topk" and fixed_k is not None:
            common_k = int(fixed_k)
            rows.append(scored(name, name, common_k, ranks_of(name, common_k), f"{ZERO_SHOT}, K given"))
        elif name == "topk":
            common_k = best_common_k(ranks)
            rows.append(scored(name, name, common_k, ranks[:, common_k - 1], ORACLE))
            if splits:
                mine, chosen = torch.empty_like(base), []
                for split in splits:
                    k = best_common_k(split.ranks)
                    mine[split.scored] = ranks[split.scored, k - 1]
                    chosen.append(k)
                rows.append(scored(name, name, sum(chosen) / len(chosen), mine, honest))
        else:
            oracle_k = best_class_k(per_class)
            own = with_own_k(oracle_k, every_image)
            class_best = class_accuracy(own, labels, n_classes)
            k_mean = float(oracle_k.double().mean())
            rows.append(scored(name, name, k_mean, own, ORACLE))
            best_of_own_class = ranks.gather(1, (oracle_k[labels] - 1).unsqueeze(1)).squeeze(1)
            rows.append(scored(name, UPPER_BOUND, k_mean, best_of_own_class, f"{ORACLE}, upper bound"))
            if splits:
                mine, chosen = torch.empty_like(base), []
                for split in splits:
                    k = best_class_k(class_accuracy(split.ranks, split.labels, n_classes))
                    mine[split.scored] = with_own_k(k, split.scored)
                    chosen.append(float(k.double().mean()))
                rows.append(scored(name, name, sum(chosen) / len(chosen), mine, honest))
    if oracle_k is not None:
        kept = oracle_k
    else:
        kept = torch.full((n_classes,), common_k or n_prompts)
    return Evaluation(
        rows=rows,
        curve1=accuracy(ranks) if curve_wanted else None,
        curve5=accuracy(ranks, 5) if curve_wanted else None,
        class_k=oracle_k,
        kept=kept,
        order=u.argsort(dim=1, stable=True).cpu(),
        uncertainty=u.cpu(),
        counts=torch.bincount(labels, minlength=n_classes),
        class_all=class_accuracy(base, labels, n_classes),
        class_best=class_best,
        class_max=per_class.max(dim=1).values if oracle_k is not None else None,
        correct=base < 1,
    )


@dataclass(frozen=True)
class _Split:
    """Ranks (M, P) and labels (M,) of images to choose K on, and which images (N,) that K may score."""

    ranks: Tensor
    labels: Tensor
    scored: Tensor


def _splits(
    ranks: Tensor,
    labels: Tensor,
    names: Sequence[str],
    prefixes: Tensor,
    selection: Selection,
    select_data: SelectionData | None,
) -> list[_Split]:
    if selection.on == "oracle":
        return []
    if selection.folds:
        folds = stratified_folds(labels.tolist(), names, selection.folds)
        held = [folds == fold for fold in range(selection.folds)]
        return [_Split(ranks[~mask], labels[~mask], mask) for mask in held]
    elsewhere = true_ranks(select_data.mean, prefixes, select_data.labels).cpu()
    return [_Split(elsewhere, select_data.labels.cpu(), torch.ones(len(labels), dtype=torch.bool))]
