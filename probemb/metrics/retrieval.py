"""Retrieval metrics: recall at k, R-Precision, mAP@R, RSUM, rank of the first match.

Inputs are a matrix `scores_QG`, larger is closer, with `match_QG`, bool; or ranked lists `top_QK`, the gallery index at
each of the first K ranks, with `Positives`. `rank_both` makes both directions' lists in bounded memory.

Letters: Q queries, G gallery items, K ranks, R matches of a query. Queries without any match are left out of every
mean. Ties rank by gallery index. A k beyond the gallery takes the whole gallery.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24  # scores ranked at a time
COLUMN_ELEMENTS = 1 << 21  # of a block's columns, transposed and ranked at a time: fits the processor's cache
BLOCK_ELEMENTS = 1 << 26  # scores in a block of rows of `rank_both`: 256 MiB in float32


# ----------------------------------------------------------------------------------------------------- rankings


def ranking(scores_QG: Tensor, depth: int) -> Tensor:
    """The `depth` closest gallery items of every query, (Q, depth) indices; ties in the order of the gallery."""
    return _ranked(scores_QG, depth)[1]


def _ranked(scores_QG: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Scores and indices at the first `depth` ranks, both (Q, depth)."""
    n_gallery = scores_QG.shape[1]
    depth = min(depth, n_gallery)
    values, index = scores_QG.topk(min(depth + 1, n_gallery), dim=1)  # one more to see a tie at the end
    tied = values[:, 1:] == values[:, :-1]
    values, index = values[:, :depth].contiguous(), index[:, :depth].contiguous()
    if not tied.any():
        return values, index
    rows = tied.any(1)  # topk does not order ties: sort by index, then stably by value
    by_index = index[rows].argsort(dim=1)
    value = values[rows].gather(1, by_index)
    by_value = by_index.gather(1, value.argsort(dim=1, descending=True, stable=True))
    index[rows] = index[rows].gather(1, by_value)
    if depth < n_gallery:
        cut = tied[:, depth - 1]  # a tie at the end needs a whole stable sort
        if cut.any():
            index[cut] = scores_QG[cut].argsort(dim=1, descending=True, stable=True)[:, :depth]
    return values, index


