"""Rankings of embedded pairs against every kind of positives: own captions, all true captions of the scenes, and the
benchmarks of COCO's test split (COCO 5K and 1K, CxC, ECCV Caption, plausible matches).

N images, M captions, L object categories.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from probemb.cli.progress import silent
from probemb.data.captions.dataset import CaptionDataset
from probemb.errors import UserError, nearest
from probemb.evaluation.embed_pairs import EmbeddedPairs, exact_match
from probemb.evaluation.rankings import (
    Ranked,
    Ranker,
    RankingOptions,
    both_directions,
    class_captions,
    depth_for,
    describe_ranking,
    make_ranker,
    numbers_per_item,
    own_captions,
    rank_all,
)
from probemb.evaluation.scores import Scores, both_ways
from probemb.metrics import (
    Positives,
    coco_benchmarks,
    coco_depth,
    coco_query_metrics,
    coco_rows,
    plausible_match_r_precision,
    query_metrics,
)
from probemb.metrics.coco import FOLDS
from probemb.metrics.plausible import VARIANTS

BENCHMARKS = ("coco", "cxc", "eccv", "pmrp")
OWN, TRUE, CLASS = "own captions", "all true captions", "captions of the class"
TITLES = {"coco_5k": "COCO 5K", "coco_1k": "COCO 1K", "cxc": "CxC", "cxc_1k": "CxC 1K", "eccv": "ECCV Caption"}
METRICS = {"r@1": "R@1", "r@5": "R@5", "r@10": "R@10", "r_precision": "R-P", "map_at_r": "mAP@R"}
SHOWN = 3  # closest items of each query that are kept
MAX_EXACT_PAIRS = 2_000_000_000  # pairs of images and captions whose truth is held at once, a byte each

PerQuery = dict[str, dict[str, Tensor]]  # side ("images", "captions") -> metric -> (N,) or (M,)


def choose_benchmarks(wanted: str | None, captions: CaptionDataset, has_objects: bool) -> list[str]:
    """--benchmarks as a list, or by default the benchmarks that the data allows.

    Args:
        wanted: names separated by commas, or None.
        has_objects: whether the objects of the images are known (--instances).

    Raises:
        UserError: an unknown name; COCO's benchmarks without COCO's ids; pmrp without objects, or the reverse.
    """
    if wanted is None:
        objects = ["pmrp"] if has_objects else []
        try:
            _check_ids(captions)
        except UserError:
            return objects
        return ["coco", "cxc", "eccv", *objects]
    names = list(dict.fromkeys(name.strip() for name in wanted.split(",") if name.strip()))
    for name in names:
        if name not in BENCHMARKS:
            what = f"There is no benchmark '{name}'.{nearest(name, BENCHMARKS)}"
            raise UserError(what, f"Choose from {', '.join(BENCHMARKS)}, separated by commas.")
    if set(names) - {"pmrp"}:
        _check_ids(captions)
    if "pmrp" in names and not has_objects:
        raise UserError(
            "Plausible matches need the objects that the images show.",
            "Name COCO's instances_val2014.json with --instances.",
        )
    if has_objects and "pmrp" not in names:
        raise UserError("--instances is given, but pmrp is not among --benchmarks.", "Add pmrp, or leave it out.")
    return names


def _check_ids(captions: CaptionDataset) -> None:
    ids = captions.caption_ids
    coco_rows(captions.image_ids, None if ids is None else [number for row in ids for number in row])


def refuse_too_many_exact_pairs(captions: CaptionDataset) -> None:
    """Raise UserError if the scenes' exact positives, a byte for each pair, are too many."""
    n_pairs = len(captions) * captions.n_captions
    if captions.scenes is not None and n_pairs > MAX_EXACT_PAIRS:
        raise UserError(
            f"{len(captions):,} images and {captions.n_captions:,} captions are {n_pairs:,} pairs, more than fit into "
            "memory at once.",
            "Evaluate fewer shards.",
        )


