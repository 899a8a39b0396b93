"""The COCO benchmarks: COCO 5K, COCO 1K, CxC and ECCV Caption, on the 25,000 pairs of the Karpathy test split.

Matches, and the scores of CxC and ECCV Caption, come from the package eccv_caption. Its COCO 1K filters lists that must
hold the whole gallery; here every fold is ranked separately.
Source: ECCV Caption; PCME++ §4.1.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from probemb.errors import UserError, nearest
from probemb.metrics.retrieval import Positives, mean_metrics, query_metrics, rsum

BENCHMARKS = ("coco", "cxc", "eccv")
FOLDS = 5
KS = (1, 5, 10)
# (images, captions, depths) -> lists of both directions, as places within `captions` and `images`
Rank = Callable[[Tensor, Tensor, tuple[int, int]], tuple[Tensor, Tensor]]


@lru_cache(1)
def package_metrics():
    """eccv_caption's ground truth and scores."""
    with warnings.catch_warnings():  # it recommends a faster JSON package
        warnings.simplefilter("ignore")
        from eccv_caption import Metrics

        return Metrics()


@lru_cache(1)
def coco_test_ids() -> tuple[list[int], list[int]]:
    """Ids of the 5,000 images and of the 25,000 captions in the order of the benchmarks."""
    package = package_metrics()
    captions = [int(i) for i in package.coco_ids]
    return [package.coco_gts["t2i"][i][0] for i in captions[::5]], captions


def coco_rows(image_ids: Iterable | None, caption_ids: Iterable | None) -> tuple[Tensor, Tensor]:
    """Rows of the benchmarks' images (5,000,) and captions (25,000,) in the data, which may hold others.

    Raises:
        UserError: the data has no ids, or some of COCO's are not among them.
    """
    remedy = "Give the data of COCO's Karpathy test split with its ids, or leave these benchmarks out."
    found = []
    for what, ids, wanted in zip(("images", "captions"), (image_ids, caption_ids), coco_test_ids()):
        if ids is None:
            raise UserError(f"The data has no COCO ids of its {what}.", remedy)
        place = {_as_int(name): row for row, name in enumerate(ids)}
        missing = [i for i in wanted if i not in place]
        if missing:
            raise UserError(
                f"{len(missing):,} of the {len(wanted):,} {what} of COCO's test split are not in the data "
                f"(the first one has id {missing[0]}).",
                remedy,
            )
        found.append(torch.tensor([place[i] for i in wanted]))
    return found[0], found[1]


def _as_int(name: object) -> int | None:
    try:
        return int(name)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        return None


def _check(benchmarks: Sequence[str]) -> None:
    for name in benchmarks:
        if name not in BENCHMARKS:
            raise UserError(
                f"There is no COCO benchmark '{name}'.{nearest(name, BENCHMARKS)}",
                f"Choose of {', '.join(BENCHMARKS)}.",
            )


