"""Search under CSD with FAISS: exactly, through one more dimension, or by the means alone with re-ranking.

CSD(q, j) = |mu_q - mu_j|^2 + u_q + u_j, u the sum of the variances. With sqrt(u_j - min u) appended to the gallery's
mean and 0 to the query's, the squared Euclidean distance in D + 1 dimensions is |mu_q - mu_j|^2 + u_j - min u; the
query's u and min u are constants of its ranking. So an exact index ("Flat") is exact under CSD, and an approximate one
approximates CSD itself. u_j may have any weight lambda: sqrt(lambda (u_j - min u)), or below 0 sqrt(lambda (u_j - max
u)). Only differences of u are added in float32, which tells items apart however large all variances are.
The paper's way searches the means and adds u_j to the candidates (PCME++ §C.5), which misses items that the means alone
do not find.

Q queries, N gallery items, D dimensions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from probemb.errors import Extra, UserError
from probemb.gaussian import Gaussian

faiss = Extra("faiss")
# Nodes examined for each one added. With FAISS' 40, recall stays below 1 at any effort, because queries lie outside of
# the gallery (their last dimension is 0); 100 takes twice the time to build.
EF_CONSTRUCTION = 100
CANDIDATES = 10  # candidates per neighbour by default, re-ranked or refined (",RFlat")
SAMPLE = 2_048  # items whose means an index keeps, to estimate what a search does not return
_REMEDY = "Use a string such as Flat, HNSW32, or IVF256,Flat."


@dataclass(frozen=True)
class Index:
    """A searchable gallery, in memory or in the files of an index folder; the fields after `origin` are of a folder.

    parts: FAISS indexes over vectors of `width` dimensions, together the gallery in order; form: "csd" or "mean"; u
    (N,) float32; sample: evenly spaced rows (S,) and their means (S, D); weight: lambda of u in the ranking, 0 for the
    form "mean"; origin: what is taken off every u, the least, or the largest for a weight below 0.
    """

    parts: tuple[faiss.Index, ...]
    form: str
    dim: int
    width: int
    uncertainty: Tensor
    sample: tuple[Tensor, Tensor]
    weight: float = 1.0
    origin: float = 0.0
    kind: str | None = None
    model: str | None = None
    weights: str | None = None
    factory: str | None = None
    items: pa.Table | None = None
    identity: str | None = None
    resize: str = "pil"

    def __len__(self) -> int:
        return len(self.uncertainty)

    def item(self, i: int) -> dict:
        """key, captions, shard, offset, size and url of an item of an index folder; of a caption also its number."""
        return self.items.slice(i, 1).to_pylist()[0]


def build_index(gallery: Gaussian, factory: str = "Flat", form: str = "csd", tolerance: float = 1.0) -> Index:
    """Index a gallery (N, D) in memory under any FAISS factory string, trained on itself. form: "csd" searches CSD
    itself, with the gallery's u times `tolerance`; "mean" the means. Raises UserError: FAISS cannot make it.
    """
    if gallery.mean.dim() != 2 or not len(gallery):
        raise UserError(f"The gallery has the shape {tuple(gallery.shape)}.", "Give at least one item, as (N, D).")
    u, mean, rows = gallery.uncertainty().float().cpu(), gallery.mean.detach().float().cpu(), sample_rows(len(gallery))
    weight, origin = weighing(form, tolerance, float(u.min()), float(u.max()))
    vectors = gallery_vectors(mean.numpy(), u.numpy(), form, factory, weight, origin)
    index = new_index(vectors.shape[1], factory)
    with faiss_errors(factory):
        index.train(vectors)
        index.add(vectors)
    return Index((index,), form, gallery.shape[1], vectors.shape[1], u, (rows, mean[rows]), weight, origin)


def sample_rows(count: int) -> Tensor:
    """Evenly spaced rows of so many items, at most SAMPLE."""
    return torch.linspace(0, count - 1, min(count, SAMPLE), dtype=torch.float64).round().long()


def weighing(form: str, tolerance: float, least: float, most: float) -> tuple[float, float]:
    """weight and origin of an `Index`; `least` and `most` u of the gallery."""
    return (0.0, 0.0) if form == "mean" else (tolerance, most if tolerance < 0 else least)


def gallery_vectors(
    mean: np.ndarray, u: np.ndarray, form: str, factory: str, weight: float = 1.0, origin: float = 0.0
) -> np.ndarray:
    """The vectors for FAISS, (N, width) float32. Raises UserError."""
    last = 0 if form == "mean" else np.sqrt(abs(weight * (u - np.float32(origin))))
    return _vectors(mean, width_of(mean.shape[1], form, factory), last)


def _vectors(mean: np.ndarray, width: int, last: np.ndarray | int = 0) -> np.ndarray:
    """Means (N, D), one more column, and zero padding: (N, width) float32. Raises UserError: not finite."""
    out = np.zeros((len(mean), width), dtype=np.float32)
    out[:, : mean.shape[1]] = mean
    out[:, mean.shape[1] : mean.shape[1] + 1] = np.reshape(last, (-1, 1))
    if not np.isfinite(out).all():
        raise UserError("An embedding holds NaN or infinity.", "Leave it out, or use another checkpoint.")
    return out


def width_of(dim: int, form: str, factory: str) -> int:
    """Dimensions of the vectors: D, or D + 1, padded with zeros to a multiple that the factory's quantizers can divide;
    flat ones to whole 16 bytes, as a search of 513 dimensions takes longer than one of 516 (`tools.bench.search`).
    """
    columns, multiple = dim + (form != "mean"), 4 if factory == "Flat" else 1
    if not re.match(r"(OPQ\d+_\d+|PCAR?\d+)", factory):
        multiple = int(np.lcm.reduce([multiple, *(int(n) for n in re.findall(r"PQ(\d+)", factory) if int(n) > 0)]))
    return -(-columns // multiple) * multiple


def new_index(width: int, factory: str) -> faiss.Index:
    """An empty, untrained index. Raises UserError for a string that FAISS does not know, or of another distance."""
    if re.search("LSH|L2norm|ITQ|PCAW", factory):
        raise UserError(f"'{factory}' does not rank by the Euclidean distance, from which CSD follows.", _REMEDY)
    with faiss_errors(factory):
        index = faiss.index_factory(width, factory, faiss.METRIC_L2)
    if isinstance(index, faiss.IndexRefine):
        index.k_factor = CANDIDATES  # with FAISS' 1 the finer codes would only sort the result
    graph = _innermost(index)
    if isinstance(graph, faiss.IndexHNSW):
        graph.hnsw.efConstruction = EF_CONSTRUCTION
    return index


def _innermost(index: faiss.Index) -> faiss.Index:
    index = faiss.downcast_index(index)
    while isinstance(index, (faiss.IndexPreTransform, faiss.IndexRefine)):
        index = faiss.downcast_index(index.index if isinstance(index, faiss.IndexPreTransform) else index.base_index)
    return index


@contextmanager
def faiss_errors(factory: str) -> Iterator[None]:
    """Raises UserError where FAISS cannot do what is asked inside."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        reason = re.sub(r"^.*?\.(?:cpp|h):\d+:\s*(Error: .*? failed: ?)?", "", " ".join(str(error).split()))[:200]
        raise UserError(f"FAISS cannot make the index '{factory}' ({reason.rstrip('. ')}).", _REMEDY) from error


