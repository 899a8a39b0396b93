"""Remote shards, fetched whole from a web server, an object store, or the output of a command.

    https://host/cc3m/00000.tar        Python's own HTTP client: a time-out for every read, and a broken transfer
                                       resumes where it stopped if the server supports ranges
    s3://bucket/cc3m/00000.tar         any other scheme: fsspec with the scheme's package (s3fs, gcsfs, adlfs, …)
    pipe:ssh host cat cc3m/00000.tar   the output of a shell command

fsspec runs in a process of its own, like a command: its event loop does not survive the fork of a data worker, and a
hanging process can be killed. Only the user can name a command: the files of a corpus (index.json) can name shards
beside themselves, and nothing else.
"""

from __future__ import annotations

import http.client
import io
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO, TypeVar
from urllib.parse import quote

from probemb.data.failures import BadShard
from probemb.data.remote.child_process import read_output
from probemb.data.remote.http_client import open_web, version_in
from probemb.data.remote.transfer import CHUNK, TransferFailed, copy
from probemb.errors import UserError, nearest

Got = TypeVar("Got")
WEB = ("http", "https")
LONGEST_PAUSE = 60.0
LONGEST_REASON = 300  # characters of a server's or command's message
_REMOTE = re.compile(r"(pipe):.|([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
_HOST = re.compile(r"[^:]*(:\d*)?|\[.*\](:\d*)?")
_READ = """
import shutil, sys, fsspec
with fsspec.open(sys.argv[1], "rb") as file:
    shutil.copyfileobj(file, sys.stdout.buffer, 1 << 20)
"""


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
    timeout   seconds after which an attempt fails without an answer (of a web server: everything before the body,
              redirects included), without a further byte, or below 1 KiB a second
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
    if remote.scheme in ("pipe", *WEB):
        return
    import fsspec

    try:
        fsspec.get_filesystem_class(remote.scheme)
    except ImportError as error:
        raise UserError(
            f"{remote} needs a package that is not installed: {str(error).rstrip('.')}.",
            "Install it with pip into the environment of this project.",
        ) from None
    except ValueError:
        known = ["pipe", *WEB, *fsspec.available_protocols()]
        raise UserError(
            f"Shards cannot be read from {remote}: '{remote.scheme}:' is not a known source."
            f"{nearest(remote.scheme, known)}",
            "Name a folder, an http(s) address, one that fsspec knows (s3://, gs://, …), or pipe:COMMAND.",
        ) from None


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
    attempt_one = {"pipe": _from_command, "http": _from_web, "https": _from_web}.get(remote.scheme, _from_fsspec)
    limit = limit if size is None else size
    state = state or TransferState()

    def attempt() -> int:
        attempt_one(remote, file, limit, policy.timeout, state)
        got = file.tell()
        if size is not None and got != size:
            raise TransferFailed(f"it has {got:,} bytes, but its index says {size:,}")
        return got

    return retry(attempt, remote, policy)


def retry(attempt: Callable[[], Got], remote: Remote, policy: FetchPolicy) -> Got:
    """The result of `attempt`, which is repeated after temporary failures. Raises BadShard, as `fetch`."""
    reason, wait = "", 0.0
    for number in range(policy.attempts):
        if number:
            pause = min(LONGEST_PAUSE, policy.backoff * 2 ** (number - 1))
            time.sleep(max(pause * random.SystemRandom().uniform(0.5, 1), min(wait, LONGEST_PAUSE)))
        try:
            return attempt()
        except TransferFailed as error:
            reason, wait = str(error), error.wait
        except TimeoutError:
            reason, wait = f"no answer in {policy.timeout:g} s", 0.0
        except (OSError, http.client.HTTPException) as error:
            reason, wait = _describe(error), 0.0
        reason = remote.hide(" ".join(reason.split()))[:LONGEST_REASON]
        if wait is None or policy.attempts == 1:
            raise BadShard(f"{remote}: cannot be fetched ({reason})") from None
    raise BadShard(f"{remote}: cannot be fetched in {policy.attempts} attempts (the last: {reason})")


def fetch_bytes(remote: Remote, limit: int, policy: FetchPolicy) -> bytes:
    """A small remote file. Raises BadShard, also for more than `limit` bytes."""
    with tempfile.TemporaryFile() as file:
        size = fetch(remote, file, None, policy, limit)
        file.seek(0)
        return file.read(size)


def fetch_range(remote: Remote, offset: int, size: int, policy: FetchPolicy) -> bytes:
    """`size` bytes of a file on a web server, from `offset` on.

    An attempt ends after `policy.timeout` seconds, even if bytes arrive. Raises BadShard: the server cannot be reached,
    serves no ranges, or has another one.
    """

    def ask() -> bytes:
        wanted = f"bytes {offset}-{offset + size - 1}/"
        with open_web(remote.address, {"Range": f"bytes={offset}-{offset + size - 1}"}, policy.timeout) as response:
            if response.status != 206:
                raise TransferFailed("the server does not serve parts of files", wait=None)
            if not response.headers.get("Content-Range", "").startswith(wanted):
                raise TransferFailed("the server answers with another range than it was asked for", wait=None)
            got = io.BytesIO()
            copy(lambda: response.read1(CHUNK), got, size, policy.timeout)
        if got.tell() != size:
            raise TransferFailed("the connection broke off")
        return got.getvalue()

    return retry(ask, remote, policy)


@dataclass
class TransferState:
    """State of a transfer between attempts: the version of the file that the bytes so far belong to."""

    version: str | None = None

    def begin(self, file: BinaryIO, position: int) -> None:
        """Seek to where an attempt writes. The file keeps its size, with which the cache has reserved its space."""
        file.seek(position)


def _from_web(remote: Remote, file: BinaryIO, limit: int, timeout: float, state: TransferState) -> None:
    start = file.tell() if state.version else 0
    resume = {"Range": f"bytes={start}-", "If-Range": state.version} if start else {}
    try:
        response = open_web(remote.address, resume, timeout)
    except TransferFailed as error:
        if error.code == 416:  # the local file is longer
            state.version = None
        raise
    with response:
        resumed = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
        if response.status == 206 and not resumed:
            state.version = None
            raise TransferFailed("the server answers with another range than it was asked for")
        state.begin(file, start if resumed else 0)
        state.version = version_in(response.headers)

        def read() -> bytes:
            response.deadline.restart()
            return response.read1(CHUNK)

        copy(read, file, limit, timeout)
        if response.length:  # bytes still missing of the stated length
            raise TransferFailed(f"the connection broke off {response.length:,} bytes before the end")


def _from_command(remote: Remote, file: BinaryIO, limit: int, timeout: float, state: TransferState) -> None:
    read_output(["/bin/sh", "-c", remote.address.partition(":")[2]], file, limit, timeout)


def _from_fsspec(remote: Remote, file: BinaryIO, limit: int, timeout: float, state: TransferState) -> None:
    read_output([sys.executable, "-c", _READ, remote.address], file, limit, timeout)


def _describe(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error) or type(error).__name__
