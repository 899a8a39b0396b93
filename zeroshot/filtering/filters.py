"""Prompt filters: weights over the prompts of a class from their uncertainty, and the choice of K.

A filter is a pure function from uncertainties u (C, P) to weights (C, P) that sum to one over the prompts of a class.
C classes, P prompts of a class, K prompts kept, N images. Source: PCME++ §3.5, Table 5 and §C.6.

Choice of K: with a common K all classes keep their K most certain prompts; acc_c(K) is the accuracy of the images of
class c, acc(K) that of all images. `topk` takes the K with the best acc(K), `best-topk` for each class the K with the
best acc_c(K); ties go to the largest K. The paper leaves open how many prompts the other classes keep meanwhile; here
the same K. So `best-topk` has two numbers: the accuracy of the classifier with a K for each class, and the mean over
classes of max_K acc_c(K), an upper bound. Chosen on the scored images, all of these are oracles.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from probemb.errors import UserError, nearest
from probemb.models.inputs import check_variances
from zeroshot.filtering.reweighting import PRIOR_IMAGES
from zeroshot.filtering.thresholds import SETTINGS, class_deviation, quantile, threshold


@dataclass(frozen=True)
class FilterOptions:
    """Options of the filters.

    Attributes:
        single: index of the prompt that `single` keeps.
        k: prompts to keep; an int for `topk`, one per class (C,) for `best-topk`; None keeps all.
        temperature: of `weighted`, in standard deviations of the class' own uncertainties.
        deviations, threshold, quantile: settings of the threshold filters; None where they are to be chosen.
        shots: labelled images of each class for `reweighted`; unlabelled: images for `reweighted-unlabelled`.
        prior: pseudo-images of each class, evenly over its prompts: the strength of the Dirichlet prior of both.
    """

    single: int = 0
    k: int | Tensor | None = None
    temperature: float = 1.0
    deviations: float | None = None
    threshold: float | None = None
    quantile: float | None = None
    shots: int = 16
    unlabelled: int = 2000
    prior: float = PRIOR_IMAGES


def single(u: Tensor, options: FilterOptions) -> Tensor:
    """One prompt, the same for every class: "a photo of a {}."."""
    weights = torch.zeros_like(u)
    weights[:, options.single] = 1.0
    return weights


def all_prompts(u: Tensor, options: FilterOptions) -> Tensor:
    """Every prompt, equally."""
    return torch.full_like(u, 1.0 / u.shape[1])


def topk(u: Tensor, options: FilterOptions) -> Tensor:
    """The K most certain prompts of each class, equally; K is one number, or one for each class."""
    n_prompts = u.shape[1]
    k = torch.as_tensor(n_prompts if options.k is None else options.k, device=u.device).reshape(-1, 1)
    if int(k.min()) < 1 or int(k.max()) > n_prompts:
        raise UserError(
            f"K must lie between 1 and the number of prompts, {n_prompts}.", "Give another --k, or more templates."
        )
    place = u.argsort(dim=1, stable=True).argsort(dim=1)  # 0 = the most certain prompt
    return (place < k).to(u.dtype) / k


def weighted(u: Tensor, options: FilterOptions) -> Tensor:
    """Soft weights: softmax of -z / temperature, z the uncertainty standardised within its class.

    Standardising makes the weights independent of the scale of u, which differs between models and classes.
    """
    spread = u.std(dim=1, keepdim=True, correction=0)
    z = torch.where(spread > 0, (u - u.mean(dim=1, keepdim=True)) / spread, 0.0)
    return torch.softmax(-z / options.temperature, dim=1)


def inverse_variance(u: Tensor, options: FilterOptions) -> Tensor:
    """Soft weights 1 / u: the precision weighting of a product of isotropic normals."""
    return torch.softmax(-u.clamp_min(torch.finfo(u.dtype).tiny).log(), dim=1)  # 1 / u could overflow


FILTERS: dict[str, Callable[[Tensor, FilterOptions], Tensor]] = {
    "single": single,
    "all": all_prompts,
    "topk": topk,
    "best-topk": topk,
    "weighted": weighted,
    "inverse-variance": inverse_variance,
    "class-deviation": class_deviation,
    "threshold": threshold,
    "quantile": quantile,
}
REWEIGHTED = ("reweighted", "reweighted-unlabelled")  # by EM, from images; `reweighting` has them
SOFT = {  # options, and the filters that use them
    "temperature": ("weighted",),
    "shots": ("reweighted",),
    "unlabelled": ("reweighted-unlabelled",),
    "prior": REWEIGHTED,
}
BY_UNCERTAINTY = (*(name for name in FILTERS if name not in ("single", "all")), *REWEIGHTED)


def fitting_filters(names: Sequence[str], model, name: str, wanted: str) -> list[str]:
    """The filters that a model allows: of a point model only those that read no uncertainty.

    Args:
        name: of the model; wanted: --filter, of which `names` are the rows.

    Raises:
        UserError: a point model, and a filter by uncertainty was asked for by its name.
    """
    if model.probabilistic:
        return list(names)
    if any(one in BY_UNCERTAINTY for one in wanted.split(",")):
        check_variances(model, name, f"--filter {wanted} reads it", "Say --filter all, single, or every.")
    return [name for name in names if name not in BY_UNCERTAINTY]


def filter_names(wanted: str) -> list[str]:
    """The filters in the table for --filter: `single`, `all` and those named, separated by commas, or every one.

    Raises:
        UserError: an unknown name.
    """
    if wanted == "every":
        return [*FILTERS, *REWEIGHTED]
    known = [*FILTERS, *REWEIGHTED, "every"]
    for name in wanted.split(","):
        if name not in known[:-1]:
            raise UserError(f"There is no filter '{name}'.{nearest(name, known)}", f"Known are: {', '.join(known)}.")
    return list(dict.fromkeys(["single", "all", *wanted.split(",")]))


def choosing(filters: Sequence[str], options: FilterOptions) -> list[str]:
    """Those of the filters that choose something on images, or are fitted to images."""
    given = {"topk": options.k, **{name: getattr(options, option) for name, option in SETTINGS.items()}}
    return [name for name in filters if name in ("best-topk", *REWEIGHTED) or (name in given and given[name] is None)]


def best_common_k(ranks: Tensor) -> int:
    """K with the best top-1 accuracy for all classes; ranks (N, P) under a common K. Ties go to the largest K."""
    return _last_best((ranks < 1).double().mean(dim=0, keepdim=True)).item()


def best_class_k(per_class: Tensor) -> Tensor:
    """K of each class from acc_c(K) (C, P); ties go to the largest K, and so does a class without images (NaN).

    Returns:
        (C,) int64 in 1..P.
    """
    return _last_best(per_class.nan_to_num(nan=-1.0))


def _last_best(score: Tensor) -> Tensor:
    n_prompts = score.shape[1]
    # 1e-9 absorbs the rounding of means; images count in steps of 1 / N
    best = score >= score.max(dim=1, keepdim=True).values - 1e-9
    return (best * torch.arange(1, n_prompts + 1, device=score.device)).max(dim=1).values


@dataclass(frozen=True)
class Selection:
    """The images that K is chosen on: `oracle`, `train` or `folds:N`."""

    on: str
    folds: int = 0

    @property
    def label(self) -> str:
        """The name in tables: "folds:5", "train", "oracle"."""
        return f"folds:{self.folds}" if self.folds else self.on


def parse_selection(text: str) -> Selection:
    """Read --select-on.

    Raises:
        UserError: anything but oracle, train and folds:N with N >= 2.
    """
    if text in ("oracle", "train"):
        return Selection(text)
    word, _, number = text.partition(":")
    if word == "folds" and (number or "5").isdecimal() and int(number or "5") >= 2:
        return Selection("folds", int(number or "5"))
    raise UserError(
        f"--select-on '{text}' is not a way to choose K.{nearest(text, ['oracle', 'train', 'folds:5'])}",
        "Say oracle, train (with --select-data PATH) or folds:5.",
    )


def stratified_folds(
    labels: Sequence[int], names: Sequence[str], n_folds: int, groups: Sequence[int] | None = None
) -> Tensor:
    """Distribute the images of each class over folds, as a function of labels and names in any order.

    Within a class, images are ordered by the hash of their name and dealt round-robin; each class continues where the
    last one stopped, so that fold sizes differ by at most one image. Images of one group go where its first one in that
    order goes, so that no picture is both chosen on and scored.

    Args:
        groups: for each image a number that images of the same picture share; None: all differ.

    Returns:
        (N,) int64 fold of each image.

    Raises:
        UserError: no class has two images, so no image could be scored with a K chosen on its own class.
    """
    labels = [int(label) for label in labels]
    groups = range(len(labels)) if groups is None else groups
    counts = Counter(label for label, _ in set(zip(labels, groups)))
    if max(counts.values(), default=0) < 2:
        raise UserError(
            f"--select-on folds:{n_folds} is not possible here: no class has more than one image, "
            "so nothing is left to choose K on.",
            "Use data with several images a class, or --select-on train with --select-data PATH.",
        )
    if (distinct := len(set(groups))) < n_folds:
        raise UserError(
            f"--select-on folds:{n_folds} needs at least {n_folds} images and there are {distinct}.",
            "Ask for fewer folds.",
        )
    rank = {name: hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest() for name in names}
    order = sorted(range(len(labels)), key=lambda i: (labels[i], rank[names[i]], names[i]))
    turn: dict[int, int] = {}
    for i in order:
        turn.setdefault(groups[i], len(turn))
    return torch.tensor([turn[group] % n_folds for group in groups], dtype=torch.int64)
