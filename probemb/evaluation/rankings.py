"""Rankings of images and captions: the table of them, their scores by blocks, and searches. Source: PCME++ Table C.7.

Scores are larger for closer pairs and without gradients; nothing of size N x M x D is held. CSD with any weights of the
variances and the cosine of the means separate into one dot product: |x - y|^2 + r + c = -(2x, -(|x|^2 + r), -1) . (y,
1, |y|^2 + c).

Letters: N images, M captions, D dimensions, J samples.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from probemb import distances
from probemb.cross_attention import CrossAttention, attention_scores
from probemb.errors import UserError, names_of
from probemb.evaluation.embedding import KeptTokens
from probemb.gaussian import Gaussian, at_least_float32
from probemb.losses.triplet import multi_instance_similarity
from probemb.metrics.retrieval import blocks, rank_both
from probemb.search import Index, build_index, refuse_small_gallery, rerank, search
from probemb.search.index import new_index, width_of

SAMPLE_ELEMENTS = 1 << 23  # distances between samples computed at a time
PAIR_ELEMENTS = 1 << 14  # pairs whose scores do not separate, computed at a time: fits the processor's cache
INSTANCE_ELEMENTS = 1 << 24  # dot products of single embeddings computed at a time
WHOLE_ELEMENTS = 1 << 28  # scores that `both_ways` holds: 1 GiB in float32
IMAGES, TEXTS = 64, 512  # whose tokens are read at a time
LARGE_U = 512.0  # float32 resolves 6e-5 there; squared distances of means of unit length are 4 at most
ALL = slice(None)
ANY_DIMENSION = 1024  # with which the spelling of an index is checked


@dataclass(frozen=True)
class Tolerance:
    """The weights of the captions' u (`i2t`) and of the images' u (`t2i`), and how they were chosen: "given", "oracle"
    (on the data that is scored) or "chosen on ...", by the best `metric` of the `positives` on the curve {"lambda":
    weights, "i2t": metric in [0, 1] at each, "t2i": the same}.
    """

    i2t: float = 1.0
    t2i: float = 1.0
    curve: dict[str, list[float]] | None = None
    metric: str | None = None
    positives: str | None = None
    chosen: str = "given"


@dataclass(frozen=True)
class RankingOptions:
    """a and b of the match probability, samples of each item, FAISS' index and how many of the means' neighbours are
    re-ranked, the weights of "tolerance", how "attention" scores, and the tokens of images and captions."""

    scale: float = 1.0
    shift: float = 0.0
    samples: int = 8
    factory: str = "Flat"
    candidates: int = 100
    device: str = "cpu"
    tolerance: Tolerance = Tolerance()
    attention: CrossAttention | None = None
    tokens: tuple[KeptTokens, KeptTokens] | None = None


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of N rows with M columns, of tensors, Gaussians, samples or tokens: a slice of the rows -> (rows, M)."""

    left: Any
    right: Any
    block: Callable[[Any, Any], Tensor]

    @torch.no_grad()
    def __call__(self, rows: slice) -> Tensor:
        return self.block(self.left[rows], self.right)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.left), len(self.right)

    def only(self, rows: Tensor, columns: Tensor) -> Self:
        """The scores of these rows and columns; with new samples, unless these are all."""
        return replace(self, left=_take(self.left, rows), right=_take(self.right, columns))

    def both_ways(self, most: int = WHOLE_ELEMENTS) -> tuple[Callable[[slice], Tensor], Callable[[slice], Tensor]]:
        """Scores and their transpose for repeated reading: computed once if at most `most`, else at every read."""
        if math.prod(self.shape) > most:
            return self, Scores(self.right, self.left, lambda right, left: self.block(left, right).T)
        whole = self(slice(None))
        return whole.__getitem__, whole.T.__getitem__


def _take(x, index: Tensor):
    """Some items, without a copy if they are all in order."""
    return x if len(index) == len(x) and torch.equal(index, torch.arange(len(x))) else x[index]


def dots(left_NE: Tensor, right_ME: Tensor) -> Scores:
    return Scores(left_NE, right_ME, lambda left, right: left @ right.T)


