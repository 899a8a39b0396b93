"""Scores of composed queries with gallery items, a block of queries at a time. N queries, T items, D dimensions."""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn import functional as F

from probemb.compose import Product
from probemb.evaluation.scores import DotScores
from probemb.gaussian import Gaussian
from probemb.losses.mpc import log_density_factors

Ranking = Literal["cosine", "density"]


@torch.no_grad()
def composed_scores(query: Product, gallery: Gaussian, by: Ranking = "cosine") -> DotScores:
    """Scores (N, T), larger is closer, as one matrix product a block of queries; nothing of size N x T x D is made.

    Args:
        query: compositions (N, D); gallery: (T, D).
        by: "cosine" of the means, MPC's choice at test time; or "density", the expected log-density of the item under
            the composition with its normaliser, in nats (`losses.mpc.expected_similarity`). The normaliser changes no
            ranking of one query.

    Raises:
        ValueError: another ranking.
    """
    if by not in ("cosine", "density"):
        raise ValueError(f"compositions are ranked by cosine or density, not by {by!r}")
    g, gallery = query.gaussian.float(), gallery.float()
    if by == "cosine":
        return DotScores(F.normalize(g.mean, dim=-1), F.normalize(gallery.mean, dim=-1))
    with torch.autocast(g.mean.device.type, enabled=False):
        left, right, row = log_density_factors(g, gallery.mean, gallery.var)
    constant = (row + query.log_normaliser)[:, None]
    return DotScores(torch.cat([left, constant], 1), torch.cat([right, torch.ones_like(right[:, :1])], 1))