def set_effort(index: Index, effort: int) -> str | None:
    """Set the cells (`nprobe`) or graph nodes (`efSearch`) that a search examines; returns the name, or None."""
    kind = type(_innermost(index.parts[0])).__name__
    name = "nprobe" if "IVF" in kind else "efSearch" if "HNSW" in kind else None
    for part in index.parts if name else ():
        faiss.ParameterSpace().set_index_parameter(part, name, effort)
    return name


def search(index: Index, queries: Gaussian, k: int) -> tuple[Tensor, Tensor]:
    """The k closest gallery items of every query (Q, D): distances (Q, k) float32, of the means for the form "mean",
    else CSD, and gallery indices (Q, k) int64. An approximate index may find fewer: the rest is infinity and -1. Raises
    UserError: k or D does not fit.
    """
    distance, found = neighbours(index, queries, k)
    if index.form != "mean":
        distance = distance + index.weight * index.origin + queries.uncertainty().float().cpu()[:, None]
    return distance, found


def neighbours(index: Index, queries: Gaussian, k: int) -> tuple[Tensor, Tensor]:
    """`search` with distances that lack what all items share (the query's u, the origin's), which would blur them."""
    if not 1 <= k <= len(index) or queries.mean.dim() != 2 or queries.shape[1] != index.dim:
        what = f"{k} neighbours of queries {tuple(queries.shape)} are asked of {len(index)} items, D = {index.dim}."
        raise UserError(what, f"Ask for 1 to {len(index)}, and embed queries (Q, D) with the gallery's model.")
    vectors = _vectors(queries.mean.detach().float().cpu().numpy(), index.width)
    distances, places, start = [], [], 0
    for part in index.parts:
        distance, found = (torch.from_numpy(one) for one in part.search(vectors, min(k, part.ntotal)))
        distances.append(distance.masked_fill(found < 0, torch.inf))
        places.append(found.where(found < 0, found + start))
        start += part.ntotal
    distance, order = torch.cat(distances, 1).sort(dim=1, stable=True)
    return distance[:, :k], torch.cat(places, 1).gather(1, order[:, :k])


