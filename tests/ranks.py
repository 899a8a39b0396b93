"""Run a function on several ranks of a real gloo group, in processes forked from this one.

A fork inherits all imports, so a group of eight costs about a second. It also inherits what earlier tests left behind:
what must not be seen there (a measurement of memory) asks for `fresh` processes, at some ten seconds each.
"""

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from queue import Empty
from typing import Any


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, fresh: bool = False) -> list[Any]:
    """fn(rank, world_size, *args) in `world_size` processes; returns the results (picklable) in rank order.

    Raises RuntimeError with the traceback of the first rank that failed, or if one was killed or takes ten
    minutes, which is for busy machines and not what ends a test: a dead rank is noticed at once.
    """
    import torch  # noqa: F401  imported before the fork, once

    context = multiprocessing.get_context("spawn" if fresh else "fork")
    with tempfile.TemporaryDirectory() as folder:
        queue = context.Queue()
        ranks = [
            context.Process(target=_rank, args=(queue, f"{folder}/store", rank, world_size, fn, args), daemon=True)
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        results: dict[int, Any] = {}
        try:
            for _ in ranks:
                rank, result, error = _next(queue, ranks, results, time.monotonic() + 600)
                if error:
                    raise RuntimeError(f"rank {rank} of {world_size} failed:\n{error}")
                results[rank] = result
        finally:
            for process in ranks:
                process.join(timeout=5 if len(results) == world_size else 0.1)
                if process.is_alive():
                    process.kill()
    return [results[rank] for rank in range(world_size)]


def _next(queue, ranks: list, results: dict, until: float) -> tuple[int, Any, str | None]:
    """Rank, result and error of the next rank to end."""
    while True:
        ended = [i for i, process in enumerate(ranks) if process.exitcode is not None and i not in results]
        try:
            return queue.get(timeout=0.5)  # after the look: an ended rank has put its result before
        except Empty:
            if ended:
                codes = ", ".join(f"rank {i} with {ranks[i].exitcode}" for i in ended)
                raise RuntimeError(f"ended without a result: {codes}") from None
            if time.monotonic() > until:
                raise RuntimeError(f"no result of any rank but {sorted(results)}") from None


def _rank(queue, store: str, rank: int, world_size: int, fn, args) -> None:
    import torch
    import torch.distributed as dist

    from probemb.distributed import leave_process_group

    torch.set_num_threads(1)
    os.environ.update(
        RANK=f"{rank}", WORLD_SIZE=f"{world_size}", LOCAL_RANK=f"{rank}", LOCAL_WORLD_SIZE=f"{world_size}"
    )
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # of an earlier test: these ranks meet in a file
        os.environ.pop(name, None)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        result = fn(rank, world_size, *args)
        dist.barrier()
        leave_process_group()
        queue.put((rank, result, None))
    except BaseException:
        queue.put((rank, None, traceback.format_exc()))
