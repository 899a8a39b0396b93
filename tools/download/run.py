"""Fetch shards in several local processes, or through Spark or Ray."""

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

UPDATE_EVERY = 0.5  # seconds


def fetch_shards(folder: Path, numbers: Sequence[int], options, settings: dict) -> None:
    """Fetch shards `numbers` of `folder` as planned, with progress.

    Raises:
        UserError: a shard could not be finished (disk full, a process was killed); all others are.
    """
    tasks = [(number, str(ShardPaths(folder, number).plan.absolute())) for number in numbers]
    for number in numbers:  # what an interrupted command left
        ShardPaths(folder, number).part.unlink(missing_ok=True)
        ShardPaths(folder, number).count.unlink(missing_ok=True)
    if options.distributor == "multiprocessing":
        _fetch_locally(folder, tasks, options, settings)
    else:
        _fetch_distributed(folder, tasks, options, settings)
    left = [number for number in numbers if read_marker(ShardPaths(folder, number)) is None]
    if left:
        raise UserError(
            f"{len(left)} of {len(numbers)} shards could not be finished: {_first_error(folder, left)}.",
            "Remove the cause, such as a full disk; the same command then resumes with these shards.",
        )


def _fetch_locally(folder: Path, tasks: list, options, settings: dict) -> None:
    """Fetch in local processes, each one shard at a time. If one is killed, all end; a restart resumes.

    img2dataset's own pool would wait forever for a killed process.
    """
    import multiprocessing

    shorten_sockets()
    context = multiprocessing.get_context("forkserver")  # imports img2dataset once
    context.set_forkserver_preload(["tools.download.worker"])
    # Python's tracker of semaphores would warn about those of a killed process, which it removes.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")
    workers = {}
    left = list(reversed(tasks))
    with _row_progress(folder, tasks) as update:
        try:
            for _ in range(min(options.processes, len(tasks))):
                connection, theirs = context.Pipe()
                worker = context.Process(target=_work, args=(folder, theirs, options, settings), daemon=True)
                worker.start()
                theirs.close()
                workers[connection] = worker
            busy = set(workers)
            while busy:
                for connection in wait(list(busy), UPDATE_EVERY):
                    try:
                        connection.recv()  # the worker is ready for the next shard
                        connection.send(left.pop() if left else None)
                    except (EOFError, ConnectionError):
                        busy.discard(connection)
                        _check_end(workers[connection])
                update()
        finally:
            for connection, worker in workers.items():
                worker.kill()
                worker.join()
                connection.close()


def _check_end(worker) -> None:
    worker.join()
    if worker.exitcode:
        code = worker.exitcode
        if 0 < code < 255:  # 255: the fork server was killed
            raise UserError(
                f"A process ended with exit code {code}; see its output above.", "Restart the same command."
            )
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code} in the middle of its work"
        raise UserError(
            f"A process {how}, probably out of memory.",
            "Restart the same command with fewer --processes or --threads; it resumes.",
        )


def _work(*arguments) -> None:
    from tools.download.worker import work

    work(*arguments)


def _fetch_distributed(folder: Path, tasks: list, options, settings: dict) -> None:
    """Fetch with img2dataset's distributors; all machines must share the folder's file system."""
    from tools.download.fetch import Fetcher

    fetcher = Fetcher(folder, options, settings)  # first: it silences packages that img2dataset imports
    from img2dataset import distributor

    start = distributor.pyspark_distributor if options.distributor == "pyspark" else distributor.ray_distributor
    ended = threading.Event()

    def watch() -> None:
        with _row_progress(folder, tasks) as update:
            while not ended.wait(UPDATE_EVERY):
                update()
            update()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        start(options.processes, fetcher, tasks, 1000, 0)
    finally:
        ended.set()
        watcher.join()


@contextmanager
def _row_progress(folder: Path, tasks: list) -> Iterator[Callable[[], None]]:
    """Progress over rows, from counts that the processes write; yields a function that updates it."""
    import pyarrow.parquet as pq

    paths = {number: ShardPaths(folder, number) for number, _ in tasks}
    rows = {number: pq.read_metadata(plan).num_rows for number, plan in tasks}
    seen = dict.fromkeys(rows, 0)
    with progress("Fetching", sum(rows.values())) as advance:

        def update() -> None:
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

        yield update
        update()


def _first_error(folder: Path, left: Sequence[int]) -> str:
    for number in left:
        try:
            text = ShardPaths(folder, number).error.read_text(errors="replace")
            return "".join(c for c in text if c.isprintable())[:300].rstrip(".")
        except OSError:
            continue
    return f"the reason could not be written into {folder / STATE}, probably because the disk is full"
