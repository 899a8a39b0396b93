"""Plausible-match R-Precision (PMRP): images and captions match if their object labels nearly agree. Source: PCME §4.1.

Letters: Q queries, G gallery items, L object categories (80 or 90 on COCO).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from probemb.errors import UserError, nearest

SORT_ELEMENTS = 1 << 23  # scores sorted at a time
VARIANTS = ("pcme", "eccv-caption")


def hamming(a_QL: Tensor, b_GL: Tensor) -> Tensor:
    """In how many places two multi-hot vectors differ, (Q, G) int32."""
    a, b = (a_QL != 0).float(), (b_GL != 0).float()
    return (a.sum(1)[:, None] + b.sum(1)[None, :] - 2 * a @ b.T).round().int()


def plausible_match_r_precision(
    scores_QG: Tensor | Callable[[slice], Tensor],
    query_labels_QL: Tensor,
    gallery_labels_GL: Tensor,
    zetas: Sequence[int] = (0, 1, 2),
    variant: str = "pcme",
) -> dict:
    """R-Precision and R@1 where a pair matches if its labels differ in at most zeta places, for each zeta.

    A caption has the labels of its image. Items without any label match nothing and are no queries; the published
    variants differ in whether they stand in the way: "pcme" drops them from every ranking, "eccv-caption" keeps them.

    Args:
        scores_QG: larger is closer; a matrix, or a function from rows to their scores, which is asked in order.
        query_labels_QL, gallery_labels_GL: multi-hot, any type.

    Returns:
        {"pmrp": mean over zetas, "pmr1": likewise, "per_zeta": {zeta: {"r_precision", "r@1"}},
        "per_query": {"pmrp": (Q,) float64, "pmr1": (Q,)}}, shares in [0, 1]; NaN for a query that is none.

    Raises:
        UserError: an unknown variant. ValueError: no query has a label and a match.
    """
    if variant not in VARIANTS:
        raise UserError(
            f"There is no variant '{variant}' of PMRP.{nearest(variant, VARIANTS)}", f"Choose {' or '.join(VARIANTS)}."
        )
    n_queries, n_gallery = len(query_labels_QL), len(gallery_labels_GL)
    score = scores_QG if callable(scores_QG) else (lambda rows: scores_QG[rows])
    is_query = (query_labels_QL != 0).any(1)
    labelled = (gallery_labels_GL != 0).any(1)
    dropped = variant == "pcme"
    gallery = gallery_labels_GL[labelled] if dropped else gallery_labels_GL
    precision = torch.full((len(zetas), n_queries), torch.nan, dtype=torch.float64)
    first = precision.clone()
    step = max(1, SORT_ELEMENTS // max(1, n_gallery))
    for start in range(0, n_queries, step):
        rows = slice(start, min(start + step, n_queries))
        scores = score(rows)
        if not torch.isfinite(scores).all():
            raise ValueError("scores hold NaN or infinity: there is no ranking to measure")
        if dropped:
            scores = scores[:, labelled.to(scores.device)]
        if not scores.shape[1]:
            break
        order = scores.argsort(dim=1, descending=True, stable=True).cpu()
        differ = hamming(query_labels_QL[rows], gallery)
        if not dropped:
            differ[:, ~labelled] = gallery_labels_GL.shape[1] + 1
        differ = differ.gather(1, order)
        rank = torch.arange(1, differ.shape[1] + 1)
        for z, zeta in enumerate(zetas):
            hit = differ <= zeta
            n_match = hit.sum(1)
            found = (hit & (rank <= n_match[:, None])).sum(1).double() / n_match
            asked = is_query[rows] & (n_match > 0)
            precision[z, rows] = found.masked_fill(~asked, torch.nan)
            first[z, rows] = hit[:, 0].double().masked_fill(~asked, torch.nan)
    if precision.isnan().all():
        raise ValueError("no query has labels that match anything in the gallery")
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
