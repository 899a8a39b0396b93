"""Shards that are not files here: fetched whole from a web server, an object store, or the output of a command.

    https://host/cc3m/00000.tar        Python's own HTTP client: a time-out for every read, and a transfer that broke
                                       off goes on where it stopped, if the server can serve ranges
    s3://bucket/cc3m/00000.tar         any other scheme: fsspec with the scheme's package (s3fs, gcsfs, adlfs, …)
    pipe:ssh host cat cc3m/00000.tar   what a shell command prints

fsspec runs in a process of its own, like a command: its event loop does not survive the fork of a data worker, and a
process that hangs can be ended. A command is run only if the person who started the run wrote it: the files of a corpus
(index.json) can name shards beside themselves, and nothing else.
"""

from __future__ import annotations

import errno
import http.client
import os
import random
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from email.message import Message
from typing import BinaryIO, TypeVar
from urllib.parse import quote

from probemb.data.tar import BadShard
from probemb.errors import UserError, nearest

Got = TypeVar("Got")
CHUNK = 1 << 20
SLOWEST = 1024  # bytes per second, over one time-out: a server that trickles holds up a run like one that is silent
LONGEST_PAUSE = 60.0
_AGAIN = {408, 416, 425, 429}  # HTTP codes that may pass, beside all from 500 on
_REMOTE = re.compile(r"(pipe):.|([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
_READ = """
import shutil, sys, fsspec
with fsspec.open(sys.argv[1], "rb") as file:
    shutil.copyfileobj(file, sys.stdout.buffer, 1 << 20)
"""


@dataclass(frozen=True)
class Remote:
    """Where a shard lies that is not a file here. Its own type, so that no path of a file is ever taken for a command.

    str() is for messages: without a user's name, password or query, which may hold a secret.
    """

    address: str

    def __str__(self) -> str:
        if self.scheme == "pipe":
            return self.address
        scheme, _, rest = self.split()[0].partition("://")
        host, slash, path = rest.partition("/")
        return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"

    @property
    def scheme(self) -> str:
        """ "https", "s3", …, or "pipe"."""
        found = _REMOTE.match(self.address)
        return (found[1] or found[2]).lower()

    def beside(self, name: str) -> Remote:
        """The file `name` in the folder that this address is. Raises ValueError for a name that leads elsewhere."""
        if not name.isprintable() or any(mark in name for mark in ("/", "\\", "::", "*", "?", "[", "{")):
            raise ValueError(name)
        folder, query = self.split()
        name = quote(name) if self.scheme in ("http", "https") else name
        return Remote(f"{folder.rstrip('/')}/{name}{query}")

    def split(self) -> tuple[str, str]:
        """The address up to its query (as of a signed web address, which holds for the whole folder), and the query."""
        end = self.address.find("?") if self.scheme in ("http", "https") else -1
        return (self.address, "") if end < 0 else (self.address[:end], self.address[end:])


@dataclass(frozen=True)
class Fetch:
    """How patiently a remote shard is fetched.

    attempts  in all
    timeout   seconds without a byte (or with fewer than 1 KiB a second) after which an attempt is given up
    backoff   seconds before the second attempt; doubled for every further one, up to a minute, and shortened at random
              by up to a half, so that the workers of a cluster do not all come back at once
    """

    attempts: int = 5
    timeout: float = 30.0
    backoff: float = 1.0


PATIENT = Fetch()


class Failed(Exception):
    """An attempt failed; `wait` is how many seconds the server asks for, or None where no attempt can succeed."""

    def __init__(self, reason: str, wait: float | None = 0.0, code: int | None = None):
        super().__init__(reason)
        self.wait, self.code = wait, code


def is_remote(source: str) -> bool:
    """Whether what a person typed is a web address, `pipe:COMMAND` or the like, rather than a path."""
    return _REMOTE.match(source) is not None and not os.path.exists(source)


def check_scheme(remote: Remote) -> None:
    """Raises UserError if nothing here can read from such an address; imports the package that will."""
    if remote.scheme in ("pipe", "http", "https"):
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
        known = ["pipe", "http", "https", *fsspec.available_protocols()]
        raise UserError(
            f"Shards cannot be read from {remote}: '{remote.scheme}:' is not a known source."
            f"{nearest(remote.scheme, known)}",
            "Name a folder, an http(s) address, one that fsspec knows (s3://, gs://, …), or pipe:COMMAND.",
        ) from None


def fetch(
    remote: Remote, file: BinaryIO, size: int | None, how: Fetch, limit: int = 1 << 50, again: Again | None = None
) -> int:
    """Write the whole of a remote file to `file` from its beginning on; returns the number of bytes.

    `size` is what its index says, None if there is none: then at most `limit` bytes are taken. With `again` of an
    earlier call the transfer goes on at the end of `file`, if the server has the same version still.
    Raises BadShard, which names it and the reason, after the last attempt, or at once where another cannot help.
    """
    attempt_one = {"pipe": _from_command, "http": _from_web, "https": _from_web}.get(remote.scheme, _from_fsspec)
    limit = limit if size is None else size
    again = again or Again()

    def attempt() -> int:
        attempt_one(remote, file, limit, how.timeout, again)
        got = file.tell()
        if size is not None and got != size:
            raise Failed(f"it has {got:,} bytes, but its index says {size:,}")
        return got

    return patiently(attempt, remote, how)


def patiently(attempt: Callable[[], Got], remote: Remote, how: Fetch) -> Got:
    """What an attempt to reach `remote` gives; one that fails for now is made again. Raises BadShard, as `fetch`."""
    reason, wait = "", 0.0
    for number in range(how.attempts):
        if number:
            pause = min(LONGEST_PAUSE, how.backoff * 2 ** (number - 1))
            time.sleep(max(pause * random.SystemRandom().uniform(0.5, 1), min(wait, LONGEST_PAUSE)))
        try:
            return attempt()
        except Failed as error:
            reason, wait = " ".join(str(error).split()), error.wait
        except TimeoutError:
            reason, wait = f"no answer in {how.timeout:g} s", 0.0
        except (OSError, http.client.HTTPException) as error:
            reason, wait = _describe(error), 0.0
        if wait is None or how.attempts == 1:
            raise BadShard(f"{remote}: cannot be fetched ({reason})") from None
    raise BadShard(f"{remote}: cannot be fetched in {how.attempts} attempts (the last: {reason})")


def fetch_bytes(remote: Remote, limit: int, how: Fetch) -> bytes:
    """A small remote file. Raises BadShard, also for more than `limit` bytes."""
    with tempfile.TemporaryFile() as file:
        size = fetch(remote, file, None, how, limit)
        file.seek(0)
        return file.read(size)


@dataclass
class Again:
    """What an attempt leaves for the next one: the mark of the version that the bytes so far belong to."""

    version: str | None = None

    def begin(self, file: BinaryIO, position: int) -> None:
        """Where in the file an attempt writes. Its size stays: the cache has reserved its room with it."""
        file.seek(position)


def _write(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[file.write(view) :]
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise UserError(
            f"There is no room left for fetched shards: {error.strerror}.",
            "Free some space, lower data.cache_gib (--cache-gib), or name another folder with data.cache (TMPDIR).",
        ) from None


def copy(read: Callable[[], bytes], file: BinaryIO, limit: int, timeout: float) -> None:
    """Append all that `read` gives, until it gives nothing."""
    since, count = time.monotonic(), 0
    while data := read():
        if file.tell() + len(data) > limit:
            raise Failed(f"it has more than {limit:,} bytes, which it should have at most", wait=None)
        _write(file, data)
        count += len(data)
        elapsed = time.monotonic() - since
        if elapsed >= timeout:
            if count < SLOWEST * elapsed:
                raise Failed(f"only {count:,} bytes came in {elapsed:.0f} s")
            since, count = time.monotonic(), 0


def open_web(remote: Remote, headers: dict[str, str], timeout: float) -> http.client.HTTPResponse:
    """The answer of a web server, whose body is not read yet. Raises Failed, OSError, HTTPException."""
    headers = {"User-Agent": "probemb", "Accept-Encoding": "identity", **headers}
    try:
        return urllib.request.urlopen(urllib.request.Request(remote.address, headers=headers), timeout=timeout)
    except urllib.error.HTTPError as error:
        error.close()
        passing = error.code >= 500 or error.code in _AGAIN
        asked = error.headers.get("Retry-After", "")
        wait = float(asked) if asked.isascii() and asked.isdigit() and len(asked) < 6 else 0.0
        raise Failed(f"HTTP {error.code} {error.reason}", wait if passing else None, error.code) from None
    except ValueError as error:  # what urllib raises for an address that is none
        raise Failed(str(error), wait=None) from None


def version_in(headers: Message) -> str | None:
    """What tells a version of a file from its others, as If-Range takes it: a strong ETag, or else the date."""
    tag = headers.get("ETag", "")
    return tag if tag.startswith('"') else headers.get("Last-Modified")


def _from_web(remote: Remote, file: BinaryIO, limit: int, timeout: float, again: Again) -> None:
    start = file.tell() if again.version else 0
    go_on = {"Range": f"bytes={start}-", "If-Range": again.version} if start else {}
    try:
        response = open_web(remote, go_on, timeout)
    except Failed as error:
        if error.code == 416:  # more bytes are here than there
            again.version = None
        raise
    with response:
        resumed = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
        if response.status == 206 and not resumed:
            again.version = None
            raise Failed("the server answers with another range than it was asked for")
        again.begin(file, start if resumed else 0)
        again.version = version_in(response.headers)
        copy(lambda: response.read1(CHUNK), file, limit, timeout)
        if response.length:  # what http.client still expects of the length that the header states
            raise Failed(f"the connection broke off {response.length:,} bytes before the end")


def _from_command(remote: Remote, file: BinaryIO, limit: int, timeout: float, again: Again) -> None:
    _from_process(["/bin/sh", "-c", remote.address.partition(":")[2]], file, limit, timeout)


def _from_fsspec(remote: Remote, file: BinaryIO, limit: int, timeout: float, again: Again) -> None:
    _from_process([sys.executable, "-c", _READ, remote.address], file, limit, timeout)


def _from_process(argv: list[str], file: BinaryIO, limit: int, timeout: float) -> None:
    """What a program prints; it and all that it started are ended when it is silent for too long."""
    file.seek(0)
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=words, start_new_session=True, bufsize=0
        )
        ready = select.poll()
        ready.register(process.stdout, select.POLLIN)

        def read() -> bytes:
            if not ready.poll(timeout * 1000):
                raise TimeoutError
            return os.read(process.stdout.fileno(), CHUNK)

        try:
            copy(read, file, limit, timeout)
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        finally:
            with suppress(ProcessLookupError):  # children of the shell may be left even when it has ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
        if process.returncode:
            words.seek(max(0, words.seek(0, os.SEEK_END) - 2000))
            said = words.read().decode(errors="replace").strip().splitlines()
            raise Failed(f"exit code {process.returncode}{': ' + said[-1][:200] if said else ''}")


def _describe(error: Exception) -> str:
    reason = getattr(error, "reason", error)
    return " ".join(str(getattr(reason, "strerror", None) or reason).split()) or type(reason).__name__