def coco_benchmarks(
    rank: Rank, image_ids: Iterable | None, caption_ids: Iterable | None, benchmarks: Sequence[str] = BENCHMARKS
) -> dict:
    """Scores of each benchmark in both directions, shares in [0, 1].

    Args:
        rank: (images, captions, depths) -> the ranked lists of both directions, over these rows of the data.
        image_ids, caption_ids: COCO's ids of all rows of the data.

    Returns:
        "coco_5k" and "coco_1k": {"i2t": {"r@1", "r@5", "r@10"}, "t2i": ..., "rsum": in percent};
        "cxc" and "cxc_1k": {"i2t": {"r@1", "r@5", "r@10", "r_precision": RPC2}, ...};
        "eccv": {"i2t": {"r@1", "r_precision", "map_at_r"}, ...}.

    Raises:
        UserError: an unknown benchmark; ids that are not COCO's.
    """
    _check(benchmarks)
    images, captions = coco_rows(image_ids, caption_ids)
    tops = rank(images, captions, coco_depth())
    out: dict = {}
    if "coco" in benchmarks:
        out["coco_5k"] = _recalls(tops)
    if "coco" in benchmarks or "cxc" in benchmarks:
        positives = _cxc_folds() if "cxc" in benchmarks else []
        depths = [max([max(KS), *(int(fold[way].counts.max()) for fold in positives)]) for way in (0, 1)]
        chunks = zip(images.chunk(FOLDS), captions.chunk(FOLDS))
        folds = [rank(*fold, (depths[0], depths[1])) for fold in chunks]
        if "coco" in benchmarks:
            mean = _mean_of([_recalls(fold) for fold in folds])
            out["coco_1k"] = mean | {"rsum": rsum(mean["i2t"], mean["t2i"])}
    if "cxc" in benchmarks or "eccv" in benchmarks:
        out |= _published_scores(_named(tops), benchmarks)
    if "cxc" in benchmarks:
        out["cxc_1k"] = _mean_of([_cxc_scores(*fold) for fold in zip(folds, positives)])
    return out


def _recalls(tops: tuple[Tensor, Tensor]) -> dict:
    out = {}
    for way, values in _own_metrics(tops).items():
        means = mean_metrics(values)
        out[way] = {f"r@{k}": means[f"r@{k}"] for k in KS}
    return out | {"rsum": rsum(out["i2t"], out["t2i"])}


