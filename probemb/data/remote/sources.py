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

import http.client
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
from probemb.data.remote.transfer import CHUNK, Failed, copy
from probemb.errors import UserError, nearest

Got = TypeVar("Got")
LONGEST_PAUSE = 60.0
LONGEST_REASON = 300  # characters of what a server or a command says
_REMOTE = re.compile(r"(pipe):.|([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
_HOST = re.compile(r"[^:]*(:\d*)?|\[.*\](:\d*)?")
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
        host = host.rpartition("@")[2]
        if "@" in self.address and not _HOST.fullmatch(host):  # part of a password that has a / or ? in it
            return f"{scheme}://…"
        return f"{scheme}://{host}{slash}{path}"

    def hide(self, text: str) -> str:
        """A text of others, without the secrets of this address where it repeats them."""
        text = text.replace(self.address, str(self))
        user = self.address.partition("://")[2].partition("/")[0].rpartition("@")[0]
        return text.replace(user, "…") if ":" in user and self.scheme != "pipe" else text

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
    timeout   seconds after which an attempt is given up that has had no answer (of a web server: all before the body,
              redirects included), or then no byte, or fewer than 1 KiB a second
    backoff   seconds before the second attempt; doubled for every further one, up to a minute, and shortened at random
              by up to a half, so that the workers of a cluster do not all come back at once
    """

    attempts: int = 5
    timeout: float = 30.0
    backoff: float = 1.0


PATIENT = Fetch()


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
            reason, wait = str(error), error.wait
        except TimeoutError:
            reason, wait = f"no answer in {how.timeout:g} s", 0.0
        except (OSError, http.client.HTTPException) as error:
            reason, wait = _describe(error), 0.0
        reason = remote.hide(" ".join(reason.split()))[:LONGEST_REASON]
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


def _from_web(remote: Remote, file: BinaryIO, limit: int, timeout: float, again: Again) -> None:
    start = file.tell() if again.version else 0
    go_on = {"Range": f"bytes={start}-", "If-Range": again.version} if start else {}
    try:
        response = open_web(remote.address, go_on, timeout)
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

        def read() -> bytes:
            response.deadline.restart()
            return response.read1(CHUNK)

        copy(read, file, limit, timeout)
        if response.length:  # what http.client still expects of the length that the header states
            raise Failed(f"the connection broke off {response.length:,} bytes before the end")


def _from_command(remote: Remote, file: BinaryIO, limit: int, timeout: float, again: Again) -> None:
    read_output(["/bin/sh", "-c", remote.address.partition(":")[2]], file, limit, timeout)


def _from_fsspec(remote: Remote, file: BinaryIO, limit: int, timeout: float, again: Again) -> None:
    read_output([sys.executable, "-c", _READ, remote.address], file, limit, timeout)


def _describe(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error) or type(error).__name__
