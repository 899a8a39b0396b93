"""The plan of a corpus folder: its lists, settings, and the rows of every shard.

    OUT/download/state.json          corpus, settings, the lists with their counts, and shards planned together
    OUT/download/plan/00012.parquet  the rows of shard 12: id (the sample's key), url, caption, extra (JSON)

A row's key is its number in the corpus. Lists that are named together share shards; lists that are added later and
retried rows get further shards.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from probemb.cli.progress import progress
from probemb.data.weblists.corpora import CORPORA, Dropped, Row, read_list
from probemb.errors import UserError
from probemb.files import replace_file, replace_text
from tools.download.shard import GOT, STATE, Marker, ShardPaths, read_marker, read_records

TWICE = "duplicate address"
_HEAD = 1 << 20  # bytes at both ends of a list that are hashed to detect changes


@dataclass
class ListSummary:
    """One list that was read: `dropped` counts unusable rows by cause, `first_dropped` names the first of each."""

    name: str
    bytes: int
    mark: str
    rows: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    first_dropped: dict[str, str] = field(default_factory=dict)


@dataclass
class Batch:
    """Shards that were planned together; `retried`: counts of the causes for which their rows are retried."""

    first_shard: int
    shards: int
    retried: dict[str, int] = field(default_factory=dict)


@dataclass
class State:
    """The state of a corpus folder; `settings` are those that decide what the shards hold, and `splits` the SHA-256 of
    the images and captions of each split of an archive.
    """

    corpus: str
    settings: dict
    splits: dict[str, str] = field(default_factory=dict)
    lists: list[ListSummary] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    format: int = 1

    @property
    def shards(self) -> int:
        """Number of planned shards."""
        return sum(one.shards for one in self.batches)

    @property
    def rows(self) -> int:
        """Rows of all lists, including dropped ones."""
        return sum(one.rows + sum(one.dropped.values()) for one in self.lists)


def read_state(folder: Path) -> State | None:
    """The state of a folder, None for a new one. Raises UserError: the folder holds something else."""
    path = folder / STATE / "state.json"
    if not path.is_file():
        if folder.exists() and not folder.is_dir():
            raise UserError(f"--out {folder} is a file.", "Name a folder.")
        if folder.is_dir() and any(not one.name.startswith(".") and one.name != STATE for one in folder.iterdir()):
            what = f"{folder} holds files that this command did not write."
            raise UserError(what, "Name a new or empty folder with --out.")
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        state = State(**content)
        if state.format != 1:
            raise ValueError(state.format)
        state.lists = [ListSummary(**one) for one in state.lists]
        state.batches = [Batch(**one) for one in state.batches]
    except (OSError, ValueError, TypeError):
        raise UserError(f"{path} cannot be read.", "Name another folder with --out.") from None
    return state


def write_state(folder: Path, state: State) -> None:
    """Replace the state atomically."""
    replace_text(folder / STATE / "state.json", json.dumps(asdict(state), indent=1) + "\n")


def check_same(folder: Path, state: State, corpus: str, settings: dict) -> None:
    """Refuse to mix corpora or settings in one folder. Raises UserError."""
    if state.corpus != corpus:
        raise UserError(f"{folder} holds {state.corpus}, not {corpus}.", "Name another folder with --out.")
    for name, value in settings.items():
        if name in state.settings and state.settings[name] != value:
            raise UserError(
                f"{folder} was started with --{name.replace('_', '-')} {state.settings[name]}, not {value}.",
                "Give the same value, or name another folder with --out.",
            )


def extend(folder: Path, state: State, paths: Sequence[Path]) -> int:
    """Plan the rows of new lists; returns the number of new lists.

    Raises:
        UserError: a list has changed since it was read, is of another format, or holds no usable row.
        OSError: from writing.
    """
    known = {one.name: one for one in state.lists}
    new = []
    for path in paths:
        mark = _fingerprint(path)
        if path.name not in known:
            new.append((path, mark))
        elif known[path.name].mark != mark:
            raise UserError(
                f"{path} is not the list that {folder} was started with: it has changed.",
                "Restore it, or name another folder with --out.",
            )
    if not new:
        return 0
    seen = set(_addresses(folder, state))
    batch = _Planner(folder, state)
    with progress("Reading", sum(path.stat().st_size for path, _ in new)) as advance:
        for path, mark in new:
            listed = ListSummary(path.name, path.stat().st_size, mark)
            state.lists.append(listed)
            _read_one(state, path, listed, seen, batch, advance)
    if not any(one.rows for one in state.lists):
        dropped = sum((Counter(one.dropped) for one in state.lists), Counter())
        why = ", ".join(f"{count:,} {cause}" for cause, count in dropped.most_common())
        raise UserError(
            f"The lists hold no usable row{f' ({why})' if why else ''}.",
            f"Check that they are the published lists of {CORPORA[state.corpus].title}.",
        )
    batch.finish({})
    return len(new)


class _Planner:
    """Collects rows into plans of full shards; the last one may be smaller."""

    def __init__(self, folder: Path, state: State):
        self.folder, self.state, self.batch = folder, state, Batch(state.shards, 0)
        self._rows: list[tuple[str, Row]] = []

    def add(self, key: str, row: Row) -> None:
        self._rows.append((key, row))
        if len(self._rows) == self.state.settings["shard_size"]:
            self._write()

    def _write(self) -> None:
        write_plan(self.folder, self.batch.first_shard + self.batch.shards, self._rows)
        self.batch.shards, self._rows = self.batch.shards + 1, []

    def finish(self, retried: dict[str, int]) -> None:
        """Write the last plan, then the state, which makes the shards official."""
        if self._rows:
            self._write()
        self.batch.retried = retried
        self.state.batches.append(self.batch)
        write_state(self.folder, self.state)


def _read_one(state: State, path: Path, listed: ListSummary, seen: set[bytes], batch: _Planner, advance) -> None:
    next_key = sum(one.rows for one in state.lists)
    dropped: Counter[str] = Counter()
    for row in read_list(state.corpus, path, advance, clean=state.settings["captions"] == "clean"):
        if isinstance(row, Row):
            address = _digest(row.url)
            if address not in seen:
                seen.add(address)
                batch.add(f"{next_key + listed.rows:09d}", row)
                listed.rows += 1
                continue
            row = Dropped(row.url, TWICE)
        dropped[row.why] += 1
        listed.first_dropped.setdefault(row.why, row.where[:300])
    listed.dropped = dict(dropped.most_common())


def write_plan(folder: Path, number: int, rows: Sequence[tuple[str, Row]]) -> None:
    """The rows of one shard, with their keys."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(
        {
            "id": pa.array([key for key, _ in rows], pa.string()),
            "url": pa.array([row.url for _, row in rows], pa.string()),
            "caption": pa.array([row.caption for _, row in rows], pa.string()),
            "extra": pa.array([json.dumps(row.extra) for _, row in rows], pa.string()),
        }
    )
    replace_file(ShardPaths(folder, number).plan, lambda aside: pq.write_table(table, aside, compression="zstd"))


