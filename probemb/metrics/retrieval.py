"""Retrieval metrics from ranked lists `top_QK`, the gallery index at each rank; these from blocks of scores.

Letters: Q queries, G gallery items, K ranks, R matches of a query. Queries without any match are left out of every
mean. A k beyond the gallery takes the whole gallery. Ties rank by gallery index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 26  # scores held at a time: 256 MiB in float32
CHUNK_ELEMENTS = 1 << 24  # of one direction alone
COLUMN_ELEMENTS = 1 << 21  # of a block's columns, transposed and ranked at a time: fits the processor's cache

KS = (1, 5, 10)
# Title, and a function of precision at each rank and of the matches among the first R, (Q, K), and of R (Q,).
METRICS: dict[str, tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "r_precision": ("R-P", lambda precision_QK, hit_QK, r_Q: hit_QK.sum(1).double() / r_Q),
    "map_at_r": ("mAP@R", lambda precision_QK, hit_QK, r_Q: (precision_QK * hit_QK).sum(1) / r_Q),
}
TITLES = {f"r@{k}": f"R@{k}" for k in KS} | {name: title for name, (title, _) in METRICS.items()}


@dataclass(frozen=True, eq=False)
class Positives:
    """Matching pairs: memory grows with the matches, not with Q x G. keys: (P,) int64, query * G + item of every match,
    sorted; counts: (Q,), R of each query."""

    n_queries: int
    n_gallery: int
    keys: Tensor
    counts: Tensor

    @staticmethod
    def from_pairs(query_P: Tensor, item_P: Tensor, n_queries: int, n_gallery: int) -> Positives:
        """Repeated pairs count once."""
        keys = torch.unique(query_P.long() * n_gallery + item_P.long())
        return Positives(n_queries, n_gallery, keys, torch.bincount(keys // n_gallery, minlength=n_queries))

    @staticmethod
    def from_matrix(match_QG: Tensor) -> Positives:
        return Positives.from_pairs(*match_QG.nonzero(as_tuple=True), *match_QG.shape)

    @staticmethod
    def of_classes(class_Q: Tensor, class_G: Tensor) -> Positives:
        places = [[(side == number).nonzero().flatten() for side in (class_Q, class_G)] for number in class_Q.unique()]
        query, item = torch.cat([torch.cartesian_prod(*both) for both in places]).T
        return Positives.from_pairs(query, item, len(class_Q), len(class_G))

    def transposed(self) -> Positives:
        query, item = self.keys // self.n_gallery, self.keys % self.n_gallery
        return Positives.from_pairs(item, query, self.n_gallery, self.n_queries)

    def of_queries(self, start: int, stop: int) -> Positives:
        first, last = torch.searchsorted(self.keys, torch.tensor([start, stop]) * self.n_gallery).tolist()
        keys = self.keys[first:last] - start * self.n_gallery
        return Positives(stop - start, self.n_gallery, keys, self.counts[start:stop])

    def hits(self, top_QK: Tensor) -> Tensor:
        """Matches at each rank, (Q, K) bool; False for index -1 (nothing found)."""
        if not len(self.keys):
            return torch.zeros_like(top_QK, dtype=torch.bool)
        wanted = torch.arange(self.n_queries)[:, None] * self.n_gallery + top_QK
        place = torch.searchsorted(self.keys, wanted).clamp_max(len(self.keys) - 1)
        return (self.keys[place] == wanted) & (top_QK >= 0)


def query_metrics(top_QK: Tensor, positives: Positives, ks: Sequence[int] = KS) -> dict[str, Tensor]:
    """ "r@k" and METRICS of every query, (Q,) float64 each; NaN without a match. Lists are as long as k and R."""
    hit_QK, r_Q = positives.hits(top_QK), positives.counts
    place_K = torch.arange(1, hit_QK.shape[1] + 1)
    precision_QK, among_r_QK = hit_QK.cumsum(1).double() / place_K, hit_QK & (place_K <= r_Q[:, None])
    found = {f"r@{k}": hit_QK[:, :k].any(1).double() for k in ks}
    found |= {name: metric(precision_QK, among_r_QK, r_Q) for name, (_, metric) in METRICS.items()}
    return {name: values.masked_fill(r_Q == 0, torch.nan) for name, values in found.items()}


def mean_metrics(per_query: dict[str, Tensor]) -> dict[str, float]:
    """Means over the queries that have a match. Raises ValueError: none has one."""
    if any(values.isnan().all() for values in per_query.values()):
        raise ValueError("no query has a match in the gallery")
    return {name: values.nanmean().item() for name, values in per_query.items()}


def score_metrics(score: Callable[[slice], Tensor], positives: Positives, ks: Sequence[int] = KS) -> dict[str, Tensor]:
    """`query_metrics` from scores of blocks of queries: rows -> (rows, G)."""
    found = []
    for rows in blocks(positives.n_queries, positives.n_gallery, CHUNK_ELEMENTS):
        of_block = positives.of_queries(rows.start, rows.stop)
        top = ranking(score(rows), max([*ks, int(of_block.counts.max())])).cpu()
        found.append(query_metrics(top, of_block, ks))
    return {name: torch.cat([values[name] for values in found]) for name in found[0]}


def rsum(i2t: dict[str, float], t2i: dict[str, float]) -> float:
    """Sum of R@1, R@5 and R@10 of both directions in percent, at most 600."""
    return 100 * sum(direction[f"r@{k}"] for direction in (i2t, t2i) for k in KS)


def ranking(scores_QG: Tensor, depth: int) -> Tensor:
    """The `depth` closest items of every query, (Q, depth). Raises ValueError: a score is NaN or infinite."""
    return _ranked(scores_QG, depth)[1]


def blocks(n_rows: int, width: int, elements: int) -> list[slice]:
    """Rows in blocks of at most so many elements, or of one row; `width`: elements of a row."""
    height = max(1, elements // max(1, width))
    return [slice(start, min(start + height, n_rows)) for start in range(0, n_rows, height)]


def _ranked(scores_QG: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Scores and indices at the first `depth` ranks, both (Q, depth)."""
    values, index = scores_QG.topk(min(depth + 1, scores_QG.shape[1]), dim=1)  # one more to see a tie at the end
    if not torch.isfinite(values).all():  # NaN ranks first
        raise ValueError("scores hold NaN or infinity: there is no ranking to measure")
    tied = (values[:, 1:] == values[:, :-1]).any(1)
    if tied.any():  # topk does not order ties
        index[tied] = scores_QG[tied].argsort(dim=1, descending=True, stable=True)[:, : index.shape[1]]
    return values[:, :depth].contiguous(), index[:, :depth].contiguous()


