"""Search under CSD with FAISS: exactly, through one more dimension, or by the means alone with re-ranking.

    index = build_index(gallery, "Flat")              # any FAISS factory string: "HNSW32", "IVF256,Flat", "PQ32", ...
    distance, place = search(index, queries, k=10)    # (Q, k) CSD and gallery indices, closest first

CSD(q, j) = |mu_q - mu_j|^2 + u_q + u_j, u the sum of the variances. With sqrt(u_j - min u) appended to the gallery's
mean and 0 to the query's, the squared Euclidean distance in D + 1 dimensions is |mu_q - mu_j|^2 + u_j - min u; the
query's u and min u are constants of its ranking. So an exact index ("Flat") is exact under CSD, and an approximate one
approximates CSD itself.
The form "tolerance" weighs u_j with any lambda (`penalty.py`).
The paper's way searches the means and adds u_j to the candidates (PCME++ §C.5), which misses items that the means alone
do not find.

Q queries, N gallery items, D dimensions.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from probemb.errors import UserError, nearest
from probemb.gaussian import Gaussian
from probemb.search.penalty import CSD, FORMS, Penalty, penalty_of

if TYPE_CHECKING:
    import faiss

    from probemb.search.items import Items

# Nodes examined for each one added. With FAISS' 40, recall stays below 1 at any effort, because queries lie outside of
# the gallery (their last dimension is 0); 100 takes twice the time to build.
EF_CONSTRUCTION = 100
MAX_BITS = 24  # of a product quantizer's code
_EFFORT = {"IVF": "nprobe", "HNSW": "efSearch", "NSG": "search_L"}
CANDIDATES = 10  # candidates per neighbour by default, re-ranked (reranking.py) or refined (",RFlat")


@dataclass(frozen=True)
class Index:
    """A searchable gallery, in memory or in the files of an index folder.

    Attributes:
        parts: FAISS indexes over vectors of `width` dimensions (padded with zeros where a quantizer needs it), which
            together hold the gallery's items in order.
        form: "csd" or "tolerance" (D + 1 dimensions), or "mean" (D).
        dim: D.
        uncertainty: (N,) float32, u of the gallery.
        penalty: of the form; without a meaning for "mean".
        kind, model, weights, factory, why, items: of an index folder, else None. "image" or "text"; the model as typed
            and its SHA-256; the FAISS factory string and the reason for it; the metadata of each item.
        identity: digest that tells one index folder from another at the same path; None in memory.
        resize: who cropped and resized the images, and does those of queries: "pil" or "tensor".
    """

    parts: tuple[faiss.Index, ...]
    form: str
    dim: int
    width: int
    uncertainty: Tensor
    penalty: Penalty = CSD
    kind: str | None = None
    model: str | None = None
    weights: str | None = None
    factory: str | None = None
    why: str | None = None
    items: Items | None = None
    identity: str | None = None
    resize: str = "pil"

    def __len__(self) -> int:
        return len(self.uncertainty)

    @property
    def weight(self) -> float:
        """The weight of the gallery's u in the ranking: 1 for CSD, 0 for the means."""
        return 0.0 if self.form == "mean" else self.penalty.weight

    @property
    def faiss(self) -> faiss.Index:
        """The FAISS index of a gallery that has one part. Raises ValueError for several."""
        (part,) = self.parts
        return part

    def item(self, i: int) -> dict:
        """key, captions, shard, offset, size and url of a gallery item; see `probemb.search.items`.

        Raises UserError: the index was made in memory.
        """
        if self.items is None:
            raise UserError("This index has no list of its items.", "Load an index folder of tools.build_index.")
        return self.items[i]


def build_index(gallery: Gaussian, factory: str = "Flat", form: str = "csd", tolerance: float | None = None) -> Index:
    """Index a gallery.

    Args:
        gallery: Gaussian (N, D).
        factory: as `faiss.index_factory` takes it; trained on the gallery if it needs training.
        form: "csd" searches CSD itself in D + 1 dimensions; "tolerance" CSD with the gallery's u times `tolerance`;
            "mean" the Euclidean distance of the means.
        tolerance: lambda, for that form alone.

    Raises UserError: an empty gallery, numbers that are not finite, an unknown factory string or one that needs a
    larger gallery.
    """
    if form not in FORMS:
        raise UserError(f"There is no form of search '{form}'.{nearest(form, FORMS)}", f"Choose {' or '.join(FORMS)}.")
    if gallery.mean.dim() != 2 or not len(gallery):
        raise UserError(f"The gallery has the shape {tuple(gallery.shape)}.", "Give at least one item, as (N, D).")
    u = gallery.uncertainty().float().cpu()
    penalty = penalty_of(form, tolerance, float(u.max()), float(u.min()))
    vectors = gallery_vectors(gallery.mean.detach().float().cpu().numpy(), u.numpy(), form, factory, penalty)
    index = new_index(vectors.shape[1], factory)
    train(index, vectors, factory)
    fill(index, vectors, factory)
    return Index((index,), form, gallery.shape[1], vectors.shape[1], u, penalty)


