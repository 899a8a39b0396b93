"""Rankings at test time: by distances, and by FAISS with and without re-ranking. Source: PCME++ Table C.7.

N images, M captions. A ranker maps rows of the images and of the captions, and a depth, to the ranked lists of both
directions, as for `probemb.metrics.coco_benchmarks`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from probemb.cross_attention import CrossAttention
from probemb.data.captions.dataset import CaptionDataset
from probemb.errors import UserError, nearest
from probemb.evaluation.embed_pairs import embed_pairs
from probemb.evaluation.embedding import Embedder
from probemb.evaluation.kept_tokens import KeptTokens
from probemb.evaluation.scores import SCORES, Scores
from probemb.evaluation.tolerance import CSD, GIVEN, Tolerance, choose_tolerance
from probemb.gaussian import Gaussian
from probemb.metrics import Positives, mean_metrics, query_metrics, rank_both, rsum
from probemb.models.inputs import check_variances
from probemb.search import build_index, rerank, search
from probemb.search.index import new_index, width_of

KS = (1, 5, 10)
RANKINGS = {  # title, and how it is computed: see describe_ranking
    "csd": ("CSD", "closed form"),
    "mean": ("mean only", "cosine of the means"),
    "wasserstein2": ("2-Wasserstein", "closed form"),
    "match-probability": ("match probability", "sampled, {samples} x {samples} samples a pair"),
    "tolerance": ("tolerance", "CSD with the captions' u times {i2t:g} and the images' u times {t2i:g}"),
    "faiss-mean": ("FAISS on the means", "{factory}, no re-ranking"),
    "faiss-rerank": ("FAISS, re-ranked", "{factory}, {candidates} candidates re-ranked by adding their uncertainty"),
    "faiss-csd": ("FAISS on CSD, D + 1", "{factory} in D + 1 dimensions, which is CSD itself"),
    "log-likelihood": ("log-likelihood", "log of the expected likelihood kernel, closed form"),
    "inclusion": ("inclusion", "of the image in the caption, closed form"),
    "kl": ("KL(image || caption)", "closed form, from the image to the caption"),
    "reverse-kl": ("KL(caption || image)", "closed form, from the caption to the image"),
    "min-kl": ("smaller KL", "closed form, the smaller one of both directions"),
    "symmetric-kl": ("symmetric KL", "closed form, the mean of both directions"),
    "bhattacharyya": ("Bhattacharyya", "closed form"),
    "average-l2": ("average L2", "sampled, {samples} x {samples} samples a pair"),
    "multi-instance": (
        "closest of the embeddings",
        "largest cosine of any of the image's embeddings with any of the caption's",
    ),
    "attention": ("cross attention", "tokens attend to tokens, {direction}"),
    "order": ("order", "what the caption exceeds the image by, squared"),
}
TITLES = {name: title for name, (title, _) in RANKINGS.items()}
ANY_DIMENSION = 1024  # with which the spelling of an index is checked
# They do not separate: some hundred times the work of CSD.
SLOW = ("log-likelihood", "bhattacharyya", "inclusion", "order")
MORE = ("kl", "reverse-kl", "min-kl", "symmetric-kl", "average-l2", "multi-instance", "attention")
BY_NAME_ALONE = (*SLOW, *MORE)  # unless the model was trained so
BY_VARIANCES = (  # not of points; CSD is, as the squared distance of the means
    *("wasserstein2", "match-probability", "tolerance", "log-likelihood", "inclusion", "kl"),
    *("reverse-kl", "min-kl", "symmetric-kl", "bhattacharyya", "average-l2"),
)
SAMPLED = ("match-probability", "average-l2")
OF_SEVERAL = ("multi-instance",)  # of K embeddings an item; all others are of one


def ranking_names(text: str | None) -> list[str]:
    """Names separated by commas; for None all but BY_NAME_ALONE, see `fitting`. Raises UserError."""
    if text is None:
        return [name for name in TITLES if name not in BY_NAME_ALONE]
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in TITLES:
            what = f"There is no ranking '{name}'.{nearest(name, TITLES)}"
            raise UserError(what, f"Choose from {', '.join(TITLES)}.")
    if not names:
        raise UserError("--rankings names none.", f"Choose from {', '.join(TITLES)}, or leave it out.")
    return list(dict.fromkeys(names))


def fitting(names: Sequence[str], model, given: bool) -> list[str]:
    """The rankings that a model's embeddings allow; if none were `given`, the one that it was trained for first.

    Raises:
        UserError: a given ranking compares single embeddings, and the model has several of an item, or the reverse; or
            it is "attention", and the model was not trained for it; or it reads variances of a point model, or a
            match probability of a model without one.
    """
    if "attention" in names and model.attention is None:
        raise UserError(
            "The ranking attention is of models that were trained for it, and this one was not.",
            f"Leave --rankings out, or choose {model.ranking}.",
        )
    several = model.n_embeddings > 1
    unfit = [name for name in names if (name in OF_SEVERAL) != several]
    if given and unfit:
        what = f"{model.n_embeddings} embeddings of an item" if several else "one embedding of an item"
        raise UserError(
            f"The ranking {unfit[0]} does not fit a model with {what}.",
            f"Leave --rankings out, or choose {model.ranking}.",
        )
    if not model.probabilistic and given and (reading := [name for name in names if name in BY_VARIANCES]):
        remedy = f"Leave --rankings out, or choose {model.ranking}."
        check_variances(model, "--model", f"the ranking {reading[0]} reads it", remedy)
    if given and model.probabilistic and "match-probability" in names and not model.predicts_matches:
        raise UserError(
            "The ranking match-probability reads a and b, which the loss of this model did not train.",
            f"Leave --rankings out, or choose {model.ranking}.",
        )
    unfit += [name for name in names if name in BY_VARIANCES and not model.probabilistic]
    unfit += [name for name in names if name == "match-probability" and not model.predicts_matches]
    left = [name for name in names if name not in unfit]
    if given or (model.ranking == "mean" and not model.probabilistic):  # which csd is the same as
        return left
    return [model.ranking, *(name for name in left if name != model.ranking)]


def check_factory(factory: str, names: Sequence[str]) -> None:
    """Refuse a string that FAISS does not know, if any ranking of `names` needs it. Raises UserError."""
    for form in {_form(name) for name in names if name.startswith("faiss")}:
        new_index(width_of(ANY_DIMENSION, form, factory), factory)


def _form(name: str) -> str:
    return "csd" if name == "faiss-csd" else "mean"


@dataclass(frozen=True)
class RankingOptions:
    """Settings of the rankings.

    Attributes:
        scale, shift: a and b of the match probability, the model's own; samples: of each item.
        factory: FAISS' index; candidates: how many of the means' neighbours are re-ranked.
        device: where scores are computed; FAISS searches on the CPU.
        tolerance: the weights of the ranking "tolerance"; by default those of CSD.
        attention: how "attention" scores; tokens: of the images and the captions, `EmbeddedPairs.tokens`.
    """

    scale: float = 1.0
    shift: float = 0.0
    samples: int = 8
    factory: str = "Flat"
    candidates: int = 100
    device: str = "cpu"
    tolerance: Tolerance = CSD
    attention: CrossAttention | None = None
    tokens: tuple[KeptTokens, KeptTokens] | None = None


class ScoreRanker:
    """Ranks by scores of all pairs, a block at a time; both directions come from one pass."""

    def __init__(self, scores: Scores):
        self.scores = scores

    def __call__(self, images: Tensor, captions: Tensor, depth: int | tuple[int, int]) -> tuple[Tensor, Tensor]:
        part = self.scores.only(images, captions)
        return rank_both(part, *part.shape, depth)


class SearchRanker:
    """Ranks by searching an index of the other side, built for every gallery, in `build_seconds` for the last call."""

    def __init__(self, images: Gaussian, captions: Gaussian, name: str, options: RankingOptions):
        self.images, self.captions, self.name, self.options = images, captions, name, options
        self.build_seconds = 0.0

    def __call__(self, images: Tensor, captions: Tensor, depth: int | tuple[int, int]) -> tuple[Tensor, Tensor]:
        of_images, of_captions = (depth, depth) if isinstance(depth, int) else depth
        self.build_seconds = 0.0
        left, right = self.images[images], self.captions[captions]
        return self._search(left, right, of_images), self._search(right, left, of_captions)

    def _search(self, queries: Gaussian, gallery: Gaussian, depth: int) -> Tensor:
        depth = min(depth, len(gallery))
        start = time.perf_counter()
        index = build_index(gallery, self.options.factory, _form(self.name))
        self.build_seconds += time.perf_counter() - start
        if self.name != "faiss-rerank":
            return search(index, queries, depth)[1]
        candidates = min(self.options.candidates, len(gallery))
        if depth <= candidates:
            return rerank(index, queries, depth, candidates)[1]
        beyond = search(index, queries, depth)[1][:, candidates:]  # keep the order of the means
        return torch.cat([rerank(index, queries, candidates, candidates)[1], beyond], 1)


Ranker = ScoreRanker | SearchRanker


def make_ranker(name: str, images: Gaussian, captions: Gaussian, options: RankingOptions = RankingOptions()) -> Ranker:
    """The ranker of that name over Gaussians (N, D) and (M, D)."""
    if name.startswith("faiss"):
        return SearchRanker(images, captions, name, options)
    extra = {"n_samples": options.samples} if name in SAMPLED else {}
    if name == "match-probability":
        extra |= {"scale": options.scale, "shift": options.shift}
    elif name == "tolerance":
        extra = {"i2t": options.tolerance.i2t, "t2i": options.tolerance.t2i}
    elif name == "attention":
        extra = {"how": options.attention, "tokens": options.tokens}
    return ScoreRanker(SCORES[name](images.to(options.device), captions.to(options.device), **extra))


def title_of(row: dict) -> str:
    """The title of a row of `evaluate_rankings`, with the origin of what was chosen for it: "tolerance, oracle"."""
    title, chosen = TITLES[row["ranking"]], row.get("chosen", GIVEN)
    return title if chosen == GIVEN else f"{title}, {chosen}"


def describe_ranking(name: str, options: RankingOptions) -> str:
    """Short description of a ranking's computation."""
    values = {"samples": options.samples, "factory": options.factory, "candidates": options.candidates}
    values |= {"i2t": options.tolerance.i2t, "t2i": options.tolerance.t2i}
    return RANKINGS[name][1].format(direction=options.attention.direction if options.attention else "", **values)


