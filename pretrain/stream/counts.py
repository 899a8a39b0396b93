"""The counts of a selection, kept beside the columns that they were taken from, so that a later start reads them alone.

    columns/filter-KEY.counts    a line of JSON: {"format", "key", "left_out": {rule: n}, "digest", "sizes": SHA-256,
                                 "lists": {rule: [missing, n, …]}}, then the kept samples of each shard as
                                 little-endian int64

KEY is a hash of all that they depend on (`Selection` makes it): the rules, the lists of keys, the shards, and the size,
times and inode of each column. The files are checked like the columns; an unusable one counts as missing, and a folder
that cannot be written to gets none.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from probemb.files import replace_file

FORMAT = 3  # also when a rule means something else than before
_MAX_LINE = 1 << 16
_MOST = 16  # files in a folder; the oldest ones go first


class Counts(NamedTuple):
    """sizes (S,) int64: kept samples of each shard; left_out: by rule; digest: of which samples are kept.

    lists: for each list of keys, how many are not in the data, and the listed samples of each corpus.
    """

    sizes: np.ndarray
    left_out: dict[str, int]
    digest: str
    lists: dict[str, list[int]]


def read_counts(
    folders: Sequence[Path], key: str, samples: np.ndarray, rules: Sequence[str], lists: Mapping[str, int]
) -> Counts | None:
    """The counts under a key in one of the folders, None if there are none.

    Args:
        samples: of the shards, (S,).
        rules: names of all rules.
        lists: for each that is a list, how many numbers it has.
    """
    for folder in folders:
        with suppress(OSError), open(_path(folder, key), "rb") as file:
            line = file.readline(_MAX_LINE)
            sizes = np.frombuffer(file.read(8 * len(samples) + 1), np.uint8)
            if (found := _checked(line, sizes, key, samples, rules, lists)) is not None:
                return found
    return None


def _checked(
    line: bytes, sizes: np.ndarray, key: str, samples: np.ndarray, rules: Sequence[str], lists: Mapping[str, int]
) -> Counts | None:
    try:
        about = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(about, dict) or (about.get("format"), about.get("key")) != (FORMAT, key):
        return None
    left_out, digest = about.get("left_out"), about.get("digest")
    if len(sizes) != 8 * len(samples) or about.get("sizes") != hashlib.sha256(sizes).hexdigest():
        return None
    if not isinstance(left_out, dict) or list(left_out) != list(rules):
        return None
    total = int(samples.sum())
    if not all(type(count) is int and 0 <= count <= total for count in left_out.values()):
        return None
    found = about.get("lists")
    if not isinstance(found, dict) or list(found) != list(lists):
        return None
    for name, numbers in found.items():
        if not isinstance(numbers, list) or len(numbers) != lists[name]:
            return None
        if not all(type(count) is int and count >= 0 for count in numbers):
            return None
    if type(digest) is not str or not re.fullmatch(r"[0-9a-f]{16}", digest):
        return None
    sizes = sizes.view("<i8").astype(np.int64)
    fits = (sizes >= 0).all() and (sizes <= samples).all() and sizes.any()
    return Counts(sizes, left_out, digest, found) if fits else None


def write_counts(folders: Sequence[Path], key: str, counts: Counts) -> None:
    """Keep the counts in the first folder that can be written to, by one process of each machine."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    sizes = counts.sizes.astype("<i8").tobytes()
    about = {"format": FORMAT, "key": key, "left_out": counts.left_out, "digest": counts.digest}
    about |= {"sizes": hashlib.sha256(sizes).hexdigest(), "lists": counts.lists}
    line = json.dumps(about).encode() + b"\n"
    for folder in folders:
        try:
            replace_file(_path(folder, key), lambda path: path.write_bytes(line + sizes))
        except OSError:
            continue
        with suppress(OSError):  # another machine removes the same ones
            _remove_oldest(folder)
        return


def _remove_oldest(folder: Path) -> None:
    found = sorted(folder.glob("filter-*.counts"), key=lambda path: path.stat().st_mtime_ns)
    for path in found[:-_MOST]:
        path.unlink(missing_ok=True)


def _path(folder: Path, key: str) -> Path:
    return folder / f"filter-{key[:16]}.counts"
