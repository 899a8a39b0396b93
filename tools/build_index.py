"""Build an index for search from embeddings.

    python -m tools.build_index --embeddings embeddings/x --out indexes/x
    python -m tools.build_index --embeddings embeddings/x --out indexes/x-graph --factory HNSW32
    python -m tools.build_index --embeddings embeddings/x --out indexes/x-two-step --form mean       # for re-ranking
    python -m tools.build_index --embeddings embeddings/x --out indexes/x-fits --tolerance -1        # all that fits

    python -m tools.build_index --part 3/16 …          # one of sixteen commands, at the same time, on any machines
    python -m tools.build_index --merge …              # when all of them have ended

Distances are CSD, through one more dimension than the embeddings have. Without --factory the command chooses an index
by the number of items and the memory, and prints the reason; --factory takes any of FAISS' factory strings.
"""

from __future__ import annotations

import math
import re
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from probemb.cli.command import Parser, run_command
from probemb.cli.machine import machine_memory
from probemb.errors import UserError

if TYPE_CHECKING:
    from probemb.search import Choice
    from probemb.search.embeddings import Embeddings
    from probemb.search.unfinished import Share

PROG = "python -m tools.build_index"
GIB = 1 << 30
MIN_GIB = 0.001
MAX_PARTS = 1_000  # a search opens all of them


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    share = share_of(options)

    from probemb.search.embeddings import CORPORA, open_embeddings, same_model

    sources = [open_embeddings(folder) for folder in options.embeddings]
    same_model(sources)
    refuse_repeated(sources)
    for source in sources:
        if not options.incomplete and source.count(options.kind) is None:
            if not source.partitions(options.kind):
                raise UserError(
                    f"{source.folder} holds no {options.kind} embeddings.",
                    f"Make them with `python -m tools.embed --items {options.kind}` or `both`.",
                )
            raise UserError(
                f"The {options.kind} embeddings of {source.folder} are not complete.",
                "Let tools.embed finish, or index the finished part with --incomplete; a corpus that does not belong "
                f"there is left out by deleting its file in {source.folder / CORPORA}.",
            )
    count = sum(part.count for source in sources for part in source.partitions(options.kind))
    if count and options.train_items and options.train_items > count:
        raise UserError(f"--train-items is {options.train_items:,} of {count:,} items.", "Give fewer.")
    choice = choose(options, count, sources[0].dim, share)
    print(choice.why, flush=True)

    from probemb.cli.progress import progress
    from probemb.search import load_index
    from probemb.search.writing import Recipe, write_index, write_share

    recipe = Recipe(
        sources, options.kind, choice, form=options.form, tolerance=options.tolerance, part_items=options.part_items,
        train_items=options.train_items, seed=options.seed, gpu=use_gpu(options.device),
    )  # fmt: skip
    shown = {"show": progress, "say": lambda text: print(text, flush=True)}
    if share:
        write_share(options.out, recipe, share, **shown)
        done = (
            f"part {share} is complete" if share.number else f"ready for --part 1/{share.of} to {share.of}/{share.of}"
        )
        print(f"{done}; --merge finishes the index when all are")
        return 0
    write_index(options.out, recipe, merge=options.merge, **shown)
    index = load_index(options.out)
    print_table(index, options.out)
    return 0


def parse(argv: Sequence[str] | None) -> Namespace:
    """Options, checked as far as possible without reading anything."""
    parser = Parser(prog=PROG, description=__doc__.splitlines()[0])
    parser.add_argument(
        "--embeddings", required=True, nargs="+", action="extend", type=Path, help="folders that tools.embed wrote"
    )
    parser.add_argument("--out", required=True, type=Path, help="folder for the index")
    parser.add_argument("--kind", choices=("image", "text"), default="image", help="what is searched (%(default)s)")
    parser.add_argument("--factory", default="auto", help="FAISS factory string, or auto (%(default)s)")
    form = "CSD, or the means alone for re-ranking (%(default)s)"
    parser.add_argument("--form", choices=("csd", "mean"), default="csd", help=form)
    tolerance = "weight of the variances in CSD: below 0, a large one is a tolerance (docs/zeroshot.md)"
    parser.add_argument("--tolerance", type=float, metavar="LAMBDA", help=tolerance)
    memory = "memory that the index may take in search; by default half of this machine's"
    parser.add_argument("--memory-gib", type=float, help=memory)
    parser.add_argument("--part-items", type=int, help="items in one FAISS file; by default what the memory holds")
    parser.add_argument("--train-items", type=int, help="items to train on; by default as the factory needs")
    parser.add_argument("--effort", type=int, help="cells (IVF) or nodes (HNSW) that a search visits")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of the training items (%(default)s)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="for training (%(default)s)")
    parser.add_argument("--incomplete", action="store_true", help="index what is embedded so far")
    several = parser.add_mutually_exclusive_group()
    several.add_argument("--part", metavar="I/N", help="build the I-th share of an index that N commands build")
    several.add_argument("--train-for", type=int, metavar="N", help="only train, for N commands with --part")
    several.add_argument("--merge", action="store_true", help="finish an index whose parts were built with --part")
    options = parser.parse_args(argv)
    if options.tolerance is not None:
        if options.form == "mean":
            raise UserError("--form mean leaves the variances out, which --tolerance weighs.", "Leave one of them out.")
        if not math.isfinite(options.tolerance):
            raise UserError(f"--tolerance is {options.tolerance}.", "Give a finite number, such as -1.")
        options.form = "csd" if options.tolerance == 1 else "tolerance"
    for name in "memory_gib", "part_items", "train_items", "effort":
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise UserError(f"--{name.replace('_', '-')} is {value}.", "Give a number above 0.")
    if options.memory_gib is not None and options.memory_gib < MIN_GIB:
        raise UserError(f"--memory-gib is {options.memory_gib:g}, which holds no index.", f"Give at least {MIN_GIB}.")
    machine = machine_memory() / GIB
    if options.memory_gib is not None and options.memory_gib > machine:
        raise UserError(
            f"--memory-gib is {options.memory_gib:g}, and this machine has {machine:.1f}.",
            "Give less; for a search on a larger machine use --factory, and --part-items for the items of a part.",
        )
    if options.seed < 0:
        raise UserError(f"--seed is {options.seed}.", "Give 0 or more.")
    return options


