"""Download a corpus by its published lists, as shards.

    python -m tools.download cc3m Train_GCC-training.tsv --out data/cc3m
    python -m tools.download cc12m cc12m.tsv --out data/cc12m --processes 16 --threads 64
    python -m tools.download redcaps annotations --out data/redcaps      # a folder of SUBREDDIT_YEAR.json
    python -m tools.download cc3m --out data/cc3m --retry-failed         # retry temporary failures
    python -m tools.download coco 2014 --out data/coco                   # or its zip archives, as files or addresses
    python -m tools.download flickr8k Flickr8k_Dataset.zip Flickr8k_text.zip --out data/flickr8k

Writes shards of KEY.jpg, KEY.txt and KEY.json with their index.json into --out, and report.json into its folder
`download`. The same command resumes an interrupted download; lists named later are added.
"""

import fcntl
import os
import re
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import as_completed
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from typing import Literal

import pyarrow as pa
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt, restricted_number_type
from pyarrow.feather import write_feather

from probemb.cli.configuration import parse_config
from probemb.cli.ranges import Processes, Requests
from probemb.data.workers import shorten_sockets
from probemb.errors import UserError, nearest
from probemb.files import replace_file
from probemb.machine import cores
from probemb.progress import progress
from probemb.runs.lock import MAX_STARTS, RunLock, count_start, refuse_locked
from probemb.runs.preemption import REQUEUE, SIGNALS, Preemption
from tools.download.archives import TITLES, fetch_archives
from tools.download.lists import CORPORA, find_lists, read_list
from tools.download.records import Paths, State, count, drop_duplicates, failed_rows, finish, read_state, show
from tools.pools import part_of, process_pool

PROG = "python -m tools.download"
PROCESSES = min(16, cores())
TEMPORARY_CAUSES = "no answer,too slow,connection,cut off,host not found,HTTP 408,HTTP 425,HTTP 429,HTTP 5"
STORED = ("image_size", "resize", "upscale", "min_size", "quality", "shard_size", "captions")  # settings of a folder


@dataclass(frozen=True)
class Download:
    """Options of the command.

    Args:
        out: the folder of the shards.
        image_size: pixels of the shorter side (keep_ratio, center_crop) or the longer one.
        resize: keep_ratio, keep_ratio_largest, center_crop, border (padded with white) or no; by default
            "keep_ratio" for lists and "no" (unchanged bytes) for archives.
        upscale: resize smaller images too.
        min_size: pixels of the shorter side below which an image is dropped.
        quality: of the JPEGs, 1 to 100.
        captions: clean (no markup, "person" for <PERSON>) or raw.
        shard_size: rows of a shard.
        patience: seconds without data after which an address is abandoned.
        seconds: for one address in total.
        max_mib: MiB of one response at most.
        user_agent: a token to add to the user agent, by which servers may address this download.
        respect_opt_out: leave out images whose server says noai, noimageai, noindex, noimageindex or none.
        private_hosts: also contact hosts in private networks, including this machine.
        processes: concurrent processes, one shard each.
        threads: concurrent requests per process.
        part: fetch only part I/N of the shards, as a task of a job array; a command without it finishes the corpus.
        retry_failed: retry images that failed for a temporary cause.
        retry_causes: those causes, separated by commas.
    """

    out: str = ""
    image_size: PositiveInt = 256
    resize: Literal["keep_ratio", "keep_ratio_largest", "center_crop", "border", "no"] | None = None
    upscale: bool = False
    min_size: NonNegativeInt = 32
    quality: restricted_number_type("Quality", int, [(">=", 1), ("<=", 100)]) = 95
    captions: Literal["clean", "raw"] = "clean"
    shard_size: PositiveInt = 10_000
    patience: PositiveFloat = 10.0
    seconds: PositiveFloat = 60.0
    max_mib: PositiveFloat = 32.0
    user_agent: str = "img2dataset"
    respect_opt_out: bool = True
    private_hosts: bool = False
    processes: Processes = PROCESSES
    threads: Requests = 64
    part: str | None = None
    retry_failed: bool = False
    retry_causes: str = TEMPORARY_CAUSES


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    own = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    corpus, sources = (words[0] if own else None), words[1:own]
    known = [*CORPORA, *TITLES]
    options = parse_config(Download, f"{PROG} {{{','.join(known)}}} LIST …", __doc__.splitlines()[0], words[own:])
    if corpus is None:
        raise UserError("No corpus was named.", f"Write it first: {PROG} cc3m Train_GCC-training.tsv --out data/cc3m.")
    if corpus not in known:
        raise UserError(f"There is no corpus {corpus}.{nearest(corpus, known)}", f"Choose one of {', '.join(known)}.")
    part = _check(options)
    paths = Paths(Path(options.out))
    state = read_state(paths, corpus)
    if state:  # settings need not be typed again, and must not differ
        typed = {word[2:].partition("=")[0].replace("-", "_").removeprefix("no_") for word in words[own:]}
        for name in STORED:
            if name in typed and getattr(options, name) != state.settings[name]:
                what = f"{paths.folder} was started with --{name.replace('_', '-')} {state.settings[name]}."
                raise UserError(what, "Give the same value, or name another folder with --out.")
        options = replace(options, **state.settings)
    state = state or State(corpus, {name: getattr(options, name) for name in STORED})
    with Preemption() as preemption:
        preemption.interrupting = *SIGNALS, signal.SIGINT
        try:
            if corpus in TITLES:
                fetch_archives(paths, state, sources, options)
            else:
                fetch_lists(paths, state, sources, options, part, preemption)
        except KeyboardInterrupt:
            if preemption.exit_code != REQUEUE:
                raise
            return REQUEUE
        except (pa.ArrowException, OSError) as error:
            name = getattr(error, "filename", None) or options.out
            what = f"{name} cannot be used: {getattr(error, 'strerror', None) or error}."
            remedy = "Free some space, make it writable, or remove it if it is damaged; the same command then resumes."
            raise UserError(what, remedy) from error
    return 0


