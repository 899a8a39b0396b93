"""Which shards a corpus has: reading `index.json` and selecting from it.

A corpus is a folder of `.tar` files beside an `index.json`: `{"shards": [{"name", "samples", "bytes"}]}`, written by
`python -m tools.index_shards FOLDER`.
"""

from __future__ import annotations

import fnmatch
import itertools
import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from probemb.errors import UserError
from probemb.files import replace_text

INDEX_NAME = "index.json"
MAX_INDEX_BYTES = 256 << 20
MAX_PATTERN_FILES = 100_000
_EMBEDDED = "make the embedded data with `python -m tools.make_scenes data/scenes`"


@dataclass(frozen=True)
class Shard:
    """One tar of a corpus: its name in the index, where it lies, how many samples and bytes it holds."""

    name: str
    path: Path
    samples: int
    bytes: int


def read_index(source: str | os.PathLike | Sequence[str | os.PathLike]) -> list[Shard]:
    """Shards of a corpus in the order of its index; several sources are put one after another.

    A source is a folder that holds `index.json`, the path of such a file, one tar, or a pattern of tars in an indexed
    folder (`data/cc3m/{00000..00331}.tar`, `data/cc3m/0*.tar`), which then selects a part of the index.

    Raises UserError: path missing, no tar or no index there, index malformed or empty, a file of the index missing
    or of another size than the index says.
    """
    if isinstance(source, (str, os.PathLike)):
        shards = _read_source(os.fspath(source))
    else:
        shards = [shard for one in source for shard in _read_source(os.fspath(one))]
    if not shards:
        raise UserError("The list of shards is empty.", "Name at least one folder or pattern of webdataset shards.")
    paths = [shard.path for shard in shards]
    if len(set(paths)) < len(paths):
        twice = next(path for i, path in enumerate(paths) if path in paths[:i])
        raise UserError(f"The shard {twice} is named twice.", "Name every shard of the corpus once.")
    return shards


def write_index(folder: str | os.PathLike, shards: Sequence[Shard]) -> Path:
    """Write `folder/index.json`, which is replaced as a whole or not at all. Returns its path. Raises OSError."""
    path = Path(folder) / INDEX_NAME
    rows = [{"name": shard.name, "samples": shard.samples, "bytes": shard.bytes} for shard in shards]
    # One shard a line, so that people can read it and tools can compare it.
    replace_text(path, '{"shards": [\n' + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n]}\n")
    return path


def _read_source(source: str) -> list[Shard]:
    path = Path(source)
    if not source.strip():
        raise UserError("The data path is empty.", "Name a folder of webdataset shards.")
    if path.is_dir():
        return _check_files(_read_index_file(path), path)
    if path.is_file() and path.name == INDEX_NAME:
        return _check_files(_read_index_file(path.parent), path.parent)
    return _read_pattern(source)


def _read_pattern(pattern: str) -> list[Shard]:
    """The part of one or more indexed folders whose shards a path with braces and wildcards names."""
    names = list(itertools.islice(_expand_braces(pattern), MAX_PATTERN_FILES + 1))
    if len(names) > MAX_PATTERN_FILES:
        raise UserError(
            f"The data path {pattern} stands for more than {MAX_PATTERN_FILES:,} files.", "Narrow the range."
        )
    indexes: dict[Path, dict[str, Shard]] = {}
    chosen: dict[Path, Shard] = {}
    for name in map(Path, names):
        folder, wild = name.parent, any(mark in name.name for mark in "*?[")
        if not (folder.is_dir() if wild else name.exists()):
            raise UserError(f"The data path {name} does not exist.", f"Check the spelling, or {_EMBEDDED}.")
        if folder not in indexes:
            indexes[folder] = {shard.name: shard for shard in _read_index_file(folder)}
        index = indexes[folder]
        if name.name in index:
            found = [index[name.name]]
        else:
            found = [shard for shard in index.values() if wild and fnmatch.fnmatchcase(shard.name, name.name)]
        if not found:
            raise UserError(
                f"No shard of {folder / INDEX_NAME} fits {name.name}.",
                f"Correct the pattern, or bring the index up to date with `{_index_command(folder)}`.",
            )
        chosen.update((shard.path, shard) for shard in found)
    for folder in indexes:
        _check_files([shard for shard in chosen.values() if shard.path.parent == folder], folder)
    return list(chosen.values())


def _expand_braces(pattern: str) -> Iterator[str]:
    """{00000..00331} and {a,b} as in a shell, one at a time, so that an absurd range costs nothing."""
    braces = re.search(r"\{([^{}]*)\}", pattern)
    if braces is None:
        if "{" in pattern or "}" in pattern:
            raise UserError(
                f"The braces of the data path {pattern} do not pair up.",
                "Write a range as in data/cc3m/{00000..00331}.tar.",
            )
        yield pattern
        return
    numbers = re.fullmatch(r"([0-9]{1,12})\.\.([0-9]{1,12})", braces[1])
    if numbers:
        width = len(numbers[1]) if numbers[1].startswith("0") else 1
        options = (f"{number:0{width}d}" for number in range(int(numbers[1]), int(numbers[2]) + 1))
    else:
        options = iter(braces[1].split(","))
    for option in options:
        yield from _expand_braces(pattern[: braces.start()] + option + pattern[braces.end() :])


def _index_command(folder: Path) -> str:
    return f"python -m tools.index_shards {shlex.quote(str(folder))}"


def _read_index_file(folder: Path) -> list[Shard]:
    """All shards with at least one sample that `folder/index.json` lists; the files themselves are not looked at."""
    path = folder / INDEX_NAME
    rebuild = f"Write it anew with `{_index_command(folder)}`."
    if not path.is_file():
        if any(folder.glob("*.tar")):
            raise UserError(
                f"{folder} holds shards, but no index.json beside them.", f"Make it with `{_index_command(folder)}`."
            )
        raise UserError(
            f"{folder} holds no webdataset shards.",
            f"Name the folder of the .tar files, or {_EMBEDDED}.",
        )
    try:
        if path.stat().st_size > MAX_INDEX_BYTES:
            raise ValueError("too large")
        rows = json.loads(path.read_text(encoding="utf-8"))["shards"]
        shards = [Shard(row["name"], folder / row["name"], row["samples"], row["bytes"]) for row in rows]
        for shard in shards:
            if type(shard.samples) is not int or type(shard.bytes) is not int or min(shard.samples, shard.bytes) < 0:
                raise ValueError("counts must be whole numbers")
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{path} is not an index of shards.", rebuild) from None
    for shard in shards:
        if shard.name in ("", "..") or Path(shard.name).name != shard.name or "\0" in shard.name:
            raise UserError(f"{path} names a file outside its own folder: {shard.name!r}.", rebuild)
    if len({shard.name for shard in shards}) < len(shards):
        raise UserError(f"{path} names a shard twice.", rebuild)
    shards = [shard for shard in shards if shard.samples]
    if not shards:
        raise UserError(f"{path} lists no shard that holds a sample.", "Name a folder of KEY.jpg + KEY.txt shards.")
    return shards


def _check_files(shards: list[Shard], folder: Path) -> list[Shard]:
    rebuild = f"If the shards are as they should be, bring the index up to date with `{_index_command(folder)}`."
    for shard in shards:
        try:
            size = shard.path.stat().st_size
        except OSError:
            raise UserError(
                f"{folder / 'index.json'} names {shard.name}, which is not there or cannot be read.", rebuild
            ) from None
        if size != shard.bytes:
            raise UserError(f"{shard.path} has {size:,} bytes, but its index says {shard.bytes:,}.", rebuild)
    return shards