def share_of(options: Namespace) -> Share | None:
    """The share that --part or --train-for names; None for a whole index. Raises UserError."""
    from probemb.search.unfinished import Share

    if options.part is not None:
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", options.part)
        if not found or not 1 <= int(found[1]) <= int(found[2]) <= MAX_PARTS:
            remedy = f"Write it as 3/16, the third of sixteen; at most {MAX_PARTS:,}."
            raise UserError(f"--part {options.part} is not a part.", remedy)
        return Share(int(found[1]), int(found[2]))
    if options.train_for is not None:
        if not 1 <= options.train_for <= MAX_PARTS:
            raise UserError(f"--train-for is {options.train_for}.", f"Give 1 to {MAX_PARTS:,}.")
        return Share(0, options.train_for)
    return None


def refuse_repeated(sources: Sequence[Embeddings]) -> None:
    """Raises UserError if a folder is named twice."""
    folders = [source.folder.resolve() for source in sources]
    if len(set(folders)) < len(folders):
        raise UserError("A folder of embeddings is named twice.", "Name each once.")


def choose(options: Namespace, count: int, dim: int, share: Share | None = None) -> Choice:
    """The requested factory, that of the unfinished index, or a suitable one; sets the defaults of part_items and
    train_items. Raises UserError.
    """
    from probemb.search import Choice, choose_factory, refuse_small_gallery
    from probemb.search.choice import bytes_per_item, default_effort, takes_effort, training_count
    from probemb.search.index import check_codes
    from probemb.search.unfinished import read_plan

    memory = int((options.memory_gib or machine_memory() / GIB / 2) * GIB)
    plan = read_plan(options.out)
    begun, why = plan.get("factory"), plan.get("why")
    if options.factory == "auto" and options.memory_gib is None and plan.get("count") == count and type(begun) is str:
        choice = Choice(begun, str(why), default_effort(begun))  # on any machine
    elif options.factory == "auto":
        choice = choose_factory(count, dim, memory)
    else:
        choice = Choice(options.factory, f"{options.factory}, as requested.", default_effort(options.factory))
    check_codes(choice.factory)
    if count:
        refuse_small_gallery(choice.factory, count)
    if options.effort and not takes_effort(choice.factory):
        raise UserError(f"The index '{choice.factory}' always searches everything.", "Leave --effort out.")
    if options.effort and count and options.effort > count:
        raise UserError(f"--effort is {options.effort:,} of {count:,} items.", "Give fewer.")
    if (plan.get("factory"), plan.get("count")) == (choice.factory, count):  # resumable on any machine
        options.part_items = options.part_items or plan.get("rows")
        options.train_items = options.train_items or plan.get("train_items")
    each = bytes_per_item(choice.factory, dim)
    if options.part_items is None:
        options.part_items = max(1, min(-(-count // (share.of if share else 1)), memory // each))
        if memory < each or count > MAX_PARTS * options.part_items:
            needed = max(each, -(-count // MAX_PARTS) * each)
            raise UserError(
                f"--memory-gib {options.memory_gib or memory / GIB:g} holds {memory // each:,} of {count:,} items at a "
                f"time, and an index has at most {MAX_PARTS:,} parts.",
                f"Give at least {1.1 * needed / GIB:.2g}.",
            )
    if count > MAX_PARTS * options.part_items:
        raise UserError(
            f"--part-items {options.part_items:,} cuts {count:,} items into more than {MAX_PARTS:,} parts.",
            f"Give at least {-(-count // MAX_PARTS):,}.",
        )
    if options.train_items is None:
        options.train_items = training_count(choice.factory, count, dim, memory) or None
    return Choice(choice.factory, choice.why, options.effort or choice.effort)


def use_gpu(device: str) -> bool:
    """True to train on GPUs. Raises UserError if there is none."""
    import faiss

    gpus = getattr(faiss, "get_num_gpus", lambda: 0)()
    if device == "cuda" and not gpus:
        raise UserError("FAISS sees no GPU here.", "Leave --device out.")
    return bool(gpus) and device != "cpu"


def print_table(index, folder: Path) -> None:
    """Print a summary of the index."""
    from rich.console import Console
    from rich.table import Table

    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    u = index.uncertainty.double()
    table = Table()
    for heading in ("items", "kind", "dimensions", "form", "factory", "parts", "size", "mean u"):
        table.add_column(heading, justify="right" if heading in ("items", "size", "mean u") else "left")
    form = index.form + (f" {index.penalty.weight:g}" if index.form == "tolerance" else "")
    table.add_row(
        f"{len(index):,}", index.kind, str(index.dim), form, index.factory, str(len(index.parts)),
        f"{size / (1 << 20):,.1f} MiB", f"{float(u.mean()):.4g}",
    )  # fmt: skip
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    console.print(table)
    console.print(f"written: {folder}", soft_wrap=True)


if __name__ == "__main__":
    run_command(main)
