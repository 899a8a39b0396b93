"""Build an index for search from embeddings.

    python -m tools.build_index --embeddings embeddings/x --out indexes/x
    python -m tools.build_index --embeddings embeddings/x --out indexes/x-graph --factory HNSW32
    python -m tools.build_index --embeddings embeddings/x --out indexes/x-two-step --form mean       # for re-ranking
    python -m tools.build_index --embeddings embeddings/x --out indexes/x-fits --tolerance -1        # all that fits

Distances are CSD, through one more dimension than the embeddings have. Without --factory the command chooses an index
by the number of items and the memory, and prints the reason; --factory takes any of FAISS' factory strings.
"""

import math
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from jsonargparse.typing import PositiveFloat, PositiveInt

from probemb.cli.command import Parser, run_command
from probemb.errors import UserError, count
from probemb.machine import machine_memory
from probemb.progress import progress
from probemb.search import Choice, choose_factory, load_index, refuse_small_gallery
from probemb.search.embeddings import CORPORA, open_embeddings, same_model
from probemb.search.folder import write_index
from probemb.search.index import item_bytes

PROG = "python -m tools.build_index"
GIB = 1 << 30
MAX_PARTS = 1_000  # a search opens all of them


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if len({folder.resolve() for folder in options.embeddings}) < len(options.embeddings):
        raise UserError("A folder of embeddings is named twice.", "Name each once.")
    sources = [open_embeddings(folder) for folder in options.embeddings]
    same_model(sources)
    for source in sources:
        if not options.incomplete and source.partitions(options.kind) and source.count(options.kind) is None:
            raise UserError(
                f"The {options.kind} embeddings of {source.folder} are not complete.",
                "Let tools.embed finish, or index the finished part with --incomplete; a corpus that does not belong "
                f"there is left out by deleting its file in {source.folder / CORPORA}.",
            )
    items = sum(part.count for source in sources for part in source.partitions(options.kind))
    choice = choose(options, items, sources[0].dim)
    print(choice.why, flush=True)
    write_index(
        options.out, sources, options.kind, choice, form=options.form, tolerance=options.tolerance,
        part_items=options.part_items, memory=int(options.memory_gib * GIB), show=progress,
    )  # fmt: skip
    index = load_index(options.out)
    size = sum(file.stat().st_size for file in options.out.rglob("*")) / (1 << 20)
    parts, u = count(len(index.parts), "part"), float(index.uncertainty.double().mean())
    print(f"{len(index):,} {index.kind}s, {parts}, {size:,.1f} MiB, mean u {u:.4g}")
    print(f"written: {options.out}")
    return 0


def parse(argv: Sequence[str] | None) -> Namespace:
    """Options, checked as far as possible without reading anything."""
    parser = Parser(prog=PROG, description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--embeddings", required=True, nargs="+", action="extend", type=Path, help="folders that tools.embed wrote")
    add("--out", required=True, type=Path, help="folder for the index")
    add("--kind", choices=("image", "text"), default="image", help="what is searched (%(default)s)")
    add("--factory", default="auto", help="FAISS factory string, or auto (%(default)s)")
    add("--form", choices=("csd", "mean"), default="csd", help="CSD, or the means alone for re-ranking (%(default)s)")
    tolerance = "weight of the variances in CSD: below 0, a large one is a tolerance (docs/concepts.md)"
    add("--tolerance", type=float, default=1.0, metavar="LAMBDA", help=tolerance)
    memory = "memory that the index may take in search; by default half of this machine's"
    add("--memory-gib", type=PositiveFloat, default=machine_memory() / GIB / 2, help=memory)
    add("--part-items", type=PositiveInt, help="items in one FAISS file; by default what the memory holds")
    add("--effort", type=PositiveInt, help="cells (IVF) or nodes (HNSW) that a search visits")
    add("--incomplete", action="store_true", help="index what is embedded so far")
    options = parser.parse_args(argv)
    if options.tolerance != 1 and options.form == "mean":
        raise UserError("--form mean leaves the variances out, which --tolerance weighs.", "Leave one of them out.")
    if not math.isfinite(options.tolerance):
        raise UserError(f"--tolerance is {options.tolerance}.", "Give a finite number, such as -1.")
    if options.memory_gib > machine_memory() / GIB:
        what = f"--memory-gib is {options.memory_gib:g}, and this machine has {machine_memory() / GIB:.1f}."
        remedy = "Give less; for a search on a larger machine use --factory, and --part-items for the items of a part."
        raise UserError(what, remedy)
    return options


def choose(options: Namespace, items: int, dim: int) -> Choice:
    """The requested factory or a suitable one; sets part_items. Raises UserError."""
    memory = int(options.memory_gib * GIB)
    choice = choose_factory(items, dim, memory)
    if options.factory != "auto":
        choice = Choice(options.factory, f"{options.factory}, as requested.")
    if items:
        refuse_small_gallery(choice.factory, items)
    if options.effort and choice.effort is None:
        raise UserError(f"The index '{choice.factory}' always searches everything.", "Leave --effort out.")
    options.part_items = options.part_items or max(1, min(items, memory // item_bytes(dim)))
    if items > MAX_PARTS * options.part_items:
        what = f"Parts of {options.part_items:,} items cut {items:,} into more than {MAX_PARTS:,}."
        raise UserError(what, f"Give more --memory-gib, or at least --part-items {-(-items // MAX_PARTS)}.")
    return Choice(choice.factory, choice.why, options.effort)


if __name__ == "__main__":
    run_command(main)
