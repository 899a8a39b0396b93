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
        return EF_SEARCH if "HNSW" in self.factory else None


def item_bytes(dim: int) -> int:
    """Bytes of an item in a graph, which has the largest ones."""
    return 4 * (dim + 1) + 8 * LINKS


def choose_factory(count: int, dim: int, memory: int) -> Choice:
    """The index for `count` items of `dim` dimensions that may take `memory` bytes during a search."""
    flat, graph, shape = count * 4 * (dim + 1), count * item_bytes(dim), f"{count:,} items of {dim} + 1 dimensions"
    if count <= FLAT_ITEMS and flat <= memory:
        return Choice("Flat", f"Flat, exact: {shape} are fast to search as a whole.")
    if count <= GRAPH_ITEMS and graph <= memory:
        return Choice(f"HNSW{LINKS}", f"HNSW{LINKS}, a graph: {shape} fit into memory as {graph / GIB:,.1f} GiB.")
    cells, parts = cell_count(count), 64
    while parts > 8 and parts * 8 > dim:  # bytes of a code: at most an eighth of the dimensions
        parts //= 2
    parts = min(parts, dim)
    # np: without the training for polysemous search, which takes minutes and is not used here
    graph_of_cells = "_HNSW32" if cells >= MANY_CELLS else ""
    factory = f"OPQ{parts}_{min(8, dim // parts) * parts},IVF{cells}{graph_of_cells},PQ{parts}np"
    why = f"IVF-PQ, compressed: {shape} are too many or too large for a graph; distances are approximate."
    return Choice(factory, why)


def cell_count(count: int) -> int:
    """Cells of an inverted file: a power of two near 8·√N that N items can train."""
    cells = 1
    while cells * 2 <= min(8 * count**0.5, count / TRAIN_PER_CELL, 1 << 20):
        cells *= 2
    return cells


def training_count(factory: str, count: int, dim: int = 1, memory: int = 1 << 62) -> int:
    """Number of items to train an index on: at most half of the memory."""
    cells = re.search(r"IVF(\d+)", factory)
    wanted = max(50_000, 2 * TRAIN_PER_CELL * int(cells[1])) if cells else 100_000
    return min(count, wanted, max(10_000, memory // (8 * (dim + 1))))


def refuse_small_gallery(factory: str, count: int) -> None:
    """Raise UserError if so many items are too few to train an index on: one for each cell and codebook entry."""
    cells = [int(n) for n in re.findall(r"IVF(\d+)", factory)]
    bits = [int(n or 8) for n in re.findall(r"(?:PQ|RQ)\d+(?:x(\d+))?", factory)]
    least = max([1, *cells, *(2**n for n in bits)])
    if count < least:
        what = f"The index '{factory}' cannot be made from {count:,} items: it needs at least {least:,}."
        raise UserError(what, "Use a smaller index, or Flat.")
