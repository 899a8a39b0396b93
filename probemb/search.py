"""Search under CSD with FAISS: exactly, through one more dimension, or by the means alone with re-ranking.

    index = build_index(gallery, "Flat")              # any FAISS factory string: "HNSW32", "IVF256,Flat", "PQ32", ...
    distance, place = search(index, queries, k=10)    # (Q, k) CSD and gallery indices, closest first

CSD(q, j) = |mu_q - mu_j|^2 + u_q + u_j, u the sum of the variances. With sqrt(u_j) appended to the gallery's mean and 0
to the query's, the squared Euclidean distance in D + 1 dimensions is |mu_q - mu_j|^2 + u_j; the query's own u is a
constant of its ranking. So an index that is exact under the Euclidean distance ("Flat") is exact under CSD, and an
approximate one approximates CSD itself. The paper's way searches the means and adds u_j to what was found (PCME++
§C.5): it cannot find what the means alone do not bring among the candidates.

Q queries, N gallery items, D dimensions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from probemb.errors import UserError, nearest
from probemb.gaussian import Gaussian

if TYPE_CHECKING:
    import faiss

FORMS = ("csd", "mean")
CANDIDATES = 10  # times k that are re-ranked by default


@dataclass(frozen=True)
class Index:
    """A searchable gallery.

    Attributes:
        faiss: the FAISS index, over vectors of `width` dimensions (padded with zeros where a quantizer needs it).
        form: "csd" (D + 1 dimensions) or "mean" (D).
        dim: D.
        width: dimensions of the FAISS index.
        uncertainty: (N,) float32, u of the gallery.
    """

    faiss: faiss.Index
    form: str
    dim: int
    width: int
    uncertainty: Tensor

    def __len__(self) -> int:
        return len(self.uncertainty)


def build_index(gallery: Gaussian, factory: str = "Flat", form: str = "csd") -> Index:
    """Index a gallery.

    Args:
        gallery: Gaussian (N, D).
        factory: as `faiss.index_factory` takes it; trained on the gallery where it needs training.
        form: "csd" searches CSD itself in D + 1 dimensions; "mean" the Euclidean distance of the means.

    Raises:
        UserError: an empty gallery, numbers that are not finite, a factory string that FAISS does not know or that
            needs a larger gallery.
    """
    import faiss

    if form not in FORMS:
        raise UserError(f"There is no form of search '{form}'.{nearest(form, FORMS)}", f"Choose {' or '.join(FORMS)}.")
    if gallery.mean.dim() != 2 or not len(gallery):
        raise UserError(f"The gallery has the shape {tuple(gallery.shape)}.", "Give at least one item, as (N, D).")
    u = gallery.uncertainty().float().cpu()
    vectors = _vectors(gallery.mean, u.sqrt() if form == "csd" else None, _multiple(factory))
    if not np.isfinite(vectors).all():
        raise UserError("The gallery holds NaN or infinity.", "Leave those items out, or use another checkpoint.")
    try:
        index = faiss.index_factory(vectors.shape[1], factory, faiss.METRIC_L2)
    except (RuntimeError, MemoryError) as error:
        raise UserError(
            f"FAISS makes no index of '{factory}' in {vectors.shape[1]} dimensions ({_reason(error)}).",
            "Use a string such as Flat, HNSW32, or IVF256,Flat.",
        ) from error
    try:
        if not index.is_trained:
            index.train(vectors)
        index.add(vectors)
    except (RuntimeError, MemoryError) as error:
        raise UserError(
            f"The index '{factory}' cannot be made from {len(u):,} items ({_reason(error)}).",
            "Use a smaller index, or Flat.",
        ) from error
    return Index(index, form, gallery.shape[1], vectors.shape[1], u)


def search(index: Index, queries: Gaussian, k: int) -> tuple[Tensor, Tensor]:
    """The k closest gallery items of every query.

    Args:
        queries: Gaussian (Q, D). k: at most the gallery's size.

    Returns:
        distance (Q, k) float32, CSD for the form "csd" and the squared Euclidean distance of the means for "mean";
        gallery indices (Q, k) int64. An approximate index may find fewer than k: the rest is infinity and -1.

    Raises:
        UserError: k is out of range, or the queries have another dimension than the gallery.
    """
    if not 1 <= k <= len(index):
        raise UserError(f"{k} neighbours are asked of a gallery of {len(index)}.", f"Ask for 1 to {len(index)}.")
    if queries.mean.dim() != 2 or queries.shape[1] != index.dim:
        raise UserError(
            f"The queries have the shape {tuple(queries.shape)}, the gallery has {index.dim} dimensions.",
            "Embed both with the same model.",
        )
    zero = torch.zeros(len(queries)) if index.form == "csd" else None
    distance, found = index.faiss.search(_vectors(queries.mean, zero, 1, index.width), k)
    distance, found = torch.from_numpy(distance), torch.from_numpy(found)
    if index.form == "csd":
        distance = distance + queries.uncertainty().float().cpu()[:, None]
    return distance.masked_fill(found < 0, torch.inf), found


def rerank(index: Index, queries: Gaussian, k: int, candidates: int | None = None) -> tuple[Tensor, Tensor]:
    """Search the means, add the gallery's uncertainty to what was found, and keep the k closest. Source: PCME++ §C.5.

    Args:
        index: of the form "mean". candidates: how many are re-ranked, at least k; by default 10 times k, at most all.

    Returns:
        CSD (Q, k) and gallery indices (Q, k), as `search`.

    Raises:
        UserError: as `search`; an index of the form "csd", which needs no re-ranking; fewer candidates than k.
    """
    if index.form != "mean":
        raise UserError("An index of CSD itself has nothing to re-rank.", "Build it with form='mean', or use search().")
    candidates = min(CANDIDATES * k if candidates is None else candidates, len(index))
    if candidates < k:
        raise UserError(f"{k} items are asked of {candidates} candidates.", "Take at least as many candidates.")
    distance, found = search(index, queries, candidates)
    distance = distance + index.uncertainty[found.clamp_min(0)] + queries.uncertainty().float().cpu()[:, None]
    distance, order = distance.sort(dim=1, stable=True)
    return distance[:, :k], found.gather(1, order)[:, :k]


def _vectors(mean: Tensor, last: Tensor | None, multiple: int, width: int | None = None) -> np.ndarray:
    """Means with one more column and zeros up to a width, (N, width) float32."""
    mean = mean.detach().float().cpu()
    columns = mean.shape[1] + (last is not None)
    width = width or -(-columns // multiple) * multiple
    out = np.zeros((len(mean), width), dtype=np.float32)
    out[:, : mean.shape[1]] = mean.numpy()
    if last is not None:
        out[:, mean.shape[1]] = last.numpy()
    return out


def _multiple(factory: str) -> int:
    """Product quantizers cut vectors into equal parts: the number of parts, by which the width must be divisible."""
    return int(np.lcm.reduce([int(n) for n in re.findall(r"PQ(\d+)", factory) if int(n) > 0] or [1]))


def _reason(error: Exception) -> str:
    """FAISS' message without its place in the source."""
    text = re.sub(r"^.*?\.(?:cpp|h):\d+:\s*", "", " ".join(str(error).split()))
    return re.sub(r"^Error: .*? failed: ?", "", text)[:200].rstrip(". ") or "no reason given"
