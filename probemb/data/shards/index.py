"""The index of a corpus, `index.json`: reading it, selecting shards from it, writing it.

A corpus is a folder of `.tar` files beside an `index.json`: `{"shards": [{"name", "samples", "bytes", "sha256"}]}`,
written by `python -m tools.index_shards FOLDER`; older ones have no `sha256`. The folder may be remote (see
`probemb/data/remote/sources.py`).
"""

import fnmatch
import hashlib
import itertools
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from probemb.data.failures import BadShard
from probemb.data.remote.sources import DEFAULT_POLICY, FetchPolicy, Remote, check_scheme, fetch_bytes, is_remote
from probemb.errors import UserError
from probemb.files import replace_text

INDEX_NAME = "index.json"
MAX_INDEX_BYTES = 256 << 20
MAX_PATTERN_FILES = 100_000
MAX_SHARD_BYTES = 1 << 44
LEAST_SAMPLE_BYTES = 1536  # the headers of two members, and an image
_TAR_WORD = re.compile(r"[^\s/'\"=:|<>;]+\.tar(?![\w.])")  # the file name of a tar, inside a command
_NOWHERE = Remote("pipe:false")  # names from an index never become part of a command
_EMBEDDED = "make the embedded data with `python -m tools.make_scenes data/scenes`"


@dataclass(frozen=True)
class Shard:
    """One tar of a corpus: its name in the index, its path or address, its number of samples and bytes.

    sha256: of the whole file, in hexadecimal; None if the index has none.
    """

    name: str
    path: Path | Remote
    samples: int
    bytes: int
    sha256: str | None = None


