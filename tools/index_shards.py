"""Write the index.json of a folder of webdataset shards.

    python -m tools.index_shards data/cc3m

Reads every .tar in the folder, counts the samples (keys with an image and a caption or class index), and writes
`{"shards": [{"name", "samples", "bytes", "sha256"}]}` beside them, from which training computes every position.
Nothing is decoded. A damaged tar stops the command before anything is written.

    python -m tools.index_shards data/cc3m --columns --score similarity

also writes data/cc3m/columns: sizes of images, lengths of captions, and scores from the parquet files beside the tars,
by which `data.filter` of pretraining selects samples.

    python -m tools.index_shards --verify data/cc3m --report damage.json

Decodes everything as training does, and prints the damage: exit code 0 if there is none, else 1. The index is compared
with the shards; --write-index rebuilds it from the readable ones; --repair DIR writes new shards of what can be read in
the damaged ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from probemb.cli.command import Parser, run_command
from probemb.cli.machine import cores
from probemb.cli.ranges import Processes
from probemb.data.shards.index import Shard, write_index
from probemb.errors import UserError
from tools.repair_shards import repair_folder
from tools.verify_shards import Verified, print_damage, read_rows, verify_folder, write_report


def find_shards(folder: Path) -> list[Path]:
    """The folder's tars by name. Raises UserError if the folder is missing or holds none."""
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}.", "Name the folder that holds the .tar files.")
    paths = sorted(path for path in folder.glob("*.tar") if path.is_file() and not path.name.startswith("."))
    if not paths:
        raise UserError(f"{folder} holds no .tar files.", "Name the folder that holds the .tar files.")
    return paths


def print_table(whole: Sequence[Verified], left_out: int) -> None:
    """Print totals as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for name in ("shards", "samples", "bytes", "groups that are no sample", "damaged, left out"):
        table.add_column(name, justify="right")
    sums = (sum(getattr(one, name) for one in whole) for name in ("samples", "bytes", "skipped"))
    table.add_row(*(f"{total:,}" for total in (len(whole), *sums, left_out)))
    Console().print(table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m tools.index_shards", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder that holds the .tar files")
    parser.add_argument("--skip-damaged", action="store_true", help="leave unreadable tars out of the index")
    parser.add_argument("--workers", type=Processes, default=min(16, cores()), help="processes (default: %(default)s)")
    parser.add_argument("--verify", action="store_true", help="decode everything and report damage")
    parser.add_argument("--report", type=Path, metavar="FILE", help="with --verify: write all damage as JSON")
    parser.add_argument("--labelled", action="store_true", help="with --verify: accept KEY.cls instead of a caption")
    parser.add_argument("--write-index", action="store_true", help="with --verify: write index.json too")
    parser.add_argument("--repair", type=Path, metavar="DIR", help="with --verify: write the readable samples there")
    parser.add_argument("--columns", action="store_true", help="also write the columns for data.filter")
    parser.add_argument("--score", action="append", default=[], metavar="COLUMN", help="a parquet column; repeatable")
    parser.add_argument("--scores", type=Path, metavar="FILE", help="parquet for all shards (default: one beside each)")
    parser.add_argument("--score-key", default="key", metavar="COLUMN", help="the keys there (default: %(default)s)")
    options = parser.parse_args(argv)
    if (options.score or options.scores) and not (options.columns and options.score):
        raise UserError("--score COLUMN belongs to --columns, and --scores to both.", "Give all that are needed.")
    if options.verify:
        if options.columns:
            raise UserError("--columns and --verify exclude each other.", "Verify first, then write the columns.")
        return verify(options)
    for name in "report", "labelled", "write_index", "repair":
        if getattr(options, name):
            raise UserError(f"--{name.replace('_', '-')} belongs to --verify.", "Add --verify.")

    results = verify_folder(find_shards(options.folder), None, options.workers, decode=False)
    shards = make_index(options.folder, results, options.skip_damaged)
    if options.columns:
        make_columns(options, shards)
    return 0


def make_columns(options: argparse.Namespace, shards: Sequence[Shard]) -> None:
    """Write the columns, and print how many samples have each score. Raises UserError."""
    from tools.measure_shards import Scores, measure_folder

    scores = Scores(tuple(options.score), options.scores, options.score_key)
    path, scored = measure_folder(options.folder, shards, scores, options.workers)
    total = sum(shard.samples for shard in shards)
    for name, count in scored.items():
        print(f"{name}: {count:,} of {total:,} samples have one")
    print(f"wrote {path}")


def verify(options: argparse.Namespace) -> int:
    """Decode everything; returns 1 if something is damaged, else 0."""
    paths = find_shards(options.folder)
    rows = None if options.write_index else read_rows(options.folder)
    results = verify_folder(paths, rows, options.workers, need_caption=not options.labelled)
    print_damage(results)
    if options.report:
        write_report(options.report, options.folder, results)
        print(f"wrote {options.report}")
    if rows and (unknown := sum(row.sha256 is None for row in rows.values())):
        print(f"{unknown:,} of {len(rows):,} shards have no SHA-256 in index.json: their content was not compared.")
    if options.repair:
        repair(options, results)
    if options.write_index:
        make_index(options.folder, results, skip_damaged=True)
    elif rows is None:
        print(f"There is no index.json in {options.folder} yet.", file=sys.stderr)
    return int(any(one.damage or one.bad for one in results))


def repair(options: argparse.Namespace, results: Sequence[Verified]) -> None:
    """Write the readable samples of damaged shards into --repair, and print how many they are."""
    names = [one.name for one in results if (one.damage or one.bad) and (options.folder / one.name).is_file()]
    for name, samples in repair_folder(options.folder, names, options.repair, not options.labelled).items():
        print(f"wrote {options.repair / name}: {samples:,} samples" if samples else f"{name}: nothing can be read")


def make_index(folder: Path, results: Sequence[Verified], skip_damaged: bool) -> list[Shard]:
    """Write the index of the readable shards, print totals, and return them. Raises UserError."""
    whole = [one for one in results if not one.damage]
    for one in results:
        if one.damage:
            print(f"damaged: {folder / one.name}: {'; '.join(one.damage)}", file=sys.stderr)
    damaged = len(results) - len(whole)
    if damaged and not skip_damaged:
        raise UserError(
            f"{damaged} of {len(results)} shards in {folder} are damaged; no index was written.",
            "Fetch them again, see --verify and --repair, or leave them out with --skip-damaged.",
        )
    if not any(one.samples for one in whole):
        raise UserError(
            f"No shard in {folder} holds a sample.",
            "A sample is KEY.jpg (or png, webp) and KEY.txt, KEY.json or KEY.cls, one after the other.",
        )
    shards = [Shard(one.name, folder / one.name, one.samples, one.bytes, one.sha256) for one in whole]
    try:
        path = write_index(folder, shards)
    except OSError as error:
        raise UserError(
            f"The index cannot be written into {folder}: {error.strerror}.", "Make the folder writable."
        ) from None
    print_table(whole, damaged)
    print(f"wrote {path}")
    return shards


if __name__ == "__main__":
    run_command(main)
