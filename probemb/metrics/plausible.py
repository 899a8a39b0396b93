"""Plausible-match R-Precision (PMRP): images and captions match if their object labels nearly agree. Source: PCME §4.1.

Letters: Q queries, G gallery items, L object categories (80 or 90 on COCO).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from probemb.errors import UserError, nearest
from probemb.gaussian import at_least_float32

SORT_ELEMENTS = 1 << 23  # scores sorted at a time
VARIANTS = ("pcme", "eccv-caption")


def plausible_match_r_precision(
    scores_QG: Tensor | Callable[[slice], Tensor],
    query_labels_QL: Tensor,
    gallery_labels_GL: Tensor,
    zetas: Sequence[int] = (0, 1, 2),
    variant: str = "pcme",
) -> dict:
    """R-Precision and R@1 where a pair matches if its labels differ in at most zeta places, for each zeta.

    A caption has the labels of its image. Items without labels match nothing and are not queries; variant "pcme" drops
    them from every ranking, "eccv-caption" keeps them.

    Args:
        scores_QG: larger is closer; a matrix, or a function from rows to their scores, called in order.
        query_labels_QL, gallery_labels_GL: multi-hot, any type.

    Returns:
        {"pmrp": mean over zetas, "pmr1": likewise, "per_zeta": {zeta: {"r_precision", "r@1"}},
        "per_query": {"pmrp": (Q,) float64, "pmr1": (Q,)}}, shares in [0, 1]; NaN for an item that is not a query.

    Raises:
        UserError: an unknown variant. ValueError: for one of `zetas` no query has a match.
    """
    if variant not in VARIANTS:
        raise UserError(
            f"There is no variant '{variant}' of PMRP.{nearest(variant, VARIANTS)}", f"Choose {' or '.join(VARIANTS)}."
        )
    n_queries, n_gallery = len(query_labels_QL), len(gallery_labels_GL)
    score = scores_QG if callable(scores_QG) else (lambda rows: scores_QG[rows])
    left, right = _label_vectors(query_labels_QL, gallery_labels_GL)
    is_query, unlabelled = (query_labels_QL != 0).any(1), ~(gallery_labels_GL != 0).any(1)
    precision = torch.full((len(zetas), n_queries), torch.nan, dtype=torch.float64)
    first = precision.clone()
    step = max(1, SORT_ELEMENTS // max(1, n_gallery))
    for start in range(0, n_queries, step):
        rows = slice(start, min(start + step, n_queries))
        scores = at_least_float32(score(rows).detach()).contiguous()  # a transposed matrix is slow to sort
        if not torch.isfinite(scores).all():
            raise ValueError("scores hold NaN or infinity: there is no ranking to measure")
        if variant == "pcme":
            scores = scores.masked_fill(unlabelled.to(scores.device), -torch.inf)  # ranked last
        found = _found_among_r(scores, (left[rows] @ right.T).numpy(), zetas)
        for z, (n_match, n_found, matched_first) in enumerate(found):
            asked = is_query[rows] & (n_match > 0)
            precision[z, rows] = (n_found.double() / n_match).masked_fill(~asked, torch.nan)
            first[z, rows] = matched_first.double().masked_fill(~asked, torch.nan)
    for zeta, values in zip(zetas, precision, strict=True):
        if values.isnan().all():
            raise ValueError(f"no query has labels that match anything in the gallery with zeta = {zeta}")
    per_zeta = {
        zeta: {"r_precision": precision[z].nanmean().item(), "r@1": first[z].nanmean().item()}
        for z, zeta in enumerate(zetas)
    }
    return {
        "pmrp": sum(values["r_precision"] for values in per_zeta.values()) / len(zetas),
        "pmr1": sum(values["r@1"] for values in per_zeta.values()) / len(zetas),
        "per_zeta": per_zeta,
        "per_query": {"pmrp": precision.nanmean(0), "pmr1": first.nanmean(0)},
    }


def _label_vectors(query_QL: Tensor, gallery_GL: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors whose dot products are the number of differing labels of two items; 1e4 if the gallery item has none."""
    a, b = (query_QL != 0).float(), (gallery_GL != 0).float()
    n_a, n_b = a.sum(1, keepdim=True), b.sum(1, keepdim=True)
    far = torch.full_like(n_b, 1e4)
    return torch.cat([a, n_a, torch.ones_like(n_a)], 1), torch.cat(
        [-2 * b, torch.ones_like(n_b), torch.where(n_b > 0, n_b, far)], 1
    )


def _ascending(scores_QG: Tensor) -> np.ndarray:
    """Every row sorted, which is far faster than argsort; numpy's sort is faster than torch's on the CPU."""
    if scores_QG.device.type != "cpu":
        return scores_QG.sort(dim=1).values.cpu().numpy()
    return np.sort(scores_QG.numpy(), axis=1)


def _found_among_r(
    scores_QG: Tensor, differ_QG: np.ndarray, zetas: Sequence[int]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each zeta: R, the matches among the R closest, and whether the closest item matches, (Q,) each."""
    ordered_QG, scores_QG = _ascending(scores_QG), scores_QG.cpu().numpy()
    n, n_gallery = scores_QG.shape
    every = np.arange(n)
    place_P = np.flatnonzero(differ_QG <= max(zetas))  # pairs: few, compared with all
    query_P, differ_P, score_P = place_P // n_gallery, differ_QG.ravel()[place_P], scores_QG.ravel()[place_P]
    differ_first = differ_QG[every, scores_QG.argmax(1)]
    out = []
    for zeta in zetas:
        match_P = differ_P <= zeta
        n_match = np.bincount(query_P[match_P], minlength=n)
        last = ordered_QG[every, n_gallery - np.maximum(n_match, 1)]  # the score at rank R
        n_found = np.bincount(query_P[match_P & (score_P >= last[query_P])], minlength=n)
        next_score = ordered_QG[every, np.maximum(n_gallery - n_match - 1, 0)]
        for q in np.flatnonzero((last == next_score) & (n_match > 0) & (n_match < n_gallery)):
            # Items tie at rank R: the first in the gallery count.
            order = np.argsort(-scores_QG[q], kind="stable")[: n_match[q]]
            n_found[q] = (differ_QG[q, order] <= zeta).sum()
        out.append(tuple(map(torch.from_numpy, (n_match, n_found, differ_first <= zeta))))
    return out