def rank_both(
    score: Callable[[slice], Tensor], n_rows: int, n_columns: int, depth: int | tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Ranked lists of both directions from one pass over the scores, of which about BLOCK_ELEMENTS are held at a time.

    Args:
        score: rows -> (rows, n_columns) scores, larger is closer; see `probemb.evaluation.scores`.
        depth: length of the lists, or one for each direction; at most the gallery's size is used.

    Returns:
        (n_rows, depth) columns closest to each row, (n_columns, depth) rows closest to each column; int64, on the CPU.

    Raises:
        ValueError: a score is NaN or infinite.
    """
    of_rows, of_columns = (depth, depth) if isinstance(depth, int) else depth
    of_columns = min(of_columns, n_rows)
    height = max(1, min(n_rows, BLOCK_ELEMENTS // max(1, n_columns)))
    width = max(1, COLUMN_ELEMENTS // height)
    rows_found: list[Tensor] = []
    best: list[tuple[Tensor, Tensor]] = []  # of each piece of columns: scores and rows
    for first in range(0, n_rows, height):
        block = score(slice(first, min(first + height, n_rows)))
        values, index = _ranked(block, of_rows)
        _refuse_infinite(values)
        rows_found.append(index.cpu())
        for part, columns in enumerate(range(0, n_columns, width)):
            values, index = _ranked(block[:, columns : columns + width].T.contiguous(), of_columns)
            _refuse_infinite(values)
            found = (values, index + first)
            if first == 0:
                best.append(found)
            else:
                best[part] = _merge(best[part], found, of_columns)
        del block  # before the next one is made
    return torch.cat(rows_found), torch.cat([rows.cpu() for _, rows in best])


def _merge(old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], depth: int) -> tuple[Tensor, Tensor]:
    """Two ranked lists as one; `old` has the lower indices, so a stable sort keeps ties in order."""
    values, index = (torch.cat(pair, dim=1) for pair in zip(old, new))
    order = values.argsort(dim=1, descending=True, stable=True)[:, :depth]
    return values.gather(1, order), index.gather(1, order)


def _refuse_infinite(values: Tensor) -> None:
    if not torch.isfinite(values).all():  # NaN ranks first, so the lists show it
        raise ValueError("scores hold NaN or infinity: there is no ranking to measure")


def ranked_matches(scores_QG: Tensor, match_QG: Tensor, depth: int) -> Tensor:
    """Matches at the first `depth` ranks, (Q, depth) bool, in bounded memory."""
    rows = max(1, CHUNK_ELEMENTS // max(1, scores_QG.shape[1]))
    return torch.cat(
        [match.gather(1, ranking(score, depth)) for score, match in zip(scores_QG.split(rows), match_QG.split(rows))]
    )


def first_match_ranks(scores_QG: Tensor, match_QG: Tensor) -> Tensor:
    """Rank of each query's first match, counted from 1, (Q,) int64; queries without a match are left out."""
    scores_QG, match_QG, _ = _queries(scores_QG, match_QG)
    n_gallery = scores_QG.shape[1]
    place = torch.arange(n_gallery, device=scores_QG.device)
    rows = max(1, CHUNK_ELEMENTS // max(1, n_gallery))
    found = []
    for score, match in zip(scores_QG.split(rows), match_QG.split(rows)):
        best = score.masked_fill(~match, -torch.inf).amax(1, keepdim=True)
        tied = score == best
        first = torch.where(tied & match, place, n_gallery).amin(1, keepdim=True)
        found.append(1 + (score > best).sum(1) + (tied & (place < first)).sum(1))
    return torch.cat(found)


def rank_summary(ranks_Q: Tensor, ks: Sequence[int] = (1, 5, 10)) -> dict[str, float]:
    """ "r@k" in [0, 1], "median_rank" (rounded down, as published) and "mean_rank" of ranks counted from 1."""
    ranks = ranks_Q.double()
    out = {f"r@{k}": (ranks <= k).double().mean().item() for k in ks}
    return out | {"median_rank": float(ranks.quantile(0.5).floor()), "mean_rank": ranks.mean().item()}


# -------------------------------------------------------------------------------------------- from ranked lists


@dataclass(frozen=True, eq=False)
class Positives:
    """Matching pairs of queries and gallery items, sorted: memory grows with the matches, not with Q x G.

    Attributes:
        n_queries, n_gallery: Q and G.
        keys: (P,) int64, query * G + item of every match, sorted.
        counts: (Q,) int64, R of each query.
    """

    n_queries: int
    n_gallery: int
    keys: Tensor
    counts: Tensor

    @staticmethod
    def from_pairs(query_P: Tensor, item_P: Tensor, n_queries: int, n_gallery: int) -> Positives:
        """Build from the indices of matching pairs; repeated pairs count once."""
        keys = torch.unique(query_P.long() * n_gallery + item_P.long())
        return Positives(n_queries, n_gallery, keys, torch.bincount(keys // n_gallery, minlength=n_queries))

    @staticmethod
    def from_matrix(match_QG: Tensor) -> Positives:
        """Build from a (Q, G) bool matrix."""
        query, item = match_QG.nonzero(as_tuple=True)
        return Positives.from_pairs(query.cpu(), item.cpu(), *match_QG.shape)

    @staticmethod
    def of_classes(class_Q: Tensor, class_G: Tensor) -> Positives:
        """Queries and items of the same class match."""
        order = class_G.argsort(stable=True)
        values = class_G[order]
        first, last = torch.searchsorted(values, class_Q), torch.searchsorted(values, class_Q, right=True)
        counts = last - first
        query = torch.arange(len(class_Q)).repeat_interleave(counts)
        place = torch.arange(len(query)) - (counts.cumsum(0) - counts)[query] + first[query]
        return Positives.from_pairs(query, order[place], len(class_Q), len(class_G))

    def transposed(self) -> Positives:
        """The other direction."""
        query, item = self.keys // self.n_gallery, self.keys % self.n_gallery
        return Positives.from_pairs(item, query, self.n_gallery, self.n_queries)

    def of_queries(self, start: int, stop: int) -> Positives:
        """The queries from `start` to `stop` alone."""
        ends = torch.tensor([start, stop]) * self.n_gallery
        first, last = torch.searchsorted(self.keys, ends).tolist()
        keys = self.keys[first:last] - start * self.n_gallery
        return Positives(stop - start, self.n_gallery, keys, self.counts[start:stop])

    def hits(self, top_QK: Tensor) -> Tensor:
        """Matches at each rank, (Q, K) bool; False for index -1 (nothing found)."""
        if not len(self.keys):
            return torch.zeros_like(top_QK, dtype=torch.bool)
        wanted = torch.arange(self.n_queries)[:, None] * self.n_gallery + top_QK
        place = torch.searchsorted(self.keys, wanted).clamp_max(len(self.keys) - 1)
        return (self.keys[place] == wanted) & (top_QK >= 0)


def query_metrics(top_QK: Tensor, positives: Positives, ks: Sequence[int] = (1, 5, 10)) -> dict[str, Tensor]:
    """Every metric of every single query from its ranked list, (Q,) float64 each; NaN for a query without a match.

    Raises:
        ValueError: the lists are shorter than k or R, and shorter than the gallery.
    """
    needed = min(max([*ks, int(positives.counts.max())]), positives.n_gallery)
    if top_QK.shape[1] < needed:
        raise ValueError(f"the lists hold {top_QK.shape[1]} ranks, but {needed} are needed: rank deeper")
    return _from_hits(positives.hits(top_QK), positives.counts, ks)


def mean_metrics(per_query: dict[str, Tensor]) -> dict[str, float]:
    """Means over the queries that have a match.

    Raises:
        ValueError: no query has one.
    """
    if any(values.isnan().all() for values in per_query.values()):
        raise ValueError("no query has a match in the gallery")
    return {name: values.nanmean().item() for name, values in per_query.items()}


def _from_hits(hit_QK: Tensor, n_match_Q: Tensor, ks: Sequence[int]) -> dict[str, Tensor]:
    rank = torch.arange(1, hit_QK.shape[1] + 1, device=hit_QK.device)
    within = (rank[None, :] <= n_match_Q[:, None]) & hit_QK  # matches among the first R
    precision = hit_QK.cumsum(1).double() / rank
    out = {f"r@{k}": hit_QK[:, :k].any(1).double() for k in ks}
    out["r_precision"] = within.sum(1).double() / n_match_Q
    out["map_at_r"] = (precision * within).sum(1) / n_match_Q
    without = n_match_Q == 0
    return {name: values.masked_fill(without, torch.nan) for name, values in out.items()}


# ------------------------------------------------------------------------------------------------- from a matrix


def _queries(scores_QG: Tensor, match_QG: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if scores_QG.shape != match_QG.shape:
        raise ValueError(f"scores {tuple(scores_QG.shape)} and match {tuple(match_QG.shape)} differ in shape")
    if not torch.isfinite(scores_QG).all():
        raise ValueError("scores hold NaN or infinity: there is no ranking to measure")
    match_QG = match_QG.bool()
    n_match = match_QG.sum(1)
    keep = n_match > 0
    if not keep.any():
        raise ValueError("no query has a match in the gallery")
    return scores_QG[keep], match_QG[keep], n_match[keep]


def recall_at_k(scores_QG: Tensor, match_QG: Tensor, k: int = 1) -> float:
    """Share of the queries with at least one match among the first k, in [0, 1]."""
    scores_QG, match_QG, _ = _queries(scores_QG, match_QG)
    return ranked_matches(scores_QG, match_QG, k).any(1).double().mean().item()


def r_precision(scores_QG: Tensor, match_QG: Tensor) -> float:
    """Mean share of matches among a query's first R, R its number of matches, in [0, 1]. Source: PCME, R-Precision."""
    return retrieval_metrics(scores_QG, match_QG, ks=())["r_precision"]


def map_at_r(scores_QG: Tensor, match_QG: Tensor) -> float:
    """mAP@R, the mean over queries of (1 / R) sum over r <= R of [item r matches] * precision at r, in [0, 1].

    Source: ECCV Caption, mAP@R.
    """
    return retrieval_metrics(scores_QG, match_QG, ks=())["map_at_r"]


def retrieval_metrics(scores_QG: Tensor, match_QG: Tensor, ks: tuple[int, ...] = (1, 5, 10)) -> dict[str, float]:
    """Every metric of one direction from one ranking: "r@k" for each k, "r_precision" and "map_at_r", in [0, 1]."""
    scores_QG, match_QG, n_match_Q = _queries(scores_QG, match_QG)
    depth = int(max([*ks, int(n_match_Q.max())]))
    return mean_metrics(_from_hits(ranked_matches(scores_QG, match_QG, depth), n_match_Q, ks))


def rsum(i2t: dict[str, float], t2i: dict[str, float]) -> float:
    """Sum of R@1, R@5 and R@10 of both directions in percent, at most 600."""
    return 100 * sum(direction[f"r@{k}"] for direction in (i2t, t2i) for k in (1, 5, 10))
