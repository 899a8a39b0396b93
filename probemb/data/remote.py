"""Remote shards, fetched whole into a bounded folder that many processes share.

    https://host/cc3m/00000.tar        requests; a broken transfer resumes where it stopped, if the server can do so
    s3://bucket/cc3m/00000.tar         any other scheme: fsspec with the scheme's package (s3fs, gcsfs, adlfs, …)
    pipe:ssh host cat cc3m/00000.tar   the output of a shell command

Only the user can name a command: an index.json names shards beside itself, and nothing else.
"""

import errno
import fcntl
import hashlib
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from queue import Empty, Queue
from typing import BinaryIO, TypeVar
from urllib.parse import quote

import fsspec
import requests

from probemb.data.failures import BadShard
from probemb.errors import UserError

Result = TypeVar("Result")
WEB = ("http", "https")
LONGEST_PAUSE = 60.0
YOUNG = 60.0  # seconds in which a temporary folder may not yet be locked
_CHUNK, _BLOCK = 1 << 16, 4 << 20  # bytes; the second of an object store
_REMOTE = re.compile(r"pipe:.|[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_USER = re.compile(r"(?<=://)([^/]*:(?!\d*/)\S*@|[^/@]*@)")  # a password may have a / in it
_TEMPORARY = {408, 416, 425, 429}  # temporary HTTP errors, besides all from 500 on
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_PREFIX = "probemb-shards-"


@dataclass(frozen=True)
class Remote:
    """The address of a remote shard; str() is for messages, without a user's name, password or query."""

    address: str

    def __str__(self) -> str:
        return self.address if self.scheme == "pipe" else _USER.sub("", self.split()[0])

    @property
    def scheme(self) -> str:
        return self.address.partition(":")[0].lower()

    def beside(self, name: str) -> "Remote":
        """The file `name` in the folder of this address. Raises ValueError for a name that leads elsewhere."""
        if not name.isprintable() or any(mark in name for mark in ("/", "\\", "::", "*", "?", "[", "{")):
            raise ValueError(f"{name!r} lies outside its own folder")
        folder, query = self.split()
        return Remote(f"{folder.rstrip('/')}/{quote(name) if self.scheme in WEB else name}{query}")

    def split(self) -> tuple[str, str]:
        """The address up to its query (of a signed web address, which covers the whole folder), and the query."""
        end = self.address.find("?") if self.scheme in WEB else -1
        return (self.address, "") if end < 0 else (self.address[:end], self.address[end:])


@dataclass(frozen=True)
class FetchPolicy:
    attempts: int = 5
    timeout: float = 30.0  # seconds in which the first answer must arrive, redirects included, and then each 64 KiB
    backoff: float = 1.0  # seconds before the second attempt; doubled for every further one, up to a minute


DEFAULT_POLICY = FetchPolicy()


def is_remote(source: str) -> bool:
    """True if a source is a web address, another URL or `pipe:COMMAND`, rather than a path."""
    return _REMOTE.match(source) is not None and not os.path.exists(source)


class TransferFailed(Exception):
    """A failed attempt after which another may succeed."""


def fetch(
    remote: Remote, file: BinaryIO, size: int | None, policy: FetchPolicy = DEFAULT_POLICY, limit: int = 1 << 50,
    state: dict[str, str] | None = None,
) -> int:  # fmt: skip
    """Write a whole remote file, of at most `limit` bytes, to `file`; returns the number of bytes.

    `state` gets the "version" of the bytes so far, a strong ETag or a date, or ""; with that of an earlier call the
    transfer resumes at the end of `file` if the server still has the same. Raises BadShard; OSError: the disk is full.
    """
    state, limit = {"version": ""} if state is None else state, limit if size is None else size

    def attempt() -> int:
        with ExitStack() as ending:
            if remote.scheme == "pipe":
                source = _from_command(remote.address, ending)
            elif remote.scheme in WEB:
                source = _from_web(remote.address, policy.timeout, state, file.tell() if state["version"] else 0)
            else:
                source = _from_fsspec(remote.address)
            chunks = ending.enter_context(closing(_watched(source, policy.timeout)))
            file.seek(next(chunks))
            if size is None:  # a file of known size keeps it, which reserves its space
                file.truncate()
            for chunk in chunks:
                if file.tell() + len(chunk) > limit:
                    raise BadShard(f"it has more than the expected {limit:,} bytes")
                file.write(chunk)
        if size is not None and file.tell() != size:
            raise TransferFailed(f"it has {file.tell():,} bytes, but its index says {size:,}")
        return file.tell()

    return _retry(attempt, remote, policy)


def fetch_range(remote: Remote, offset: int, size: int, policy: FetchPolicy) -> bytes:
    """`size` bytes of a file on a web server, from `offset` on. Raises BadShard, also if it serves no ranges."""

    def attempt() -> bytes:
        source = _from_web(remote.address, policy.timeout, {"version": ""}, offset, f"{offset + size - 1}")
        with closing(_watched(source, policy.timeout)) as chunks:
            if next(chunks) != offset:
                raise BadShard("the server does not serve parts of files")
            data = b""
            while len(data) < size and (chunk := next(chunks, b"")):
                data += chunk
        if len(data) != size:
            raise BadShard("the server answers with another range than it was asked for")
        return data

    return _retry(attempt, remote, policy)


def _retry(attempt: Callable[[], Result], remote: Remote, policy: FetchPolicy) -> Result:
    number = 0
    while True:
        number += 1
        try:
            return attempt()
        except (TransferFailed, BadShard) as error:
            reason, final = str(error), isinstance(error, BadShard)
        except TimeoutError:
            reason, final = f"no answer in {policy.timeout:g} s", False
        except requests.exceptions.ChunkedEncodingError:
            reason, final = "the connection broke off", False
        except (OSError, ValueError) as error:  # also of requests
            final = isinstance(error, (ValueError, requests.TooManyRedirects))  # an invalid address
            while inner := error.__cause__ or error.__context__:
                error = inner
            if getattr(error, "errno", None) in _FULL:
                raise error from None
            reason = getattr(error, "strerror", None) or type(error).__name__  # messages may hold a password
        if final or number == policy.attempts:
            reason = " ".join(reason.split())[:300]
            raise BadShard(f"{remote}: cannot be fetched ({reason}; attempt {number})") from None
        pause = min(LONGEST_PAUSE, policy.backoff * 2 ** (number - 1))
        time.sleep(pause * random.SystemRandom().uniform(0.5, 1))  # the workers of a cluster do not all retry at once


def _watched(source: Iterator, timeout: float) -> Iterator:
    """Read in a thread that is left behind once it stalls: any call of a source may hang. Raises TimeoutError."""
    items, given_up = Queue(8), threading.Event()

    def work() -> None:
        try:
            for item in source:
                if given_up.is_set():
                    return
                items.put(item)
            items.put(None)
        except BaseException as error:
            items.put(error)

    threading.Thread(target=work, daemon=True, name="fetch").start()
    try:
        while (item := items.get(timeout=timeout)) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    except Empty:
        raise TimeoutError from None
    finally:
        given_up.set()
        while not items.empty():  # the thread may wait for room
            items.get()


# The sources yield the position in the file at which their bytes belong, then the bytes.


def _from_web(address: str, timeout: float, state: dict[str, str], start: int = 0, last: str = "") -> Iterator:
    headers = {"User-Agent": "probemb", "Accept-Encoding": "identity"}
    headers |= {"Range": f"bytes={start}-{last}"} if start or last else {}
    headers |= {"If-Range": state["version"]} if start and state["version"] else {}
    with requests.get(address, headers=headers, stream=True, timeout=2 * timeout) as response:  # `_watched` is first
        code, tag, date = response.status_code, *map(response.headers.get, ("ETag", "Last-Modified"))
        other = code == 206 and not response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
        if code == 416 or other:  # the local file is longer
            state["version"] = ""
        if code >= 300:  # also a redirect that leads nowhere
            kind = TransferFailed if code >= 500 or code in _TEMPORARY else BadShard
            raise kind(f"HTTP {code} {response.reason}")
        if other:
            raise TransferFailed("the server answers with another range than it was asked for")
        state["version"] = tag if tag and tag.startswith('"') else date or ""
        yield start if code == 206 else 0
        yield from response.iter_content(_CHUNK)


def _from_command(address: str, ending: ExitStack) -> Iterator:
    """The output of a command, which is killed with its children at the end of `ending`."""
    words = ending.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
    command = ["/bin/sh", "-c", address.partition(":")[2]]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=words, start_new_session=True
    )
    ending.callback(_end_group, process)

    def output() -> Iterator:
        yield 0
        with process.stdout:
            yield from iter(partial(process.stdout.read, _CHUNK), b"")
        if process.wait():
            words.seek(max(0, words.seek(0, os.SEEK_END) - 2000))
            said = words.read().decode(errors="replace").strip().splitlines()
            raise TransferFailed(f"exit code {process.returncode}{': ' + said[-1] if said else ''}")

    return output()


def _end_group(process: subprocess.Popen) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _from_fsspec(address: str) -> Iterator:
    yield 0
    try:
        store, path = fsspec.core.url_to_fs(address)
        with store.open(path, "rb", block_size=_BLOCK) as file:
            yield from iter(partial(file.read, _CHUNK), b"")
    except Exception as error:  # each package has its own
        words = re.sub(r"\S*@|\?\S+", "…", str(error))  # without a user or a query
        final = isinstance(error, (ImportError, ValueError))  # its package is missing, or the scheme unknown
        raise (BadShard if final else TransferFailed)(f"{type(error).__name__}: {words}") from None


def in_background(work: Callable[[], Result]) -> Future[Result]:
    """Run it in a daemon thread, which does not delay the end of the program."""
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True, name="fetch in background").start()
    return done


