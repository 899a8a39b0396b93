"""Progress of a long step: a bar in a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LINE_EVERY = 10.0  # seconds between progress lines where there is no terminal


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show progress on stderr, with `advance(n)`, which this yields. A `total` of 0 is unknown."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    started = told = time.monotonic()
    console, done = Console(stderr=True), 0
    columns = (TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total or None)

        def advance(n: int) -> None:
            nonlocal done, told
            done, now = done + n, time.monotonic()
            bar.advance(task, n)
            if not console.is_terminal and now - told >= LINE_EVERY:
                told, left = now, (now - started) / max(done, 1) * max(total - done, 0)
                of = f" of {total:,}, about {left:.0f} s left" if total else ""
                print(f"{title}: {done:,}{of}", file=sys.stderr, flush=True)

        yield advance
    if not console.is_terminal:
        print(f"{title}: {done:,} in {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)


@contextmanager
def silent(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show no progress; takes the place of `progress`."""
    yield lambda n: None
