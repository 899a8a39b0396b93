"""Asking web servers that may do anything: one request, through redirects, up to the body of the answer.

urllib's own time-out holds for each read alone, so that a server which sends a byte now and then holds a thread for
ever, and it follows redirects to ftp. Here an answer has to begin within one deadline, connection, TLS and redirects
included; nothing but http and https is asked; a user's name and password reach nobody but the server that they are for.
Proxies are those of the environment, as urllib finds them.
"""

from __future__ import annotations

import base64
import http.client
import string
import urllib.error
import urllib.request
from dataclasses import dataclass, replace
from email.message import Message
from urllib.parse import quote, unquote, urljoin, urlsplit, urlunsplit

from probemb.data.remote.deadline import Answer, Deadline, WebHandler
from probemb.data.remote.transfer import Failed

MOST_REDIRECTS = 10
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
_AGAIN = {408, 416, 425, 429}  # HTTP codes that may pass, beside all from 500 on
_FOR_EVERYBODY = {"User-Agent", "Accept-Encoding", "Range", "If-Range"}  # headers that follow to another server
_INVALID = (
    "it is no valid web address; spaces and what is not ASCII are written as %20 and so on, and / ? # @ : in a user's "
    "name or password as %2F %3F %23 %40 %3A"
)


def open_web(address: str, headers: dict[str, str], timeout: float, method: str = "GET") -> Answer:
    """The answer of a web server, whose body is not read yet, `timeout` seconds from now at the latest.

    Raises Failed, OSError (TimeoutError), HTTPException.
    """
    headers = {"User-Agent": "probemb", "Accept-Encoding": "identity", **headers}
    place, deadline, opener = _Place.of(address), Deadline(timeout), _make_opener()
    for _ in range(MOST_REDIRECTS + 1):
        answer = _ask(opener, method, place, headers, deadline)
        if 200 <= answer.status < 300:
            return answer
        answer.close()
        if answer.status not in _REDIRECTS or "Location" not in answer.headers:
            raise _refusal(answer)
        before, place = place, place.redirected(answer)
        if not before.trusts(place):
            headers = {name: value for name, value in headers.items() if name in _FOR_EVERYBODY}
    raise Failed(f"more than {MOST_REDIRECTS} redirects", wait=None)


def version_in(headers: Message) -> str | None:
    """What tells a version of a file from its others, as If-Range takes it: a strong ETag, or else the date."""
    tag = headers.get("ETag", "")
    return tag if tag.startswith('"') else headers.get("Last-Modified")


def _ask(
    opener: urllib.request.OpenerDirector, method: str, place: _Place, headers: dict, deadline: Deadline
) -> Answer:
    headers = {**headers, "Authorization": place.login} if place.login else headers
    try:
        # urllib hands a time-out on, through proxies, to what makes the connection: here a Deadline.
        return opener.open(urllib.request.Request(place.address, headers=headers, method=method), timeout=deadline)
    except urllib.error.URLError as error:
        if isinstance(error.reason, OSError):
            raise error.reason from None
        raise Failed(str(error.reason), wait=None) from None
    except (http.client.InvalidURL, ValueError):  # whose own words may show a password or a query
        raise Failed(_INVALID, wait=None) from None


def _refusal(answer: Answer) -> Failed:
    passing = answer.status >= 500 or answer.status in _AGAIN
    asked = answer.headers.get("Retry-After", "")
    wait = float(asked) if asked.isascii() and asked.isdigit() and len(asked) < 6 else 0.0
    return Failed(f"HTTP {answer.status} {answer.reason}", wait if passing else None, answer.status)


@dataclass(frozen=True)
class _Place:
    """Where a request goes.

    address  without a user's name and password
    origin   scheme, host, port
    login    name and password, as the header Authorization has them
    """

    address: str
    origin: tuple[str, str, int]
    login: str | None = None

    @classmethod
    def of(cls, address: str) -> _Place:
        """Raises Failed: it is no address."""
        try:
            parts = urlsplit(address)
            origin = (parts.scheme, parts.hostname or "", parts.port or _PORTS[parts.scheme])
        except ValueError:
            raise Failed(_INVALID, wait=None) from None
        user, _, host = parts.netloc.rpartition("@")
        name, _, password = user.partition(":")
        known = f"{unquote(name)}:{unquote(password)}".encode()
        login = f"Basic {base64.b64encode(known).decode()}" if user else None
        return cls(urlunsplit(parts._replace(netloc=host)), origin, login)

    def redirected(self, answer: Answer) -> _Place:
        """Where the server says that the file is. Raises Failed: it is not to be asked for there."""
        # http.client decodes headers as ISO-8859-1; as urllib does, spaces and the like are quoted.
        target = quote(answer.headers["Location"], encoding="iso-8859-1", safe=string.punctuation)
        try:
            target = urljoin(self.address, target)
            scheme = urlsplit(target).scheme
        except ValueError:
            scheme = ""
        if scheme not in _PORTS:
            where = f"'{scheme[:20]}:'" if scheme else "no address"
            what = f"HTTP {answer.status} {answer.reason}, a redirect to {where}, which is not allowed"
            raise Failed(what, wait=None, code=answer.status)
        place = _Place.of(target)
        return replace(place, login=place.login or self.login) if self.trusts(place) else place

    def trusts(self, other: _Place) -> bool:
        """Whether it is the same server, or the same with TLS, which may have what is meant for this one."""
        (scheme, host, port), (other_scheme, other_host, other_port) = self.origin, other.origin
        with_tls = (scheme, port, other_scheme, other_port) == ("http", 80, "https", 443)
        return host == other_host and (with_tls or (scheme, port) == (other_scheme, other_port))


def _make_opener() -> urllib.request.OpenerDirector:
    opener = urllib.request.OpenerDirector()
    for handler in (urllib.request.ProxyHandler, urllib.request.UnknownHandler, WebHandler):
        opener.add_handler(handler())
    return opener
