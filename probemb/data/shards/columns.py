"""Columns of a corpus: numbers for every sample, by which training selects them without opening a tar.

They lie in `columns/` beside index.json, written by `python -m tools.shards measure FOLDER`:

    shards.npy   (S, 4) uint64: hash of the shard's name, its samples, its bytes, the start of its SHA-256 (0: unknown)
    NAME.npy     one number for each sample, shard after shard in the order of shards.npy

The files are untrusted: types and lengths are checked, and never are objects unpickled.
"""

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from probemb.data.npy import read_npy
from probemb.data.shards.index import Shard
from probemb.errors import UserError

FOLDER_NAME = "columns"
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
_SCORE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def key_hash(keys: Iterable[str]) -> np.ndarray:
    """64-bit hashes of keys or names, (n,) uint64."""
    digests = (hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest() for key in keys)
    return np.frombuffer(b"".join(digests), "<u8")


def score_column(name: str) -> str:
    """The column of a score. Raises UserError: a name that makes no file name."""
    if not _SCORE_NAME.fullmatch(name):
        raise UserError(
            f"'{name}' cannot name a column of scores.", "Use at most 64 letters, digits, underscores and hyphens."
        )
    return SCORE + name


class Columns:
    """Columns of one folder, read piece by piece.

    Args:
        folder: the folder `columns`.
        command: what makes them, for messages.

    Raises:
        UserError: there are none, or `shards.npy` is not such a file.
    """

    def __init__(self, folder: Path, command: str):
        self.folder, self.command = folder, command
        if not (folder / "shards.npy").is_file():
            raise UserError(
                f"{folder} holds no columns, by which data.filter selects samples.", f"Make them with `{command}`."
            )
        table = self._map("shards", "<u8", (None, 4))
        self._table = np.array(table)
        counts = self._table[:, 1]
        if counts.max(initial=0) >= 2**40 or len(counts) >= 2**22:
            raise self._damaged("shards")
        self.stops = np.cumsum(counts.astype(np.int64))
        self._order = np.argsort(self._table[:, 0])
        self._files: dict[str, tuple[Path, np.dtype, int]] = {}

    def rows_of(self, shards: Sequence[Shard]) -> np.ndarray:
        """Offset of each shard's numbers, (n,) int64. Raises UserError: the columns are of other shards."""
        wanted = describe_shards(shards)
        names = wanted[:, 0]
        hashes = self._table[self._order, 0]
        place = np.minimum(np.searchsorted(hashes, names), max(len(hashes) - 1, 0))
        found = self._order[place] if len(hashes) else np.zeros(len(names), np.int64)
        held = self._table[found] if len(hashes) else np.zeros_like(wanted)
        fits = (held[:, :3] == wanted[:, :3]).all(1)
        fits &= (held[:, 3] == wanted[:, 3]) | (held[:, 3] == 0) | (wanted[:, 3] == 0)
        if not fits.all():
            other = shards[int(np.flatnonzero(~fits)[0])].name
            raise UserError(
                f"The columns in {self.folder} do not describe {other} as it is now.",
                f"Bring them up to date with `{self.command}`.",
            )
        return self.stops[found] - self._table[found, 1].astype(np.int64)

    def need(self, name: str) -> None:
        """Raise UserError if there is no such column."""
        if name not in self._files:
            wanted = f"{self.command} --score {name.removeprefix(SCORE)}" if name.startswith(SCORE) else self.command
            path = self.folder / f"{name}.npy"
            if not path.is_file():
                raise UserError(f"{self.folder} has no column {name}.", f"Make it with `{wanted}`.")
            numbers = self._map(name, TYPES.get(name, "<f4"), (int(self.stops[-1]) if len(self.stops) else 0,))
            self._files[name] = path, numbers.dtype, numbers.offset

    def versions(self, names: Sequence[str]) -> list[list]:
        """[name, bytes, times of change, inode] of `shards.npy` and these columns, to tell if they have changed."""
        found = []
        for name in ("shards", *names):
            try:
                status = (self.folder / f"{name}.npy").stat()
            except OSError:
                raise self._damaged(name) from None
            found.append([name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino])
        return found

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Numbers [start, stop) of a column. Not mapped, so that a pass over them takes no memory."""
        self.need(name)
        path, dtype, offset = self._files[name]
        numbers = np.fromfile(path, dtype, stop - start, offset=offset + start * dtype.itemsize)
        if len(numbers) != stop - start:
            raise self._damaged(name)
        return numbers

    def _map(self, name: str, dtype: str, shape: tuple[int | None, ...]) -> np.memmap:
        try:
            array = read_npy(self.folder / f"{name}.npy", mapped=True)
        except (OSError, ValueError):
            raise self._damaged(name) from None
        fits = array.dtype == dtype and array.ndim == len(shape)
        if not fits or any(want not in (None, have) for want, have in zip(shape, array.shape)):
            raise self._damaged(name)
        return array

    def _damaged(self, name: str) -> UserError:
        return UserError(
            f"{self.folder / name}.npy is damaged or not of these shards.", f"Make it again with `{self.command}`."
        )


def describe_shards(shards: Sequence[Shard]) -> np.ndarray:
    """Rows of `shards.npy`."""
    rows = np.empty((len(shards), 4), "<u8")
    rows[:, 0] = key_hash(shard.name for shard in shards)
    rows[:, 1] = [shard.samples for shard in shards]
    rows[:, 2] = [shard.bytes for shard in shards]
    rows[:, 3] = [int(shard.sha256[:16], 16) if shard.sha256 else 0 for shard in shards]
    return rows


def write_columns(
    folder: str | os.PathLike, shards: Sequence[Shard], parts: Iterable[Mapping[str, np.ndarray]], names: Sequence[str]
) -> Path:
    """Write `folder/columns`, in place of an older one. Returns its path. Raises OSError.

    Args:
        parts: the columns of each shard, in the order of `shards`; they are written as they come.
        names: of the columns; each part has them all.
    """
    final = Path(folder) / FOLDER_NAME
    types = {name: np.dtype(TYPES.get(name, "<f4")) for name in names}
    total = sum(shard.samples for shard in shards)
    new = Path(tempfile.mkdtemp(prefix=f".{FOLDER_NAME}.", dir=folder))
    try:
        new.chmod(0o755)
        with ExitStack() as stack:
            files = {name: stack.enter_context(open(new / f"{name}.npy", "wb")) for name in types}
            for name, dtype in types.items():
                header = {"descr": dtype.str, "fortran_order": False, "shape": (total,)}
                np.lib.format.write_array_header_1_0(files[name], header)
            for shard, part in zip(shards, parts, strict=True):
                for name, dtype in types.items():
                    if part[name].shape != (shard.samples,):
                        raise ValueError(f"{shard.name} has {len(part[name])} numbers for {shard.samples} samples")
                    files[name].write(part[name].astype(dtype).tobytes())
        np.save(new / "shards.npy", describe_shards(shards))
        if final.exists():
            shutil.rmtree(final)
        new.rename(final)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    return final