def pending(folder: Path, state: State, part: tuple[int, int] = (1, 1)) -> list[int]:
    """Unfinished shards; for part (i, n), counted from 1, every n-th."""
    return [n for n in range(part[0] - 1, state.shards, part[1]) if read_marker(ShardPaths(folder, n)) is None]


def markers(folder: Path, state: State) -> list[Marker]:
    """Markers of all finished shards, in order."""
    found = (read_marker(ShardPaths(folder, number)) for number in range(state.shards))
    return [one for one in found if one is not None]


def plan_retry(folder: Path, state: State, causes: Sequence[str]) -> tuple[int, list[str]]:
    """Plan new shards for all rows that failed for one of `causes` ("HTTP 5" stands for HTTP 500 to 599).

    All shards must be finished. Returns the number of rows, and the other causes of failures.
    """
    failed: dict[str, tuple[str, int]] = {}  # key -> cause and shard of the last time
    others: set[str] = set()
    retried_from = min((one.first_shard for one in state.batches if one.retried), default=state.shards)
    for number in range(state.shards):
        for row in read_records(ShardPaths(folder, number), ["key", "cause"]):
            if any(row["cause"].startswith(cause) for cause in causes):
                failed[row["key"]] = (row["cause"], number)
                continue
            if row["cause"] != GOT:
                others.add(row["cause"])
            if number >= retried_from:
                failed.pop(row["key"], None)
    if not failed:
        return 0, sorted(others)
    batch = _Planner(folder, state)
    for key, row in _planned(folder, failed):
        batch.add(key, row)
    batch.finish(dict(Counter(cause for cause, _ in failed.values()).most_common()))
    return len(failed), sorted(others)


def _planned(folder: Path, failed: dict[str, tuple[str, int]]) -> Iterator[tuple[str, Row]]:
    import pyarrow.parquet as pq

    for number in sorted({number for _, number in failed.values()}):
        for row in pq.read_table(ShardPaths(folder, number).plan).to_pylist():
            if failed.get(row["id"], ("", -1))[1] == number:
                yield row["id"], Row(row["url"], row["caption"], json.loads(row["extra"]))


def _addresses(folder: Path, state: State) -> Iterator[bytes]:
    import pyarrow.parquet as pq

    for number in range(state.shards):
        for url in pq.read_table(ShardPaths(folder, number).plan, columns=["url"])["url"].to_pylist():
            yield _digest(url)


def _digest(url: str) -> bytes:
    return hashlib.blake2b(url.encode(), digest_size=8).digest()


def _fingerprint(path: Path) -> str:
    """Digest of a file's size and both ends, which detects another list without reading gigabytes."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        found = hashlib.sha256(f"{size} ".encode() + file.read(_HEAD))
        file.seek(max(0, size - _HEAD), os.SEEK_SET)
        found.update(file.read(_HEAD))
    return found.hexdigest()
