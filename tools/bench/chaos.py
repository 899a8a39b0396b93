"""Disturb pretraining in every way that it promises to survive, and print what became of it.

    python -m tools.bench.chaos                # all of it, an hour on two cores
    python -m tools.bench.chaos --only disk    # rows whose name has the word

Each row is some of the project's end-to-end tests, which need the checkout with tests/ and pytest. The processes,
signals and file systems are real; a full disk needs the right to mount a tmpfs, without which its row is skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from probemb.cli.command import Parser, run_command
from probemb.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
WATCHDOG, DISK, STREAM = (f"tests/pretrain/{name}" for name in ("test_watchdog.py", "test_full_disk.py", "stream"))
KILLS = "tests/end_to_end/test_chaos.py::test_twenty_kills_change_nothing"


class Row(NamedTuple):
    """A disturbance, what is promised, and the tests that cause and check it."""

    name: str
    promise: str
    tests: tuple[str, ...]


ROWS = (
    *(Row(f"20 kills, ZeRO {stage}", "the same bits as undisturbed", (f"{KILLS}[{stage}]",)) for stage in range(4)),
    Row("full disk", "logs decide nothing, a checkpoint ends all ranks with 2", (DISK, "-k", "disk or log")),
    Row("deleted run folder", "all ranks end with 2", (DISK, "-k", "deleted")),
    Row("stopped rank", "named, ended with 2 after engine.timeout", (WATCHDOG, "-k", "stopped_rank")),
    Row("stopped data workers", "named, ended with 2 after engine.timeout", (WATCHDOG, "-k", "worker")),
    Row("silent server", "named, ended with 2 after engine.timeout", (WATCHDOG, "-k", "data_of_another")),
    Row("killed or failing rank", "named, all ranks end", (WATCHDOG, "-k", "killed or fails or never")),
    Row(
        "damaged shards, killed workers",
        "replaced and counted, or named",
        (STREAM, "-k", "damage or fail or lost or killed"),
    ),
)


def main() -> int:
    """Run the rows; 1 if one of them broke its promise."""
    parser = Parser(prog="python -m tools.bench.chaos", description="Disturb pretraining and see what becomes of it.")
    parser.add_argument("--only", default="", metavar="WORD", help="rows whose name has this word")
    only = parser.parse_args().only
    rows = [row for row in ROWS if only in row.name]
    if not rows:
        raise UserError(f"No row has '{only}' in its name.", f"Choose from: {'; '.join(row.name for row in ROWS)}.")
    if not (ROOT / "tests").is_dir():
        raise UserError(f"There is no {ROOT / 'tests'}.", "Run this in a checkout of the project.")
    from rich.console import Console
    from rich.table import Table

    table, broken = Table("disturbance", "promise", "kept", "seconds"), 0
    for row in rows:
        print(f"{row.name} …", flush=True)
        began = time.perf_counter()
        kept = run(row)
        broken += kept == "no"
        table.add_row(row.name, row.promise, kept, f"{time.perf_counter() - began:.0f}")
    Console().print(table)
    return int(broken > 0)


def run(row: Row) -> str:
    """ "yes", "no" (then the tests' output is printed), or "skipped" """
    argv = [sys.executable, "-m", "pytest", "-q", "-m", "slow or not slow", "-rs", *row.tests]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(done.stdout, flush=True)
        return "no"
    return "partly: some was skipped" if " skipped" in done.stdout.splitlines()[-1] else "yes"


if __name__ == "__main__":
    run_command(main)
