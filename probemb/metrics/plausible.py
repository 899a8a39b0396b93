"""Plausible-match R-Precision (PMRP): images and captions match if their object labels nearly agree. Source: PCME §4.1.

Letters: Q queries, G gallery items, L object categories (80 or 90 on COCO), Z values of zeta.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from probemb.gaussian import at_least_float32
from probemb.metrics.retrieval import blocks

SORT_ELEMENTS = 1 << 22  # scores sorted at a time
VARIANTS = ("pcme", "eccv-caption")


def plausible_match_r_precision(
    score: Callable[[slice], Tensor], query_labels_QL: Tensor, gallery_labels_GL: Tensor,
    zetas: Sequence[int] = (0, 1, 2), variant: str = "pcme",
) -> dict:  # fmt: skip
    """R-Precision and R@1 where a pair matches if its labels differ in at most zeta places, for each zeta.

    A caption has the labels of its image, multi-hot. Items without labels match nothing and are no queries; variant
    "pcme" drops them from every ranking, "eccv-caption" keeps them. score: rows -> (rows, G), called in order. Returns
    shares, NaN for an item that is no query: means over zetas, "per_zeta" and "per_query".
    """
    n_queries, n_gallery = len(query_labels_QL), len(gallery_labels_GL)
    a, b = (query_labels_QL != 0).float(), (gallery_labels_GL != 0).float()
    is_query, unlabelled = a.any(1).numpy(), ~b.any(1)
    far = b.sum(1).masked_fill(unlabelled, 1e4)  # unlabelled items differ from everything
    precision = np.full((2, len(zetas), n_queries), np.nan)  # R-Precision, R@1
    for rows in blocks(n_queries, n_gallery, SORT_ELEMENTS):
        scores = at_least_float32(score(rows)).contiguous()  # a transposed matrix is slow to sort
        if not torch.isfinite(scores).all():
            raise ValueError("scores hold NaN or infinity: there is no ranking to measure")
        if variant == "pcme":
            scores = scores.masked_fill(unlabelled.to(scores.device), -torch.inf)  # ranked last
        differ = (a[rows].sum(1, keepdim=True) + far - 2 * a[rows] @ b.T).numpy()
        for z, found in enumerate(_found_among_r(scores.cpu().numpy(), differ, zetas)):
            precision[:, z, rows] = np.where(is_query[rows], found, np.nan)
    both = torch.from_numpy(precision)
    means = both.nanmean(2).tolist()
    per_zeta = {zeta: {"r_precision": means[0][z], "r@1": means[1][z]} for z, zeta in enumerate(zetas)}
    found = {name: sum(values) / len(zetas) for name, values in zip(("pmrp", "pmr1"), means)}
    return found | {"per_zeta": per_zeta, "per_query": dict(zip(("pmrp", "pmr1"), both.nanmean(1)))}


def _found_among_r(scores_QG: np.ndarray, differ_QG: np.ndarray, zetas: Sequence[int]) -> list[np.ndarray]:
    """For each zeta the share of matches among the R closest, and whether the closest item matches, (2, Q)."""
    # Sorted values give the score at rank R, far faster than sorted indices; NaN where nothing matches.
    ordered_QG, every = np.sort(scores_QG, axis=1), np.arange(len(scores_QG))
    place_P = np.flatnonzero(differ_QG <= max(zetas))  # pairs: few, compared with all
    query_P, n_gallery = place_P // scores_QG.shape[1], scores_QG.shape[1]
    differ_P, score_P = differ_QG.ravel()[place_P], scores_QG.ravel()[place_P]
    differ_first, out = differ_QG[every, scores_QG.argmax(1)], []
    for zeta in zetas:
        match_P = differ_P <= zeta
        r = np.bincount(query_P[match_P], minlength=len(every))
        last = ordered_QG[every, n_gallery - np.maximum(r, 1)]
        after = ordered_QG[every, np.maximum(n_gallery - r - 1, 0)]
        found = np.bincount(query_P[match_P & (score_P >= last[query_P])], minlength=len(every))
        for q in np.flatnonzero((last == after) & (r > 0) & (r < n_gallery)):  # a tie at rank R: by gallery index
            found[q] = (differ_QG[q, np.argsort(-scores_QG[q], kind="stable")[: r[q]]] <= zeta).sum()
        out.append(np.where(r > 0, [found / np.maximum(r, 1), differ_first <= zeta], np.nan))
    return out
