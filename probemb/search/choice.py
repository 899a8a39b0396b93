"""The FAISS index that suits a gallery.

The bounds follow FAISS' own guide: exact search while it is fast, a graph while it fits into memory, inverted lists
with compressed codes beyond.
"""

import re
from dataclasses import dataclass

from probemb.errors import UserError

GIB = 1 << 30
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
        return EF_SEARCH if re.search(r"HNSW|NSG|IMI", self.factory) else None


def choose_factory(count: int, dim: int, memory: int) -> Choice:
    """The index for `count` items of `dim` dimensions that may take `memory` bytes during a search."""
    flat, graph = count * 4 * (dim + 1), count * (4 * (dim + 1) + 8 * LINKS)
    shape = f"{count:,} items of {dim} + 1 dimensions"
    if count <= FLAT_ITEMS and flat <= memory:
        return Choice("Flat", f"Flat, exact: {shape} are {_size(flat)}, which is fast to search as a whole.")
    if count <= GRAPH_ITEMS and graph <= memory:
        why = f"HNSW{LINKS}, a graph: {shape} are too many to search all of them, and fit as {_size(graph)} into the "
        return Choice(f"HNSW{LINKS}", f"{why}{_size(memory)} that the index may take.")
    cells, parts = cell_count(count), 64
    while parts > 8 and parts * 8 > dim:  # bytes of a code: at most an eighth of the dimensions
        parts //= 2
    parts = min(parts, dim)
    # np: without the training for polysemous search, which takes minutes and is not used here
    graph_of_cells = "_HNSW32" if cells >= MANY_CELLS else ""
    factory = f"OPQ{parts}_{min(8, dim // parts) * parts},IVF{cells}{graph_of_cells},PQ{parts}np"
    size = count * (parts + 8)
    why = f"IVF-PQ, compressed: {shape} would take {_size(graph)} as a graph"
    why += f", and {_size(memory)} are given" if graph > memory else ", which takes too long to build"
    why += f"; codes of {parts} bytes in {cells:,} cells take {_size(size)}"
    why += ", which is still more: searches will read from the disk" if size > memory else ""
    return Choice(factory, f"{why}. Distances are approximate.")


def cell_count(count: int) -> int:
    """Cells of an inverted file: a power of two near 8·√N that N items can train."""
    cells = 1
    while cells * 2 <= min(8 * count**0.5, count / TRAIN_PER_CELL, 1 << 20):
        cells *= 2
    return cells


def training_count(factory: str, count: int, dim: int = 1, memory: int = 1 << 62) -> int:
    """Number of items to train an index on: at most half of the memory; 0 for indexes without training."""
    if re.fullmatch(r"(Flat|HNSW\d*(,Flat)?)", factory):
        return 0
    cells = re.search(r"IVF(\d+)", factory)
    wanted = max(50_000, 2 * TRAIN_PER_CELL * int(cells[1])) if cells else 100_000
    return min(count, wanted, max(10_000, memory // (8 * (dim + 1))))


def refuse_small_gallery(factory: str, count: int) -> None:
    """Raise UserError if so many items are too few to train an index on: one for each cell and codebook entry."""
    cells = [int(n) for n in re.findall(r"IVF(\d+)", factory)]
    bits = [int(n or 8) for n in re.findall(r"(?:PQ|RQ)\d+(?:x(\d+))?", factory)]
    bits += [int(n) for n in re.findall(r"IMI\d+x(\d+)", factory)]
    least = max([1, *cells, *(2**n for n in bits)])
    if count < least:
        raise UserError(
            f"The index '{factory}' cannot be made from {count:,} items: it needs at least {least:,}.",
            "Use a smaller index, or Flat.",
        )


def bytes_per_item(factory: str, dim: int) -> int:
    """Approximate bytes of an item in an index; those of the vectors if the string is not understood."""
    base, _, refined = factory.partition(",RFlat" if factory.endswith(",RFlat") else ",Refine(")
    links = re.search(r"HNSW(\d*)", base)
    size = _vector_bytes(base, dim) + (8 if "IVF" in base else 8 * int(links[1] or 32) if links else 0)
    return size + (_vector_bytes(refined, dim) if base != factory else 0)


def _vector_bytes(factory: str, dim: int) -> int:
    codes, scalar = re.search(r"(?<!O)PQ(\d+)(?:x(\d+))?", factory), re.search(r"SQ(4|6|8|fp16|bf16)", factory)
    if codes:
        return -(-int(codes[1]) * int(codes[2] or 8) // 8)
    if scalar:
        return -(-(dim + 1) * {"4": 4, "6": 6, "8": 8}.get(scalar[1], 16) // 8)
    return 4 * (dim + 1)


def _size(size: float) -> str:
    return f"{size / GIB:,.1f} GiB" if size >= GIB / 10 else f"{size / (1 << 20):,.0f} MiB"