def evaluate_rankings(
    pairs: EmbeddedPairs, captions: CaptionDataset, rankings: Sequence[str], options: RankingOptions,
    benchmarks: Sequence[str] = (), objects: Tensor | None = None, show=silent,
) -> tuple[list[dict], PerQuery, dict[str, Tensor]]:  # fmt: skip
    """Every ranking against every kind of positives.

    Args:
        rankings: names in `probemb.evaluation.rankings.TITLES`.
        benchmarks: names in BENCHMARKS.
        objects: (images of `captions`, L) multi-hot object categories, for "pmrp".

    Returns:
        rows: {"positives", "ranking", "how", "i2t", "t2i", "rsum", "ms_per_query", "index_seconds",
            "numbers_per_item"}, and for tolerance
            "chosen": "given", "oracle" or "chosen on ...".
        per_query: side -> metric -> values of every query under the first ranking.
        tops: side -> (N, 3) or (M, 3) int64, the closest rows of the other side under the first ranking.
    """
    table = _Table(pairs, captions, [name for name in benchmarks if name != "pmrp"], objects)
    with show("rankings", len(rankings)) as advance:
        for name in rankings:
            table.add(name, options)
            if advance:
                advance(1)
    order = list(dict.fromkeys(row["positives"] for row in table.rows))
    return sorted(table.rows, key=lambda row: order.index(row["positives"])), table.per_query, table.tops


def known_positives(pairs: EmbeddedPairs, captions: CaptionDataset) -> dict[str, Positives]:
    """Positives of images, (N, M): OWN, CLASS for data with classes, and TRUE where every true match is known."""
    kinds = {OWN: own_captions(pairs.owner, len(pairs.images))}
    if captions.classes is not None:
        kinds[CLASS] = class_captions(captions, pairs.owner, pairs.kept)
    if captions.scenes is not None:
        kinds[TRUE] = Positives.from_matrix(exact_match(captions, pairs.kept))
    return kinds


