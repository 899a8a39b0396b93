"""The index of a corpus, `index.json`, and its columns, `columns.npz`: reading and writing them, selecting shards.

A corpus is a folder of `.tar` files beside an `index.json`, `{"shards": [{"name", "samples", "bytes", "sha256"}]}`.
`columns.npz`, by which training selects samples without opening a tar, has name, bytes and samples of each shard in
`shards`, and in every other array one number for each sample. `tools.shards index` and `measure` write them.
"""

import fnmatch
import hashlib
import io
import json
import os
import re
import shlex
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np
from braceexpand import UnbalancedBracesError, braceexpand

from probemb.data.failures import BadShard
from probemb.data.reading import checked
from probemb.data.remote import DEFAULT_POLICY, FetchPolicy, Remote, fetch, is_remote
from probemb.errors import UserError
from probemb.files import replace_file, replace_text

INDEX_NAME, COLUMNS_NAME = "index.json", "columns.npz"
MAX_INDEX_BYTES = 256 << 20
_TAR_WORD = re.compile(r"[^\s/'\"=:|<>;]+\.tar(?![\w.])")  # the file name of a tar, inside a command
_INDEX_IT = "`python -m tools.shards index`"


@dataclass(frozen=True)
class Shard:
    """One tar of a corpus."""

    name: str  # in the index
    path: Path | Remote
    samples: int
    bytes: int
    sha256: str | None = None  # in hexadecimal; None if the index has none


def read_index(source: str | os.PathLike, policy: FetchPolicy = DEFAULT_POLICY) -> list[Shard]:
    """Shards of a corpus in the order of its index.

    The source is a folder that holds `index.json`, the path of such a file, one tar, or a pattern of tars in an indexed
    folder (`data/cc3m/{00000..00331}.tar`, `data/cc3m/0*.tar`). All these may start with `https://host/` or
    `s3://bucket/`. Or it is `pipe:COMMAND` (`pipe:ssh host cat cc3m/{00000..00331}.tar`), which prints the named tar,
    and the index if index.json takes the tar's place.

    Raises UserError, also for a file of another size than the index says; remote ones are checked when fetched.
    """
    source = os.fspath(source)
    indexes: dict[Path | Remote, dict[str, Shard]] = {}
    chosen: dict[Path | Remote, Shard] = {}
    for address in [source] if os.path.exists(source) else expand_braces(source):
        folder, name = _split(address)
        if folder not in indexes:
            indexes[folder] = {shard.name: shard for shard in read_index_file(folder, policy)}
        index = indexes[folder]
        names = [name] if name in index else fnmatch.filter(index, name)
        if not names:
            remedy = f"Correct the pattern, or bring the index up to date with {_INDEX_IT}."
            raise UserError(f"No shard of the index in {folder} fits {name}.", remedy)
        for shard in map(index.get, names):
            shard = replace(shard, path=Remote(address)) if address.startswith("pipe:") else shard
            chosen[shard.path] = shard
    for shard in chosen.values():
        if isinstance(shard.path, Path):
            size = shard.path.stat().st_size if shard.path.is_file() else None
            if size != shard.bytes:
                found = "is missing" if size is None else f"has {size:,} bytes"
                remedy = f"If the shards are correct, bring the index up to date with {_INDEX_IT}."
                raise UserError(f"{shard.path} {found}, but its index says {shard.bytes:,} bytes.", remedy)
    return list(chosen.values())


def expand_braces(pattern: str) -> list[str]:
    """Expand {00000..00331} and {a,b} as a shell does. Raises UserError: they are unbalanced."""
    try:
        return list(braceexpand(pattern, escape=False))
    except UnbalancedBracesError:
        shown = Remote(pattern) if is_remote(pattern) else pattern  # without the secrets of an address
        remedy = "Write a range as in data/cc3m/{00000..00331}.tar."
        raise UserError(f"The braces of the data path {shown} do not pair up.", remedy) from None


def _split(address: str) -> tuple[Path | Remote, str]:
    """The folder of an index, or the command that prints it, and a pattern for the names of its shards."""
    if address.startswith("pipe:"):
        names = [*_TAR_WORD.finditer(address)]
        if len(names) != 1:
            remedy = "Write the command that prints one tar, as in 'pipe:ssh host cat data/cc3m/{00000..00331}.tar'."
            raise UserError(f"The command of {address} names {len(names)} tars where it should name one.", remedy)
        return Remote(address[: names[0].start()] + INDEX_NAME + address[names[0].end() :]), names[0][0]
    remote = is_remote(address)
    whole, query = Remote(address).split() if remote else (address, "")
    folder, name = os.path.split(whole)
    if name == INDEX_NAME:
        name = "*"
    elif os.path.isdir(address) or folder.endswith(":") or not re.search(r"[*?[]|\.tar$", name):  # or a host alone
        folder, name = whole, "*"
    return Remote(folder + query) if remote else Path(folder), name


