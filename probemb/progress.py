"""Progress of a long step: a bar in a terminal, elsewhere a line every ten seconds."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

tqdm.monitor_interval = 0  # no thread: processes are forked meanwhile


class _Lines:
    """A line for each state of a bar, where there is no terminal."""

    def write(self, text: str) -> None:
        if text.strip():
            print(text.strip(), file=sys.stderr, flush=True)

    def flush(self) -> None:
        pass


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], object]]:
    """Show progress on stderr, with `advance(n)`, which this yields. A `total` of 0 is unknown."""
    file, seconds, delay = (sys.stderr, 0.1, 0.0) if sys.stderr.isatty() else (_Lines(), 10.0, 10.0)
    with tqdm(desc=title, total=total or None, mininterval=seconds, delay=delay, file=file) as bar:
        yield bar.update


@contextmanager
def silent(title: str, total: int) -> Iterator[Callable[[int], object]]:
    """Show no progress; takes the place of `progress`."""
    yield lambda n: None
