"""Prompt filters: classifiers made of prompts that are chosen, or weighted, by their uncertainty.

FILTERS is the table. C classes, P prompts of a class, K prompts kept, G settings of a filter, N images, D dimensions.
Source: PCME++ §3.5, Table 5 and §C.6; thresholds and re-weighting: ProLIP (Chun et al., ICLR 2025).

acc_c(K) is the accuracy of the images of class c with a common K: all classes keep their K most certain prompts. `topk`
takes the K with the best acc(K), `best-topk` for each class that with the best acc_c(K); ties go to the largest K. The
paper leaves open how many prompts the other classes keep meanwhile, so `best-topk` has two numbers: the accuracy of the
classifier with a K for each class, and the mean over classes of max_K acc_c(K), an upper bound.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from probemb.errors import UserError, names_of
from probemb.evaluation.classification import accuracy, class_accuracy, class_vectors, prefix_vectors, true_ranks
from probemb.gaussian import Gaussian
from probemb.metrics.bootstrap import interval, resample_accuracy
from probemb.metrics.uncertainty import standard_error
from zeroshot.evaluations.reweighting import Reweighting, few_of_each, fit_labelled, fit_unlabelled, name_hash

KINDS = ("zero-shot", "few-shot", "unlabelled", "transductive", "oracle")  # of a row's note
ZERO_SHOT, FEW_SHOT, UNLABELLED, TRANSDUCTIVE, ORACLE = KINDS
UPPER_BOUND = "best-topk, per-class upper bound"
STEPS = 20  # values of a threshold that is chosen


# ---------------------------------------------------------------------- weights (C, P) from uncertainties u (C, P)


def topk(u: Tensor, k: int) -> Tensor:
    """The K most certain prompts of each class, equally."""
    return (_places(u) < k).to(u.dtype) / k


def weighted(u: Tensor, temperature: float) -> Tensor:
    """Soft weights: softmax of -z / temperature, z the uncertainty standardised within its class."""
    spread = u.std(dim=1, keepdim=True, correction=0)
    z = torch.where(spread > 0, (u - u.mean(dim=1, keepdim=True)) / spread, 0.0)
    return torch.softmax(-z / temperature, dim=1)


def class_deviation(u: Tensor, deviations: float) -> Tensor:
    """The prompts of a class below its mean uncertainty + `deviations` standard deviations."""
    exact = u.double()  # the mean of equal prompts is theirs, to the bit
    spread = exact.std(dim=1, keepdim=True, correction=0)
    return _keep_below(u, exact.mean(dim=1, keepdim=True) + deviations * spread)


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


class Filter(NamedTuple):
    """A row of the table: `weights` from u and the option `setting`, None where they are fitted to images.

    `candidates`: of u, the settings to choose from where none is given; `soft`: no prompt is dropped; `reads_u`: a
    point model cannot have it.
    """

    weights: Callable[..., Tensor] | None = None
    setting: str | None = None
    candidates: Callable[[Tensor], list] | None = None
    soft: bool = False
    reads_u: bool = True


FILTERS = {
    "single": Filter(  # the same prompt for every class: "a photo of a {}."
        lambda u, i: torch.zeros_like(u).index_fill_(1, torch.tensor(i, device=u.device), 1.0), "single", reads_u=False,
    ),
    "all": Filter(lambda u: torch.full_like(u, 1.0 / u.shape[1]), reads_u=False),
    "topk": Filter(topk, "k", lambda u: list(range(1, u.shape[1] + 1))),
    "best-topk": Filter(topk, None, lambda u: list(range(1, u.shape[1] + 1))),
    "weighted": Filter(weighted, "temperature", soft=True),
    # 1 / u, the precision weighting of a product of isotropic normals, which could overflow
    "inverse-variance": Filter(lambda u: (-u.clamp_min(torch.finfo(u.dtype).tiny).log()).softmax(dim=1), soft=True),
    "class-deviation": Filter(class_deviation, "deviations", lambda u: [step / 4 for step in range(-8, 9)]),
    "threshold": Filter(
        lambda u, limit: _keep_below(u, u.new_tensor(limit)), "threshold",
        lambda u: torch.linspace(float(u.min()), float(u.max()), STEPS + 1, dtype=torch.float64)[1:].tolist(),
    ),
    "quantile": Filter(quantile, "quantile", lambda u: [(i + 1) / STEPS for i in range(STEPS)]),
    "reweighted": Filter(soft=True),
    "reweighted-unlabelled": Filter(soft=True),
}  # fmt: skip


def filter_names(wanted: str) -> list[str]:
    """The filters in the table for --filter: `single`, `all` and those named, separated by commas, or every one.

    Raises UserError: an unknown name.
    """
    names = names_of(wanted, [*FILTERS, "every"], "filter")
    return list(FILTERS) if "every" in names else list(dict.fromkeys(["single", "all", *names]))


class LabelledMeans(NamedTuple):
    """Embedded images: means (M, D) of unit length, labels (M,), names, which decide folds and the few that are taken.

    `rows`: (N,) bool, which of the evaluated images these are; None where they are others.
    """

    mean: Tensor
    labels: Tensor
    names: Sequence[str]
    rows: Tensor | None = None


Split = tuple[LabelledMeans, Tensor]  # images to choose on, and (N,) bool the evaluated images that the choice scores


def fold_count(select_on: str) -> int:
    """N of `--select-on folds:N`, 0 of oracle and train. Raises UserError."""
    if select_on in ("oracle", "train"):
        return 0
    word, _, number = select_on.partition(":")
    if word == "folds" and number.isdecimal() and int(number) >= 2:
        return int(number)
    raise UserError(
        f"--select-on '{select_on}' is not a way to choose K.", "Say oracle, train (with --select-data) or folds:5."
    )


def stratified_folds(
    labels: Sequence[int], names: Sequence[str], n_folds: int, groups: Sequence[int] | None = None
) -> Tensor:
    """(N,) fold of each image, a function of labels and names in any order; images of one group share theirs.

    Within a class, images are dealt round-robin in the order of their names' hashes; each class continues where the
    last one stopped. Raises UserError: no class has two images, or there are fewer images than folds.
    """
    labels = [int(label) for label in labels]
    groups = range(len(labels)) if groups is None else groups
    counts = Counter(label for label, _ in set(zip(labels, groups)))
    if max(counts.values(), default=0) < 2 or len(set(groups)) < n_folds:
        what = f"--select-on folds:{n_folds} is not possible: too few images, or no class has more than one."
        raise UserError(what, "Use fewer folds, data with several images per class, or --select-on train.")
    order = sorted(range(len(labels)), key=lambda i: (labels[i], name_hash(names[i]), names[i]))
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
        splits.append((LabelledMeans(means, images.labels[others], names, others), ~others))
    return splits


class Classifier(NamedTuple):
    """A filter with its setting: class vectors (C, D), ranks (N,) of the images, prompts kept (C,) if any drop."""

    vectors: Tensor
    ranks: Tensor
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
        kept: filter -> (C,) prompts that each class keeps, and the note of their row.
    """

    def __init__(
        self, images: LabelledMeans, prompts: Gaussian, names: Sequence[str], options: Mapping[str, Any],
        splits: Sequence[Split] = (), source: str = "",
    ):  # fmt: skip
        self.images = images._replace(rows=torch.ones(len(images.labels), dtype=torch.bool))
        self.prompts, self.options, self.splits, self.source = prompts, options, splits, source
        self.u = prompts.uncertainty()
        self.n_classes, self.n_prompts = self.u.shape
        self.counts = torch.bincount(images.labels, minlength=self.n_classes)
        self.rows: list[dict] = []
        self.kept: dict[str, tuple[Tensor, str]] = {}
        self.reweighted: dict[str, Reweighting] = {}
        self.oracle: Classifier | None = None
        self._candidates: dict[str, Candidates] = {}
        self._row_ranks: list[Tensor] = []
        self.all = self._classifier(FILTERS["all"].weights(self.u))
        for name in names:
            self._evaluate(name)
        self._add_intervals()

    def curve(self, n: int) -> Tensor | None:
        """(P,) top-n accuracy with a common K = 1..P, or None if no filter needs it."""
        return accuracy(self.candidates("topk").ranks, n) if "topk" in self._candidates else None

    def by_class(self, ranks: Tensor) -> Tensor:
        """Accuracy of each class, (C,), or (C, K) for ranks (N, K); NaN for a class without images."""
        return class_accuracy(ranks, self.images.labels, self.n_classes)

    def _ranks(self, vectors: Tensor, images: LabelledMeans | None = None) -> Tensor:
        """Ranks of the evaluated images, or of others, under (C, D) or (G, C, D) class vectors."""
        images = images or self.images
        return true_ranks(images.mean, vectors, images.labels).cpu()

    def _classifier(self, weights: Tensor, **more) -> Classifier:
        vectors = class_vectors(self.prompts.mean, weights)
        return Classifier(vectors, self._ranks(vectors), **more)

    def candidates(self, name: str) -> Candidates:
        """Classifiers of every setting that a filter chooses from."""
        name = "topk" if name == "best-topk" else name
        if name not in self._candidates:
            settings = FILTERS[name].candidates(self.u)
            weights = [FILTERS[name].weights(self.u, value) for value in settings]
            if name == "topk":
                stack = prefix_vectors(self.prompts.mean, self.u)
            else:
                stack = torch.stack([class_vectors(self.prompts.mean, one) for one in weights])
            self._candidates[name] = Candidates(settings, stack, self._ranks(stack), [_n_kept(w) for w in weights])
        return self._candidates[name]

    def _fit(self, images: LabelledMeans, labelled: bool) -> Classifier:
        """Weights that EM finds on a few of some images."""
        labels, prior = images.labels.tolist() if labelled else [0] * len(images.names), self.options["prior"]
        few = few_of_each(labels, images.names, self.options["shots" if labelled else "unlabelled"])
        means = images.mean[torch.tensor(few).to(images.mean.device)]
        if labelled:
            fit = fit_labelled(means, images.labels[few], self.prompts, prior)
        else:
            fit = fit_unlabelled(means, self.prompts, prior)
        return self._classifier(fit.weights, fit=fit)

    def _choose(self, name: str, images: LabelledMeans) -> Classifier:
        """The best setting of a filter on some images."""
        if FILTERS[name].weights is None:
            return self._fit(images, name == "reweighted")
        found = self.candidates(name)
        ranks = self._ranks(found.stack, images) if images.rows is None else found.ranks[images.rows]
        if name == "best-topk":
            k = best_settings(class_accuracy(ranks, images.labels, self.n_classes)) + 1
            vectors = found.stack[k - 1, torch.arange(self.n_classes)]
            return Classifier(vectors, self._ranks(vectors), k.cpu())
        g = int(best_settings(accuracy(ranks)[None]))
        setting = None if name == "topk" else found.settings[g]
        return Classifier(found.stack[g], found.ranks[:, g], found.kept[g], setting)

    def _evaluate(self, name: str) -> None:
        """Add the rows of a filter."""
        rule, value = FILTERS[name], self.options.get(FILTERS[name].setting)
        if rule.weights is not None and (rule.candidates is None or value is not None):
            weights = rule.weights(self.u) if rule.setting is None else rule.weights(self.u, value)
            shown = value if rule.candidates and name != "topk" else None
            given = f", {'K' if rule.setting == 'k' else rule.setting} given" if rule.candidates else ""
            kept = None if rule.soft else _n_kept(weights)
            self._add(name, [self._classifier(weights, kept=kept, setting=shown)], ZERO_SHOT + given)
            return
        unlabelled = name == "reweighted-unlabelled"
        note, other = (TRANSDUCTIVE, UNLABELLED) if unlabelled else (ORACLE, FEW_SHOT)
        other = f"{other} ({self.source})"
        own = self._choose(name, self.images)
        self._add(name, [own], note)
        if name == "best-topk":
            self.oracle = own
            bound = self.candidates(name).ranks.gather(1, (own.kept[self.images.labels] - 1).unsqueeze(1)).squeeze(1)
            self._add(name, [own._replace(ranks=bound)], f"{ORACLE}, upper bound", UPPER_BOUND)
        chosen = [self._choose(name, images) for images, _ in self.splits]
        for number, (fit, where) in enumerate([(own.fit, note), *((best.fit, other) for best in chosen)]):
            if fit is not None:
                self.reweighted[f"{name}, {where}" + (f", {number}" if number and len(chosen) > 1 else "")] = fit
        if chosen:
            self._add(name, chosen, other)

    def _add(self, name: str, found: Sequence[Classifier], note: str, title: str | None = None) -> None:
        """Add a row, but for its intervals; `found`: the classifier, or that of each split."""
        ranks = found[0].ranks.clone()
        if len(found) > 1:
            for (_, scored), best in zip(self.splits, found):
                ranks[scored] = best.ranks[scored]
        right, base, setting = ranks < 1, self.all.ranks, None
        k = None if found[0].kept is None else torch.cat([one.kept for one in found])
        if len(found) == 1 and k is not None and FILTERS[name].candidates:
            self.kept.setdefault(name, (k, note))
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


def best_settings(score: Tensor) -> Tensor:
    """(R,) the best of G settings by score (R, G); ties go to the last one, and so does a row without scores (NaN)."""
    score = score.nan_to_num(nan=-1.0)
    best = score >= score.max(dim=1, keepdim=True).values - 1e-9  # the rounding of means; images count 1 / N
    return (best * torch.arange(score.shape[1], device=score.device)).max(dim=1).values
