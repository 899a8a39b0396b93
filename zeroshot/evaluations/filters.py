"""Prompt filters: classifiers made of prompts that are chosen, or weighted, by their uncertainty.

FILTERS is the table. C classes, P prompts of a class, K prompts kept, G settings of a filter, N images, D dimensions.
Source: PCME++ §3.5, Table 5 and §C.6; thresholds and re-weighting: ProLIP (Chun et al., ICLR 2025).

acc_c(K) is the accuracy of the images of class c with a common K: all classes keep their K most certain prompts. `topk`
takes the K with the best acc(K), `best-topk` for each class that with the best acc_c(K); ties go to the largest K. The
paper leaves open how many prompts the other classes keep meanwhile, so `best-topk` has two numbers: the accuracy of the
classifier with a K for each class, and the mean over classes of max_K acc_c(K), an upper bound.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from probemb.errors import UserError, nearest
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
from zeroshot.evaluations.reweighting import Reweighting, few_of_each, fit_labelled, fit_unlabelled

ZERO_SHOT, FEW_SHOT, UNLABELLED, TRANSDUCTIVE, ORACLE = "zero-shot", "few-shot", "unlabelled", "transductive", "oracle"
UPPER_BOUND = "best-topk, per-class upper bound"
STEPS = 20  # values of a threshold that is chosen
DEVIATIONS = tuple(step / 4 for step in range(-8, 9))


# ---------------------------------------------------------------------- weights (C, P) from uncertainties u (C, P)


def one_prompt(u: Tensor, index: int) -> Tensor:
    """One prompt, the same for every class: "a photo of a {}."."""
    weights = torch.zeros_like(u)
    weights[:, index] = 1.0
    return weights


def all_prompts(u: Tensor) -> Tensor:
    """Every prompt, equally."""
    return torch.full_like(u, 1.0 / u.shape[1])


def topk(u: Tensor, k: int) -> Tensor:
    """The K most certain prompts of each class, equally."""
    if not 1 <= k <= u.shape[1]:
        raise UserError(
            f"K must lie between 1 and the number of prompts, {u.shape[1]}.", "Give another --k, or more templates."
        )
    return (_places(u) < k).to(u.dtype) / k


def weighted(u: Tensor, temperature: float) -> Tensor:
    """Soft weights: softmax of -z / temperature, z the uncertainty standardised within its class."""
    spread = u.std(dim=1, keepdim=True, correction=0)
    z = torch.where(spread > 0, (u - u.mean(dim=1, keepdim=True)) / spread, 0.0)
    return torch.softmax(-z / temperature, dim=1)


def inverse_variance(u: Tensor) -> Tensor:
    """Soft weights 1 / u: the precision weighting of a product of isotropic normals."""
    return torch.softmax(-u.clamp_min(torch.finfo(u.dtype).tiny).log(), dim=1)  # 1 / u could overflow


def class_deviation(u: Tensor, deviations: float) -> Tensor:
    """The prompts of a class below its mean uncertainty + `deviations` standard deviations."""
    exact = u.double()  # the mean of equal prompts is theirs, to the bit
    spread = exact.std(dim=1, keepdim=True, correction=0)
    return _keep_below(u, exact.mean(dim=1, keepdim=True) + deviations * spread)


def threshold(u: Tensor, limit: float) -> Tensor:
    """The prompts below one uncertainty, the same for all classes."""
    return _keep_below(u, u.new_tensor(limit))


def quantile(u: Tensor, share: float) -> Tensor:
    """The most certain share of all C x P prompts, which leaves some classes more prompts than others."""
    return _keep_below(u, u.flatten().sort().values[max(1, round(share * u.numel())) - 1])


def _keep_below(u: Tensor, limit: Tensor) -> Tensor:
    """Equal weights of the prompts with u <= limit; a class that would lose every prompt keeps the most certain."""
    kept = u <= limit
    kept |= (_places(u) == 0) & ~kept.any(dim=1, keepdim=True)
    return kept.to(u.dtype) / kept.sum(dim=1, keepdim=True)


def _places(u: Tensor) -> Tensor:
    return u.argsort(dim=1, stable=True).argsort(dim=1)  # 0 = the most certain prompt


def _limits(u: Tensor) -> list[float]:
    low, high = float(u.min()), float(u.max())
    return [*torch.linspace(low, high, STEPS + 1, dtype=torch.float64)[1:-1].tolist(), high]


class Filter(NamedTuple):
    """A row of the table: `weights` from u and the option `setting`, None where they are fitted to images.

    `candidates`: of u, the settings to choose from where none is given; `options`: others with an effect; `soft`: no
    prompt is dropped; `reads_u`: a point model cannot have it.
    """

    weights: Callable[..., Tensor] | None = None
    setting: str | None = None
    candidates: Callable[[Tensor], list] | None = None
    options: tuple[str, ...] = ()
    soft: bool = False
    reads_u: bool = True


FILTERS = {
    "single": Filter(one_prompt, "single", reads_u=False),
    "all": Filter(all_prompts, reads_u=False),
    "topk": Filter(topk, "k", lambda u: list(range(1, u.shape[1] + 1))),
    "best-topk": Filter(topk, None, lambda u: list(range(1, u.shape[1] + 1))),
    "weighted": Filter(weighted, "temperature", soft=True),
    "inverse-variance": Filter(inverse_variance, soft=True),
    "class-deviation": Filter(class_deviation, "deviations", lambda u: list(DEVIATIONS)),
    "threshold": Filter(threshold, "threshold", _limits),
    "quantile": Filter(quantile, "quantile", lambda u: [(i + 1) / STEPS for i in range(STEPS)]),
    "reweighted": Filter(options=("shots", "prior"), soft=True),
    "reweighted-unlabelled": Filter(options=("unlabelled", "prior"), soft=True),
}


def filter_names(wanted: str) -> list[str]:
    """The filters in the table for --filter: `single`, `all` and those named, separated by commas, or every one.

    Raises UserError: an unknown name.
    """
    if wanted == "every":
        return list(FILTERS)
    for name in wanted.split(","):
        if name not in FILTERS:
            known = [*FILTERS, "every"]
            raise UserError(f"There is no filter '{name}'.{nearest(name, known)}", f"Known are: {', '.join(known)}.")
    return list(dict.fromkeys(["single", "all", *wanted.split(",")]))


def chooses(name: str, options: Mapping[str, Any]) -> bool:
    """True for a filter that chooses a setting on images, or is fitted to images."""
    one = FILTERS[name]
    return one.weights is None or (one.candidates is not None and options.get(one.setting) is None)


# ------------------------------------------------------------------------------------------- images to choose on


class LabelledMeans(NamedTuple):
    """Embedded images: means (M, D) of unit length, labels (M,), names, which decide folds and the few that are taken.

    `rows`: (N,) bool, which of the evaluated images these are; None where they are others.
    """

    mean: Tensor
    labels: Tensor
    names: Sequence[str]
    rows: Tensor | None = None


class Split(NamedTuple):
    """Images to choose on, and (N,) bool the evaluated images that the choice scores."""

    images: LabelledMeans
    scored: Tensor


def fold_count(select_on: str) -> int:
    """N of `--select-on folds:N`, 0 of oracle and train. Raises UserError."""
    if select_on in ("oracle", "train"):
        return 0
    word, _, number = select_on.partition(":")
    if word == "folds" and (number or "5").isdecimal() and int(number or "5") >= 2:
        return int(number or "5")
    raise UserError(
        f"--select-on '{select_on}' is not a way to choose K.{nearest(select_on, ['oracle', 'train', 'folds:5'])}",
        "Say oracle, train (with --select-data PATH) or folds:5.",
    )


def stratified_folds(
    labels: Sequence[int], names: Sequence[str], n_folds: int, groups: Sequence[int] | None = None
) -> Tensor:
    """(N,) fold of each image, a function of labels and names in any order; images of one group share theirs.

    Within a class, images are dealt round-robin in the order of their names' hashes; each class continues where the
    last one stopped. Raises UserError: no class has two images.
    """
    labels = [int(label) for label in labels]
    groups = range(len(labels)) if groups is None else groups
    counts = Counter(label for label, _ in set(zip(labels, groups)))
    if max(counts.values(), default=0) < 2:
        what = f"--select-on folds:{n_folds} is not possible: no class has more than one image to choose K on."
        raise UserError(what, "Use data with several images a class, or --select-on train with --select-data PATH.")
    if (distinct := len(set(groups))) < n_folds:
        what = f"--select-on folds:{n_folds} needs at least {n_folds} images and there are {distinct}."
        raise UserError(what, "Ask for fewer folds.")
    rank = {name: hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest() for name in names}
    order = sorted(range(len(labels)), key=lambda i: (labels[i], rank[names[i]], names[i]))
    turn: dict[int, int] = {}
    for i in order:
        turn.setdefault(groups[i], len(turn))
    return torch.tensor([turn[group] % n_folds for group in groups], dtype=torch.int64)


def fold_splits(images: LabelledMeans, n_folds: int, groups: Sequence[int] | None = None) -> list[Split]:
    """For each fold the images of all others, to choose on."""
    folds, splits = stratified_folds(images.labels.tolist(), images.names, n_folds, groups), []
    for fold in range(n_folds):
        others = folds != fold
        names = [name for name, used in zip(images.names, others.tolist()) if used]
        means = images.mean[others.to(images.mean.device)]
        splits.append(Split(LabelledMeans(means, images.labels[others], names, others), ~others))
    return splits


# ----------------------------------------------------------------------------------------------------- evaluation


class Classifier(NamedTuple):
    """A filter with its setting: class vectors (C, D), ranks of the images (N,), prompts kept (C,), if any drop."""

    vectors: Tensor
    ranks: Tensor | None = None
    kept: Tensor | None = None
    setting: float | None = None
    fit: Reweighting | None = None


class Candidates(NamedTuple):
    """Classifiers of G settings: stack (G, C, D), ranks of the evaluated images (N, G), prompts kept (C,) of each."""

    settings: list[float]
    stack: Tensor
    ranks: Tensor
    kept: list[Tensor]


class Evaluation:
    """Accuracy of N images under each filter: with given settings, with those best on the images (an oracle), and on
    `splits`. Ranks of the true class under every classifier are computed once.

    Args:
        options: settings of the filters by name, as in ImagenetConfig; "single": index of the prompt `single` keeps.
        source: name of the splits in the notes.

    Attributes:
        rows: of the table; shares in [0, 1]. "k": prompts kept, the mean over classes (and folds) where it varies; None
            for soft weights. "gain": top-1 minus that of `all`, its error paired over images.
        oracle: the classifier of best-topk with each class' K chosen on the images, or None.
        kept: filter -> (C,) prompts that each class keeps, and "oracle" if their number was chosen on the images.
    """

    def __init__(
        self, images: LabelledMeans, prompts: Gaussian, names: Sequence[str], options: Mapping[str, Any],
        splits: Sequence[Split] = (), source: str = "",
    ):  # fmt: skip
        self.images, self.prompts, self.options, self.splits = images, prompts, options, splits
        self.u, self.source = prompts.uncertainty(), source
        self.n_classes, self.n_prompts = self.u.shape
        self.rows: list[dict] = []
        self.kept: dict[str, tuple[Tensor, str]] = {}
        self.reweighted: dict[str, Reweighting] = {}
        self.oracle: Classifier | None = None
        self._found: dict[str, Candidates] = {}
        self._row_ranks: list[Tensor] = []
        self.all = self._fixed("all", None)
        for name in names:
            self._evaluate(name)
        self._add_intervals()

    @cached_property
    def prefixes(self) -> Candidates:
        """Classifiers of every common K."""
        stack, ks = prefix_vectors(self.prompts.mean, self.u), range(1, self.n_prompts + 1)
        return Candidates(list(ks), stack, self._ranks(stack), [torch.full((self.n_classes,), k) for k in ks])

    @property
    def counts(self) -> Tensor:
        """(C,) images of each class."""
        return torch.bincount(self.images.labels, minlength=self.n_classes)

    def curve(self, n: int) -> Tensor | None:
        """(P,) top-n accuracy with a common K = 1..P, or None if no filter needs it."""
        return accuracy(self.prefixes.ranks, n) if "prefixes" in vars(self) else None

    def by_class(self, ranks: Tensor) -> Tensor:
        """(C,) or (C, G) accuracy of each class, NaN without images, from ranks (N,) or (N, G)."""
        return class_accuracy(ranks, self.images.labels, self.n_classes)

    def confidence(self, temperature: float) -> Tensor:
        """(N,) probability of the class that `all` says, under a softmax of the temperature times the cosines."""
        return confidences(self.images.mean, self.all.vectors, temperature)

    def _ranks(self, vectors: Tensor) -> Tensor:
        """Ranks of the evaluated images under (C, D) or (G, C, D) class vectors."""
        return true_ranks(self.images.mean, vectors, self.images.labels).cpu()

    def _candidates(self, name: str) -> Candidates:
        if FILTERS[name].weights is topk:
            return self.prefixes
        if name not in self._found:
            settings = FILTERS[name].candidates(self.u)
            weights = [FILTERS[name].weights(self.u, value) for value in settings]
            stack = torch.stack([class_vectors(self.prompts.mean, one) for one in weights])
            self._found[name] = Candidates(settings, stack, self._ranks(stack), [_n_kept(one) for one in weights])
        return self._found[name]

    def _fixed(self, name: str, setting) -> Classifier:
        """A filter that chooses nothing."""
        one = FILTERS[name]
        weights = one.weights(self.u) if one.setting is None else one.weights(self.u, setting)
        vectors = class_vectors(self.prompts.mean, weights)
        kept, shown = None if one.soft else _n_kept(weights), setting if one.candidates and name != "topk" else None
        return Classifier(vectors, self._ranks(vectors), kept, shown)

    def _learn(self, name: str, images: LabelledMeans) -> Classifier:
        """The best setting of a filter on some images, or what EM fits to a few of them."""
        if FILTERS[name].weights is None:
            labelled, prior = name == "reweighted", self.options["prior"]
            labels = images.labels.tolist() if labelled else [0] * len(images.names)
            few = few_of_each(labels, images.names, self.options["shots" if labelled else "unlabelled"])
            means = images.mean[torch.tensor(few).to(images.mean.device)]
            fit = (
                fit_labelled(means, images.labels[few], self.prompts, prior)
                if labelled
                else fit_unlabelled(means, self.prompts, prior)
            )
            return Classifier(class_vectors(self.prompts.mean, fit.weights), fit=fit)
        found = self._candidates(name)
        if images is self.images:
            ranks = found.ranks
        elif images.rows is not None:
            ranks = found.ranks[images.rows]
        else:
            ranks = true_ranks(images.mean, found.stack, images.labels).cpu()
        if name == "best-topk":
            k = best_class_k(class_accuracy(ranks, images.labels, self.n_classes))
            return Classifier(found.stack[k - 1, torch.arange(self.n_classes)], kept=k.cpu())
        g = best_common_k(ranks) - 1
        setting = None if name == "topk" else found.settings[g]
        return Classifier(found.stack[g], found.ranks[:, g], found.kept[g], setting)

    def _evaluate(self, name: str) -> None:
        """Add the rows of a filter."""
        one = FILTERS[name]
        if not chooses(name, self.options):
            found = self._fixed(name, self.options.get(one.setting))
            given = f", {'K' if one.setting == 'k' else one.setting} given" if one.candidates else ""
            self._add(name, found.ranks, [found], ZERO_SHOT + given)
            if given:
                self.kept[name] = found.kept, ""
            return
        unlabelled = name == "reweighted-unlabelled"
        note, other = (TRANSDUCTIVE, UNLABELLED) if unlabelled else (ORACLE, FEW_SHOT)
        other = f"{other} ({self.source})"
        own = self._learn(name, self.images)
        own = own._replace(ranks=self._ranks(own.vectors) if own.ranks is None else own.ranks)
        self._add(name, own.ranks, [own], note)
        if own.kept is not None:
            self.kept[name] = own.kept, ORACLE
        if name == "best-topk":
            self.oracle = own
            bound = self.prefixes.ranks.gather(1, (own.kept[self.images.labels] - 1).unsqueeze(1)).squeeze(1)
            self._add(name, bound, [own], f"{ORACLE}, upper bound", UPPER_BOUND)
        learned = [self._learn(name, split.images) for split in self.splits]
        for number, (fit, where) in enumerate([(own.fit, note), *((best.fit, other) for best in learned)]):
            if fit is not None:
                self.reweighted[f"{name}, {where}" + (f", {number}" if number and len(learned) > 1 else "")] = fit
        if learned:
            ranked = torch.empty_like(own.ranks)
            for (_, scored), best in zip(self.splits, learned):
                ranked[scored] = (self._ranks(best.vectors) if best.ranks is None else best.ranks)[scored]
            self._add(name, ranked, learned, other)

    def _add(self, name: str, ranks: Tensor, found: Sequence[Classifier], note: str, title: str | None = None) -> None:
        """Add a row, but for its intervals; `found`: the classifiers that scored the images, of several folds."""
        right, base, setting = ranks < 1, self.all.ranks, None
        k = None if found[0].kept is None else torch.cat([one.kept for one in found])
        title = title or name
        if found[0].setting is not None:
            setting = sum(one.setting for one in found) / len(found)
            title = f"{name}, {'mean ' if len(found) > 1 else ''}{setting:.3g}"
        if name == "reweighted":
            title = f"{name}, up to {self.options['shots']} shots"
        top1 = float(accuracy(ranks))
        self._row_ranks.append(ranks)
        self.rows.append({
            "filter": name, "title": title, "k": None if k is None else float(k.double().mean()), "top1": top1,
            "top5": float(accuracy(ranks, 5)), "top1_se": standard_error(right.double()),
            "mean_per_class_recall": float(self.by_class(ranks).nanmean()), "gain": top1 - float(accuracy(base)),
            "gain_se": standard_error(right.double() - (base < 1).double()), "note": note, "setting": setting,
            "intervals": {}, "k_varies": k is not None and len(k.unique()) > 1,
        })  # fmt: skip

    def _add_intervals(self) -> None:
        """Bootstrap intervals of the rows over the same resamples; none of a single image."""
        if len(self.images.labels) < 2:
            return
        ranks = torch.stack([self.all.ranks, *self._row_ranks], dim=1)
        first = resample_accuracy(ranks < 1, self.images.labels, self.n_classes)
        five = resample_accuracy(ranks < 5, self.images.labels, self.n_classes)
        for q, row in enumerate(self.rows, 1):
            top1 = first.accuracy[:, q]
            values = {"top1": top1, "top5": five.accuracy[:, q], "mean_per_class_recall": first.per_class[:, q]}
            values["gain"] = top1 - first.accuracy[:, 0]
            row["intervals"] = {name: interval(value) for name, value in values.items()}


def _n_kept(weights: Tensor) -> Tensor:
    return (weights > 0).sum(dim=1).cpu()


def best_common_k(ranks: Tensor) -> int:
    """K with the best top-1 accuracy for all classes; ranks (N, P) under a common K. Ties go to the largest K."""
    return _last_best((ranks < 1).double().mean(dim=0, keepdim=True)).item()


def best_class_k(per_class: Tensor) -> Tensor:
    """(C,) K in 1..P from acc_c(K) (C, P); ties go to the largest K, and so does a class without images (NaN)."""
    return _last_best(per_class.nan_to_num(nan=-1.0))


def _last_best(score: Tensor) -> Tensor:
    # 1e-9 absorbs the rounding of means; images count in steps of 1 / N
    best = score >= score.max(dim=1, keepdim=True).values - 1e-9
    return (best * torch.arange(1, score.shape[1] + 1, device=score.device)).max(dim=1).values
