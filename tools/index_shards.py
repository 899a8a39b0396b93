"""Write the index.json of a folder of webdataset shards.

    python -m tools.index_shards data/cc3m

Walks the headers of every .tar in the folder, counts the samples (keys with an image and a caption or class index),
and writes `{"shards": [{"name", "samples", "bytes"}]}` beside them, which gives training every position without
opening a shard. Nothing is decoded. A tar that cannot be read stops the command before anything is written.

    python -m tools.index_shards --verify data/cc3m --report damage.json

Reads and decodes everything as training does, and prints the damage: exit code 0 if there is none, else 1. The index is
compared with the shards but not changed; --write-index rebuilds it from the readable shards.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from probemb.cli.command import Parser, run_command
from probemb.cli.progress import progress
from probemb.data.failures import BadShard
from probemb.data.shards.index import Shard, write_index
from probemb.data.shards.samples import list_samples
from probemb.errors import UserError
from probemb.pools import process_pool


@dataclass(frozen=True)
class Walked:
    """One tar: its index row, the number of groups of files that are not samples, or why it cannot be read."""

    shard: Shard
    skipped: int
    damage: str | None = None


def walk_shard(path: Path) -> Walked:
    """Count the samples of one tar."""
    try:
        samples, skipped = list_samples(path)
    except BadShard as error:
        return Walked(Shard(path.name, path, 0, 0), 0, str(error))
    return Walked(Shard(path.name, path, len(samples), path.stat().st_size), skipped)


def find_shards(folder: Path) -> list[Path]:
    """The folder's tars by name. Raises UserError if the folder is missing or holds none."""
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}.", "Name the folder that holds the .tar files.")
    paths = sorted(path for path in folder.glob("*.tar") if path.is_file() and not path.name.startswith("."))
    if not paths:
        raise UserError(f"{folder} holds no .tar files.", "Name the folder in which the .tar files lie themselves.")
    return paths


def walk_folder(folder: Path, workers: int) -> list[Walked]:
    """All tars of the folder in the order of their names, walked by `workers` processes, with a progress bar."""
    paths = find_shards(folder)
    walked = []
    with (
        progress("Walking shards", len(paths)) as advance,
        process_pool(min(workers, len(paths)), "--workers") as pool,
    ):
        for one in pool.map(walk_shard, paths):
            walked.append(one)
            advance(1)
    return walked


def print_table(walked: Sequence[Walked], left_out: int) -> None:
    """Print totals as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for name in ("shards", "samples", "bytes", "groups that are no sample", "damaged, left out"):
        table.add_column(name, justify="right")
    totals = (
        len(walked),
        sum(one.shard.samples for one in walked),
        sum(one.shard.bytes for one in walked),
        sum(one.skipped for one in walked),
        left_out,
    )
    table.add_row(*(f"{total:,}" for total in totals))
    Console().print(table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m tools.index_shards", description="Write the index.json of a folder of webdataset shards."
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder that holds the .tar files")
    parser.add_argument("--skip-damaged", action="store_true", help="leave tars that cannot be read out of the index")
    parser.add_argument(
        "--workers", type=int, default=min(16, os.cpu_count() or 1), help="processes (default: %(default)s)"
    )
    parser.add_argument("--verify", action="store_true", help="decode everything and report damage")
    parser.add_argument("--report", type=Path, metavar="FILE", help="with --verify: write all damage as JSON")
    parser.add_argument("--labelled", action="store_true", help="with --verify: KEY.cls is enough, without a caption")
    parser.add_argument("--write-index", action="store_true", help="with --verify: write index.json, too")
    options = parser.parse_args(argv)
    if options.workers < 1:
        raise UserError(f"--workers {options.workers} is too small.", "Give at least one process.")
    if options.verify:
        return verify(options)
    for name in "report", "labelled", "write_index":
        if getattr(options, name):
            raise UserError(f"--{name.replace('_', '-')} belongs to --verify.", "Add --verify.")

    make_index(options.folder, options.workers, options.skip_damaged)
    return 0


def verify(options: argparse.Namespace) -> int:
    """Decode everything; returns 1 if something is damaged, else 0."""
    from tools.verify_shards import print_damage, read_rows, verify_folder, write_report

    paths = find_shards(options.folder)
    rows = None if options.write_index else read_rows(options.folder)
    results = verify_folder(paths, rows, options.workers, options.labelled)
    print_damage(results)
    if options.report:
        write_report(options.report, options.folder, results)
        print(f"wrote {options.report}")
    if options.write_index:
        make_index(options.folder, options.workers, skip_damaged=True)
    elif rows is None:
        print(f"There is no index.json in {options.folder} yet.", file=sys.stderr)
    return int(any(one.damage or one.bad for one in results))


def make_index(folder: Path, workers: int, skip_damaged: bool) -> None:
    """Walk the shards, write the index, print totals. Raises UserError."""
    walked = walk_folder(folder, workers)
    whole = [one for one in walked if one.damage is None]
    damaged = [one for one in walked if one.damage is not None]
    for one in damaged:
        print(f"damaged: {one.damage}", file=sys.stderr)
    if damaged and not skip_damaged:
        raise UserError(
            f"{len(damaged)} of {len(walked)} shards in {folder} cannot be read; no index was written.",
            "Fetch them again, or leave them out with --skip-damaged.",
        )
    if not any(one.shard.samples for one in whole):
        raise UserError(
            f"No shard in {folder} holds a sample.",
            "A sample is KEY.jpg (or png, webp) and KEY.txt, KEY.json or KEY.cls, one after the other.",
        )
    try:
        path = write_index(folder, [one.shard for one in whole])
    except OSError as error:
        raise UserError(
            f"The index cannot be written into {folder}: {error.strerror}.", "Make the folder writable."
        ) from None
    print_table(whole, len(damaged))
    print(f"wrote {path}")


if __name__ == "__main__":
    run_command(main)
