"""Retrieval of embedded pairs: every ranking against every kind of positives, and the weights of "tolerance".

N images, M captions, L object categories; Q queries and G gallery items of one direction.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from probemb.data.captions.dataset import CaptionDataset
from probemb.errors import UserError, names_of
from probemb.evaluation.embedding import EmbeddedPairs, Embedder, embed_pairs, exact_match
from probemb.evaluation.rankings import NUMBERS, RANKINGS, Ranker, RankingOptions, Scores, Tolerance, tolerance_scores
from probemb.gaussian import Gaussian
from probemb.metrics.coco import COCO, FOLDS, coco_positives, coco_rows
from probemb.metrics.plausible import VARIANTS, plausible_match_r_precision
from probemb.metrics.retrieval import KS, TITLES, Positives, mean_metrics, query_metrics, rsum, score_metrics
from probemb.progress import silent

BENCHMARKS = (*COCO, "pmrp")
OWN, TRUE, CLASS = "own captions", "all true captions", "captions of the class"
SIDES = {"i2t": "images", "t2i": "captions"}  # the queries of each direction
PLAUSIBLE = {"r@1": "pmr1", "r_precision": "pmrp"}
ALL = "all"  # rows
SHOWN = 3  # closest items of each query that are kept

GRID = (-4.0, -2.0, -1.5, -1.0, -0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
CHOSEN_BY = {"map_at_r": "mAP@R", "recall": "mean of R@1, R@5 and R@10"}  # both in [0, 1]
ORACLE = "oracle"

PerQuery = dict[str, dict[str, Tensor]]  # side ("images", "captions") -> "positives: metric" -> (N,) or (M,)


class Fold(NamedTuple):
    """Rows of images and of captions that are ranked alone (None: all), a name for these, and both ways' matches."""

    name: str
    rows: tuple[Tensor, Tensor] | None
    positives: tuple[Positives, Positives]


class Kind(NamedTuple):
    """A kind of positives: metrics that are reported, means over folds."""

    folds: list[Fold]
    metrics: tuple[str, ...] = (*TITLES, "rsum")


def _whole(positives: Positives) -> Kind:
    return Kind([Fold(ALL, None, (positives, positives.transposed()))])


def own_captions(pairs: EmbeddedPairs) -> Positives:
    n, m = len(pairs.images), len(pairs.texts)
    return Positives.from_pairs(pairs.owner, torch.arange(m), n, m)


def class_captions(pairs: EmbeddedPairs) -> Positives:
    """Every image matches the captions of all images of its class; (N, M)."""
    numbers = torch.tensor(pairs.data.class_numbers())
    return Positives.of_classes(numbers, numbers[pairs.owner])


def known_positives(pairs: EmbeddedPairs) -> dict[str, Positives]:
    """Positives of images, (N, M): OWN, and CLASS and TRUE where these are known."""
    kinds = {OWN: own_captions(pairs)}
    if pairs.data.classes is not None:
        kinds[CLASS] = class_captions(pairs)
    if pairs.data.truth is not None:
        kinds[TRUE] = Positives.from_matrix(exact_match(pairs.data))
    return kinds


def all_kinds(pairs: EmbeddedPairs, benchmarks: Sequence[str]) -> dict[str, Kind]:
    kinds = {title: _whole(one) for title, one in known_positives(pairs).items()}
    if set(benchmarks) & set(COCO):
        test = _test_split(pairs.data)
        is_all = all(torch.equal(rows, torch.arange(n)) for rows, n in zip(test, (len(pairs.images), len(pairs.texts))))
        split = (ALL, None) if is_all else ("test split", test)
        folds = [(f"fold {i}", rows) for i, rows in enumerate(zip(*(side.chunk(FOLDS) for side in test)))]
        chosen = [one for name in COCO if name in benchmarks for one in COCO[name]]
        for one in sorted(chosen, key=lambda one: one.title == "CxC 1K"):  # last in the tables
            rows = folds if one.folds > 1 else [split]
            kinds[one.title] = Kind([Fold(*fold, both) for fold, both in zip(rows, coco_positives(one))], one.metrics)
    return kinds


def _test_split(data: CaptionDataset) -> tuple[Tensor, Tensor]:
    """Rows of COCO's test split among the images and the captions. Raises UserError: some are missing."""
    return coco_rows(data.image_ids, data.caption_ids and list(chain(*data.caption_ids)))