@torch.no_grad()
def tolerance_scores(a: Gaussian, b: Gaussian, i2t: float = 1.0, t2i: float = 1.0) -> Scores:
    """-(|mu_a - mu_b|^2 + t2i u_a + i2t u_b) of images (N, D) and captions (M, D): 1 and 1 is -CSD. A weight bears the
    name of the direction whose gallery it weighs. Float64 where u is so large that float32 would blur the ranking.
    """
    u_a, u_b = t2i * a.uncertainty()[:, None], i2t * b.uncertainty()[:, None]
    x, y = at_least_float32(a.mean), at_least_float32(b.mean)
    if any(len(u) and float(u.abs().max()) > LARGE_U for u in (u_a, u_b)):
        x, y, u_a, u_b = x.double(), y.double(), u_a.double(), u_b.double()
    x, y = distances.near_origin(x, y)
    row, column = -(x.square().sum(1, keepdim=True) + u_a), y.square().sum(1, keepdim=True) + u_b
    return dots(torch.cat([2 * x, row, -torch.ones_like(row)], 1), torch.cat([y, torch.ones_like(column), column], 1))


def pairwise(a: Any, b: Any, score: Callable[[Any, Any], Tensor], elements: int | None = None, each: int = 1) -> Scores:
    """Scores that do not separate, of some rows at a time: `each` numbers of a pair, and at most `elements`."""

    def block(left: Any, right: Any) -> Tensor:
        parts = blocks(len(left), len(right) * each, elements or PAIR_ELEMENTS)
        return torch.cat([score(left[rows], right) for rows in parts])

    return Scores(a, b, block)


def _closed_form(score: Callable[[Gaussian, Gaussian], Tensor], separates: bool = False) -> Callable[..., Scores]:
    """separates: the score is made of matrix products, so a whole block is computed at once."""
    return lambda a, b, _: (Scores if separates else pairwise)(a.float(), b.float(), score)


@dataclass(frozen=True, eq=False)
class _Samples:
    """Samples of N items, the same at every read, drawn again each time: all of 25,000 captions take a gigabyte."""

    gaussian: Gaussian
    seed: int
    rows: slice  # that are read

    def draw(self, number: int) -> Tensor:
        mean = self.gaussian.mean
        generator = torch.Generator(mean.device).manual_seed(self.seed + 2 * number)
        noise = torch.randn(mean.shape, dtype=mean.dtype, device=mean.device, generator=generator)
        return noise.mul_(self.gaussian.std).add_(mean)[self.rows]

    def __len__(self) -> int:
        return len(range(len(self.gaussian))[self.rows])

    def __getitem__(self, index: slice | Tensor) -> Self:
        """Of a slice the same samples; of other rows new ones."""
        return replace(self, rows=index) if isinstance(index, slice) else _Samples(self.gaussian[index], self.seed, ALL)


