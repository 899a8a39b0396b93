"""Retrieval metrics from scores and matches: recall at k, R-Precision, mAP@R, RSUM.

Letters: Q queries, G gallery items. `scores_QG`: larger is closer (pass the negative of a distance).
`match_QG`: bool. Queries without any match are left out of every mean. Ties rank by gallery index.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24  # scores ranked at a time


def ranking(scores_QG: Tensor, depth: int) -> Tensor:
    """The `depth` closest gallery items of every query, (Q, depth) indices; ties in the order of the gallery."""
    depth = min(depth, scores_QG.shape[1])
    values, index = scores_QG.topk(depth, dim=1)
    index, by_index = index.sort(dim=1)  # topk leaves ties in no order: by index first, then stably by value
    by_value = values.gather(1, by_index).argsort(dim=1, descending=True, stable=True)
    index = index.gather(1, by_value)
    last = values[:, -1:]
    cut_ties = (scores_QG == last).sum(1) > (values == last).sum(1)
    if cut_ties.any():  # more items tie with the last one than fit: only a whole stable sort says which come first
        whole = scores_QG[cut_ties].argsort(dim=1, descending=True, stable=True)
        index[cut_ties] = whole[:, :depth]
    return index


def ranked_matches(scores_QG: Tensor, match_QG: Tensor, depth: int) -> Tensor:
    """Whether the item at each of the first `depth` ranks matches, (Q, depth) bool, in bounded memory."""
    rows = max(1, CHUNK_ELEMENTS // max(1, scores_QG.shape[1]))
    return torch.cat(
        [match.gather(1, ranking(score, depth)) for score, match in zip(scores_QG.split(rows), match_QG.split(rows))]
    )


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
    hit = ranked_matches(scores_QG, match_QG, depth)  # (Q, depth)
    rank = torch.arange(1, hit.shape[1] + 1, device=hit.device)
    within = (rank[None, :] <= n_match_Q[:, None]) & hit  # matches among the first R
    precision = hit.cumsum(1).double() / rank
    out = {f"r@{k}": hit[:, :k].any(1).double().mean().item() for k in ks}
    out["r_precision"] = (within.sum(1).double() / n_match_Q).mean().item()
    out["map_at_r"] = ((precision * within).sum(1) / n_match_Q).mean().item()
    return out


def rsum(i2t: dict[str, float], t2i: dict[str, float]) -> float:
    """Sum of R@1, R@5 and R@10 of both directions in percent, at most 600."""
    return 100 * sum(direction[f"r@{k}"] for direction in (i2t, t2i) for k in (1, 5, 10))
