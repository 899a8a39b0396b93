"""Small questions to a web server about a shard that is there: which version it is, and some bytes of it."""

from __future__ import annotations

import io

from probemb.data.remote.http_client import open_web, version_in
from probemb.data.remote.sources import PATIENT, Fetch, Remote, patiently
from probemb.data.remote.transfer import CHUNK, Failed, copy

WEB = ("http", "https")


def version_of(remote: Remote, how: Fetch = PATIENT) -> str | None:
    """The version of a file on a web server now: a strong ETag, or its date. None if the server states neither.

    None for every other source as well. Raises BadShard: it cannot be reached.
    """
    if remote.scheme not in WEB:
        return None

    def ask() -> str | None:
        # Not HEAD: a signed address is often good for GET alone. A server without ranges is not listened to for longer.
        with open_web(remote.address, {"Range": "bytes=0-0"}, how.timeout) as response:
            return version_in(response.headers)

    return patiently(ask, remote, how)


def fetch_range(remote: Remote, offset: int, size: int, how: Fetch) -> bytes:
    """`size` bytes of a file on a web server, from `offset` on.

    An attempt ends after `how.timeout` seconds, however steadily the server trickles. Raises BadShard: the server
    cannot be reached, serves no parts of files, or has other ones.
    """

    def ask() -> bytes:
        wanted = f"bytes {offset}-{offset + size - 1}/"
        with open_web(remote.address, {"Range": f"bytes={offset}-{offset + size - 1}"}, how.timeout) as response:
            if response.status != 206:
                raise Failed("the server does not serve parts of files", wait=None)
            if not response.headers.get("Content-Range", "").startswith(wanted):
                raise Failed("the server answers with another range than it was asked for", wait=None)
            got = io.BytesIO()
            copy(lambda: response.read1(CHUNK), got, size, how.timeout)
        if got.tell() != size:
            raise Failed("the connection broke off")
        return got.getvalue()

    return patiently(ask, remote, how)
