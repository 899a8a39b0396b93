"""Columns of a corpus: numbers for every sample, by which training selects them without opening a tar.

They lie in columns.npz beside index.json, written by `python -m tools.shards measure FOLDER`: name, bytes and samples
of each shard in `shards`, the start of its hash in `sha256`, and in every other array one number for each sample.
"""

import hashlib
import os
import re
import shlex
import zipfile
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from probemb.data.remote.sources import Remote
from probemb.data.shards.index import Shard
from probemb.errors import UserError
from probemb.files import replace_file

COLUMNS_NAME = "columns.npz"
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


def score_column(name: str) -> str:
    """The column of a score. Raises UserError: a name that does not suit."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
        what = f"'{name}' cannot name a column of scores."
        raise UserError(what, "Use at most 64 letters, digits, underscores and hyphens.")
    return SCORE + name


def write_columns(folder: Path, shards: Sequence[Shard], columns: dict[str, np.ndarray]) -> Path:
    """Write `folder/columns.npz`, atomically. Returns its path. Raises OSError."""
    path = folder / COLUMNS_NAME
    numbers = {name: column.astype(TYPES.get(name, "<f4")) for name, column in columns.items()}

    def write(aside: Path) -> None:
        with open(aside, "wb") as file:
            np.savez(file, shards=list(map(_version, shards)), sha256=list(map(_hash, shards)), **numbers)

    replace_file(path, write)
    return path


def read_columns(shards: Sequence[Shard], names: Sequence[str], given: str | None = None) -> dict[str, np.ndarray]:
    """Numbers of all samples of the shards, in their order; `given`: path of the columns, by default beside the shards.

    Raises UserError: there are none, not these, or of other shards.
    """
    parts: dict[str, list[np.ndarray]] = {name: [] for name in names}
    if given is None and (remote := [shard for shard in shards if isinstance(shard.path, Remote)]):
        raise UserError(
            f"{remote[0].path} is remote, and data.filter needs columns on this machine.",
            f"Copy {COLUMNS_NAME} from beside the shards, and name it in data.filter.columns.",
        )
    for path, group in groupby(shards, lambda shard: Path(given) if given else shard.path.parent):
        for name, numbers in _read(path, list(group), names).items():
            parts[name].append(numbers)
    return {name: np.concatenate(numbers) for name, numbers in parts.items()}


def _read(path: Path, shards: Sequence[Shard], names: Sequence[str]) -> dict[str, np.ndarray]:
    path = path / COLUMNS_NAME if path.is_dir() else path
    folder = "FOLDER" if isinstance(shards[0].path, Remote) else shlex.quote(os.fspath(shards[0].path.parent))
    remedy = f"Make them with `python -m tools.shards measure {folder}`."
    try:
        with np.load(path, allow_pickle=False) as file:
            for name in names:
                if name not in file:
                    option = f" --score {name.removeprefix(SCORE)}" if name.startswith(SCORE) else ""
                    raise UserError(f"{path} has no column {name}.", f"{remedy[:-2]}{option}`.")
            known, hashes, columns = file["shards"].tolist(), file["sha256"].tolist(), {n: file[n] for n in names}
    except FileNotFoundError:
        raise UserError(f"There is no {path}, by which data.filter selects samples.", remedy) from None
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} cannot be read ({type(error).__name__}).", remedy) from None
    rows = {version: i for i, version in enumerate(known)}
    stops = np.cumsum([int(version.rpartition("\n")[2]) for version in known], dtype=np.int64)
    pieces = []
    for shard in shards:
        i = rows.get(_version(shard))
        if i is None or ("" not in (hashes[i], _hash(shard)) and hashes[i] != _hash(shard)):
            raise UserError(f"{path} does not describe {shard.name} as it is now.", remedy)
        pieces.append(slice(stops[i] - shard.samples, stops[i]))
    return {name: np.concatenate([column[piece] for piece in pieces]) for name, column in columns.items()}


def _version(shard: Shard) -> str:
    return f"{shard.name}\n{shard.bytes}\n{shard.samples}"


def _hash(shard: Shard) -> str:
    return (shard.sha256 or "")[:16]