class ShardCache:
    """Remote shards as local files, in a folder that many processes share; any of them may be killed at any moment.

    HASH.tar    a whole shard; an open one may be removed, as its readers keep its bytes
    HASH.part   one being fetched, with its final size (sparse), which reserves its space
    HASH.lock   held while it is opened or fetched; flock's, so the kernel releases it with the process

    `limit`: bytes of all together. Without a folder there is a temporary one, which `close` or the end of this process
    removes. Raises UserError.
    """

    def __init__(self, folder: str | Path | None, limit: int, policy: FetchPolicy = DEFAULT_POLICY):
        self.limit, self.policy, self.close = limit, policy, lambda: None
        try:
            if folder is None:
                folder, self.close = _temporary_folder()
            self.folder = Path(folder)
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._locked("writable.lock"):
                pass
            for part in self.folder.glob("*.part"):  # perhaps of a killed process
                with suppress(BlockingIOError), self._locked(f"{part.stem}.lock", fcntl.LOCK_NB):
                    part.unlink(missing_ok=True)
        except OSError as error:
            what = f"{folder} cannot be used as the cache of shards: {error.strerror}."
            raise UserError(what, "Name a writable folder on a local disk with data.cache.") from None

    def open(self, remote: Remote, size: int) -> BinaryIO:
        """The shard, of `size` bytes, fetched first if needed. Raises BadShard, OSError."""
        name = hashlib.sha256(f"{remote.address}\0{size}".encode()).hexdigest()[:32]
        path, part = self.folder / f"{name}.tar", self.folder / f"{name}.part"
        with self._locked(f"{name}.lock"):
            with suppress(FileNotFoundError):
                file = open(path, "rb", buffering=0)  # noqa: SIM115  stays open
                now = time.time_ns()  # the kernel's own timestamps are milliseconds apart, too coarse for the order
                os.utime(file.fileno(), ns=(now, now))
                return file
            file = open(part, "w+b", buffering=0)  # noqa: SIM115  stays open
            try:
                os.ftruncate(file.fileno(), size)
                self._make_room()
                fetch(remote, file, size, self.policy)
                os.fsync(file.fileno())
                part.rename(path)
            except BaseException:
                part.unlink(missing_ok=True)
                file.close()
                raise
            return file

    @contextmanager
    def _locked(self, name: str, flags: int = 0) -> Iterator[None]:
        with open(self.folder / name, "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | flags)
            yield

    def _make_room(self) -> None:
        """Remove the least recently opened shards that are beyond the limit."""
        files = []
        for kind in ("part", "tar"):  # in this order, one that gets its final name meanwhile is counted
            for path in self.folder.glob(f"*.{kind}"):
                with suppress(FileNotFoundError):
                    files.append((path.stat(), path))
        total = sum(about.st_size for about, _ in files)
        for about, path in sorted(files, key=lambda file: file[0].st_mtime_ns):
            if total > self.limit and path.suffix == ".tar":
                path.unlink(missing_ok=True)
                total -= about.st_size


def _temporary_folder() -> tuple[Path, Finalize]:
    """A folder, and what removes it. Those of killed processes, which are no longer locked, are removed first."""
    for old in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # in use, or another user's
            if time.time() - old.stat().st_ctime > YOUNG:
                _claim(old)()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    return folder, _claim(folder)


def _claim(folder: Path) -> Finalize:
    """Lock a folder until this process ends, which removes it, as does a call of the result. Raises OSError."""
    owner = open(folder / "owner", "ab")  # noqa: SIM115  stays open
    fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        owner.close()

    return Finalize(None, remove, exitpriority=5)  # not in forked workers
