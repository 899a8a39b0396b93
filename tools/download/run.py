"""Fetch shards in several processes here, or wherever Spark or Ray put them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path

from probemb.cli.progress import progress
from probemb.data.workers import shorten_sockets
from probemb.errors import UserError
from tools.download.shard import STATE, ShardPaths, read_marker

LOOK_EVERY = 0.5  # seconds


def fetch_shards(folder: Path, numbers: Sequence[int], given, settings: dict) -> None:
    """Fetch shards `numbers` of `folder` by their plans, with progress; `given` and `settings` as the command's.

    Raises:
        UserError: a shard could not be finished (no room, a process was killed); all others are.
    """
    tasks = [(number, str(ShardPaths(folder, number).plan.absolute())) for number in numbers]
    for number in numbers:  # what an interrupted command left
        ShardPaths(folder, number).part.unlink(missing_ok=True)
        ShardPaths(folder, number).count.unlink(missing_ok=True)
    if given.distributor == "multiprocessing":
        _here(folder, tasks, given, settings)
    else:
        _elsewhere(folder, tasks, given, settings)
    left = [number for number in numbers if read_marker(ShardPaths(folder, number)) is None]
    if left:
        raise UserError(
            f"{len(left)} of {len(numbers)} shards could not be finished: {_first_error(folder, left)}.",
            "Remove the cause, as a full disk; the same command then goes on with these shards.",
        )


def _here(folder: Path, tasks: list, given, settings: dict) -> None:
    """Processes that take shard after shard; when one is killed, the others are ended too, as nothing is lost by it.

    img2dataset's own pool would wait for ever for what a killed process was to do.
    """
    import multiprocessing

    shorten_sockets()
    context = multiprocessing.get_context("forkserver")  # img2dataset is imported once for all
    context.set_forkserver_preload(["tools.download.worker"])
    # Of a process that is ended, Python's tracker of semaphores would say that some are left, and removes them.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")
    workers = {}
    left = list(reversed(tasks))
    with _counting(folder, tasks) as look:
        try:
            for _ in range(min(given.processes, len(tasks))):
                line, other = context.Pipe()
                worker = context.Process(target=_work, args=(folder, other, given, settings), daemon=True)
                worker.start()
                other.close()
                workers[line] = worker
            busy = set(workers)
            while busy:
                for line in wait(list(busy), LOOK_EVERY):
                    try:
                        line.recv()  # ready for the next shard
                        line.send(left.pop() if left else None)
                    except (EOFError, ConnectionError):
                        busy.discard(line)
                        _check_end(workers[line])
                look()
        finally:
            for line, worker in workers.items():
                worker.kill()
                worker.join()
                line.close()


def _check_end(worker) -> None:
    worker.join()
    if worker.exitcode:
        code = worker.exitcode
        if 0 < code < 255:  # 255: the process that starts them was killed
            raise UserError(
                f"A process ended with exit code {code}; what it said stands above.", "Start the same command again."
            )
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code} in the middle of its work"
        raise UserError(
            f"A process {how}, usually for want of memory.",
            "Start the same command again, with fewer --processes or --threads; it goes on.",
        )


def _work(*arguments) -> None:
    from tools.download.worker import work

    work(*arguments)


def _elsewhere(folder: Path, tasks: list, given, settings: dict) -> None:
    """img2dataset's distributors; the folder must be on a file system that all machines see."""
    from tools.download.fetch import make_fetcher

    fetcher = make_fetcher(folder, given, settings)  # first: it quietens what img2dataset imports
    from img2dataset import distributor

    start = distributor.pyspark_distributor if given.distributor == "pyspark" else distributor.ray_distributor
    ended = threading.Event()

    def watch() -> None:
        with _counting(folder, tasks) as look:
            while not ended.wait(LOOK_EVERY):
                look()
            look()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        start(given.processes, fetcher, tasks, 1000, 0)
    finally:
        ended.set()
        watcher.join()


@contextmanager
def _counting(folder: Path, tasks: list) -> Iterator[Callable[[], None]]:
    """Progress over rows, from what the processes note beside the records; yields a function that looks."""
    import pyarrow.parquet as pq

    paths = {number: ShardPaths(folder, number) for number, _ in tasks}
    rows = {number: pq.read_metadata(plan).num_rows for number, plan in tasks}
    seen = dict.fromkeys(rows, 0)
    with progress("Fetching", sum(rows.values())) as advance:

        def look() -> None:
            for number, count in list(seen.items()):
                if paths[number].marker.exists():
                    now = rows[number]
                else:
                    try:
                        now = int(paths[number].count.read_text() or 0)
                    except (OSError, ValueError):
                        continue
                if now > count:
                    advance(now - count)
                    seen[number] = now
                if seen[number] == rows[number]:
                    del seen[number]

        yield look
        look()


def _first_error(folder: Path, left: Sequence[int]) -> str:
    for number in left:
        try:
            text = ShardPaths(folder, number).error.read_text(errors="replace")
            return "".join(c for c in text if c.isprintable())[:300].rstrip(".")
        except OSError:
            continue
    return f"the reason could not be written into {folder / STATE}, which is often for want of room"