def _check(options: Download) -> tuple[int, int]:
    """Check options before anything is read; returns the part as (i, n). Raises UserError."""
    if not options.out:
        raise UserError("--out is missing.", "Name the folder for the shards, for example --out data/cc3m.")
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,60}", options.user_agent):
        raise UserError(f"--user-agent is '{options.user_agent[:80]}'.", "Give one word of letters, digits, . _ and -.")
    if options.part is None:
        return 1, 1
    part = part_of(options.part)
    if options.retry_failed:
        raise UserError("--part and --retry-failed exclude each other.", "Retry with one command for all parts.")
    return part


def fetch_lists(
    paths: Paths, state: State, sources: Sequence[str], options: Download, part: tuple[int, int], preemption: Preemption
) -> None:
    """Fetch a web corpus; without a part, also drop duplicates and write index and report."""
    title = CORPORA[state.corpus].title
    if not sources and not state.lists:
        raise UserError("No list was named.", f"Name the published list of {title} after {state.corpus}.")
    lists = find_lists(state.corpus, sources)
    for path in lists:  # refuse a list of another format before anything is created
        if path.name not in state.lists:
            next(read_list(state.corpus, path), None)
    paths.make()
    name = "whole" if part[1] == 1 else f"part-{part[0]}-of-{part[1]}"
    with closing(RunLock(paths.home / "locks" / name)):
        for other in (paths.home / "locks").iterdir():  # the other tasks of the same array run beside this one
            if other.is_dir() and other.name != name and not other.name.endswith(f"-of-{part[1]}"):
                refuse_locked(other)
        with open(paths.home / "locks" / "lists", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # the first task of an array reads the lists for all
            state = read_state(paths, state.corpus) or state
            plan_lists(paths, state, lists)
        run(paths, state, options, part, preemption)
        asked = sum(listed["rows"] for listed in state.lists.values())
        dropped = sum((Counter(listed["dropped"]) for listed in state.lists.values()), Counter())
        if part[1] > 1:
            show(title, asked, count(paths), dropped)
            return
        if options.retry_failed:
            causes = [cause for word in options.retry_causes.split(",") if (cause := word.strip())]
            failed = failed_rows(paths, causes)
            print(f"retrying {len(failed):,} images", file=sys.stderr)
            plan(paths, state, failed)
            state.write(paths)
            failed_rows(paths, causes, forget=True)
            run(paths, state, options, part, preemption)
        drop_duplicates(paths)
        shutil.rmtree(paths.work)
        finish(paths, title, [paths.folder], asked, dropped, options.processes)


def plan_lists(paths: Paths, state: State, lists: Sequence[Path]) -> None:
    """Plan the rows of new lists. Raises UserError: a list has changed since it was read, or holds no usable row."""
    new, rows = [], []
    for path in lists:
        size = path.stat().st_size
        if path.name not in state.lists:
            new.append(path)
        elif state.lists[path.name]["bytes"] != size:
            what = f"{path} is not the list that {paths.folder} was started with: it has changed."
            raise UserError(what, "Restore it, or name another folder with --out.")
    for number, path in paths.pending():
        if number >= state.shards:  # of a command that was killed before it had read its lists
            os.unlink(path)
    with progress("Reading bytes", sum(path.stat().st_size for path in new)) as advance:
        for path in new:
            dropped, usable = Counter(), 0
            for row in read_list(state.corpus, path, advance, clean=state.settings["captions"] == "clean"):
                if isinstance(row, str):
                    dropped[row] += 1
                    continue
                usable += 1
                rows.append({"url": row.url, "caption": " ".join(row.caption.split()), **row.extra})
                if len(rows) == state.settings["shard_size"]:
                    plan(paths, state, rows)
                    rows = []
            listed = {"bytes": path.stat().st_size, "rows": usable + dropped.total(), "dropped": dict(dropped)}
            state.lists[path.name] = listed
    plan(paths, state, rows)
    if not state.shards:
        why = ", ".join(f"{n:,} {cause}" for listed in state.lists.values() for cause, n in listed["dropped"].items())
        shutil.rmtree(paths.home)
        what = f"The lists hold no usable row ({why})."
        raise UserError(what, f"Check that they are the published lists of {CORPORA[state.corpus].title}.")
    if new:
        state.write(paths)  # makes the planned shards official


def plan(paths: Paths, state: State, rows: Sequence[dict]) -> None:
    """Write rows as further shards to be fetched."""
    names = ["url", "caption", *CORPORA[state.corpus].kept]
    for first in range(0, len(rows), state.settings["shard_size"]):
        chunk = rows[first : first + state.settings["shard_size"]]
        table = pa.table({name: _column([row.get(name) for row in chunk]) for name in names})
        write = partial(write_feather, table, compression="uncompressed")  # Arrow's file format
        replace_file(paths.todo / f"{state.shards:05d}.arrow", write)
        state.shards += 1


def _column(values: list) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError):  # a list that mixes numbers and text
        return pa.array([None if value is None else str(value) for value in values])


