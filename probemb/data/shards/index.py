"""The index of a corpus, `index.json`: reading it, selecting shards from it, writing it.

A corpus is a folder of `.tar` files beside an `index.json`: `{"shards": [{"name", "samples", "bytes", "sha256"}]}`,
written by `python -m tools.shards index FOLDER`; older ones have no `sha256`. The folder may be remote (see
`probemb/data/remote/sources.py`).
"""

import fnmatch
import hashlib
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from braceexpand import UnbalancedBracesError, braceexpand

from probemb.data.failures import BadShard
from probemb.data.remote.sources import DEFAULT_POLICY, FetchPolicy, Remote, check_scheme, fetch_bytes, is_remote
from probemb.errors import UserError
from probemb.files import replace_text

INDEX_NAME = "index.json"
MAX_INDEX_BYTES = 256 << 20
MAX_PATTERN_FILES = 1_000_000
_TAR_WORD = re.compile(r"[^\s/'\"=:|<>;]+\.tar(?![\w.])")  # the file name of a tar, inside a command
_SHA256 = re.compile("[0-9a-f]{64}")
_NOWHERE = Remote("pipe:false")  # names from an index never become part of a command
_SCENES = "make the synthetic data with `python -m tools.make_scenes data/scenes`"


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
    shards = []
    for one in source:
        remote = Remote(one) if isinstance(one, str) and is_remote(one) else None
        if remote:
            check_scheme(remote)
        shards += (_read_commands if remote and remote.scheme == "pipe" else _read_source)(one, policy)
    if not shards:
        raise UserError("The list of shards is empty.", "Name at least one folder or pattern of webdataset shards.")
    refuse_repeats(shards)
    return shards


def refuse_repeats(shards: Sequence[Shard]) -> None:
    """Raise UserError if a shard is named twice."""
    path, times = Counter(shard.path for shard in shards).most_common(1)[0]
    if times > 1:
        remedy = "Name every shard once, and say with data.weights what is to be seen more often."
        raise UserError(f"The shard {path} is named {times} times.", remedy)


def expand_braces(pattern: str) -> list[str]:
    """Expand {00000..00331} and {a,b} as a shell does. Raises UserError: unbalanced, or too many names."""
    shown = str(Remote(pattern)) if is_remote(pattern) else pattern  # without the secrets of an address
    try:
        names = list(islice(braceexpand(pattern, escape=False), MAX_PATTERN_FILES + 1))
    except UnbalancedBracesError:
        if pattern.startswith("pipe:"):  # a shell uses braces otherwise, too
            return [pattern]
        remedy = "Write a range as in data/cc3m/{00000..00331}.tar."
        raise UserError(f"The braces of the data path {shown} do not pair up.", remedy) from None
    if len(names) > MAX_PATTERN_FILES:
        what = f"The data path {shown} stands for more than {MAX_PATTERN_FILES:,} files."
        raise UserError(what, "Narrow the range.")
    return names


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


def _read_source(source: str | os.PathLike, policy: FetchPolicy) -> list[Shard]:
    """The shards of indexed folders that a path or address with braces and wildcards selects."""
    indexes: dict[Path | Remote, dict[str, Shard]] = {}
    chosen: dict[Path | Remote, Shard] = {}
    for address in [os.fspath(source)] if os.path.exists(source) else expand_braces(os.fspath(source)):
        folder, name = _split(address)
        if folder not in indexes:
            if isinstance(folder, Path):
                shards = read_index_file(folder)
            else:
                shards = _fetch_index(folder.beside(INDEX_NAME), folder.beside, policy)
            indexes[folder] = {shard.name: shard for shard in shards}
        found = [indexes[folder][name]] if name in indexes[folder] else []
        if not found and any(mark in name for mark in "*?["):
            found = [shard for shard in indexes[folder].values() if fnmatch.fnmatchcase(shard.name, name)]
        if not found:
            remedy = "Correct the pattern, or bring the index up to date with `python -m tools.shards index`."
            raise UserError(f"No shard of the index in {folder} fits {name}.", remedy)
        chosen.update((shard.path, shard) for shard in found)
    for shard in chosen.values():
        if isinstance(shard.path, Path):
            _check_file(shard)
    return list(chosen.values())


