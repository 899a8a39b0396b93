"""Searches that weigh the gallery's uncertainties in another way than their index: candidates, ranked again.

Q queries, N gallery items.
"""

from __future__ import annotations

import torch
from torch import Tensor

from probemb.errors import UserError
from probemb.gaussian import Gaussian
from probemb.search.index import CANDIDATES, Index, neighbours, search


def rerank(
    index: Index, queries: Gaussian, k: int, candidates: int | None = None, weight: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Search the means, add the gallery's uncertainty to the candidates, and keep the k closest. Source: PCME++ §C.5.

    Args:
        index: of the form "mean". candidates: how many are re-ranked, from k to all; by default 10 times k.
        weight: of the gallery's uncertainty.

    Returns CSD (Q, k) with the weighted uncertainty, and gallery indices (Q, k). Raises UserError: as `search`; an
    index of another form; fewer candidates than k.
    """
    if index.form != "mean":
        raise UserError("An index of CSD itself has nothing to re-rank.", "Build it with form='mean', or use search().")
    candidates = min(CANDIDATES * k if candidates is None else candidates, len(index))
    if candidates < k:
        raise UserError(f"{k} items are asked of {candidates} candidates.", "Take at least as many candidates.")
    distance, found = _weighted(index, *neighbours(index, queries, candidates), weight)
    return _whole(index, queries, distance[:, :k]), found[:, :k]


def search_weighted(index: Index, queries: Gaussian, k: int, weight: float) -> tuple[Tensor, Tensor]:
    """`search` by CSD with the gallery's u times `weight`, exactly, in an index of any weight.

    An index of another weight gives candidates, ever more of them, until no other item can be among the k closest: what
    the weight changes is bounded by the gallery's least and largest u.

    Raises UserError: as `search`; the index has another weight and is not an exact one on the CPU.
    """
    if weight == index.weight and index.form != "mean":
        return search(index, queries, k)
    if not is_exact(index):
        raise UserError(
            f"This index ranks with the gallery's variances times {index.weight:g}, and only a Flat one on the CPU can "
            f"also rank with {weight:g}.",
            f"Build another with `python -m tools.build_index --tolerance {weight:g}`.",
        )
    change = weight - index.weight
    least = min(change * float(u) for u in torch.aminmax(index.uncertainty))
    look = min(CANDIDATES * k, len(index))
    while True:
        distance, found = neighbours(index, queries, look)
        beyond = distance[:, -1:].double() + least  # of any item that is not among the candidates
        distance, found = _weighted(index, distance, found, change)
        distance, found = distance[:, :k], found[:, :k]
        if look == len(index) or bool((distance[:, -1:] < beyond).all()):
            return _whole(index, queries, distance), found
        look = min(4 * look, len(index))


def is_exact(index: Index) -> bool:
    """True if the index compares with every item, in memory that serves any number of neighbours."""
    import faiss

    return all(isinstance(faiss.downcast_index(part), faiss.IndexFlat) for part in index.parts)


def _weighted(index: Index, distance: Tensor, found: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """Candidates in the order of their distances plus `weight` times their u, in float64; what was not found stays
    last.
    """
    u = index.uncertainty[found.clamp_min(0)].double()
    distance, order = (distance.double() + weight * u).sort(dim=1, stable=True)
    return distance, found.gather(1, order)


def _whole(index: Index, queries: Gaussian, distance: Tensor) -> Tensor:
    """Distances with what `neighbours` leaves out, float32."""
    constant = 0.0 if index.form == "mean" else index.penalty.constant
    return (distance - constant + queries.uncertainty().double().cpu()[:, None]).float()