def run(paths: Paths, state: State, options: Download, part: tuple[int, int], preemption: Preemption) -> None:
    """Fetch the unfinished shards. Raises UserError: one could not be finished, or a process was killed."""
    tasks = paths.pending(part)
    if not tasks:
        return
    paths.make()
    try:
        reason = fetch_shards(paths, options, CORPORA[state.corpus].kept, tasks)
    except KeyboardInterrupt:
        starts, left = paths.home / f"starts-{part[0]}-of-{part[1]}", len(paths.pending(part))
        if preemption.exit_code == REQUEUE and count_start(starts, -len(tasks), -left) >= MAX_STARTS:
            raise UserError(
                f"{MAX_STARTS} starts in a row were asked to stop before they had finished a shard.",
                "Give it more time (sbatch --time), or a new --out with a smaller --shard-size, and start it again.",
            ) from None
        raise
    if left := len(paths.pending(part)):
        what = f"{left} of {len(tasks)} shards could not be finished: {reason[:300].rstrip('.')}."
        raise UserError(what, "Remove the cause, such as a full disk; the same command then resumes with these shards.")


def fetch_shards(paths: Paths, options: Download, columns: tuple[str, ...], tasks: Sequence[tuple[int, str]]) -> str:
    """Fetch in several processes, until a shard cannot be stored; returns the reason."""
    shorten_sockets()
    context = get_context("forkserver")  # imports img2dataset once
    context.set_forkserver_preload(["tools.download.fetch"])
    given = options.processes, len(tasks), "--processes", context
    with progress("Fetching shards", len(tasks)) as advance, process_pool(*given) as pool:
        try:
            for job in as_completed([pool.submit(fetch_one, paths.folder, options, columns, task) for task in tasks]):
                if reason := job.result():
                    return reason
                advance(1)
        finally:
            for child in active_children():  # a shard may take long, and is fetched again
                child.kill()
    return ""


def fetch_one(folder: Path, options: Download, columns: tuple[str, ...], task: tuple[int, str]) -> str:
    """Fetch a shard, in a process of the pool; returns why it is not done, or nothing."""
    return _fetcher(folder, options, columns).fetch(*task)


@cache
def _fetcher(folder: Path, options: Download, columns: tuple[str, ...]):
    from tools.download.fetch import Fetcher

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()  # killed with it
    return Fetcher(folder, options, columns)
