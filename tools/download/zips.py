"""Files inside archives that nobody vouches for: found and read by name, never unpacked."""

from __future__ import annotations

import hashlib
import http.client
import io
import os
import urllib.request
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from probemb.data.sources import Fetch, Remote, fetch, is_remote
from probemb.data.tar import BadSample, BadShard
from probemb.errors import UserError
from probemb.progress import progress

MAX_ARCHIVE_BYTES = 64 << 30
MAX_TEXT_BYTES = 2 << 30


@dataclass(frozen=True)
class Place:
    """Where an image lies: a file in a folder, or a member of a zip."""

    archive: str
    member: str | None
    size: int


def fetched(source: str, folder: Path) -> Path:
    """The archive as a file or folder here. Raises UserError."""
    if not is_remote(source):
        path = Path(source)
        if not path.exists():
            raise UserError(f"The archive {path} does not exist.", "Check the path.")
        return path
    remote = Remote(source)
    if remote.scheme not in ("http", "https"):
        raise UserError(f"{remote} is no web address.", "Name a file, a folder or an http(s) address.")
    name = Path(remote.split()[0]).name
    path = folder / f"{hashlib.sha256(source.encode()).hexdigest()[:8]}-{name}"
    if path.exists():
        return path
    folder.mkdir(exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    with progress(f"Fetching {name}", _stated_size(remote)) as advance:
        try:
            with _Growing(part, advance) as file:
                fetch(remote, file, None, Fetch(), MAX_ARCHIVE_BYTES)
                os.fsync(file.fileno())
            part.replace(path)
        except BadShard as error:
            raise UserError(f"{error}.", "Fetch it by other means and name the file.") from None
        finally:
            part.unlink(missing_ok=True)
    return path


class _Growing(io.FileIO):
    """A file that tells by how much it has grown; a transfer that begins again does not count twice."""

    def __init__(self, path: Path, advance: Callable[[int], object]):
        super().__init__(path, "w+")
        self._advance, self._most = advance, 0

    def write(self, data) -> int:
        count = super().write(data)
        if self.tell() > self._most:
            self._advance(self.tell() - self._most)
            self._most = self.tell()
        return count


def _stated_size(remote: Remote) -> int:
    """Bytes that the server says the file has, for the time that is left; 0 where it does not say."""
    request = urllib.request.Request(remote.address, method="HEAD", headers={"User-Agent": "probemb"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.headers.get("Content-Length") or 0)
    except (OSError, ValueError, http.client.HTTPException):
        return 0


def members(path: Path) -> list[tuple[str, Place]]:
    """Names and places of what a zip, a folder or a single file holds. Nothing is unpacked."""
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
        raise UserError(f"{label} is of no use: {error}.", "Fetch the archive again.") from None


def read_bytes(place: Place, limit: int) -> bytes:
    """What lies there. Raises BadSample: it is larger than `limit` or than it says, or damaged."""
    if place.size > limit:
        raise BadSample(f"it has {place.size:,} bytes, more than {limit:,}")
    try:
        if place.member is None:
            with open(place.archive, "rb") as file:
                return file.read(limit)
        with _archive(place.archive).open(place.member) as file:
            data = file.read(place.size + 1)
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError) as error:
        raise BadSample(f"it cannot be read ({type(error).__name__})") from None
    if len(data) != place.size:
        raise BadSample("it has another size than its archive says")
    return data