class _Table:
    """The rows so far, and the values of single queries under the first ranking."""

    def __init__(self, pairs: EmbeddedPairs, captions: CaptionDataset, coco: list[str], objects: Tensor | None):
        self.pairs, self.captions, self.coco = pairs, captions, coco
        self.objects = None if objects is None else objects[pairs.kept]
        self.rows: list[dict] = []
        self.per_query: PerQuery = {"images": {}, "captions": {}}
        self.tops: dict[str, Tensor] = {}
        self.kinds = known_positives(pairs, captions)
        self.depth = depth_for(list(self.kinds.values()))
        if coco:
            self.depth = tuple(max(pair) for pair in zip(self.depth, coco_depth()))

    def add(self, name: str, options: RankingOptions) -> None:
        """Rank everything, and append a row for each kind of positives."""
        first = not self.rows
        ranker = make_ranker(name, self.pairs.images, self.pairs.texts, options)
        ranked = rank_all(ranker, len(self.pairs.images), len(self.pairs.texts), self.depth)
        about = {
            "ranking": name, "how": describe_ranking(name, options), "ms_per_query": ranked.ms_per_query,
            "index_seconds": ranked.build_seconds,
            "numbers_per_item": numbers_per_item(name, self.pairs.texts, options),
        }  # fmt: skip
        if name == "tolerance":
            about["chosen"] = options.tolerance.chosen
        for positives, matches in self.kinds.items():
            self.rows.append({"positives": positives, **about, **both_directions(ranked, matches)})
            if first:
                self._keep(positives, query_metrics(ranked.i2t, matches), "images")
                self._keep(positives, query_metrics(ranked.t2i, matches.transposed()), "captions")
        if first:
            self.tops = {"images": ranked.i2t[:, :SHOWN], "captions": ranked.t2i[:, :SHOWN]}
        if self.coco:
            self._add_coco(ranker, ranked, about, first)
        if self.objects is not None and not name.startswith("faiss"):
            self._add_plausible(ranker, about, first)

    def _keep(self, positives: str, values: dict[str, Tensor], side: str) -> None:
        self.per_query[side] |= {f"{positives}: {METRICS[name]}": tensor for name, tensor in values.items()}

    def _add_coco(self, ranker: Ranker, ranked: Ranked, about: dict, first: bool) -> None:
        ids, lists = self._coco_ids(), []

        def rank(images: Tensor, texts: Tensor, depth: tuple[int, int]):
            known = len(images) == len(ranked.i2t) and len(texts) == len(ranked.t2i)
            known = known and all(torch.equal(rows, torch.arange(len(rows))) for rows in (images, texts))
            if known:  # the data is the test split, already ranked
                lists.append((ranked.i2t[:, : depth[0]], ranked.t2i[:, : depth[1]]))
            else:
                lists.append(ranker(images, texts, depth))
            return lists[-1]

        found = coco_benchmarks(rank, *ids, self.coco)
        self.rows += [{"positives": TITLES[name], **about, **scores} for name, scores in found.items()]
        if first:
            self._keep_coco(ids, *lists)

    def _coco_ids(self) -> tuple[list, list]:
        """Of the embedded images and captions."""
        kept, captions = self.pairs.kept, self.captions
        return [captions.image_ids[i] for i in kept], [number for i in kept for number in captions.caption_ids[i]]

    def _keep_coco(self, ids: tuple[list, list], lists: tuple[Tensor, Tensor], *folds: tuple[Tensor, Tensor]) -> None:
        """Spread the values of the test split over all rows of the data, NaN elsewhere."""
        image_rows, caption_rows = coco_rows(*ids)
        places = {"i2t": ("images", image_rows, len(ids[0])), "t2i": ("captions", caption_rows, len(ids[1]))}
        for name, directions in coco_query_metrics(lists, self.coco, folds).items():
            for direction, metrics in directions.items():
                side, rows, total = places[direction]
                empty = torch.full((total,), torch.nan, dtype=torch.float64)
                self._keep(TITLES[name], {key: empty.index_copy(0, rows, v) for key, v in metrics.items()}, side)

    def _add_plausible(self, ranker: Ranker, about: dict, first: bool) -> None:
        objects, owner, both = self.objects, self.pairs.owner, both_ways(ranker.scores)
        for variant in VARIANTS:
            found = plausible_matches(*both, objects, objects[owner], variant)
            row = {"positives": f"plausible matches, {variant}", **about}
            for direction, side in (("i2t", "images"), ("t2i", "captions")):
                values = found[direction].pop("per_query")
                if first:
                    self._keep(row["positives"], {"r_precision": values["pmrp"], "r@1": values["pmr1"]}, side)
            self.rows.append(row | found)
            if self.coco:
                found = plausible_1k(ranker.scores, objects, objects[owner], coco_rows(*self._coco_ids()), variant)
                self.rows.append({"positives": f"plausible matches 1K, {variant}", **about, **found})


def plausible_matches(i2t, t2i, of_images: Tensor, of_texts: Tensor, variant: str) -> dict:
    """`plausible_match_r_precision` of both directions, with PMRP as "r_precision" and PMR@1 as "r@1".

    Args:
        i2t, t2i: scores, as there.
        of_images, of_texts: (N, L) and (M, L) multi-hot object categories.
    """
    found = {
        "i2t": plausible_match_r_precision(i2t, of_images, of_texts, variant=variant),
        "t2i": plausible_match_r_precision(t2i, of_texts, of_images, variant=variant),
    }
    return {way: {"r@1": one["pmr1"], "r_precision": one["pmrp"], **one} for way, one in found.items()}


def plausible_1k(
    scores: Scores, of_images: Tensor, of_texts: Tensor, rows: tuple[Tensor, Tensor], variant: str
) -> dict:
    """The mean of `plausible_matches` over the folds of COCO 1K. Source: PCME Table 3.

    Args:
        rows: of the test split's images and captions, in COCO's order (`coco_rows`).
    """
    found = []
    for images, texts in zip(*(side.chunk(FOLDS) for side in rows)):
        both = both_ways(scores.only(images, texts))
        found.append(plausible_matches(*both, of_images[images], of_texts[texts], variant))
    return {
        way: {name: sum(one[way][name] for one in found) / FOLDS for name in ("r@1", "r_precision")}
        for way in ("i2t", "t2i")
    }