def rerank(
    index: Index, queries: Gaussian, k: int, candidates: int | None = None, weight: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Search the means, add the candidates' u times `weight`, keep the k closest. Source: PCME++ §C.5."""
    candidates = min(CANDIDATES * k if candidates is None else candidates, len(index))
    distance, found = _weighted(index, *neighbours(index, queries, candidates), weight)
    return _whole(index, queries, distance[:, :k]), found[:, :k]


def search_weighted(index: Index, queries: Gaussian, k: int, weight: float) -> tuple[Tensor, Tensor]:
    """`search` with the gallery's u times `weight`, exactly: an index of another weight gives ever more candidates
    until, by the gallery's least and largest u, no other can be among the k closest. Raises UserError: as `search`.
    """
    if weight == index.weight and index.form != "mean":
        return search(index, queries, k)
    if not is_exact(index):
        what = f"This index ranks with the variances times {index.weight:g}; only a Flat one may with {weight:g}."
        raise UserError(what, f"Build another one with `python -m tools.build_index --tolerance {weight:g}`.")
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
    return all(isinstance(faiss.downcast_index(part), faiss.IndexFlat) for part in index.parts)


def _weighted(index: Index, distance: Tensor, found: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """Candidates in the order of their distances plus `weight` times their u, in float64; -1 stays last."""
    u = index.uncertainty[found.clamp_min(0)].double()
    distance, order = (distance.double() + weight * u).sort(dim=1, stable=True)
    return distance, found.gather(1, order)


def _whole(index: Index, queries: Gaussian, distance: Tensor) -> Tensor:
    """Distances with what `neighbours` leaves out, float32."""
    return (distance + index.weight * index.origin + queries.uncertainty().double().cpu()[:, None]).float()


# FAISS' own guide: exact search while it is fast, a graph while it fits into memory, inverted lists with codes beyond.
FLAT_ITEMS = 100_000  # up to here an exact answer takes a few hundredths of a second on one core
GRAPH_ITEMS = 20_000_000  # a graph of more takes days to build
LINKS = 32  # of each node of the graph
EF_SEARCH = 64
MANY_CELLS = 32_768  # from here on a graph finds the nearest cells faster than looking at all
TRAIN_PER_CELL = 40  # FAISS warns below 39


@dataclass(frozen=True)
class Choice:
    """A FAISS factory string, the reason for it, and how many cells or nodes a search examines (None: the default)."""

    factory: str
    why: str
    asked_effort: int | None = None

    @property
    def effort(self) -> int | None:
        """By default the root of the number of cells, at least 16, or EF_SEARCH nodes of a graph; None: all items."""
        if self.asked_effort:
            return self.asked_effort
        if cells := re.search(r"IVF(\d+)", self.factory):
            return min(int(cells[1]), max(16, int(int(cells[1]) ** 0.5)))
        return EF_SEARCH if "HNSW" in self.factory else None


def item_bytes(dim: int) -> int:
    """Bytes of an item in a graph, which has the largest ones."""
    return 4 * (dim + 1) + 8 * LINKS


def choose_factory(count: int, dim: int, memory: int) -> Choice:
    """The index for `count` items of `dim` dimensions that may take `memory` bytes during a search."""
    graph, shape = count * item_bytes(dim), f"{count:,} items of {dim} + 1 dimensions"
    if count <= FLAT_ITEMS and count * 4 * (dim + 1) <= memory:
        return Choice("Flat", f"Flat, exact: {shape} are fast to search as a whole.")
    if count <= GRAPH_ITEMS and graph <= memory:
        return Choice(f"HNSW{LINKS}", f"HNSW{LINKS}, a graph: {shape} fit into memory as {graph / 2**30:,.1f} GiB.")
    cells, parts = cell_count(count), 64
    while parts > 8 and parts * 8 > dim:  # bytes of a code: at most an eighth of the dimensions
        parts //= 2
    parts, graph_of_cells = min(parts, dim), "_HNSW32" if cells >= MANY_CELLS else ""
    # np: without the training for polysemous search, which takes minutes and is not used here
    factory = f"OPQ{parts}_{min(8, dim // parts) * parts},IVF{cells}{graph_of_cells},PQ{parts}np"
    why = f"IVF-PQ, compressed: {shape} are too many or too large for a graph; distances are approximate."
    return Choice(factory, why)


def cell_count(count: int) -> int:
    """Cells of an inverted file: a power of two near 8·√N that N items can train."""
    most = min(8 * count**0.5, count / TRAIN_PER_CELL, 1 << 20)
    return 1 << max(0, int(most).bit_length() - 1)


def training_count(factory: str, count: int, dim: int = 1, memory: int = 1 << 62) -> int:
    """Number of items to train an index on: at most half of the memory."""
    cells = re.search(r"IVF(\d+)", factory)
    wanted = max(50_000, 2 * TRAIN_PER_CELL * int(cells[1])) if cells else 100_000
    return min(count, wanted, max(10_000, memory // (8 * (dim + 1))))


def refuse_small_gallery(factory: str, count: int) -> None:
    """Raise UserError if so many items cannot train an index: one for each cell and codebook entry."""
    cells = [int(n) for n in re.findall(r"IVF(\d+)", factory)]
    bits = [int(n or 8) for n in re.findall(r"(?:PQ|RQ)\d+(?:x(\d+))?", factory)]
    least = max([1, *cells, *(2**n for n in bits)])
    if count < least:
        what = f"The index '{factory}' cannot be made from {count:,} items: it needs at least {least:,}."
        raise UserError(what, "Use a smaller index, or Flat.")
