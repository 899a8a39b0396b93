"""Remote shards, fetched whole from a web server, an object store, or the output of a command.

    https://host/cc3m/00000.tar        requests; a broken transfer resumes where it stopped, if the server can do so
    s3://bucket/cc3m/00000.tar         any other scheme: fsspec with the scheme's package (s3fs, gcsfs, adlfs, …)
    pipe:ssh host cat cc3m/00000.tar   the output of a shell command

Only the user can name a command: the files of a corpus (index.json) can name shards beside themselves, and nothing
else.
"""

from __future__ import annotations

import errno
import io
import os
import random
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import BinaryIO, TypeVar
from urllib.parse import quote

import fsspec
import requests
import urllib3
from requests.exceptions import InvalidSchema, InvalidURL, TooManyRedirects

from probemb.data.failures import BadShard
from probemb.errors import UserError

Result = TypeVar("Result")
WEB = ("http", "https")
SLOWEST = 1024  # bytes per second over one time-out; slower servers would block a run
LONGEST_PAUSE = 60.0
LONGEST_REASON = 300  # characters of a server's or command's message
MOST_REDIRECTS = 10
_CHUNK = 1 << 20
_BLOCK = 4 << 20  # of an object store
_REMOTE = re.compile(r"(pipe):.|([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
_HOST = re.compile(r"[^:]*(:\d*)?|\[.*\](:\d*)?")
_TEMPORARY = {408, 416, 425, 429}  # temporary HTTP errors, besides all from 500 on
_INVALID = "it is or leads to no valid web address; what is not ASCII, and / ? # @ : in a password, is written as %2F …"


@dataclass(frozen=True)
class Remote:
    """The address of a remote shard; a separate type, so that a file's path is never mistaken for a command.

    str() is for messages: without a user's name, password or query, which may hold a secret.
    """

    address: str

    def __str__(self) -> str:
        if self.scheme == "pipe":
            return self.address
        scheme, _, rest = self.split()[0].partition("://")
        host, slash, path = rest.partition("/")
        host = host.rpartition("@")[2]
        if "@" in self.address and not _HOST.fullmatch(host):  # part of a password that has a / or ? in it
            return f"{scheme}://…"
        return f"{scheme}://{host}{slash}{path}"

    def hide(self, text: str) -> str:
        """A text of the server or command without the secrets of this address."""
        text = text.replace(self.address, str(self))
        user = self.address.partition("://")[2].partition("/")[0].rpartition("@")[0]
        return text.replace(user, "…") if ":" in user and self.scheme != "pipe" else text

    @property
    def scheme(self) -> str:
        """ "https", "s3", …, or "pipe"."""
        found = _REMOTE.match(self.address)
        return (found[1] or found[2]).lower()

    def beside(self, name: str) -> Remote:
        """The file `name` in the folder of this address. Raises ValueError for a name that leads elsewhere."""
        if not name.isprintable() or any(mark in name for mark in ("/", "\\", "::", "*", "?", "[", "{")):
            raise ValueError(name)
        folder, query = self.split()
        name = quote(name) if self.scheme in WEB else name
        return Remote(f"{folder.rstrip('/')}/{name}{query}")

    def split(self) -> tuple[str, str]:
        """The address up to its query (of a signed web address, which covers the whole folder), and the query."""
        end = self.address.find("?") if self.scheme in WEB else -1
        return (self.address, "") if end < 0 else (self.address[:end], self.address[end:])


@dataclass(frozen=True)
class FetchPolicy:
    """Attempts and time limits of a fetch.

    attempts  in all
    timeout   seconds after which an attempt fails below 1 KiB a second, redirects and everything else included
    backoff   seconds before the second attempt; doubled for every further one, up to a minute, and shortened at random
              by up to a half, so that the workers of a cluster do not all retry at once
    """

    attempts: int = 5
    timeout: float = 30.0
    backoff: float = 1.0


DEFAULT_POLICY = FetchPolicy()


def is_remote(source: str) -> bool:
    """True if a source is a web address, another URL or `pipe:COMMAND`, rather than a path."""
    return _REMOTE.match(source) is not None and not os.path.exists(source)


def check_scheme(remote: Remote) -> None:
    """Raises UserError for an address that cannot be read from; imports the package of its scheme."""
    try:
        if remote.scheme not in ("pipe", *WEB):
            fsspec.get_filesystem_class(remote.scheme)
    except (ImportError, ValueError) as error:  # the package is missing, or the scheme is unknown
        raise UserError(
            f"Shards cannot be read from {remote}: {str(error).rstrip('.')}.",
            "Install its package with pip, or name a folder, an http(s) address, one that fsspec knows (s3://, gs://, "
            "…), or pipe:COMMAND.",
        ) from None


@dataclass
class TransferState:
    """The version of the file that the bytes so far belong to: a strong ETag or a date; None if it is unknown."""

    version: str | None = None


def fetch(
    remote: Remote,
    file: BinaryIO,
    size: int | None,
    policy: FetchPolicy,
    limit: int = 1 << 50,
    state: TransferState | None = None,
) -> int:
    """Write a whole remote file to `file`; returns the number of bytes.

    `size` comes from the index; without it at most `limit` bytes are accepted. With the `state` of an earlier call the
    transfer resumes at the end of `file` if the server still has the same version. Raises BadShard, with address and
    reason, after the last attempt, or at once where another cannot help.
    """
    transfer = {"pipe": _from_command, "http": _from_web, "https": _from_web}.get(remote.scheme, _from_fsspec)
    state = state or TransferState()

    def attempt() -> int:
        start = file.tell() if state.version else 0
        sink = _Sink(file, limit if size is None else size, trim=size is None)
        sink.watch(lambda: transfer(remote.address, sink, start, policy.timeout, state), policy.timeout)
        if size is not None and file.tell() != size:
            raise TransferFailed(f"it has {file.tell():,} bytes, but its index says {size:,}")
        return file.tell()

    return _retry(attempt, remote, policy)


def fetch_bytes(remote: Remote, limit: int, policy: FetchPolicy) -> bytes:
    """A small remote file. Raises BadShard, also for more than `limit` bytes."""
    with tempfile.TemporaryFile() as file:
        size = fetch(remote, file, None, policy, limit)
        file.seek(0)
        return file.read(size)


def fetch_range(remote: Remote, offset: int, size: int, policy: FetchPolicy) -> bytes:
    """`size` bytes of a file on a web server, from `offset` on.

    Raises BadShard: the server cannot be reached, serves no ranges, or has another one.
    """

    def read(sink: _Sink) -> None:
        asked = f"{offset}-{offset + size - 1}"
        with _answer(remote.address, {"Range": f"bytes={asked}"}, policy.timeout) as response:
            if response.status_code != 206:
                raise TransferFailed("the server does not serve parts of files", final=True)
            if not response.headers.get("Content-Range", "").startswith(f"bytes {asked}/"):
                raise TransferFailed("the server answers with another range than it was asked for", final=True)
            sink.write(_chunks(response.raw))

    def attempt() -> bytes:
        sink = _Sink(io.BytesIO(), size)
        sink.watch(lambda: read(sink), policy.timeout)
        if sink.file.tell() != size:
            raise TransferFailed("the connection broke off")
        return sink.file.getvalue()

    return _retry(attempt, remote, policy)


class TransferFailed(Exception):
    """A failed attempt; `final`: another cannot succeed."""

    def __init__(self, reason: str, final: bool = False, code: int | None = None):
        super().__init__(reason)
        self.final, self.code = final, code


class _Sink:
    """The file that an attempt writes to, from a thread that is left behind once it stalls: any of its calls may hang.

    Attributes:
        process: a command, which is ended with its children when the attempt is given up.
        trim: no byte may follow those of an attempt. A file of known size keeps it, which reserves its space.
    """

    def __init__(self, file: BinaryIO, limit: int, trim: bool = False):
        self.file, self.limit, self.trim, self.count = file, limit, trim, 0
        self.process: subprocess.Popen | None = None
        self._lock, self._given_up = threading.Lock(), False

    def watch(self, work: Callable[[], None], timeout: float) -> None:
        """Run `work`. Raises what it raises, and TimeoutError: it writes less than `SLOWEST`."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=run, daemon=True, name="fetch").start()
        try:
            before = 0
            while not wait([done], timeout).done and self.count - before >= SLOWEST * timeout:
                before = self.count
        finally:
            with self._lock:
                self._given_up = not done.done()
            if self._given_up and self.process:
                end_group(self.process)
        if self._given_up:
            raise TimeoutError
        done.result()

    def begin(self, position: int) -> None:
        """Go to where an attempt writes; what follows is of another version."""
        with self._lock:
            if not self._given_up:
                self.file.seek(position)
                if self.trim:
                    self.file.truncate()

    def write(self, chunks: Iterable[bytes]) -> None:
        """Append. Raises TransferFailed, UserError: the disk is full."""
        for data in chunks:
            with self._lock:
                if self._given_up:
                    raise TransferFailed("given up")
                if self.file.tell() + len(data) > self.limit:
                    raise TransferFailed(f"it has more than the expected {self.limit:,} bytes", final=True)
                try:
                    view = memoryview(data)
                    while view:
                        view = view[self.file.write(view) :]
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                        raise
                    raise UserError(
                        f"There is no space left for fetched shards: {error.strerror}.",
                        "Free some space, lower data.cache_gib, or name another folder with data.cache (TMPDIR).",
                    ) from None
                self.count += len(data)


def end_group(process: subprocess.Popen) -> None:
    """Kill a process that leads a session of its own, and its children."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _retry(attempt: Callable[[], Result], remote: Remote, policy: FetchPolicy) -> Result:
    for number in range(1, policy.attempts + 1):
        final = False
        try:
            return attempt()
        except TransferFailed as error:
            reason, final = str(error), error.final
        except TimeoutError:
            reason = f"no answer in {policy.timeout:g} s"
        except OSError as error:  # also of requests
            reason = _describe(error)
        reason = remote.hide(" ".join(reason.split()))[:LONGEST_REASON]
        if final or policy.attempts == 1:
            raise BadShard(f"{remote}: cannot be fetched ({reason})") from None
        if number < policy.attempts:
            pause = min(LONGEST_PAUSE, policy.backoff * 2 ** (number - 1))
            time.sleep(pause * random.SystemRandom().uniform(0.5, 1))
    raise BadShard(f"{remote}: cannot be fetched in {policy.attempts} attempts (the last: {reason})")


@contextmanager
def _answer(address: str, headers: dict[str, str], timeout: float) -> Iterator[requests.Response]:
    """The response of a web server. Raises TransferFailed, OSError."""
    headers = {"User-Agent": "probemb", "Accept-Encoding": "identity", **headers}
    with requests.Session() as session:
        session.max_redirects = MOST_REDIRECTS
        try:
            response = session.get(address, headers=headers, stream=True, timeout=timeout)
        except (InvalidURL, InvalidSchema, ValueError):  # whose messages may hold a password
            raise TransferFailed(_INVALID, final=True) from None
        except TooManyRedirects:
            raise TransferFailed(f"more than {MOST_REDIRECTS} redirects", final=True) from None
        except requests.Timeout:
            raise TimeoutError from None
        if (code := response.status_code) >= 300:  # also a redirect that leads nowhere
            raise TransferFailed(f"HTTP {code} {response.reason}", code < 500 and code not in _TEMPORARY, code)
        try:
            yield response
        except urllib3.exceptions.TimeoutError:
            raise TimeoutError from None
        except urllib3.exceptions.HTTPError:
            raise TransferFailed("the connection broke off") from None


def _chunks(source) -> Iterator[bytes]:
    """Yield the bytes as they arrive."""
    while data := source.read1(_CHUNK):
        yield data


def _from_web(address: str, sink: _Sink, start: int, timeout: float, state: TransferState) -> None:
    resume = {"Range": f"bytes={start}-", "If-Range": state.version} if start else {}
    try:
        with _answer(address, resume, timeout) as response:
            resumed = response.status_code == 206
            if resumed and not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
                raise TransferFailed("the server answers with another range than it was asked for", code=416)
            sink.begin(start if resumed else 0)
            tag = response.headers.get("ETag", "")
            state.version = tag if tag.startswith('"') else response.headers.get("Last-Modified")
            sink.write(_chunks(response.raw))
    except TransferFailed as error:
        if error.code == 416:  # the local file is longer
            state.version = None
        raise


def _from_command(address: str, sink: _Sink, start: int, timeout: float, state: TransferState) -> None:
    sink.begin(0)
    with tempfile.TemporaryFile() as words:
        command = ["/bin/sh", "-c", address.partition(":")[2]]
        sink.process = process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=words, start_new_session=True
        )
        try:
            sink.write(_chunks(process.stdout))
            process.wait()
        finally:
            end_group(process)  # its children may outlive it
            process.wait()
            process.stdout.close()
        if process.returncode:
            words.seek(max(0, words.seek(0, os.SEEK_END) - 2000))
            said = words.read().decode(errors="replace").strip().splitlines()
            raise TransferFailed(f"exit code {process.returncode}{': ' + said[-1] if said else ''}")


def _from_fsspec(address: str, sink: _Sink, start: int, timeout: float, state: TransferState) -> None:
    sink.begin(0)
    try:
        store, path = fsspec.core.url_to_fs(address)
        with store.open(path, "rb", block_size=_BLOCK) as file:
            sink.write(iter(lambda: file.read(_CHUNK), b""))
    except (TransferFailed, UserError):
        raise
    except Exception as error:  # each package has its own
        raise TransferFailed(f"{type(error).__name__}: {error}") from None


def _describe(error: BaseException) -> str:
    """The innermost reason; the messages around it name the whole address."""
    while inner := error.__cause__ or error.__context__:
        error = inner
    return str(getattr(error, "strerror", None) or error) or type(error).__name__
