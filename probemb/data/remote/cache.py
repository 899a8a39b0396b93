"""A folder of fetched shards that many processes share: bounded, and safe whoever is killed at what moment.

    HASH.tar    a whole shard; its readers hold a shared lock on it
    HASH.part   one being fetched, as large as it will be (sparse), so that its room is taken; its fetcher holds an
                exclusive lock. Renamed when it is whole. Without a lock it is the remains of a killed process
    lock        held exclusively while room is made

The locks are flock's: the kernel drops them with the process, so there are none to clean up. The shard that has not
been opened for the longest time goes first, and never one that is being read.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import BinaryIO

from probemb.data.failures import BadShard
from probemb.data.remote.sources import PATIENT, Again, Fetch, Remote, fetch
from probemb.errors import UserError

GIB = 1 << 30
_SCRATCH = "probemb-shards-"


class CacheFull(UserError):
    """There is no room for a shard, as all others are being read."""


class ShardCache:
    """Remote shards as local files.

    Args:
        folder: made if it is missing; on a file system of this machine, as locks over a network are not to be trusted.
        limit: bytes that all shards in it may take together, those being fetched included.
        how: patience of every fetch.
        option: how a person raises `limit`, for messages.

    Attributes:
        versions: of what this process has fetched from the web, the version that the server stated (see `Again`).

    Raises:
        UserError: the folder cannot be made, or its file system has no locks.
    """

    def __init__(self, folder: Path, limit: int, how: Fetch = PATIENT, option: str = "data.cache_gib"):
        self.folder, self.limit, self.how, self.option = folder, limit, how, option
        self.versions: dict[Remote, str | None] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self._making_room():
                pass
        except OSError as error:
            raise UserError(
                f"{folder} cannot be used as the cache of shards: {error.strerror}.",
                "Name a writable folder on a local disk with data.cache.",
            ) from None

    def open(self, remote: Remote, size: int, wait: bool = True) -> BinaryIO:
        """The shard of so many bytes, open for reading, fetched first if it is not here; stays here while it is open.

        `wait`: while there is no room, wait for the fetches of others to end, as what they bring may then give way.
        Raises BadShard: it cannot be fetched, and CacheFull.
        """
        if size > self.limit:
            raise CacheFull(
                f"{remote} has {size / GIB:.2f} GiB, more than the {self.limit / GIB:.2f} GiB of the cache of shards.",
                f"Raise {self.option}.",
            )
        path, began = self.path(remote, size), time.time()
        part = path.with_suffix(".part")
        while True:
            file = _open_whole(path, size)
            if file is not None:
                return file
            file = _lock_part(part)
            if file is None:  # another process has just finished it, or given up
                self._raise_failure(part, began)
                continue
            try:
                if path.exists():
                    part.unlink()
                    file.close()
                    continue
                while not self._make_room(file, part, size, wait):
                    time.sleep(0.05)
                again = Again()
                fetch(remote, file, size, self.how, again=again)
                self.versions[remote] = again.version
                os.fsync(file.fileno())
                _mark_used(file)
                with self._making_room():  # a name that changes while room is counted would be missed
                    part.rename(path)
            except BaseException as error:
                if isinstance(error, BadShard):
                    part.with_suffix(".failed").write_text(str(error), errors="replace")
                with suppress(OSError):
                    part.unlink()
                file.close()
                raise
            part.with_suffix(".failed").unlink(missing_ok=True)
            fcntl.flock(file, fcntl.LOCK_SH)
            return file

    def path(self, remote: Remote, size: int) -> Path:
        """Where the shard lies while `open` keeps it here."""
        name = hashlib.sha256(f"{remote.address}\0{size}".encode()).hexdigest()[:32]
        return self.folder / f"{name}.tar"

    def remove(self, remote: Remote, size: int) -> None:
        """Give its room to others now, where no process will open it again; whoever has it open can go on reading."""
        self.path(remote, size).unlink(missing_ok=True)

    def _raise_failure(self, part: Path, began: float) -> None:
        """Those who waited for a fetch that failed share its failure, instead of trying one after the other."""
        failed = part.with_suffix(".failed")
        with suppress(OSError):
            if failed.stat().st_mtime >= began:
                raise BadShard(failed.read_text())

    @contextmanager
    def _making_room(self) -> Iterator[None]:
        with open(self.folder / "lock", "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _make_room(self, file: BinaryIO, part: Path, size: int, wait: bool) -> bool:
        """Take `size` bytes for `part`; False if there may be room later. Raises CacheFull if there will not."""
        with self._making_room():
            others = {}
            for path in self.folder.iterdir():
                if path.suffix in (".tar", ".part") and path != part:
                    with suppress(FileNotFoundError):
                        others[path] = path.stat()
            total, used = sum(stat.st_size for stat in others.values()), []
            for path, stat in sorted(others.items(), key=lambda item: item[1].st_mtime_ns):
                if total + size <= self.limit:
                    break
                if _remove_unused(path):
                    total -= stat.st_size
                else:
                    used.append((path.suffix, stat.st_size))
            if total + size <= self.limit:
                os.ftruncate(file.fileno(), size)
                return True
        if wait and any(suffix == ".part" and taken for suffix, taken in used):
            return False
        raise CacheFull(
            f"The cache of shards ({self.limit / GIB:.2f} GiB) is full of {len(used)} shards being read.",
            f"Raise {self.option}, or use fewer workers or lanes: each worker reads a shard for each of its lanes.",
        )


def _open_whole(path: Path, size: int) -> BinaryIO | None:
    try:
        file = open(path, "rb", buffering=0)  # noqa: SIM115  stays open
    except FileNotFoundError:
        return None
    fcntl.flock(file, fcntl.LOCK_SH)
    if not _is_at(file, path):  # it was removed before we had the lock
        file.close()
        return None
    if os.fstat(file.fileno()).st_size != size:  # someone else's doing; the name says the size
        path.unlink(missing_ok=True)
        file.close()
        return None
    _mark_used(file)
    return file


def _mark_used(file: BinaryIO) -> None:
    now = time.time_ns()  # the kernel's own stamps are milliseconds apart, too coarse to tell which was first
    os.utime(file.fileno(), ns=(now, now))


def _lock_part(part: Path) -> BinaryIO | None:
    """The file to fetch into, for us alone; None if after waiting for it there is nothing left to fetch into."""
    file = os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0)
    fcntl.flock(file, fcntl.LOCK_EX)
    if _is_at(file, part):
        return file
    file.close()
    return None


def _remove_unused(path: Path) -> bool:
    try:
        file = open(path, "rb", buffering=0)  # noqa: SIM115  closed below, with its lock
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(file, path):
            path.unlink()
        return True
    except BlockingIOError:
        return False
    finally:
        file.close()


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


class Scratch:
    """A folder for fetched shards that ends with this process (`close`), however it ends.

    What a killed process has left is removed by the next one on this machine: its `owner` file is no longer locked.
    """

    def __init__(self, parent: Path | None = None):
        parent = parent or Path(tempfile.gettempdir())
        _sweep(parent)
        self.folder = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=parent))
        self._owner = open(self.folder / ".owner", "ab")  # noqa: SIM115  its lock is the sign of life
        fcntl.flock(self._owner, fcntl.LOCK_EX)
        (self.folder / ".owner").rename(self.folder / "owner")
        # Finalize does nothing in forked workers.
        self.close = Finalize(self, _end_scratch, args=(self.folder, self._owner), exitpriority=5)


def _end_scratch(folder: Path, owner: BinaryIO) -> None:
    ended = folder.with_name(f"{folder.name}-ended")
    with suppress(OSError):
        folder.rename(ended)  # a fetch that still goes on finds no folder to write into
        for path in ended.iterdir():
            if path.name != "owner":  # which goes last: by it the next process knows what is left
                path.unlink()
    shutil.rmtree(ended, ignore_errors=True)
    owner.close()


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f"{_SCRATCH}*"):
        with suppress(OSError):  # another user's, one being made, or one that still lives
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with open(folder / "owner", "rb") as owner:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _end_scratch(folder, owner)
