"""HTTP requests to untrusted servers: one request, through redirects, up to the body of the response.

urllib's time-out applies to each read separately, so that a server which sends a byte now and then blocks a thread
indefinitely, and it follows redirects to ftp. Here a response has to start within one deadline, connection, TLS and
redirects included; only http and https are used; a user's name and password are sent only to the server they are for.
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
from probemb.data.remote.transfer import TransferFailed

MOST_REDIRECTS = 10
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
_TEMPORARY = {408, 416, 425, 429}  # temporary HTTP errors, besides all from 500 on
_FORWARDED = {"User-Agent", "Accept-Encoding", "Range", "If-Range"}  # headers for another server after a redirect
_INVALID = (
    "it is no valid web address; spaces and what is not ASCII are written as %20 and so on, and / ? # @ : in a user's "
    "name or password as %2F %3F %23 %40 %3A"
)


def open_web(address: str, headers: dict[str, str], timeout: float, method: str = "GET") -> Answer:
    """The response of a web server, its body still unread, within `timeout` seconds.

    Raises TransferFailed, OSError (TimeoutError), HTTPException.
    """
    headers = {"User-Agent": "probemb", "Accept-Encoding": "identity", **headers}
    target, deadline, opener = _Target.of(address), Deadline(timeout), _make_opener()
    for _ in range(MOST_REDIRECTS + 1):
        answer = _ask(opener, method, target, headers, deadline)
        if 200 <= answer.status < 300:
            return answer
        answer.close()
        if answer.status not in _REDIRECTS or "Location" not in answer.headers:
            raise _refusal(answer)
        before, target = target, target.redirected(answer)
        if not before.trusts(target):
            headers = {name: value for name, value in headers.items() if name in _FORWARDED}
    raise TransferFailed(f"more than {MOST_REDIRECTS} redirects", wait=None)


def version_in(headers: Message) -> str | None:
    """The version of a file as If-Range takes it: a strong ETag, or else the date."""
    tag = headers.get("ETag", "")
    return tag if tag.startswith('"') else headers.get("Last-Modified")


def _ask(
    opener: urllib.request.OpenerDirector, method: str, target: _Target, headers: dict, deadline: Deadline
) -> Answer:
    headers = {**headers, "Authorization": target.login} if target.login else headers
    try:
        # urllib passes the time-out, here a Deadline, through proxies to the code that makes the connection.
        return opener.open(urllib.request.Request(target.address, headers=headers, method=method), timeout=deadline)
    except urllib.error.URLError as error:
        if isinstance(error.reason, OSError):
            raise error.reason from None
        raise TransferFailed(str(error.reason), wait=None) from None
    except (http.client.InvalidURL, ValueError):  # their messages may contain a password or a query
        raise TransferFailed(_INVALID, wait=None) from None


def _refusal(answer: Answer) -> TransferFailed:
    passing = answer.status >= 500 or answer.status in _TEMPORARY
    asked = answer.headers.get("Retry-After", "")
    wait = float(asked) if asked.isascii() and asked.isdigit() and len(asked) < 6 else 0.0
    return TransferFailed(f"HTTP {answer.status} {answer.reason}", wait if passing else None, answer.status)


@dataclass(frozen=True)
class _Target:
    """The target of a request."""

    address: str  # without a user's name and password
    origin: tuple[str, str, int]  # scheme, host, port
    login: str | None = None  # name and password as the header Authorization

    @classmethod
    def of(cls, address: str) -> _Target:
        """Parse an address. Raises TransferFailed: not a valid one."""
        try:
            parts = urlsplit(address)
            origin = (parts.scheme, parts.hostname or "", parts.port or _PORTS[parts.scheme])
        except ValueError:
            raise TransferFailed(_INVALID, wait=None) from None
        user, _, host = parts.netloc.rpartition("@")
        name, _, password = user.partition(":")
        known = f"{unquote(name)}:{unquote(password)}".encode()
        login = f"Basic {base64.b64encode(known).decode()}" if user else None
        return cls(urlunsplit(parts._replace(netloc=host)), origin, login)

    def redirected(self, answer: Answer) -> _Target:
        """The target of a redirect. Raises TransferFailed: it is not allowed."""
        # http.client decodes headers as ISO-8859-1; spaces are quoted, as urllib does.
        target = quote(answer.headers["Location"], encoding="iso-8859-1", safe=string.punctuation)
        try:
            target = urljoin(self.address, target)
            scheme = urlsplit(target).scheme
        except ValueError:
            scheme = ""
        if scheme not in _PORTS:
            where = f"'{scheme[:20]}:'" if scheme else "no address"
            what = f"HTTP {answer.status} {answer.reason}, a redirect to {where}, which is not allowed"
            raise TransferFailed(what, wait=None, code=answer.status)
        target = _Target.of(target)
        return replace(target, login=target.login or self.login) if self.trusts(target) else target

    def trusts(self, other: _Target) -> bool:
        """True if it is the same server, or the same with TLS, which may get this one's headers."""
        (scheme, host, port), (other_scheme, other_host, other_port) = self.origin, other.origin
        with_tls = (scheme, port, other_scheme, other_port) == ("http", 80, "https", 443)
        return host == other_host and (with_tls or (scheme, port) == (other_scheme, other_port))


def _make_opener() -> urllib.request.OpenerDirector:
    opener = urllib.request.OpenerDirector()
    for handler in (urllib.request.ProxyHandler, urllib.request.UnknownHandler, WebHandler):
        opener.add_handler(handler())
    return opener
