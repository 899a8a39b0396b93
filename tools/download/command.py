"""Fetch a corpus by its published lists and write it as shards for training.

    python -m tools.download cc3m Train_GCC-training.tsv --out data/cc3m
    python -m tools.download cc12m cc12m.tsv --out data/cc12m --processes 16 --threads 64
    python -m tools.download redcaps annotations --out data/redcaps      # a folder of SUBREDDIT_YEAR.json
    python -m tools.download cc3m --out data/cc3m --retry-failed         # retry temporary failures
    python -m tools.download coco 2014 --out data/coco                   # or its zip archives, as files or addresses
    python -m tools.download flickr8k Flickr8k_Dataset.zip Flickr8k_text.zip --out data/flickr8k

Writes shards of KEY.jpg, KEY.txt and KEY.json with their index.json into --out, and into its folder `download` a
record of every row (`records`), report.json and report.html. The same command resumes an interrupted download; lists
named later are added. docs/download.md explains losses.
"""

from __future__ import annotations

import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from probemb.cli.configuration import parse_config
from probemb.data.weblists.corpora import CORPORA, find_lists, read_list
from probemb.errors import UserError, nearest
from probemb.runs.starts import refuse_idle_start
from tools.download.options import STORED_SETTINGS, TEMPORARY_CAUSES, Download, check, restore_settings

PROG = "python -m tools.download"
ARCHIVES = ("coco", "flickr8k")


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    own = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    corpus, sources = (words[0] if own else None), words[1:own]
    options = parse_config(
        Download,
        f"{PROG} {{{','.join([*CORPORA, *ARCHIVES])}}} LIST …",
        "Fetch a corpus by its published lists and write it as indexed shards.",
        words[own:],
    )
    if corpus is None:
        raise UserError("No corpus was named.", f"Write it first: {PROG} cc3m Train_GCC-training.tsv --out data/cc3m.")
    if corpus not in CORPORA and corpus not in ARCHIVES:
        known = [*CORPORA, *ARCHIVES]
        raise UserError(f"There is no corpus {corpus}.{nearest(corpus, known)}", f"Choose one of {', '.join(known)}.")
    part = check(options)
    options = restore_settings(options, words[own:])
    signal.signal(signal.SIGTERM, _stop)
    from pyarrow import ArrowException

    from tools.download.shard import NotWritten

    try:
        if corpus in ARCHIVES:
            from tools.download.archives import fetch_archives

            return fetch_archives(corpus, sources, options)
        return fetch_lists(corpus, sources, options, part)
    except (NotWritten, ArrowException) as error:
        raise UserError(
            f"A file of {options.out} is damaged: {' '.join(str(error).split())[:300].rstrip('.')}.",
            "Remove the file, or name another folder with --out; the same command then resumes.",
        ) from error
    except OSError as error:
        raise UserError(
            f"{error.filename or options.out} cannot be used: {error.strerror or error}.",
            "Free some space or make it writable; the same command then resumes where it stopped.",
        ) from error


class Terminated(KeyboardInterrupt):
    """SIGTERM."""


def _stop(*_) -> None:
    raise Terminated


def fetch_lists(corpus: str, sources: Sequence[str], options: Download, part: tuple[int, int]) -> int:
    """Fetch a web corpus and write shards, index and report."""
    from tools.download import plan
    from tools.download.shard import STATE

    folder = Path(options.out)
    settings = {name: getattr(options, name) for name in STORED_SETTINGS} | {"resize": options.resize or "keep_ratio"}
    state = plan.read_state(folder)
    if state is not None:
        plan.check_same(folder, state, corpus, settings)
    elif not sources:
        raise UserError("No list was named.", f"Name the published list of {CORPORA[corpus].title} after {corpus}.")
    paths = find_lists(corpus, sources)
    if state is None and CORPORA[corpus].columns:  # JSON would be read as a whole
        for path in paths:  # refuse a list of another format before anything is created
            next(read_list(corpus, path), None)
    made = not folder.exists()
    for name in ("plan", "records", "work", "locks"):
        (folder / STATE / name).mkdir(parents=True, exist_ok=True)
    with _lock_part(folder / STATE, part):
        try:
            with _wait_for_lock(folder / STATE / "locks" / "lists"):
                state = plan.read_state(folder) or plan.State(corpus, settings)
                plan.check_same(folder, state, corpus, settings)
                plan.extend(folder, state, paths)
        except UserError:
            if made and part[1] == 1 and plan.read_state(folder) is None:  # refused lists leave nothing
                shutil.rmtree(folder, ignore_errors=True)
            raise
        if options.prepare:
            asked = sum(one.rows for one in state.lists)
            print(f"{state.rows:,} rows, {asked:,} to be requested, {state.shards:,} shards")
            return 0
        run(folder, state, options, part)
        if part[1] > 1:
            report(folder, state, options, write=False)
            return 0
        if options.retry_failed:
            causes = [cause for one in options.retry_causes.split(",") if (cause := one.strip())]
            count, others = plan.plan_retry(folder, state, causes)
            kept = f"; not for: {', '.join(others)}" if others and not count else ""
            print(f"retrying {count:,} images{kept}", file=sys.stderr)
            run(folder, state, options, part)
        finish(folder, state, options)
        shutil.rmtree(folder / STATE / "work", ignore_errors=True)
    return 0