def _split(address: str) -> tuple[Path | Remote, str]:
    """The folder of an index, and a pattern for the names of its shards."""
    if not is_remote(address):
        if not address.strip():
            raise UserError("The data path is empty.", "Name a folder of webdataset shards.")
        path = Path(address)
        return (path, "*") if path.is_dir() else (path.parent, "*" if path.name == INDEX_NAME else path.name)
    whole, query = Remote(address).split()
    folder, _, name = whole.rpartition("/")
    if "/" not in whole.partition("://")[2]:  # a host alone
        folder, name = whole, "*"
    elif name == INDEX_NAME or not (name.endswith(".tar") or any(mark in name for mark in "*?[")):
        folder, name = (folder if name == INDEX_NAME else whole), "*"
    return Remote(folder + query), name


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
                "Correct the command, or bring the index up to date with `python -m tools.shards index`.",
            )
        shards.append(replace(named, path=Remote(command)))
    return shards


def _fetch_index(remote: Remote, beside: Callable[[str], Remote], policy: FetchPolicy) -> list[Shard]:
    remedy = "Make it with `python -m tools.shards index` where the shards are, and check that it can be reached."
    try:
        content = fetch_bytes(remote, MAX_INDEX_BYTES, policy)
    except BadShard as error:
        raise UserError(f"There is no index of shards: {error}.", remedy) from None
    return _parse_index(content, str(remote), beside, remedy)


def read_index_file(folder: Path) -> list[Shard]:
    """All shards with at least one sample in `folder/index.json`; the files themselves are not checked."""
    path, command = folder / INDEX_NAME, f"`python -m tools.shards index {shlex.quote(str(folder))}`"
    if not folder.is_dir():
        raise UserError(f"The data path {folder} does not exist.", f"Check the spelling, or {_SCENES}.")
    if not path.is_file():
        if any(folder.glob("*.tar")):
            raise UserError(f"{folder} holds shards, but no index.json beside them.", f"Make it with {command}.")
        raise UserError(f"{folder} holds no webdataset shards.", f"Name the folder of the .tar files, or {_SCENES}.")
    with open(path, "rb") as file:
        return _parse_index(file.read(MAX_INDEX_BYTES + 1), str(path), folder.joinpath, f"Rebuild it with {command}.")


def _parse_index(content: bytes, path: str, beside: Callable[[str], Path | Remote], rebuild: str) -> list[Shard]:
    """`beside` gives the path or address of a file name; it may raise ValueError."""
    try:
        if len(content) > MAX_INDEX_BYTES:
            raise ValueError("too large")
        rows = json.loads(content.decode())["shards"]
        found = [(row["name"], row["samples"], row["bytes"], row.get("sha256")) for row in rows]
        for name, samples, size, sha256 in found:
            if type(name) is not str or type(samples) is not int or type(size) is not int:
                raise TypeError("a name and whole numbers")
            name.encode()  # UnicodeEncodeError, a ValueError: half of a surrogate pair
            if not 0 <= samples <= size < 1 << 44 or not (sha256 is None or _SHA256.fullmatch(sha256)):
                raise ValueError("no such shard")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{path} is not an index of shards.", rebuild) from None
    shards = []
    for name, samples, size, sha256 in found:
        try:
            if name in ("", ".", "..") or "/" in name or "\0" in name:
                raise ValueError(name)
            where = beside(name)
        except ValueError:
            raise UserError(f"{path} names a file outside its own folder: {name!r}.", rebuild) from None
        if samples:
            shards.append(Shard(name, where, samples, size, sha256))
    if len({name for name, *_ in found}) < len(found):
        raise UserError(f"{path} names a shard twice.", rebuild)
    if not shards:
        raise UserError(f"{path} lists no shard that holds a sample.", "Name a folder of KEY.jpg + KEY.txt shards.")
    return shards


def _check_file(shard: Shard) -> None:
    command = f"`python -m tools.shards index {shlex.quote(str(shard.path.parent))}`"
    remedy = f"If the shards are correct, bring the index up to date with {command}."
    try:
        size = shard.path.stat().st_size
    except OSError:
        what = f"{shard.path.parent / INDEX_NAME} names {shard.name}, which is missing or cannot be read."
        raise UserError(what, remedy) from None
    if size != shard.bytes:
        raise UserError(f"{shard.path} has {size:,} bytes, but its index says {shard.bytes:,}.", remedy)
