"""Scores that call a query doubtful before it is answered, from the candidates that the index returns for it.

The same computation serves a query and its calibration. It looks at the CANDIDATES closest items alone, not at the
whole gallery. Every score is high for a doubtful query.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from probemb.gaussian import Gaussian
    from probemb.models.match import MatchModel
    from probemb.search import Index

CANDIDATES = 100
SCORES = {  # name -> (title, meaning), in words for people who search
    "u": ("uncertainty", "how vague the query is by the model's own variance"),
    "expected-matches": ("expected matches", f"how many of the {CANDIDATES} closest items the model expects to fit"),
    "entropy": ("evenness of the matches", f"how evenly the {CANDIDATES} closest items share the chance to be the one"),
    "spread": ("variety of the closest", "how much the ten closest items differ from each other"),
    "distance": ("distance of the closest", "how far the closest item is from the query"),
    "margin": ("narrowness of the lead", "how little closer the first item is than the second, 0 if not at all"),
}


def candidate_count(index: Index) -> int:
    """Number of candidates that scores look at."""
    return min(CANDIDATES, len(index))


def query_scores(
    index: Index, query: Gaussian, distance_QK: Tensor, found_QK: Tensor, model: MatchModel
) -> dict[str, Tensor]:
    """Every score that the model and the index allow, (Q,) each, in the order of SCORES.

    Args:
        distance_QK, found_QK: CSD (with the weight of the index's u in the form "tolerance") and rows of the
            `candidate_count` closest items, -1 for one that was not found.
    """
    from torch.nn.functional import logsigmoid

    from probemb.evaluation.predictors import NEIGHBOURS, candidate_scores, spread

    u = query.float().uncertainty().cpu()
    u_items = index.uncertainty[found_QK.clamp_min(0)]
    if index.form == "tolerance":
        distance_QK = distance_QK + (1 - index.weight) * u_items
    apart = distance_QK - u[:, None] - u_items
    scores = {"u": u} if model.probabilistic else {}
    log_p = logsigmoid(model.log_odds_at(distance_QK, u[:, None] + u_items, index.dim)) if model.matches else None
    scores |= candidate_scores(apart, log_p, model)
    means = stored_means(index, found_QK[:, :NEIGHBOURS])
    if means is not None:
        scores["spread"] = spread(means)
    return {name: scores[name].nan_to_num() for name in SCORES if name in scores}  # finite, if nothing was found


def stored_means(index: Index, found_QK: Tensor) -> Tensor | None:
    """Means of items as the index stores them, (Q, K, D); None if it gives none back, such as IVF.

    An item that was not found is replaced by the first one.
    """
    import torch

    rows = found_QK.where(found_QK >= 0, found_QK[:, :1]).clamp_min(0).flatten()
    means, start = torch.empty(len(rows), index.dim), 0
    for part in index.parts:
        here = ((rows >= start) & (rows < start + part.ntotal)).nonzero().flatten()
        try:
            if len(here):
                vectors = part.reconstruct_batch((rows[here] - start).numpy())
                means[here] = torch.from_numpy(vectors)[:, : index.dim]
        except RuntimeError:
            return None
        start += part.ntotal
    return means.view(*found_QK.shape, index.dim)