@contextmanager
def _lock_part(state: Path, part: tuple[int, int]) -> Iterator[None]:
    """Lock the whole folder, or one of its parts."""
    from probemb.runs.lock import RunLock, refuse_locked

    name = "whole" if part[1] == 1 else f"part-{part[0]}-of-{part[1]}"
    lock = RunLock(state / "locks" / name)
    try:
        for one in (state / "locks").iterdir():
            fellow = one.name.endswith(f"-of-{part[1]}") or one.name == "lists"
            if one.name != name and not fellow:
                refuse_locked(one)
        yield
    finally:
        lock.release()


@contextmanager
def _wait_for_lock(path: Path) -> Iterator[None]:
    """Wait for a lock: tasks of an array start together, and one of them reads the lists for all."""
    from probemb.runs.lock import RunLock

    waiting = False
    while True:
        try:
            lock = RunLock(path)
            break
        except UserError:
            if not waiting:
                print("another task is reading the lists; waiting for it", file=sys.stderr, flush=True)
            waiting = True
            time.sleep(1)
    try:
        yield
    finally:
        lock.release()


def run(folder: Path, state, options: Download, part: tuple[int, int]) -> None:
    """Fetch the unfinished shards."""
    from tools.download.plan import pending
    from tools.download.run import fetch_shards
    from tools.download.shard import STATE

    numbers = pending(folder, state, part)
    if not numbers:
        return
    try:
        fetch_shards(folder, numbers, options, state.settings)
    except Terminated:
        refuse_idle_start(
            folder / STATE / f"starts-{part[0]}-of-{part[1]}",
            -len(numbers),
            -len(pending(folder, state, part)),
            "a shard",
            "Give it more time (sbatch --time), or a new --out with a smaller --shard-size, and start it again.",
        )
        raise


def finish(folder: Path, state, options: Download) -> None:
    """Drop duplicates across shards, write the index and the report."""
    from probemb.data.shards.index import INDEX_NAME
    from tools.download.plan import markers
    from tools.download.shard import drop_duplicates, write_shard_index

    drop_duplicates(folder, state.shards)
    made = report(folder, state, options)
    if not write_shard_index(folder, markers(folder, state)):
        (folder / INDEX_NAME).unlink(missing_ok=True)
        cause, count = next(iter(made["lost"].items()), ("nothing was asked", 0))
        raise UserError(
            f"No image was fetched: {count:,} of {made['asked']:,} for the cause '{cause}'.",
            f"See {folder}/download/report.html. {_remedy(cause)}",
        )


def _remedy(cause: str) -> str:
    """Advice on retrying images that were lost for a cause."""
    if cause.startswith(tuple(TEMPORARY_CAUSES.split(","))):
        return "The same command with --retry-failed retries them."
    if cause == "private address":
        return "If these hosts are yours: --private-hosts --retry-failed --retry-causes 'private address'."
    return f"Retrying rarely helps here; --retry-failed --retry-causes '{cause}' does it."


def report(folder: Path, state, options: Download, write: bool = True) -> dict:
    """Print the report as a table or JSON; with `write`, also write its files."""
    from tools.download.plan import markers
    from tools.download.report import Outcome, publish
    from tools.download.shard import ShardPaths

    done = markers(folder, state)
    outcome = Outcome(
        title=CORPORA[state.corpus].title,
        asked=state.rows,
        dropped=sum((Counter(one.dropped) for one in state.lists), Counter()),
        markers=done,
        retried=sum((Counter(one.retried) for one in state.batches), Counter()),
        shards=state.shards,
        tars=[ShardPaths(folder, one.shard).tar for one in done if one.samples],
        lists=[asdict(one) for one in state.lists],
        settings=state.settings,
    )
    return publish(folder, outcome, options.json, write)