def choose_benchmarks(wanted: str | None, captions: CaptionDataset, has_objects: bool) -> list[str]:
    """--benchmarks as a list, by default those that the data allows. Raises UserError: the data does not allow one."""
    if wanted is None:
        objects = ["pmrp"] if has_objects else []
        try:
            _test_split(captions)
        except UserError:
            return objects
        return [*COCO, *objects]
    names = names_of(wanted, BENCHMARKS, "benchmark") if wanted.strip() else []
    if set(names) & set(COCO):
        _test_split(captions)
    if "pmrp" in names and not has_objects:
        remedy = "Name COCO's instances_val2014.json with --instances."
        raise UserError("Plausible matches need the objects that the images show.", remedy)
    return names


def evaluate_rankings(
    pairs: EmbeddedPairs, rankings: Sequence[str], options: RankingOptions, benchmarks: Sequence[str] = (),
    objects: Tensor | None = None, show=silent,
) -> tuple[list[dict], PerQuery, dict[str, Tensor]]:  # fmt: skip
    """Every ranking against every kind of positives; objects: (N, L) multi-hot, for "pmrp". Returns rows; and of the
    first ranking the metrics of every query, NaN for one without positives, and side -> (N or M, 3) int64, the closest
    rows of the other side.
    """
    kinds, rows, first = all_kinds(pairs, benchmarks), [], None
    test = _test_split(pairs.data) if set(benchmarks) & set(COCO) else None
    with show("rankings", len(rankings)) as advance:
        for name in rankings:
            ranking, ranker = RANKINGS[name], Ranker(name, pairs.images, pairs.texts, options)
            ranked, found, values = measure(ranker, kinds)
            if objects is not None and ranker.scores is not None:
                plausible, more = measure_plausible(ranker, pairs.owner, objects, test)
                found |= plausible
                values = {side: values[side] | more[side] for side in values}
            about = {"ranking": name, "how": ranking.how.format(**vars(options)), "ms_per_query": ranked.ms_per_query}
            about |= {"index_seconds": ranked.build_seconds}
            about |= {"numbers_per_item": NUMBERS[ranking.keeps](pairs.texts, options)}
            about |= {"chosen": options.tolerance.chosen} if name == "tolerance" else {}
            first = first or (values, {"images": ranked.i2t[:, :SHOWN], "captions": ranked.t2i[:, :SHOWN]})
            rows += [{"positives": title, **about, **metrics} for title, metrics in found.items()]
            advance(1)
    order = list(dict.fromkeys(row["positives"] for row in rows))
    return sorted(rows, key=lambda row: order.index(row["positives"])), *first


def measure(ranker: Ranker, kinds: dict[str, Kind]) -> tuple:
    """Rank once for all kinds of positives among the same rows. Returns the lists of the whole data; title -> {"i2t":
    metrics, "t2i": metrics, "rsum": in percent}; `per_query`.
    """
    depths: dict[str, tuple[int, int]] = {}
    folds = {fold.name: fold for kind in kinds.values() for fold in kind.folds}
    for fold in (fold for kind in kinds.values() for fold in kind.folds):
        before = depths.get(fold.name, (max(KS), max(KS)))
        depths[fold.name] = tuple(max(depth, int(one.counts.max())) for depth, one in zip(before, fold.positives))
    lists = {name: ranker(depths[name], fold.rows) for name, fold in folds.items()}
    found: dict[str, dict] = {}
    per_query: PerQuery = {side: {} for side in SIDES.values()}
    for title, kind in kinds.items():
        means: dict = {}
        for place, (way, side) in enumerate(SIDES.items()):
            queries = [query_metrics(lists[fold.name][place], fold.positives[place]) for fold in kind.folds]
            each = [mean_metrics(values) for values in queries]
            means[way] = {name: sum(one[name] for one in each) / len(each) for name in TITLES}
            for name in TITLES:
                spread = torch.full((len(lists[ALL][place]),), torch.nan, dtype=torch.float64)
                for fold, values in zip(kind.folds, queries):
                    spread[slice(None) if fold.rows is None else fold.rows[place]] = values[name]
                per_query[side][f"{title}: {TITLES[name]}"] = spread
        found[title] = {way: {name: one[name] for name in kind.metrics if name in one} for way, one in means.items()}
        if "rsum" in kind.metrics:
            found[title]["rsum"] = rsum(means["i2t"], means["t2i"])
    return lists[ALL], found, per_query