def file_sha256(path: str | os.PathLike) -> str:
    """SHA-256 of a file, as `sha256sum` prints it. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_index(
    source: str | os.PathLike | Sequence[str | os.PathLike], policy: FetchPolicy = DEFAULT_POLICY
) -> list[Shard]:
    """Shards of a corpus in the order of its index; several sources are concatenated.

    A source is a folder that holds `index.json`, the path of such a file, one tar, or a pattern of tars in an indexed
    folder (`data/cc3m/{00000..00331}.tar`, `data/cc3m/0*.tar`), which selects a part of the index. All these may start
    with `https://host/` or `s3://bucket/`; `policy` limits the attempts to fetch such an index. Or it is `pipe:COMMAND`
    (`pipe:ssh host cat cc3m/{00000..00331}.tar`), which prints the named tar, and the index if index.json takes the
    tar's place.

    Raises UserError: a missing path, tar or index, a malformed or empty index, a file of another size than the index
    says. Remote shards are checked when they are fetched.
    """
    if isinstance(source, (str, os.PathLike)):
        source = [source]
    shards = [shard for one in source for shard in _read_source(one, policy)]
    if not shards:
        raise UserError("The list of shards is empty.", "Name at least one folder or pattern of webdataset shards.")
    paths = [shard.path for shard in shards]
    if len(set(paths)) < len(paths):
        twice = next(path for path, count in Counter(paths).items() if count > 1)
        raise UserError(f"The shard {twice} is named twice.", "Name every shard of the corpus once.")
    return shards


def write_index(folder: str | os.PathLike, shards: Sequence[Shard]) -> Path:
    """Write `folder/index.json`, atomically. Returns its path. Raises OSError."""
    path = Path(folder) / INDEX_NAME
    rows = [{"name": shard.name, "samples": shard.samples, "bytes": shard.bytes} for shard in shards]
    for row, shard in zip(rows, shards, strict=True):
        if shard.sha256:
            row["sha256"] = shard.sha256
    # One shard a line, for readers and diffs.
    replace_text(path, '{"shards": [\n' + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n]}\n")
    return path


def _read_source(given: str | os.PathLike, policy: FetchPolicy) -> list[Shard]:
    source, path = os.fspath(given), Path(given)
    if isinstance(given, str) and is_remote(given):
        check_scheme(Remote(given))
        return _read_commands(given, policy) if Remote(given).scheme == "pipe" else _read_remote(given, policy)
    if not source.strip():
        raise UserError("The data path is empty.", "Name a folder of webdataset shards.")
    if path.is_dir():
        return _check_files(read_index_file(path), path)
    if path.is_file() and path.name == INDEX_NAME:
        return _check_files(read_index_file(path.parent), path.parent)
    return _read_pattern(source)


def _read_pattern(pattern: str) -> list[Shard]:
    """The shards of indexed folders that a path with braces and wildcards selects."""
    names = expand_braces(pattern)
    indexes: dict[Path, dict[str, Shard]] = {}
    chosen: dict[Path, Shard] = {}
    for name in map(Path, names):
        folder, wild = name.parent, any(mark in name.name for mark in "*?[")
        if not (folder.is_dir() if wild else name.exists()):
            raise UserError(f"The data path {name} does not exist.", f"Check the spelling, or {_EMBEDDED}.")
        if folder not in indexes:
            indexes[folder] = {shard.name: shard for shard in read_index_file(folder)}
        index = indexes[folder]
        found = _choose(index, name.name, str(folder / INDEX_NAME), f"`{_index_command(folder)}`")
        chosen.update((shard.path, shard) for shard in found)
    for folder in indexes:
        _check_files([shard for shard in chosen.values() if shard.path.parent == folder], folder)
    return list(chosen.values())


def _choose(index: dict[str, Shard], name: str, label: str, command: str) -> list[Shard]:
    """The shards of an index that match a name, possibly with wildcards."""
    if name in index:
        return [index[name]]
    wild = any(mark in name for mark in "*?[")
    found = [shard for shard in index.values() if wild and fnmatch.fnmatchcase(shard.name, name)]
    if not found:
        raise UserError(
            f"No shard of {label} fits {name}.", f"Correct the pattern, or bring the index up to date with {command}."
        )
    return found


def _read_remote(source: str, policy: FetchPolicy) -> list[Shard]:
    """The shards in remote folders that an address with braces and wildcards selects."""
    indexes: dict[str, dict[str, Shard]] = {}
    chosen: dict[Remote, Shard] = {}
    for address in expand_braces(source):
        whole, query = Remote(address).split()
        folder, _, name = whole.rpartition("/")
        if "/" not in whole.partition("://")[2]:  # a host alone
            folder, name = whole, "*"
        elif name == INDEX_NAME or not (name.endswith(".tar") or any(mark in name for mark in "*?[")):
            folder, name = (folder if name == INDEX_NAME else whole), "*"
        base = Remote(folder + query)
        if base.address not in indexes:
            rows = _fetch_index(base.beside(INDEX_NAME), base.beside, policy)
            indexes[base.address] = {shard.name: shard for shard in rows}
        command = "`python -m tools.index_shards` and copy it there"
        found = _choose(indexes[base.address], name, str(base.beside(INDEX_NAME)), command)
        chosen.update((shard.path, shard) for shard in found)
    return list(chosen.values())


def _read_commands(source: str, policy: FetchPolicy) -> list[Shard]:
    """The shards that commands print. The index only adds sizes to the names in the commands."""
    indexes: dict[str, dict[str, Shard]] = {}
    shards = []
    for command in expand_braces(source):
        names = [*_TAR_WORD.finditer(command)]
        if len(names) != 1:
            raise UserError(
                f"The command of {command} names {len(names)} tars where it should name one.",
                "Write the command that prints one tar, as in 'pipe:ssh host cat data/cc3m/{00000..00331}.tar'.",
            )
        prints_index = command[: names[0].start()] + INDEX_NAME + command[names[0].end() :]
        if prints_index not in indexes:
            rows = _fetch_index(Remote(prints_index), lambda _: _NOWHERE, policy)
            indexes[prints_index] = {shard.name: shard for shard in rows}
        named = indexes[prints_index].get(names[0][0])
        if named is None:
            raise UserError(
                f"The index that {prints_index} prints does not name {names[0][0]}.",
                "Correct the command, or bring the index up to date with `python -m tools.index_shards`.",
            )
        shards.append(replace(named, path=Remote(command)))
    return shards


def _fetch_index(remote: Remote, beside: Callable[[str], Remote], policy: FetchPolicy) -> list[Shard]:
    remedy = "Make it with `python -m tools.index_shards` where the shards are, and check that it can be reached."
    try:
        content = fetch_bytes(remote, MAX_INDEX_BYTES, policy)
    except BadShard as error:
        raise UserError(f"There is no index of shards: {error}.", remedy) from None
    return _parse_index(content, str(remote), beside, remedy)


def expand_braces(pattern: str) -> list[str]:
    """Expand {00000..00331} and {a,b} as a shell does. Raises UserError: unbalanced, or too many names."""
    names = list(itertools.islice(_expand_braces(pattern), MAX_PATTERN_FILES + 1))
    if len(names) > MAX_PATTERN_FILES:
        raise UserError(
            f"The data path {_shown(pattern)} stands for more than {MAX_PATTERN_FILES:,} files.", "Narrow the range."
        )
    return names


def _expand_braces(pattern: str) -> Iterator[str]:
    """Generate one name at a time, so that a huge range costs nothing."""
    command = pattern.startswith("pipe:")  # a shell also uses braces otherwise
    braces = re.search(r"(?<!\$)\{([^{}\s]*(?:\.\.|,)[^{}\s]*)\}" if command else r"\{([^{}]*)\}", pattern)
    if braces is None:
        if not command and ("{" in pattern or "}" in pattern):
            raise UserError(
                f"The braces of the data path {_shown(pattern)} do not pair up.",
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


def _shown(source: str) -> str:
    """The source as typed, without the secrets of an address."""
    return str(Remote(source)) if is_remote(source) else source


def _index_command(folder: Path) -> str:
    return f"python -m tools.index_shards {shlex.quote(str(folder))}"


def read_index_file(folder: Path) -> list[Shard]:
    """All shards with at least one sample in `folder/index.json`; the files themselves are not checked."""
    path = folder / INDEX_NAME
    rebuild = f"Rebuild it with `{_index_command(folder)}`."
    if not path.is_file():
        if any(folder.glob("*.tar")):
            remedy = f"Make it with `{_index_command(folder)}`."
            raise UserError(f"{folder} holds shards, but no index.json beside them.", remedy)
        raise UserError(f"{folder} holds no webdataset shards.", f"Name the folder of the .tar files, or {_EMBEDDED}.")
    with open(path, "rb") as file:
        content = file.read(MAX_INDEX_BYTES + 1)
    return _parse_index(content, str(path), lambda name: folder / name, rebuild)


def _parse_index(content: bytes, path: str, beside: Callable[[str], Path | Remote], rebuild: str) -> list[Shard]:
    """`beside` gives the path or address of a file name; it may raise ValueError."""
    try:
        if len(content) > MAX_INDEX_BYTES:
            raise ValueError("too large")
        rows = json.loads(content.decode())["shards"]
        shards = [Shard(row["name"], Path(), row["samples"], row["bytes"], row.get("sha256")) for row in rows]
        for shard in shards:
            if type(shard.name) is not str:
                raise ValueError("names must be strings")
            if type(shard.samples) is not int or type(shard.bytes) is not int or min(shard.samples, shard.bytes) < 0:
                raise ValueError("counts must be whole numbers")
            if shard.sha256 is not None and not re.fullmatch("[0-9a-f]{64}", shard.sha256):
                raise ValueError("not a hash")
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{path} is not an index of shards.", rebuild) from None
    for shard in shards:
        try:
            if shard.name in ("", "..") or Path(shard.name).name != shard.name or "\0" in shard.name:
                raise ValueError(shard.name)
            beside(shard.name)
        except ValueError:
            raise UserError(f"{path} names a file outside its own folder: {shard.name!r}.", rebuild) from None
        if shard.bytes > MAX_SHARD_BYTES or shard.samples * LEAST_SAMPLE_BYTES > shard.bytes:
            counts = f"{shard.samples:,} samples in {shard.bytes:,} bytes"
            raise UserError(f"{path} says that {shard.name} holds {counts}, which cannot be.", rebuild)
    if len({shard.name for shard in shards}) < len(shards):
        raise UserError(f"{path} names a shard twice.", rebuild)
    shards = [replace(shard, path=beside(shard.name)) for shard in shards if shard.samples]
    if not shards:
        raise UserError(f"{path} lists no shard that holds a sample.", "Name a folder of KEY.jpg + KEY.txt shards.")
    return shards


def _check_files(shards: list[Shard], folder: Path) -> list[Shard]:
    rebuild = f"If the shards are correct, bring the index up to date with `{_index_command(folder)}`."
    for shard in shards:
        try:
            size = shard.path.stat().st_size
        except OSError:
            what = f"{folder / 'index.json'} names {shard.name}, which is missing or cannot be read."
            raise UserError(what, rebuild) from None
        if size != shard.bytes:
            raise UserError(f"{shard.path} has {size:,} bytes, but its index says {shard.bytes:,}.", rebuild)
    return shards
