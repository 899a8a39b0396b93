"""Processes that share the work of a command."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.context import BaseContext

from probemb.errors import UserError


@contextmanager
def process_pool(processes: int, option: str, context: BaseContext | None = None) -> Iterator[ProcessPoolExecutor]:
    """A pool of processes; leaving the block cancels jobs that have not started.

    Args:
        option: the command's option for the number of processes.
        context: their start method; None for the system's default.

    Raises:
        UserError: one of them was killed.
    """
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        try:
            yield pool
        except BrokenProcessPool:
            raise UserError(
                "A process was killed; it probably ran out of memory.", f"Start the command again with fewer {option}."
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)
