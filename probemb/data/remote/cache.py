"""A bounded folder of fetched shards that many processes share; any of them may be killed at any moment.

HASH.tar    a whole shard; an open one may be removed, as its readers keep its bytes
HASH.part   one being fetched, with its final size (sparse), which reserves its space
XX.lock     held while a shard whose HASH begins so is fetched; flock's, so the kernel releases it with the process
lock        held while space is made
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

from probemb.data.remote.sources import DEFAULT_POLICY, FetchPolicy, Remote, fetch
from probemb.errors import UserError

GIB = 1 << 30
_PREFIX = "probemb-shards-"
_YOUNG = 60.0  # seconds in which a temporary folder may not yet be locked


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
            with self._locked("lock"):
                pass
        except OSError as error:
            raise UserError(
                f"{folder} cannot be used as the cache of shards: {error.strerror}.",
                "Name a writable folder on a local disk with data.cache.",
            ) from None

    def open(self, remote: Remote, size: int) -> BinaryIO:
        """The shard (`size` bytes), open for reading, fetched first if needed. Raises BadShard: it cannot be."""
        path = self.folder / (hashlib.sha256(f"{remote.address}\0{size}".encode()).hexdigest()[:32] + ".tar")
        if (file := self._open(path, size)) is not None:
            return file
        with self._locked(f"{path.name[:2]}.lock"):
            if (file := self._open(path, size)) is not None:  # another process has fetched it
                return file
            part = path.with_suffix(".part")
            file = open(part, "w+b", buffering=0)  # noqa: SIM115  stays open
            try:
                self._make_room(file, size)
                fetch(remote, file, size, self.policy)
                os.fsync(file.fileno())
                with self._locked("lock"):  # others, making room, count it under one of its names
                    part.rename(path)
            except BaseException:
                part.unlink(missing_ok=True)
                file.close()
                raise
            return file

    def _open(self, path: Path, size: int) -> BinaryIO | None:
        try:
            file = open(path, "rb", buffering=0)  # noqa: SIM115  stays open
        except FileNotFoundError:
            return None
        if os.fstat(file.fileno()).st_size != size:  # modified from outside
            path.unlink(missing_ok=True)
            file.close()
            return None
        now = time.time_ns()  # the kernel's own timestamps are milliseconds apart, too coarse for the order
        os.utime(file.fileno(), ns=(now, now))
        return file

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        with open(self.folder / name, "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _make_room(self, part: BinaryIO, size: int) -> None:
        """Reserve `size` bytes; the least recently opened shards go."""
        with self._locked("lock"):
            known = {}
            for path in self.folder.iterdir():
                if path.suffix in (".tar", ".part"):
                    with suppress(FileNotFoundError):
                        known[path] = path.stat()
            total = size + sum(about.st_size for about in known.values())
            for path, about in sorted(known.items(), key=lambda item: item[1].st_mtime_ns):
                if total > self.limit and self._remove(path):
                    total -= about.st_size
            os.ftruncate(part.fileno(), size)

    def _remove(self, path: Path) -> bool:
        """Remove a shard, or what a killed process has left of one; False if it is being fetched."""
        with open(self.folder / f"{path.name[:2]}.lock", "ab") as lock, suppress(BlockingIOError):
            if path.suffix == ".part":
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            return True
        return False


def temporary_folder() -> tuple[Path, Finalize]:
    """A folder for fetched shards, and what removes it; the end of this process does, too.

    Those of killed processes, which are no longer locked, are removed first.
    """
    parent = Path(tempfile.gettempdir())
    for old in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's, or in use
            if not old.is_symlink() and old.stat().st_uid == os.getuid() and time.time() - old.stat().st_ctime > _YOUNG:
                _remove(old, _lock_folder(old))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    return folder, Finalize(None, _remove, args=(folder, _lock_folder(folder)), exitpriority=5)  # not in forked workers


def _lock_folder(folder: Path) -> int:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle


def _remove(folder: Path, handle: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(handle)