def measure_plausible(
    ranker: Ranker, owner: Tensor, objects: Tensor, test: tuple[Tensor, Tensor] | None
) -> tuple[dict, PerQuery]:
    """Plausible matches of objects (N, L), of all and as means over the folds of COCO 1K (PCME Table 3)."""

    def variants(scores: Scores, images: Tensor, texts: Tensor) -> dict[str, dict]:
        i2t, t2i = scores.both_ways()
        ways = {"i2t": (i2t, images, texts), "t2i": (t2i, texts, images)}
        return {
            variant: {way: plausible_match_r_precision(*one, variant=variant) for way, one in ways.items()}
            for variant in VARIANTS
        }

    found: dict[str, dict] = {}
    per_query: PerQuery = {side: {} for side in SIDES.values()}
    for variant, ways in variants(ranker.scores, objects, objects[owner]).items():
        title = f"plausible matches, {variant}"
        for way, side in SIDES.items():
            values = ways[way].pop("per_query")
            per_query[side] |= {f"{title}: {TITLES[m]}": values[of] for m, of in PLAUSIBLE.items()}
        found[title] = {way: {m: one[of] for m, of in PLAUSIBLE.items()} | one for way, one in ways.items()}
    folds = zip(*(side.chunk(FOLDS) for side in test)) if test else ()
    each = [variants(ranker.scores.only(i, c), objects[i], objects[owner[c]]) for i, c in folds]
    for variant in VARIANTS if each else ():
        found[f"plausible matches 1K, {variant}"] = {
            way: {m: sum(one[variant][way][of] for one in each) / FOLDS for m, of in PLAUSIBLE.items()} for way in SIDES
        }
    return found, per_query


def retrieval(images: Gaussian, texts: Gaussian, positives: Positives, ranking: str, options: RankingOptions) -> dict:
    """{"i2t": metrics, "t2i": metrics, "rsum": in percent} of (N, D) and (M, D); positives: of the images."""
    return measure(Ranker(ranking, images, texts, options), {"": _whole(positives)})[1][""]


def evaluate_retrieval(
    embedder: Embedder, captions: CaptionDataset, ranking: str | None = None, by_class: bool = False
) -> dict:
    """`retrieval` under one ranking, by which finetuning selects its model; for a point model always that of its
    training. The weights of "tolerance" are those with the best recalls of own captions on these same images. by_class:
    all captions of an image's class are its matches. Raises UserError: as `embed_pairs`.
    """
    model = embedder.model
    ranking = ranking if ranking and model.probabilistic else model.ranking
    pairs = embed_pairs(embedder, captions, with_tokens=ranking == "attention")
    found: dict = {"ranking": ranking, "images": len(pairs.images), "captions": len(pairs.texts)}
    options = RankingOptions(
        *model.match_model.numbers, device=embedder.device.name, attention=model.attention, tokens=pairs.tokens
    )
    positives = own_captions(pairs)
    if ranking == "tolerance":
        chosen = choose_tolerance(pairs, positives, "recall")
        options, found["tolerance"] = replace(options, tolerance=chosen), {"i2t": chosen.i2t, "t2i": chosen.t2i}
    if by_class:
        positives = class_captions(pairs)
    return found | retrieval(pairs.images, pairs.texts, positives, ranking, options)


def choose_tolerance(
    pairs: EmbeddedPairs, positives: Positives, metric: str = "map_at_r", grid: Sequence[float] = GRID,
    chosen: str = ORACLE, of: str | None = None,
) -> Tolerance:  # fmt: skip
    """The weight of each direction's gallery that is best on these pairs by `metric`, one of CHOSEN_BY; of equally good
    ones the one closest to 0. positives: of images, (N, M), named `of`; chosen: the label of the choice.
    """
    curve = {
        "lambda": [float(weight) for weight in grid],
        "i2t": sweep(pairs.images, pairs.texts, positives, metric, grid),
        "t2i": sweep(pairs.texts, pairs.images, positives.transposed(), metric, grid),
    }

    def best(values: list[float]) -> float:
        return max(zip(values, curve["lambda"]), key=lambda pair: (pair[0], -abs(pair[1])))[1]

    return Tolerance(best(curve["i2t"]), best(curve["t2i"]), curve, metric, of, chosen)


@torch.no_grad()
def sweep(
    queries: Gaussian, gallery: Gaussian, positives: Positives, metric: str, grid: Sequence[float] = GRID
) -> list[float]:
    """The metric of queries (Q, D) under each weight of the gallery's u, in [0, 1]."""
    names, ks = ([f"r@{k}" for k in KS], KS) if metric == "recall" else ([metric], ())
    means, _ = tolerance_scores(queries, gallery, 0, 0).both_ways()
    u, found = gallery.uncertainty(), []
    u = (u.double() - u.double().mean()).to(u.dtype)  # what all have in common changes no order, but blurs the scores
    for weight in grid:
        per_query = score_metrics(lambda rows, by=weight: torch.sub(means(rows), u, alpha=by), positives, ks)
        values = mean_metrics({name: per_query[name] for name in names})
        found.append(sum(values.values()) / len(values))
    return found
