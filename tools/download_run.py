"""Fetch shards in several processes here, or wherever Spark or Ray put them."""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from probemb.errors import UserError
from probemb.progress import progress
from tools.download_shard import STATE, ShardPaths, read_marker

LOOK_EVERY = 0.5  # seconds


def fetch_shards(folder: Path, numbers: Sequence[int], given, settings: dict) -> None:
    """Fetch shards `numbers` of `folder` by their plans, with progress; `given` and `settings` as the command's.

    Raises:
        UserError: a shard could not be finished (no room, a process was killed); all others are.
    """
    if given.distributor != "multiprocessing" and not importlib.util.find_spec(given.distributor):
        raise UserError(
            f"--distributor {given.distributor} needs the package {given.distributor}.",
            f"Install it with pip install {given.distributor}, or leave the option out.",
        )
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


def make_fetcher(folder: Path, given, settings: dict):
    """The downloader of the command's options. Imports img2dataset."""
    from tools.download_fetch import Fetcher, Images
    from tools.download_web import Limits

    images = Images(
        settings["image_size"], settings["resize"], settings["upscale"], settings["min_size"], settings["quality"]
    )
    limits = Limits(
        given.seconds, min(given.patience, given.seconds), int(given.max_mib * 2**20), given.redirects,
        given.private_hosts,
    )  # fmt: skip
    return Fetcher(
        folder.absolute(),
        images,
        limits,
        threads=given.threads,
        hash=settings["hash"],
        user_agent=given.user_agent,
        opt_out=given.respect_opt_out,
        shard_size=settings["shard_size"],
    )


def _here(folder: Path, tasks: list, given, settings: dict) -> None:
    """Processes that take shard after shard; when one is killed, the others are ended too, as nothing is lost by it.

    img2dataset's own pool would wait for ever for what a killed process was to do.
    """
    import multiprocessing

    context = multiprocessing.get_context("forkserver")  # img2dataset is imported once for all
    context.set_forkserver_preload(["tools.download_fetch"])
    count = min(given.processes, len(tasks))
    turn = context.Value("l", 0)
    workers = [
        context.Process(target=_work, args=(folder, tasks, turn, given, settings), daemon=True) for _ in range(count)
    ]
    with _counting(folder, tasks) as look:
        try:
            for worker in workers:
                worker.start()
            while any(worker.is_alive() for worker in workers):
                time.sleep(LOOK_EVERY)
                look()
                killed = [worker.exitcode for worker in workers if (worker.exitcode or 0) < 0]
                if killed:
                    raise UserError(
                        f"A process was ended by signal {-killed[0]}, usually for want of memory.",
                        "Start the same command again, with fewer --processes or --threads; it goes on.",
                    )
        finally:
            for worker in workers:
                if worker.pid is not None:
                    worker.kill()
                    worker.join()


def _work(folder: Path, tasks: list, turn, given, settings: dict) -> None:
    from tools.download_fetch import follow_parent

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command ends us
    follow_parent()
    fetcher = make_fetcher(folder, given, settings)
    while True:
        with turn.get_lock():
            number = turn.value
            turn.value += 1
        if number >= len(tasks):
            return
        done, _ = fetcher(tasks[number])
        if not done:
            os._exit(1)  # the next shard would fail as well


def _elsewhere(folder: Path, tasks: list, given, settings: dict) -> None:
    """img2dataset's distributors; the folder must be on a file system that all machines see."""
    os.environ.setdefault("TQDM_DISABLE", "1")
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
        start(given.processes, make_fetcher(folder, given, settings), tasks, 1000, 0)
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
