"""Processes, and jobs, that share the work of a command."""

import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.context import BaseContext

from probemb.errors import UserError


@contextmanager
def process_pool(
    processes: int, jobs: int, option: str, context: BaseContext | None = None
) -> Iterator[ProcessPoolExecutor]:
    """A pool of so many processes, or fewer for few jobs; leaving the block cancels jobs that have not started.

    `option`: the command's, for their number; `context`: their start method, None for the system's default. Raises
    UserError: one of them was killed.
    """
    with ProcessPoolExecutor(max(1, min(processes, jobs)), mp_context=context) as pool:
        try:
            yield pool
        except BrokenProcessPool:
            what = "A process was killed; it probably ran out of memory."
            raise UserError(what, f"Start the command again with fewer {option}.") from None
        finally:
            pool.shutdown(cancel_futures=True)


def part_of(text: str) -> tuple[int, int]:
    """I and N of --part I/N, from 1/N to N/N. Raises UserError."""
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise UserError(f"--part is {text}.", "Write it as 3/16: the third of sixteen parts.")
    return int(found[1]), int(found[2])