def read_index_file(folder: Path | Remote, policy: FetchPolicy = DEFAULT_POLICY) -> list[Shard]:
    """All shards with a sample in the index of a folder, or that a command prints."""
    remedy = f"Make it with {_INDEX_IT} where the shards are, and check that it can be reached."
    if isinstance(folder, Remote):
        path = folder if folder.scheme == "pipe" else folder.beside(INDEX_NAME)
        file = io.BytesIO()
        try:
            fetch(path, file, None, policy, MAX_INDEX_BYTES)
        except BadShard as error:
            raise UserError(f"There is no index of shards: {error}.", remedy) from None
        content = file.getvalue()
    else:
        path, remedy = folder / INDEX_NAME, f"Make it with `python -m tools.shards index {shlex.quote(str(folder))}`."
        if not path.is_file():
            if any(folder.glob("*.tar")):
                raise UserError(f"{folder} holds shards, but no index.json beside them.", remedy)
            what = f"{folder} {'holds no webdataset shards' if folder.exists() else 'does not exist'}."
            raise UserError(
                what,
                "Name the folder of .tar files, or make it (docs/data.md), or `python -m tools.make_scenes FOLDER`.",
            )
        content = path.read_bytes()
    shards = []
    with checked(path, "an index of shards", remedy):
        for row in json.loads(content)["shards"]:
            name, samples, size = row["name"], row["samples"], row["bytes"]
            if name in ("", ".", "..") or "/" in name or "\0" in name or not 0 <= samples <= size < 1 << 44:
                raise ValueError(f"{name!r} lies outside its own folder, or cannot have these sizes")
            where = folder / name if isinstance(folder, Path) else folder
            if where is folder and folder.scheme != "pipe":  # a name from an index never becomes part of a command
                where = folder.beside(name)
            shards += [Shard(name, where, samples, size, row.get("sha256"))] if samples else []
    return shards


def write_index(folder: str | os.PathLike, shards: Sequence[Shard]) -> Path:
    path = Path(folder) / INDEX_NAME
    rows = [
        {name: value for name, value in vars(one).items() if name != "path" and value is not None} for one in shards
    ]
    # One shard a line, for readers and diffs.
    replace_text(path, '{"shards": [\n' + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n]}\n")
    return path


TYPES = {
    "key": "<u8",  # see `key_hash`
    "width": "<u4",  # pixels, before EXIF turns the image; 0 for an image whose header cannot be read
    "height": "<u4",
    "fewest_words": "<u2",  # of a sample's captions; 0 without a readable one
    "most_words": "<u2",
    "fewest_chars": "<u2",
    "most_chars": "<u2",
}
SCORE = "score."  # scores are float32 under this and their name; NaN where a sample has none


def key_hash(keys: Iterable[str]) -> np.ndarray:
    """64-bit hashes of keys, (n,) uint64."""
    digests = (hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest() for key in keys)
    return np.frombuffer(b"".join(digests), "<u8")


def write_columns(folder: Path, shards: Sequence[Shard], columns: dict[str, np.ndarray]) -> Path:
    path = folder / COLUMNS_NAME
    arrays = {name: column.astype(TYPES.get(name, "<f4")) for name, column in columns.items()}

    def write(aside: Path) -> None:
        with open(aside, "wb") as file:
            np.savez(file, shards=list(map(_version, shards)), **arrays)

    replace_file(path, write)
    return path


def read_columns(shards: Sequence[Shard], names: Sequence[str], given: str | None = None) -> dict[str, np.ndarray]:
    """Numbers of all samples of the shards, in their order; `given`: path of the columns, by default beside them."""
    parts: dict[str, list[np.ndarray]] = {name: [] for name in names}
    if not given and (remote := [shard.path for shard in shards if isinstance(shard.path, Remote)]):
        what = f"{remote[0]} is remote, and data.filter needs columns on this machine."
        raise UserError(what, f"Copy {COLUMNS_NAME} from beside the shards, and name it in data.filter.columns.")
    for path, group in groupby(shards, lambda shard: Path(given) if given else shard.path.parent):
        path = path / COLUMNS_NAME if path.is_dir() else path
        remedy = "Make them with `python -m tools.shards measure FOLDER`, and --score NAME for a score."
        try:
            with np.load(path, allow_pickle=False) as file:
                stored = {name: file[name] for name in ("shards", *names)}
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            what = f"{path}, by which data.filter selects samples, cannot be read: {error}."
            raise UserError(what, remedy) from None
        versions = stored["shards"].tolist()
        stops = np.cumsum([int(version.rpartition("\n")[2]) for version in versions], dtype=np.int64)
        stop_of = dict(zip(versions, stops.tolist()))
        for shard in group:
            if (stop := stop_of.get(_version(shard))) is None:
                raise UserError(f"{path} does not describe {shard.name} as it is now.", remedy)
            for name in names:
                parts[name].append(stored[name][stop - shard.samples : stop])
    return {name: np.concatenate(numbers) for name, numbers in parts.items()}


def _version(shard: Shard) -> str:
    return f"{shard.name}\n{shard.bytes}\n{shard.samples}"