def rank_both(
    score: Callable[[slice], Tensor], n_rows: int, n_columns: int, depth: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """`ranking` of both directions from one pass over the scores, about BLOCK_ELEMENTS at a time: the columns closest
    to each row, (n_rows, depth[0]), and the rows closest to each column, (n_columns, depth[1]); int64, on the CPU.
    """
    of_rows: list[Tensor] = []
    best: dict[int, tuple[Tensor, Tensor]] = {}  # first of some columns -> scores and rows
    whole = blocks(n_rows, n_columns, BLOCK_ELEMENTS)
    for rows in whole:
        block = score(rows)
        of_rows.append(ranking(block, depth[0]).cpu())
        for columns in blocks(n_columns, whole[0].stop, COLUMN_ELEMENTS):
            values, index = _ranked(block[:, columns].T.contiguous(), depth[1])
            index += rows.start
            if columns.start in best:  # the rows before have the lower indices, so a stable sort keeps ties in order
                values, index = (torch.cat(pair, 1) for pair in zip(best[columns.start], (values, index)))
                order = values.argsort(dim=1, descending=True, stable=True)[:, : depth[1]]
                values, index = values.gather(1, order), index.gather(1, order)
            best[columns.start] = values, index
        del block  # before the next one is made
    return torch.cat(of_rows), torch.cat([found.cpu() for _, found in best.values()])
