"""Disturb trainings in every way that they promise to survive, and print what became of them.

    python -m tools.bench.chaos                # all of it, ten minutes on two free cores
    python -m tools.bench.chaos --only disk    # tests whose name has the word; "not kills" leaves the longest out

These are the project's tests that are marked `chaos`; their names say what is promised. They need a checkout with
tests/, and pytest. Processes, signals, file systems and files are real; a full disk needs the right to mount a tmpfs,
without which its tests are skipped, and the table says so.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from probemb.cli.command import Parser, run_command
from probemb.errors import UserError

TESTS = Path(__file__).resolve().parents[2] / "tests"
FILES = (
    "end_to_end/test_chaos.py",
    "finetune/test_disturbed.py",
    "pretrain/test_full_disk.py",
    "pretrain/test_preemption.py",
    "pretrain/test_watchdog.py",
    "pretrain/stream/test_content.py",
    "pretrain/stream/test_stream.py",
    "data/shards/test_tar.py",
    "data/test_images.py",
    "models/test_hub.py",
    "tools/test_verify_shards.py",
)
LIMIT = 1800  # seconds for a test; ZeRO-3 gathers each parameter over gloo, so its kills take minutes on busy cores


class Outcomes:
    """A plugin of pytest that counts how the tests ended, by their names without parameters, and their seconds."""

    def __init__(self):
        self.counts: dict[str, Counter] = defaultdict(Counter)
        self.seconds: Counter = Counter()

    def pytest_runtest_logreport(self, report) -> None:
        name = report.location[2].partition("[")[0].removeprefix("test_").replace("_", " ")
        self.seconds[name] += report.duration
        if report.when == "call" or report.outcome != "passed":  # a fixture's failure or skip stands for the test's
            self.counts[name][report.outcome] += 1

    def rows(self) -> list[tuple[str, str, str]]:
        """Promise, how often it was kept, and seconds."""
        rows = []
        for name, count in self.counts.items():
            skipped = f", {count['skipped']} skipped" if count["skipped"] else ""
            rows.append((name, f"{count['passed']} of {count.total()}{skipped}", f"{self.seconds[name]:.0f}"))
        return rows


def disturb(files: Sequence[Path], only: str = "") -> tuple[Outcomes, int]:
    """Run the tests in `files` that are marked `chaos` and have a word in their name; how they ended, pytest's code."""
    import pytest

    outcomes = Outcomes()
    words = ["-vv", "-rs", "-m", "chaos", "-k", only, f"--timeout={LIMIT}", "-p", "no:cacheprovider"]
    return outcomes, int(pytest.main([*words, *map(str, files)], plugins=[outcomes]))


def main() -> int:
    """Print the table; 1 if a promise was broken."""
    parser = Parser(prog="python -m tools.bench.chaos", description="Disturb trainings and see what becomes of them.")
    parser.add_argument("--only", default="", metavar="WORD", help="tests whose name has this word (pytest's -k)")
    only = parser.parse_args().only
    if not TESTS.is_dir():
        raise UserError(f"There is no {TESTS}.", "Run this in a checkout of the project.")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    outcomes, code = disturb([TESTS / name for name in FILES], only)
    if not outcomes.counts:
        raise UserError(
            f"No test ran (pytest ended with {code}).", "Give --only a word of a test's name, or leave it out."
        )
    from rich.console import Console
    from rich.table import Table

    table = Table("promise", "kept", "seconds")
    for row in outcomes.rows():
        table.add_row(*row)
    Console().print(table)
    return int(code != 0)


if __name__ == "__main__":
    run_command(main)
