"""Accuracy under every prompt filter: the whole curve over K, oracle and few-shot choices. Functions on tensors.

N images, C classes, P prompts of a class, K prompts kept, G values of a setting, D dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from probemb.evaluation.classification import (
    accuracy,
    class_accuracy,
    class_vectors,
    confidences,
    prefix_vectors,
    true_ranks,
)
from probemb.gaussian import Gaussian
from probemb.metrics import interval, resample_accuracy, standard_error
from zeroshot.filtering.filters import (
    FILTERS,
    REWEIGHTED,
    FilterOptions,
    Selection,
    best_class_k,
    best_common_k,
)
from zeroshot.filtering.reweighting import Reweighting, few_of_each, fit_labelled, fit_unlabelled
from zeroshot.filtering.rows import (
    FEW_SHOT,
    ORACLE,
    TRANSDUCTIVE,
    UNLABELLED,
    UPPER_BOUND,
    ZERO_SHOT,
    Evaluation,
    Row,
    SelectionData,
    count_shots,
    paired_standard_error,
    shots_text,
)
from zeroshot.filtering.splits import Chosen, make_splits
from zeroshot.filtering.thresholds import SETTINGS, candidates


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
    temperature: float | None = None,
) -> Evaluation:
    """Accuracy under each filter.

    Args:
        image_mean: (N, D), unit length; labels: (N,) int64; image_names: N names, which decide the folds.
        prompts: Gaussian (C, P, D).
        filters: names in FILTERS or REWEIGHTED.
        options: `k` is the user's K for `topk`, or None; likewise the settings of the thresholds.
        selection: images on which K is chosen, and prompts are re-weighted, besides the oracle; "train" needs
            `select_data`.
        groups: for each image a number that images of the same picture share, which are kept in one fold.
        temperature: the factor of the cosines in a softmax over the classes; None for a model without one.

    Raises:
        UserError: folds are not possible, or K is out of range.
    """
    everything = torch.ones(len(labels), dtype=torch.bool)
    images = Chosen(image_mean, labels.cpu(), image_names, everything, None)
    splits = make_splits(images, selection, select_data, groups)
    scorer = _Scorer(images, prompts, options, splits, selection.label)
    if "best-topk" in filters or ("topk" in filters and options.k is None):
        scorer.rank_every_k()
    rows = [row for name in filters for row in scorer.rows(name)]
    return scorer.evaluation(rows, temperature)


class _Scorer:
    """Ranks of the true class under every classifier, each computed once.

    Attributes:
        base: (N,) ranks under `all`.
        ranks: (N, P) ranks with a common K = 1..P, or None where no filter needs them.
        per_class: (C, P) accuracy of each class, from `ranks`.
    """

    def __init__(self, images: Chosen, prompts: Gaussian, options: FilterOptions, splits: list[Chosen], source: str):
        self.images, self.labels, self.options = images, images.labels, options
        self.splits, self.few_shot, self.unlabelled = splits, f"{FEW_SHOT} ({source})", f"{UNLABELLED} ({source})"
        self.prompts, self.mean, self.u = prompts, prompts.mean, prompts.uncertainty()
        self.n_classes, self.n_prompts = self.u.shape
        self.base = self._filtered("all")
        self.ranks = self.per_class = self.prefixes = self.split_ranks = None
        self.oracle_k = self.oracle_best_topk = None
        self.kept, self.kept_by = None, ""
        self.reweighted: dict[str, Reweighting] = {}
        self.row_ranks: list[Tensor] = []

    def rank_every_k(self) -> None:
        """Compute `ranks`, from which K is chosen."""
        self.prefixes = prefix_vectors(self.mean, self.u)
        self.ranks = self._true_ranks(self.prefixes)
        self.per_class = class_accuracy(self.ranks, self.labels, self.n_classes)
        self.split_ranks = [split.ranks(self.prefixes, self.ranks) for split in self.splits]

    def rows(self, name: str) -> list[Row]:
        """The rows of one filter."""
        if name == "best-topk":
            return self._best_topk(name)
        if name == "topk" and self.options.k is None:
            return self._topk(name)
        if name == "topk":
            k = torch.full((self.n_classes,), int(self.options.k))
            self._keep(k)
            return [self._row(name, k, self._filtered(name, k=int(self.options.k)), f"{ZERO_SHOT}, K given")]
        if name in SETTINGS:
            return self._threshold(name, SETTINGS[name])
        if name in REWEIGHTED:
            return self._reweighted(name)
        k = {"single": 1, "all": self.n_prompts}.get(name)  # the others have soft weights
        k = None if k is None else torch.tensor([k])
        return [self._row(name, k, self.base if name == "all" else self._filtered(name), ZERO_SHOT)]

    def evaluation(self, rows: list[Row], temperature: float | None) -> Evaluation:
        """Everything together."""
        vectors = class_vectors(self.mean, FILTERS["all"](self.u, self.options))
        return Evaluation(
            rows=self._with_intervals(rows),
            curve1=None if self.ranks is None else accuracy(self.ranks),
            curve5=None if self.ranks is None else accuracy(self.ranks, 5),
            oracle_k=self.oracle_k,
            kept=self.kept,
            kept_by=self.kept_by,
            order=self.u.argsort(dim=1, stable=True).cpu(),
            uncertainty=self.u.cpu(),
            counts=torch.bincount(self.labels, minlength=self.n_classes),
            class_all=class_accuracy(self.base, self.labels, self.n_classes),
            oracle_best_topk=self.oracle_best_topk,
            oracle_max_over_k=None if self.oracle_k is None else self.per_class.max(dim=1).values,
            correct=self.base < 1,
            confidence=None if temperature is None else confidences(self.images.mean, vectors, temperature),
            reweighted=self.reweighted,
        )

    def _row(
        self, name: str, k: Tensor | None, ranks: Tensor, note: str, title: str | None = None,
        setting: float | None = None,
    ) -> Row:  # fmt: skip
        """`k`: numbers of prompts that classes, or classes in folds, keep; None for soft weights."""
        self.row_ranks.append(ranks)
        right = ranks < 1
        top1, recall = float(accuracy(ranks)), class_accuracy(ranks, self.labels, self.n_classes).nanmean()
        return Row(
            name, title or name, None if k is None else float(k.double().mean()), top1, float(accuracy(ranks, 5)),
            standard_error(right), float(recall), gain=top1 - float(accuracy(self.base)),
            gain_se=paired_standard_error(right, self.base < 1), note=note, setting=setting,
            k_varies=k is not None and len(k.unique()) > 1,
        )  # fmt: skip

    def _with_intervals(self, rows: list[Row]) -> list[Row]:
        """The rows in the order in which `_row` made them, with bootstrap intervals over the same resamples."""
        if len(self.labels) < 2:
            return rows
        ranks = torch.stack([self.base, *self.row_ranks], dim=1)
        first = resample_accuracy(ranks < 1, self.labels, self.n_classes)
        five = resample_accuracy(ranks < 5, self.labels, self.n_classes)
        found = []
        for q, row in enumerate(rows, 1):
            top1 = first.accuracy[:, q]
            values = {"top1": top1, "top5": five.accuracy[:, q], "mean_per_class_recall": first.per_class[:, q]}
            values["gain"] = top1 - first.accuracy[:, 0]
            found.append(replace(row, intervals={name: interval(value) for name, value in values.items()}))
        return found

    def _true_ranks(self, vectors: Tensor, images: Tensor | None = None) -> Tensor:
        """Ranks of the evaluated images, or of some of them (N,) bool, under (C, D) or (G, C, D) class vectors."""
        mean, labels = self.images.mean, self.labels
        if images is not None:
            mean, labels = mean[images.to(mean.device)], labels[images]
        return true_ranks(mean, vectors, labels).cpu()

    def _filtered(self, name: str, **settings: float) -> Tensor:
        """(N,) ranks under a filter's weights."""
        weights = FILTERS[name](self.u, replace(self.options, **settings))
        return self._true_ranks(class_vectors(self.mean, weights))

    def _with_class_k(self, k: Tensor, images: Tensor) -> Tensor:
        """Ranks of some images (N,) bool where class c keeps its k[c] most certain prompts."""
        return self._true_ranks(self.prefixes[k - 1, torch.arange(self.n_classes)], images)

    def _keep(self, k: Tensor, by: str = "") -> None:
        """Set the prompts that the report calls kept: by the first filter with a number, unless best-topk has one."""
        if self.kept is None:
            self.kept, self.kept_by = k.cpu(), by

    def _topk(self, name: str) -> list[Row]:
        kept = [torch.full((self.n_classes,), k) for k in range(1, self.n_prompts + 1)]
        return self._best_of(name, self.ranks, self.split_ranks, kept)

    def _best_of(
        self, name: str, ranks: Tensor, split_ranks: list[Tensor], kept: Sequence[Tensor],
        settings: Sequence[float] | None = None,
    ) -> list[Row]:  # fmt: skip
        """The best of G settings in ascending order: on the scored images, an oracle, and on others.

        Args:
            ranks: (N, G); split_ranks: (M, G) of every split; kept: (C,) prompts that each setting keeps.
        """

        def row(ranks: Tensor, chosen: list[int], note: str) -> Row:
            setting = None if settings is None else sum(settings[g] for g in chosen) / len(chosen)
            title = name if settings is None else setting_title(name, setting, mean=len(set(chosen)) > 1)
            return self._row(name, torch.cat([kept[g] for g in chosen]), ranks, note, title, setting)

        best = best_common_k(ranks) - 1
        self._keep(kept[best], ORACLE)
        rows = [row(ranks[:, best], [best], ORACLE)]
        if self.splits:
            ranked, chosen = torch.empty_like(self.base), []
            for split, theirs in zip(self.splits, split_ranks, strict=True):
                chosen.append(best_common_k(theirs) - 1)
                ranked[split.scored] = ranks[split.scored, chosen[-1]]
            rows.append(row(ranked, chosen, self.few_shot))
        return rows

    def _threshold(self, name: str, option: str) -> list[Row]:
        if (given := getattr(self.options, option)) is not None:
            weights = FILTERS[name](self.u, self.options)
            ranks = self._true_ranks(class_vectors(self.mean, weights))
            note = f"{ZERO_SHOT}, {option} given"
            self._keep(n_kept(weights))
            return [self._row(name, n_kept(weights), ranks, note, setting_title(name, given), given)]
        settings = candidates(name, self.u)
        weights = [FILTERS[name](self.u, replace(self.options, **{option: value})) for value in settings]
        stack = torch.stack([class_vectors(self.mean, one) for one in weights])
        ranks = self._true_ranks(stack)
        split_ranks = [split.ranks(stack, ranks) for split in self.splits]
        return self._best_of(name, ranks, split_ranks, [n_kept(one) for one in weights], settings)

    def _reweighted(self, name: str) -> list[Row]:
        """Re-weighted with the evaluated images (an oracle, or transductive without their labels), and with others."""

        def row(ranks: Tensor, fits: list[Reweighting], note: str) -> Row:
            if name != "reweighted":
                return self._row(name, None, ranks, note)
            shots = count_shots(self.options.shots, [fit.counts for fit in fits])
            return replace(self._row(name, None, ranks, note, f"{name}, {shots_text(shots)}"), shots=shots)

        own = self._fit(name, self.images)
        note, other = (ORACLE, self.few_shot) if name == "reweighted" else (TRANSDUCTIVE, self.unlabelled)
        self.reweighted[f"{name}, {note}"] = own
        rows = [row(self._true_ranks(class_vectors(self.mean, own.weights)), [own], note)]
        if self.splits:
            ranked, fits = torch.empty_like(self.base), []
            for number, split in enumerate(self.splits):
                fits.append(found := self._fit(name, split))
                part = f", {number + 1}" if len(self.splits) > 1 else ""
                self.reweighted[f"{name}, {other}{part}"] = found
                ranked[split.scored] = self._true_ranks(class_vectors(self.mean, found.weights), split.scored)
            rows.append(row(ranked, fits, other))
        return rows

    def _fit(self, name: str, images: Chosen) -> Reweighting:
        """Prompts re-weighted by EM, with labels of a few images of each class or without any."""
        if name == "reweighted":
            few = torch.tensor(few_of_each(images.labels.tolist(), images.names, self.options.shots))
            mean = images.mean[few.to(images.mean.device)]
            return fit_labelled(mean, images.labels[few], self.prompts, self.options.prior)
        some = torch.tensor(few_of_each([0] * len(images.names), images.names, self.options.unlabelled))
        return fit_unlabelled(images.mean[some.to(images.mean.device)], self.prompts, self.options.prior)

    def _best_topk(self, name: str) -> list[Row]:
        self.oracle_k = best_class_k(self.per_class)
        self.kept, self.kept_by = self.oracle_k, ORACLE
        own = self._with_class_k(self.oracle_k, self.images.scored)
        self.oracle_best_topk = class_accuracy(own, self.labels, self.n_classes)
        best_of_own_class = self.ranks.gather(1, (self.oracle_k[self.labels] - 1).unsqueeze(1)).squeeze(1)
        rows = [
            self._row(name, self.oracle_k, own, ORACLE),
            self._row(name, self.oracle_k, best_of_own_class, f"{ORACLE}, upper bound", UPPER_BOUND),
        ]
        if self.splits:
            ranked, chosen = torch.empty_like(self.base), []
            for split, ranks in zip(self.splits, self.split_ranks, strict=True):
                k = best_class_k(class_accuracy(ranks, split.labels, self.n_classes))
                ranked[split.scored] = self._with_class_k(k, split.scored)
                chosen.append(k)
            rows.append(self._row(name, torch.cat(chosen), ranked, self.few_shot))
        return rows


def n_kept(weights: Tensor) -> Tensor:
    """Number of prompts of each class with any weight, (C,) on the CPU."""
    return (weights > 0).sum(dim=1).cpu()


def setting_title(name: str, setting: float, mean: bool = False) -> str:
    """ "quantile 0.35", or "quantile, mean 0.35" of settings that differ between folds."""
    return (
        f"{name},{' mean' * mean} c = {setting:.2f}"
        if name == "class-deviation"
        else (f"{name}{', mean' * mean} {setting:.3g}")
    )