def numbers_per_item(name: str, embedding: Gaussian, options: RankingOptions) -> int:
    """Numbers that a gallery keeps of every item for a ranking. Source: PCME Table 1.

    Sampled rankings keep their samples; they could draw them again from 2 D numbers, as here.
    """
    if name == "attention":  # of the captions, in the mean
        return round(options.tokens[1].lengths.double().mean().item()) * options.tokens[1].values.shape[1]
    d, one = embedding.shape[-1], embedding.mean[0].numel()
    if name in ("mean", "faiss-mean", "multi-instance", "order"):
        return one
    if name in ("csd", "tolerance", "faiss-csd", "faiss-rerank"):
        return d + 1
    return options.samples * d if name in SAMPLED else 2 * d


@dataclass(frozen=True)
class Ranked:
    """Ranked lists of both directions, and their cost: milliseconds a query, seconds to build indexes."""

    i2t: Tensor
    t2i: Tensor
    ms_per_query: float
    build_seconds: float | None


def rank_all(ranker: Ranker, n_images: int, n_captions: int, depth: tuple[int, int]) -> Ranked:
    """Rank everything against everything."""
    start = time.perf_counter()
    i2t, t2i = ranker(torch.arange(n_images), torch.arange(n_captions), depth)
    seconds = time.perf_counter() - start
    build = ranker.build_seconds if isinstance(ranker, SearchRanker) else None
    return Ranked(i2t, t2i, 1000 * (seconds - (build or 0)) / (n_images + n_captions), build)