def gallery_vectors(mean: np.ndarray, u: np.ndarray, form: str, factory: str, penalty: Penalty = CSD) -> np.ndarray:
    """The vectors for FAISS of (N, D) means and (N,) uncertainties: (N, width) float32. Raises UserError."""
    last = None if form == "mean" else penalty.column(u)
    vectors = _vectors(mean, last, width_of(mean.shape[1], form, factory))
    if not np.isfinite(vectors).all():
        raise UserError("The gallery holds NaN or infinity.", "Leave those items out, or use another checkpoint.")
    return vectors


def width_of(dim: int, form: str, factory: str) -> int:
    """Dimensions of the vectors: D, or D + 1, rounded up to a multiple that the factory's quantizers can divide.

    Flat vectors are padded to whole 16 bytes: zeros change no distance, and a search of 513 dimensions takes longer
    than one of 516 (`tools.bench.search`).
    """
    columns = dim + (form != "mean")
    return -(-columns // _multiple(factory)) * _multiple(factory)


def new_index(width: int, factory: str) -> faiss.Index:
    """An empty, untrained index. Raises UserError for a string that FAISS does not know."""
    import faiss

    check_codes(factory)
    try:
        index = faiss.index_factory(width, factory, faiss.METRIC_L2)
    except (RuntimeError, MemoryError) as error:
        raise UserError(
            f"FAISS makes no index of '{factory}' in {width} dimensions ({_reason(error)}).",
            "Use a string such as Flat, HNSW32, or IVF256,Flat.",
        ) from error
    refuse_other_distances(index, factory)
    if isinstance(index, faiss.IndexRefine):
        index.k_factor = CANDIDATES  # with FAISS' 1 the finer codes would only sort the result
    graph = _innermost(index)
    if isinstance(graph, faiss.IndexHNSW):
        graph.hnsw.efConstruction = EF_CONSTRUCTION
    return index


def check_codes(factory: str) -> None:
    """Raises UserError for codes of a width with which FAISS would end the process."""
    for bits in re.findall(r"PQ\d+x(\d+)", factory):
        if len(bits) > 2 or not 1 <= int(bits) <= MAX_BITS:
            raise UserError(f"'{factory}' has codes of {bits[:9]} bits.", f"Use 1 to {MAX_BITS}; 8 is common.")


def refuse_other_distances(index: faiss.Index, factory: str) -> None:
    """Raises UserError for an index whose distance is not Euclidean, such as LSH, L2norm and PCAW64."""
    import faiss

    while True:
        index = faiss.downcast_index(index)
        chain = [index.chain.at(i) for i in range(index.chain.size())] if hasattr(index, "chain") else []
        other = any(map(_changes_distances, map(faiss.downcast_VectorTransform, chain)))
        if other or isinstance(index, faiss.IndexLSH) or index.metric_type != faiss.METRIC_L2:
            raise UserError(
                f"'{factory}' does not rank by the Euclidean distance, from which CSD follows.",
                "Use a string such as Flat, HNSW32, or IVF256,Flat.",
            )
        if isinstance(index, faiss.IndexPreTransform):
            index = index.index
        elif isinstance(index, faiss.IndexRefine):
            index = index.base_index
        else:
            return


def _changes_distances(transform) -> bool:
    """True if a transformation of vectors is anything other than a rotation or a projection."""
    import faiss

    whitens = isinstance(transform, faiss.PCAMatrix) and transform.eigen_power != 0
    return whitens or isinstance(transform, faiss.NormalizationTransform | faiss.ITQTransform)


def train(index: faiss.Index, vectors: np.ndarray, factory: str) -> None:
    """Train an index that needs it. Raises UserError."""
    if not index.is_trained:
        _make(index.train, vectors, factory)


def fill(index: faiss.Index, vectors: np.ndarray, factory: str) -> None:
    """Add vectors. Raises UserError."""
    _make(index.add, vectors, factory)


def _make(step: Callable, vectors: np.ndarray, factory: str) -> None:
    try:
        step(vectors)
    except (RuntimeError, MemoryError) as error:
        raise UserError(
            f"The index '{factory}' cannot be made from {len(vectors):,} items ({_reason(error)}).",
            "Use a smaller index, or Flat.",
        ) from error


def search(index: Index, queries: Gaussian, k: int) -> tuple[Tensor, Tensor]:
    """The k closest gallery items of every query.

    Args:
        queries: Gaussian (Q, D). k: at most the gallery's size.

    Returns:
        distance (Q, k) float32: the squared Euclidean distance of the means for the form "mean", CSD for "csd", and for
        "tolerance" CSD with the item's u times lambda; gallery indices (Q, k) int64. An approximate index may find
        fewer than k: the rest is infinity and -1.

    Raises UserError: k is out of range, or the queries have another dimension than the gallery or are not finite.
    """
    distance, found = neighbours(index, queries, k)
    if index.form != "mean":
        distance = distance - index.penalty.constant + queries.uncertainty().float().cpu()[:, None]
    return distance, found


def neighbours(index: Index, queries: Gaussian, k: int) -> tuple[Tensor, Tensor]:
    """`search` with distances that lack what is the same for all items: the query's u and the penalty's constant, which
    would blur the distances of large variances in float32.
    """
    if not 1 <= k <= len(index):
        raise UserError(f"{k} neighbours are asked of a gallery of {len(index)}.", f"Ask for 1 to {len(index)}.")
    if queries.mean.dim() != 2 or queries.shape[1] != index.dim:
        raise UserError(
            f"The queries have the shape {tuple(queries.shape)}, the gallery has {index.dim} dimensions.",
            "Embed both with the same model.",
        )
    vectors = _vectors(queries.mean.detach().float().cpu().numpy(), None, index.width)
    if not np.isfinite(vectors).all():
        raise UserError("A query holds NaN or infinity.", "Leave it out, or use another checkpoint.")
    distances, places, start = [], [], 0
    for part in index.parts:
        distance, found = (torch.from_numpy(one) for one in part.search(vectors, min(k, part.ntotal)))
        distances.append(distance.masked_fill(found < 0, torch.inf))
        places.append(found.where(found < 0, found + start))
        start += part.ntotal
    distance, found = torch.cat(distances, 1), torch.cat(places, 1)
    if len(index.parts) > 1:
        distance, order = distance.sort(dim=1, stable=True)
        distance, found = distance[:, :k], found.gather(1, order[:, :k])
    return distance, found


def set_effort(index: Index, effort: int) -> str | None:
    """Set how many cells (`nprobe`) or nodes of a graph (`efSearch`, `search_L`) an approximate index examines.

    Returns the name of the parameter, None for an index without one.
    """
    import faiss

    name = None
    for part in index.parts:
        inner = _innermost(part)
        kind = type(inner).__name__
        name = next((name for mark, name in _EFFORT.items() if mark in kind), None)
        if name == "search_L":
            inner.nsg.search_L = effort
        elif name:
            space = faiss.GpuParameterSpace() if "Gpu" in kind else faiss.ParameterSpace()
            space.set_index_parameter(part, name, effort)
    return name


def _innermost(index: faiss.Index) -> faiss.Index:
    """The index inside transforms and refinement."""
    import faiss

    index = faiss.downcast_index(index)
    while isinstance(index, (faiss.IndexPreTransform, faiss.IndexRefine)):
        index = faiss.downcast_index(index.index if isinstance(index, faiss.IndexPreTransform) else index.base_index)
    return index


def _vectors(mean: np.ndarray, last: np.ndarray | None, width: int) -> np.ndarray:
    """Means (N, D), one more column, and zero padding: (N, width) float32."""
    out = np.zeros((len(mean), width), dtype=np.float32)
    out[:, : mean.shape[1]] = mean
    if last is not None:
        out[:, mean.shape[1]] = last
    return out


def _multiple(factory: str) -> int:
    """The divisor of the width: the number of equal parts into which product quantizers cut vectors.

    Transforms such as OPQ64_512 and PCA256 take any width.
    """
    if re.match(r"(OPQ\d+_\d+|PCA[RW]*\d+)", factory):
        return 1
    if factory == "Flat":
        return 4
    return int(np.lcm.reduce([int(n) for n in re.findall(r"PQ(\d+)", factory) if int(n) > 0] or [1]))


def _reason(error: Exception) -> str:
    """FAISS' message without file and line."""
    text = re.sub(r"^.*?\.(?:cpp|h):\d+:\s*", "", " ".join(str(error).split()))
    return re.sub(r"^Error: .*? failed: ?", "", text)[:200].rstrip(". ") or "no reason given"
