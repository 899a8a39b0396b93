"""A bounded folder of fetched shards that many processes share; any of them may be killed at any moment.

    HASH.tar    a whole shard; its readers hold a shared lock on it
    HASH.part   one being fetched, with its final size (sparse), which reserves its space; its fetcher holds an
                exclusive lock. Renamed when it is complete. Without a lock it was left by a killed process
    lock        held exclusively while space is made

The locks are flock's, which the kernel releases with the process. The least recently opened shard is removed first,
never one that is being read.
"""

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
from probemb.data.remote.sources import DEFAULT_POLICY, FetchPolicy, Remote, fetch
from probemb.errors import UserError

GIB = 1 << 30
_TEMPORARY_PREFIX = "probemb-shards-"


class CacheFull(UserError):
    """No space for a shard: all others are being read."""


class ShardCache:
    """Remote shards as local files.

    Args:
        folder: made if it is missing; on a local file system, because locks over a network are unreliable.
        limit: bytes of all shards in it together, including those being fetched.
        policy: attempts and time limits of every fetch.

    Raises UserError: the folder cannot be made, or its file system has no locks.
    """

    def __init__(self, folder: Path, limit: int, policy: FetchPolicy = DEFAULT_POLICY):
        self.folder, self.limit, self.policy = folder, limit, policy
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
        """The shard (`size` bytes), open for reading; fetched first if needed, and kept in the cache while it is open.

        `wait`: without space, wait for other fetches to end, since their shards can then be removed. Raises BadShard:
        it cannot be fetched; CacheFull.
        """
        if size > self.limit:
            raise CacheFull(
                f"{remote} has {size / GIB:.2f} GiB, more than the {self.limit / GIB:.2f} GiB of the cache of shards.",
                "Raise data.cache_gib.",
            )
        path, began = self.path(remote, size), time.time()
        part = path.with_suffix(".part")
        while True:
            file = _open_whole(path, size)
            if file is not None:
                return file
            file = _lock_part(part)
            if file is None:  # another process has just finished or failed
                self._raise_failure(part, began)
                continue
            try:
                if path.exists():
                    part.unlink()
                    file.close()
                    continue
                while not self._make_room(file, part, size, wait):
                    time.sleep(0.05)
                fetch(remote, file, size, self.policy)
                os.fsync(file.fileno())
                _mark_used(file)
                with self._making_room():  # which lists the names, and removes what nobody has locked
                    part.rename(path)
                    fcntl.flock(file, fcntl.LOCK_SH)
            except BaseException as error:
                if isinstance(error, BadShard):
                    part.with_suffix(".failed").write_text(str(error), errors="replace")
                with suppress(OSError):
                    part.unlink()
                file.close()
                raise
            part.with_suffix(".failed").unlink(missing_ok=True)
            return file

    def path(self, remote: Remote, size: int) -> Path:
        name = hashlib.sha256(f"{remote.address}\0{size}".encode()).hexdigest()[:32]
        return self.folder / f"{name}.tar"

    def _raise_failure(self, part: Path, began: float) -> None:
        """Share the failure of a fetch with the processes that waited for it, instead of retrying in each."""
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
        """Reserve `size` bytes for `part`; False if there may be space later. Raises CacheFull if there will not."""
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
            "Raise data.cache_gib, or use fewer workers or lanes: each worker reads a shard for each of its lanes.",
        )


def _open_whole(path: Path, size: int) -> BinaryIO | None:
    try:
        file = open(path, "rb", buffering=0)  # noqa: SIM115  stays open
    except FileNotFoundError:
        return None
    fcntl.flock(file, fcntl.LOCK_SH)
    if not _is_at(file, path):  # removed before it was locked
        file.close()
        return None
    if os.fstat(file.fileno()).st_size != size:  # modified from outside; the name states the size
        path.unlink(missing_ok=True)
        file.close()
        return None
    _mark_used(file)
    return file


def _mark_used(file: BinaryIO) -> None:
    now = time.time_ns()  # the kernel's own timestamps are milliseconds apart, too coarse for the order
    os.utime(file.fileno(), ns=(now, now))


def _lock_part(part: Path) -> BinaryIO | None:
    """The file to fetch into, locked exclusively; None after another process' fetch has ended.

    A process that has fetched keeps the file open with a shared lock, for as long as it reads the shard: whoever waits
    for it asks for a shared one, too.
    """
    file = os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(file, part):
            return file
    except BlockingIOError:
        fcntl.flock(file, fcntl.LOCK_SH)
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


class TemporaryCache:
    """A folder for fetched shards that is removed when this process ends, or by `close`.

    The folder of a killed process, whose `owner` file is no longer locked, is removed by the next process.
    """

    def __init__(self, parent: Path | None = None):
        parent = parent or Path(tempfile.gettempdir())
        _sweep(parent)
        self.folder = Path(tempfile.mkdtemp(prefix=_TEMPORARY_PREFIX, dir=parent))
        self._owner = open(self.folder / ".owner", "ab")  # noqa: SIM115  its lock marks the folder as in use
        fcntl.flock(self._owner, fcntl.LOCK_EX)
        (self.folder / ".owner").rename(self.folder / "owner")
        # Finalize does nothing in forked workers.
        self.close = Finalize(self, _remove_temporary, args=(self.folder, self._owner), exitpriority=5)


def _remove_temporary(folder: Path, owner: BinaryIO) -> None:
    ended = folder.with_name(f"{folder.name}-ended")
    with suppress(OSError):
        folder.rename(ended)  # a fetch still in progress finds no folder to write into
        for path in ended.iterdir():
            if path.name != "owner":  # removed last: it marks the folder as a leftover
                path.unlink()
    shutil.rmtree(ended, ignore_errors=True)
    owner.close()


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f"{_TEMPORARY_PREFIX}*"):
        with suppress(OSError):  # another user's, one being made, or one in use
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with open(folder / "owner", "rb") as owner:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_temporary(folder, owner)