def own_captions(owner: Tensor, n_images: int) -> Positives:
    """Every image matches its own captions; (N, M)."""
    return Positives.from_pairs(owner, torch.arange(len(owner)), n_images, len(owner))


def class_captions(captions: CaptionDataset, owner: Tensor, kept: Sequence[int]) -> Positives:
    """Every image matches the captions of all images of its class; (N, M). Raises UserError: data without classes."""
    numbers = torch.tensor(captions.class_numbers())[kept]
    return Positives.of_classes(numbers, numbers[owner])


def depth_for(positives: Sequence[Positives]) -> tuple[int, int]:
    """Needed depth of both directions' lists for these positives of images."""
    pairs = [(p, p.transposed()) for p in positives]
    return tuple(max(max(KS), *(int(pair[way].counts.max()) for pair in pairs)) for way in (0, 1))


def both_directions(ranked: Ranked, positives: Positives) -> dict:
    """{"i2t": metrics, "t2i": metrics, "rsum": in percent}."""
    i2t = mean_metrics(query_metrics(ranked.i2t, positives, KS))
    t2i = mean_metrics(query_metrics(ranked.t2i, positives.transposed(), KS))
    return {"i2t": i2t, "t2i": t2i, "rsum": rsum(i2t, t2i)}


def evaluate_retrieval(
    embedder: Embedder, captions: CaptionDataset, ranking: str | None = None, by_class: bool = False
) -> dict:
    """RSUM and its parts under one ranking, by which finetuning selects its model.

    Args:
        ranking: one of TITLES; by default, and for a point model always, the one that the model was trained for. The
            weights of "tolerance" are those with the best recalls of own captions, on these same images.
        by_class: the captions of an image's class are its matches, not its own alone.

    Returns:
        {"rsum": percent, "i2t": {"r@1", ...}, "t2i": ..., "ranking", "images": N, "captions": M}, and of "tolerance"
        its weights, "tolerance": {"i2t", "t2i"}.

    Raises:
        UserError: too many images that cannot be read, embeddings that are not finite.
    """
    ranking = ranking if ranking and embedder.model.probabilistic else embedder.model.ranking
    pairs = embed_pairs(embedder, captions, with_tokens=ranking == "attention")
    images, texts, owner = pairs.images, pairs.texts, pairs.owner
    found: dict = {"ranking": ranking, "images": len(images), "captions": len(texts)}
    model, device = embedder.model, embedder.device.name
    options = RankingOptions(*model.match_numbers(), device=device, attention=model.attention, tokens=pairs.tokens)
    own = own_captions(owner, len(images))
    if ranking == "tolerance":
        chosen = choose_tolerance(pairs, own, "recall")
        options, found["tolerance"] = replace(options, tolerance=chosen), {"i2t": chosen.i2t, "t2i": chosen.t2i}
    return found | retrieval(
        images, texts, class_captions(captions, owner, pairs.kept) if by_class else own, ranking, options
    )


def retrieval(
    images: Gaussian, texts: Gaussian, positives: Positives, ranking: str, options: RankingOptions = RankingOptions()
) -> dict:
    """`both_directions` of embedded pairs, (N, D) and (M, D), under one ranking; positives of images, (N, M)."""
    ranker = make_ranker(ranking, images, texts, options)
    return both_directions(rank_all(ranker, len(images), len(texts), depth_for([positives])), positives)