def sampled(a: Gaussian, b: Gaussian, score: Callable[[Tensor, Tensor], Tensor], n_samples: int) -> Scores:
    """A mean over pairs of samples: `score` of samples (N, J, D) and (M, 1, D). One set of samples for all pairs."""

    def block(left: _Samples, right: _Samples) -> Tensor:
        z_NJD = torch.stack([left.draw(j) for j in range(n_samples)], 1)
        total, step = z_NJD.new_zeros(len(left), len(right)), max(1, SAMPLE_ELEMENTS // max(1, len(right)))
        for k in range(n_samples):
            z_M1D = right.draw(k)[:, None]
            for some, part in zip(total.split(step), z_NJD.split(step)):
                some += score(part, z_M1D)
            del z_M1D  # before the next one is drawn
        return total.div_(n_samples)

    return Scores(_Samples(a.float(), 1, ALL), _Samples(b.float(), 2, ALL), block)


def match_probability_scores(a: Gaussian, b: Gaussian, scale: float, shift: float, n_samples: int = 8) -> Scores:
    score = partial(distances.match_probability_of_samples, scale=float(scale), shift=float(shift))
    return sampled(a, b, score, n_samples)


def _multi_instance(a: Gaussian, b: Gaussian) -> Scores:
    """The largest dot product of any of a row's K embeddings with any of a column's. Source: PVSE."""
    left, right = (at_least_float32(g.mean if g.mean.ndim == 3 else g.mean[:, None]) for g in (a, b))
    return pairwise(left, right, multi_instance_similarity, INSTANCE_ELEMENTS, right.shape[1] ** 2)


def _attention(a: Gaussian, b: Gaussian, options: RankingOptions) -> Scores:
    """Stacked cross attention of tokens; the Gaussians have no part in it. Source: SCAN."""

    def block(images: KeptTokens, texts: KeptTokens) -> Tensor:
        device = options.device
        found = torch.empty(len(images), len(texts), device=device)
        for some in blocks(len(texts), 1, TEXTS):
            words = texts[some].read(device)
            for part in blocks(len(images), 1, IMAGES):
                found[part, some] = attention_scores(images[part].read(device), words, options.attention)
        return found

    return Scores(*options.tokens, block)


# Numbers that a gallery keeps of every item. Source: PCME Table 1.
NUMBERS: dict[str, Callable[[Gaussian, RankingOptions], int]] = {
    "mean": lambda gallery, o: gallery.mean[0].numel(),
    "mean and u": lambda gallery, o: gallery.shape[-1] + 1,
    "both": lambda gallery, o: 2 * gallery.shape[-1],
    "samples": lambda gallery, o: o.samples * gallery.shape[-1],  # could be drawn again from 2 D numbers, as here
    "tokens": lambda gallery, o: o.tokens[1].items[0].shape[1] * round(sum(map(len, o.tokens[1].items)) / len(gallery)),
}


class Ranking(NamedTuple):
    """A ranking; its name in RANKINGS is that of --rankings, whose help lists them all.

    how: it is computed, with fields of RankingOptions; keeps: one of NUMBERS; scores: of images and captions, None: by
    a search in an index of the form `index`; variances: it reads them, so it is not of points; usual: measured where no
    names are given; several: of K embeddings an item.
    """

    title: str
    how: str
    keeps: str
    scores: Callable[[Gaussian, Gaussian, RankingOptions], Scores] | None = None
    index: str = "mean"
    variances: bool = False
    usual: bool = False
    several: bool = False


_USUAL, _SAMPLES = {"variances": True, "usual": True}, "sampled, {samples} x {samples} samples a pair"

RANKINGS: dict[str, Ranking] = {
    "csd": Ranking("CSD", "closed form", "mean and u", lambda a, b, o: tolerance_scores(a, b), usual=True),
    "mean": Ranking("mean only", "cosine of the means", "mean",
                    lambda a, b, o: dots(at_least_float32(a.mean), at_least_float32(b.mean)), usual=True),
    "wasserstein2": Ranking("2-Wasserstein", "closed form", "both",
                            _closed_form(lambda x, y: -distances.wasserstein2(x, y), separates=True), **_USUAL),
    "match-probability": Ranking("match probability", _SAMPLES, "samples",
                                 lambda a, b, o: match_probability_scores(a, b, o.scale, o.shift, o.samples), **_USUAL),
    "tolerance": Ranking(
        "tolerance", "CSD with the captions' u times {tolerance.i2t:g} and the images' u times {tolerance.t2i:g}",
        "mean and u", lambda a, b, o: tolerance_scores(a, b, o.tolerance.i2t, o.tolerance.t2i), **_USUAL),
    "faiss-mean": Ranking("FAISS on the means", "{factory}, no re-ranking", "mean", usual=True),
    "faiss-rerank": Ranking("FAISS, re-ranked", "{factory}, {candidates} candidates re-ranked by adding their "
                            "uncertainty", "mean and u", usual=True),
    "faiss-csd": Ranking("FAISS on CSD, D + 1", "{factory} in D + 1 dimensions, which is CSD itself", "mean and u",
                         index="csd", usual=True),
    "log-likelihood": Ranking("log-likelihood", "log of the expected likelihood kernel, closed form", "both",
                              _closed_form(lambda x, y: -distances.elk(x, y)), variances=True),
    "inclusion": Ranking("inclusion", "of the image in the caption, closed form", "both",
                         _closed_form(distances.inclusion), variances=True),
    "kl": Ranking("KL(image || caption)", "closed form, from the image to the caption", "both",
                  _closed_form(lambda x, y: -distances.kl(x, y), separates=True), variances=True),
    "reverse-kl": Ranking("KL(caption || image)", "closed form, from the caption to the image", "both",
                          _closed_form(lambda x, y: -distances.kl(y, x).T, separates=True), variances=True),
    "min-kl": Ranking("smaller KL", "closed form, the smaller one of both directions", "both",
                      _closed_form(lambda x, y: -distances.min_kl(x, y), separates=True), variances=True),
    "symmetric-kl": Ranking("symmetric KL", "closed form, the mean of both directions", "both",
                            _closed_form(lambda x, y: -distances.symmetric_kl(x, y), separates=True), variances=True),
    "bhattacharyya": Ranking("Bhattacharyya", "closed form", "both",
                             _closed_form(lambda x, y: -distances.bhattacharyya(x, y)), variances=True),
    "average-l2": Ranking("average L2", _SAMPLES, "samples", variances=True, scores=lambda a, b, o: sampled(
        a, b, lambda x, y: -distances.mean_distance_of_samples(x, y), o.samples)),
    "multi-instance": Ranking(
        "closest of the embeddings", "largest cosine of any of the image's embeddings with any of the caption's",
        "mean", lambda a, b, o: _multi_instance(a, b), several=True),
    "attention": Ranking("cross attention", "tokens attend to tokens, {attention.direction}", "tokens", _attention),
    "order": Ranking("order", "what the caption exceeds the image by, squared", "mean",
                     _closed_form(lambda x, y: distances.order_similarity(x.mean, y.mean))),
}  # fmt: skip


def ranking_names(text: str | None) -> list[str]:
    """Names separated by commas; for None the usual ones, see `fitting`, without FAISS those that need none. Raises
    UserError.
    """
    if text is not None:
        return names_of(text, RANKINGS, "ranking")
    return [name for name, one in RANKINGS.items() if one.usual and (one.scores is not None or find_spec("faiss"))]


def fitting(names: Sequence[str], model, given: bool) -> list[str]:
    """The rankings that fit a model; if none were `given`, the one that it was trained for first. Raises UserError."""
    unfit = {name: why for name in names if (why := _unfit(name, model))}
    if given and unfit:
        name, why = next(iter(unfit.items()))
        what = f"The ranking {name} does not fit a model {why}."
        raise UserError(what, f"Leave --rankings out, or choose {model.ranking}.")
    left = [name for name in names if name not in unfit]
    if given or (model.ranking == "mean" and not model.probabilistic):  # which csd is the same as
        return left
    return [model.ranking, *(name for name in left if name != model.ranking)]


def _unfit(name: str, model) -> str | None:
    ranking = RANKINGS[name]
    if name == "attention" and model.attention is None:
        return "that was not trained for it"
    if ranking.several != (model.n_embeddings > 1):
        return f"with {model.n_embeddings} embedding{'s' * (model.n_embeddings > 1)} of an item"
    if ranking.variances and not model.probabilistic:
        return "without uncertainty, a point model: it reads variances"
    if name == "match-probability" and not model.match_model.matches:
        return "whose loss did not train a and b"
    return None


def check_factory(factory: str, names: Sequence[str], count: int) -> None:
    """Refuse a string that FAISS does not know, or for too few items, if a ranking needs it. Raises UserError."""
    for form in {RANKINGS[name].index for name in names if RANKINGS[name].scores is None}:
        new_index(width_of(ANY_DIMENSION, form, factory), factory)
        refuse_small_gallery(factory, count)


class Ranked(NamedTuple):
    """Ranked lists of both directions, and their cost: milliseconds a query, seconds to build indexes."""

    i2t: Tensor
    t2i: Tensor
    ms_per_query: float
    build_seconds: float | None


class Ranker:
    """Ranks Gaussians (N, D) and (M, D) in both directions, or some rows alone; depth: of either direction's lists."""

    def __init__(self, name: str, images: Gaussian, captions: Gaussian, options: RankingOptions = RankingOptions()):
        self.name, self.sides, self.options = name, (images, captions), options
        self.scores = None if RANKINGS[name].scores is None else scores_of(name, images, captions, options)

    def __call__(self, depth: tuple[int, int], rows: tuple[Tensor, Tensor] | None = None) -> Ranked:
        start, build = time.perf_counter(), None
        if self.scores is not None:
            part = self.scores if rows is None else self.scores.only(*rows)
            lists, n = rank_both(part, *part.shape, depth), sum(part.shape)
        else:
            sides = self.sides if rows is None else [side[some] for side, some in zip(self.sides, rows)]
            n, form = sum(map(len, sides)), RANKINGS[self.name].index
            indexes = [build_index(gallery, self.options.factory, form) for gallery in sides[::-1]]
            build = time.perf_counter() - start
            lists = [self._search(*one) for one in zip(indexes, sides, depth)]
        return Ranked(*lists, 1000 * (time.perf_counter() - start - (build or 0)) / n, build)

    def _search(self, index: Index, queries: Gaussian, depth: int) -> Tensor:
        depth, candidates = min(depth, len(index)), min(self.options.candidates, len(index))
        if self.name != "faiss-rerank":
            return search(index, queries, depth)[1]
        top = rerank(index, queries, min(depth, candidates), candidates)[1]
        # Beyond the candidates, the order of the means.
        return top if depth <= candidates else torch.cat([top, search(index, queries, depth)[1][:, candidates:]], 1)


@torch.no_grad()
def scores_of(name: str, images: Gaussian, captions: Gaussian, options: RankingOptions = RankingOptions()) -> Scores:
    return RANKINGS[name].scores(images.to(options.device), captions.to(options.device), options)


def title_of(row: dict) -> str:
    """The title of a row of `evaluate_rankings`, with the origin of what was chosen for it: "tolerance, oracle"."""
    title, chosen = RANKINGS[row["ranking"]].title, row.get("chosen", "given")
    return title if chosen == "given" else f"{title}, {chosen}"
