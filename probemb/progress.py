"""Progress of a long step: a bar in a terminal, a line now and then elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

tqdm.monitor_interval = 0  # no thread: processes are forked meanwhile


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], object]]:
    """Show progress on stderr, with `advance(n)`, which this yields. A `total` of 0 is unknown."""
    seconds = 0.1 if sys.stderr.isatty() else 10.0
    with tqdm(desc=title, total=total or None, mininterval=seconds, file=sys.stderr) as bar:
        yield bar.update


@contextmanager
def silent(title: str, total: int) -> Iterator[Callable[[int], object]]:
    """Show no progress; takes the place of `progress`."""
    yield lambda n: None
