"""The benchmarks on the 25,000 pairs of COCO's Karpathy test split: COCO 5K and 1K, CxC, ECCV Caption.

Matches come from the package eccv_caption; each fold of COCO 1K is ranked alone. Source: ECCV Caption; PCME++ §4.1; for
CxC 1K, Probabilistic VSE++/VSRN §4.3.
"""

import warnings
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from probemb.errors import UserError
from probemb.metrics.retrieval import Positives

FOLDS = 5


class CocoBenchmark(NamedTuple):
    """A benchmark: title, attribute of its matches in eccv_caption, number of folds, and metrics."""

    title: str
    truth: str
    folds: int
    metrics: tuple[str, ...]


RECALLS = ("r@1", "r@5", "r@10")
COCO: dict[str, tuple[CocoBenchmark, ...]] = {  # value of --benchmarks
    "coco": (
        CocoBenchmark("COCO 5K", "coco_gts", 1, (*RECALLS, "rsum")),
        CocoBenchmark("COCO 1K", "coco_gts", FOLDS, (*RECALLS, "rsum")),
    ),
    "cxc": (
        CocoBenchmark("CxC", "cxc_gts", 1, (*RECALLS, "r_precision")),
        CocoBenchmark("CxC 1K", "cxc_gts", FOLDS, (*RECALLS, "r_precision")),
    ),
    "eccv": (CocoBenchmark("ECCV Caption", "eccv_gts", 1, ("r@1", "r_precision", "map_at_r")),),
}


@lru_cache(1)
def package_metrics():
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
    """Rows of the benchmarks' images (5,000,) and captions (25,000,) in the data. UserError: some are missing."""
    remedy, found = "Give the data of COCO's Karpathy test split with its ids, or leave these benchmarks out.", []
    for what, ids, wanted in zip(("images", "captions"), (image_ids, caption_ids), coco_test_ids()):
        place = {int(name) if str(name).lstrip("-").isdecimal() else name: row for row, name in enumerate(ids or ())}
        if missing := [i for i in wanted if i not in place]:
            told = f"{len(missing):,} of the {len(wanted):,} {what} of COCO's test split are not in the data"
            raise UserError(f"{told} (the first one has id {missing[0]}).", remedy)
        found.append(torch.tensor([place[i] for i in wanted]))
    return found[0], found[1]


def coco_positives(benchmark: CocoBenchmark) -> list[tuple[Positives, Positives]]:
    """Matches of images and of captions in each fold, by places within the fold of `coco_rows`.

    R of a whole test split also counts the two captions of COCO that are not among the 25,000, as published.
    """
    ids = coco_test_ids()
    place = [{name: row for row, name in enumerate(names)} for names in ids]
    size = [-(-len(names) // benchmark.folds) for names in ids]
    sides = []
    for side, way in enumerate(("i2t", "t2i")):
        truth = getattr(package_metrics(), benchmark.truth)[way]
        of_query, of_item, queries, items = place[side], place[1 - side], size[side], size[1 - side]
        pairs = [(of_query[q], of_item[i]) for q, matches in truth.items() for i in matches if i in of_item]
        query, item = torch.tensor(pairs).T
        folds = []
        for fold in range(benchmark.folds):
            inside = (query // queries == fold) & (item // items == fold)
            folds.append(Positives.from_pairs(query[inside] % queries, item[inside] % items, queries, items))
        if benchmark.folds == 1:
            for q, matches in truth.items():
                folds[0].counts[of_query[q]] = len(set(matches))
        sides.append(folds)
    return list(zip(*sides))