def _own_metrics(tops: tuple[Tensor, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Of every query, from lists in which caption k belongs to image k // 5."""
    n_images, n_captions = (len(top) for top in tops)
    i2t = Positives.from_pairs(torch.arange(n_captions) // 5, torch.arange(n_captions), n_images, n_captions)
    known = (("i2t", tops[0], i2t), ("t2i", tops[1], i2t.transposed()))
    return {way: query_metrics(top[:, : max(KS)], positives, KS) for way, top, positives in known}


def _mean_of(folds: Sequence[dict]) -> dict:
    """Mean of {"i2t": {metric: value}, "t2i": ...} over folds."""
    return {
        way: {name: sum(fold[way][name] for fold in folds) / len(folds) for name in folds[0][way]}
        for way in ("i2t", "t2i")
    }


def _cxc_scores(tops: tuple[Tensor, Tensor], positives: tuple[Positives, Positives]) -> dict:
    """Recall and RPC2 of one fold. Source: Probabilistic VSE++/VSRN §4.3, Table 2."""
    out = {}
    for way, top, known in zip(("i2t", "t2i"), tops, positives):
        means = mean_metrics(query_metrics(top, known, KS))
        out[way] = {name: means[name] for name in (*(f"r@{k}" for k in KS), "r_precision")}
    return out


def _cxc_folds() -> list[tuple[Positives, Positives]]:
    """CxC's positives of both directions within each fold of COCO 1K, by place in the fold."""
    ids = dict(zip(("i2t", "t2i"), coco_test_ids()))
    size = {way: -(-len(names) // FOLDS) for way, names in ids.items()}
    place = {way: {name: row for row, name in enumerate(names)} for way, names in ids.items()}
    found: list[list[Positives]] = [[] for _ in range(FOLDS)]
    for way, other in (("i2t", "t2i"), ("t2i", "i2t")):
        pairs = torch.tensor([
            (place[way][query], place[other][item])
            for query, items in package_metrics().cxc_gts[way].items()
            for item in set(items)
            if item in place[other]
        ])  # fmt: skip
        query, item = pairs.T
        for fold, known in enumerate(found):
            inside = (query // size[way] == fold) & (item // size[other] == fold)
            known.append(
                Positives.from_pairs(query[inside] - fold * size[way], item[inside] - fold * size[other],
                                     size[way], size[other])
            )  # fmt: skip
    return [(known[0], known[1]) for known in found]


def coco_depth() -> tuple[int, int]:
    """Needed depth of both directions' lists: the largest number of matches of a query."""
    package = package_metrics()
    found = []
    for way in ("i2t", "t2i"):
        truths = (package.cxc_gts[way], package.eccv_gts[way])
        found.append(max(max(KS), *(len(items) for truth in truths for items in truth.values())))
    return found[0], found[1]


def _named(tops: tuple[Tensor, Tensor]) -> dict[str, dict[int, list[int]]]:
    """Lists of places as {"i2t": {image id: caption ids}, "t2i": ...}."""
    image_ids, caption_ids = (torch.tensor(ids) for ids in coco_test_ids())
    found = {"i2t": (image_ids, caption_ids, tops[0]), "t2i": (caption_ids, image_ids, tops[1])}
    return {
        way: dict(zip(queries.tolist(), torch.where(top < 0, -1, gallery[top]).tolist()))  # -1: nothing found
        for way, (queries, gallery, top) in found.items()
    }


def _published_scores(retrieved: dict[str, dict[int, list[int]]], benchmarks: Sequence[str]) -> dict:
    from eccv_caption._metrics import compute_rprecision

    package, out = package_metrics(), {}
    if "cxc" in benchmarks:
        recalls = {k: package.cxc_recalls(retrieved, "all", K=k) for k in KS}
        out["cxc"] = {
            way: {f"r@{k}": float(recalls[k][way]) for k in KS}
            | {"r_precision": float(compute_rprecision(retrieved[way], package.cxc_gts[way]))}
            for way in ("i2t", "t2i")
        }
    if "eccv" in benchmarks:
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bar has no switch
            scores = package.eccv_metrics(retrieved, "all")
        names = {"r@1": "eccv_r1", "r_precision": "eccv_rprecision", "map_at_r": "eccv_map_at_r"}
        out["eccv"] = {
            way: {name: float(scores[theirs][way]) for name, theirs in names.items()} for way in ("i2t", "t2i")
        }
    return out


def coco_query_metrics(
    tops: tuple[Tensor, Tensor],
    benchmarks: Sequence[str] = BENCHMARKS,
    folds: Sequence[tuple[Tensor, Tensor]] = (),
) -> dict:
    """Scores of every query, from lists over `coco_rows` to `coco_depth`: {"eccv": {"i2t": {"r@1": (5000,), ...}}}.

    NaN for queries that a benchmark does not have.

    Args:
        folds: the lists of the folds of COCO 1K, in their order, for "coco_1k": R@k of each query in its own fold.
    """
    _check(benchmarks)
    package = package_metrics()
    truths = {"coco_5k": package.coco_gts, "cxc": package.cxc_gts, "eccv": package.eccv_gts}
    ids = dict(zip(("i2t", "t2i"), coco_test_ids()))
    place = {way: {name: row for row, name in enumerate(names)} for way, names in ids.items()}
    out: dict = {}
    for name, truth in truths.items():
        if name.partition("_")[0] not in benchmarks:
            continue
        out[name] = {}
        for way, other, top in (("i2t", "t2i", tops[0]), ("t2i", "i2t", tops[1])):
            pairs = [
                (place[way][query], place[other][item])
                for query, items in truth[way].items()
                for item in items
                if item in place[other]
            ]
            query, item = torch.tensor(pairs).T
            known = Positives.from_pairs(query, item, len(place[way]), len(place[other]))
            counts = torch.zeros_like(known.counts)
            for query_id, items in truth[way].items():  # R also counts two captions outside the 25,000
                counts[place[way][query_id]] = len(set(items))
            positives = Positives(known.n_queries, known.n_gallery, known.keys, counts)
            out[name][way] = query_metrics(top, positives, KS)
    if folds and "coco" in benchmarks:
        each = [_own_metrics(fold) for fold in folds]
        out["coco_1k"] = {
            way: {f"r@{k}": torch.cat([fold[way][f"r@{k}"] for fold in each]) for k in KS} for way in ("i2t", "t2i")
        }
    return out
