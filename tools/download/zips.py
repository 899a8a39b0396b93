"""Read files inside untrusted archives by name, without unpacking."""

from __future__ import annotations

import hashlib
import http.client
import io
import os
import sys
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from lzma import LZMAError
from pathlib import Path
from typing import BinaryIO

from probemb.cli.progress import progress
from probemb.data.failures import BadSample, BadShard
from probemb.data.remote.http_client import open_web
from probemb.data.remote.sources import WEB, FetchPolicy, Remote, TransferState, fetch, is_remote
from probemb.data.remote.transfer import TransferFailed
from probemb.errors import UserError
from probemb.files import replace_text

MAX_ARCHIVE_BYTES = 64 << 30
MAX_TEXT_BYTES = 2 << 30


@dataclass(frozen=True)
class Place:
    """The location of an image: a file in a folder, or a member of a zip."""

    archive: str
    member: str | None
    size: int


def fetch_archive(source: str, folder: Path, patience: float = 60.0) -> Path:
    """The archive as a local file or folder; an interrupted transfer resumes. Raises UserError.

    `patience`: seconds without data after which an attempt ends.
    """
    if not is_remote(source):
        path = Path(source)
        if not path.exists():
            raise UserError(f"The archive {path} does not exist.", "Check the path.")
        return path
    remote = Remote(source)
    if remote.scheme not in ("http", "https"):
        raise UserError(f"{remote} is not a web address.", "Name a file, a folder or an http(s) address.")
    name = Path(remote.split()[0]).name
    path = folder / f"{hashlib.sha256(source.encode()).hexdigest()[:8]}-{name}"
    if path.exists():
        return path
    folder.mkdir(exist_ok=True)
    part, mark = (path.with_name(f".{path.name}.{kind}") for kind in ("part", "version"))
    print(f"requesting {remote}", file=sys.stderr, flush=True)  # a server may take a while to answer
    with progress(f"Fetching {name}", _stated_size(remote)) as advance:
        try:
            with _ProgressFile(part, advance) as file:
                file.truncate(
                    fetch(remote, file, None, FetchPolicy(timeout=patience), MAX_ARCHIVE_BYTES, _SavedTransfer(mark))
                )
                os.fsync(file.fileno())
        except BadShard as error:
            raise UserError(
                f"{error}.",
                "The same command resumes where this one stopped; or fetch it by other means and name the file.",
            ) from None
        except UserError:  # whose remedy names the trainer's options
            raise UserError(
                f"There is no room left in {folder} for {name}.",
                "Free some space; the same command then resumes where it stopped.",
            ) from None
    mark.unlink(missing_ok=True)
    if name.lower().endswith(".zip") and not zipfile.is_zipfile(part):
        part.unlink()
        raise UserError(
            f"What {remote} sends is not a zip archive.", "Correct the address, or fetch it by other means and name it."
        )
    part.replace(path)
    return path


class _SavedTransfer(TransferState):
    """The state of a transfer in a file, from which the next command resumes it."""

    def __init__(self, path: Path):
        self._path = path

    @property
    def version(self) -> str | None:
        try:
            return self._path.read_text(encoding="utf-8") or None
        except (OSError, ValueError):
            return None

    @version.setter
    def version(self, version: str | None) -> None:
        replace_text(self._path, version or "")

    def begin(self, file: BinaryIO, position: int) -> None:
        file.seek(position)
        file.truncate()  # the next command resumes at the end, so no bytes of another version may follow


class _ProgressFile(io.FileIO):
    """A file that reports its growth; a restarted transfer does not count twice."""

    def __init__(self, path: Path, advance: Callable[[int], object]):
        super().__init__(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+")
        self._advance, self._most = advance, self.seek(0, os.SEEK_END)
        advance(self._most)

    def write(self, data) -> int:
        count = super().write(data)
        if self.tell() > self._most:
            self._advance(self.tell() - self._most)
            self._most = self.tell()
        return count


def _stated_size(remote: Remote) -> int:
    """The size of a file according to its server, for the progress bar; 0 if it is unknown."""
    if remote.scheme not in WEB:
        return 0
    try:
        with open_web(remote.address, {}, timeout=10, method="HEAD") as answer:
            return int(answer.headers.get("Content-Length") or 0)
    except (OSError, ValueError, http.client.HTTPException, TransferFailed):
        return 0


def members(path: Path) -> list[tuple[str, Place]]:
    """Names and locations of the files in a zip or folder, or of a single file. Nothing is unpacked."""
    if path.is_dir():
        found = sorted(one for one in path.rglob("*") if one.is_file())
        return [(one.relative_to(path).as_posix(), Place(str(one), None, one.stat().st_size)) for one in found]
    if path.suffix.lower() != ".zip" and not zipfile.is_zipfile(path):
        return [(path.name, Place(str(path), None, path.stat().st_size))]
    try:
        members = _archive(str(path)).infolist()
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise UserError(f"{path} is not a whole zip archive: {error}.", "Fetch it again.") from None
    return [(one.filename, Place(str(path), one.filename, one.file_size)) for one in members if not one.is_dir()]


@lru_cache(maxsize=8)
def _archive(path: str) -> zipfile.ZipFile:
    return zipfile.ZipFile(path)


def read_text(place: Place, label: str) -> bytes:
    try:
        return read_bytes(place, MAX_TEXT_BYTES)
    except BadSample as error:
        raise UserError(f"{label} is unusable: {error}.", "Fetch the archive again.") from None


def read_bytes(place: Place, limit: int) -> bytes:
    """The bytes of a file. Raises BadSample: larger than `limit` or than stated, or damaged."""
    if place.size > limit:
        raise BadSample(f"it has {place.size:,} bytes, more than {limit:,}")
    try:
        if place.member is None:
            with open(place.archive, "rb") as file:
                return file.read(limit)
        with _archive(place.archive).open(place.member) as file:
            data = file.read(place.size + 1)
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, LZMAError, RuntimeError, NotImplementedError) as error:
        raise BadSample(f"it cannot be read ({type(error).__name__})") from None
    if len(data) != place.size:
        raise BadSample("it has another size than its archive says")
    return data
