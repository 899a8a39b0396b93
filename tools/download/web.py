"""Requests to untrusted servers with limits on time and bytes per address.

img2dataset uses urllib, whose time-out applies to each read separately and whose responses are unlimited: a server that
sends a byte now and then blocks a thread indefinitely, and one that never stops fills the memory. `bounded` installs an
opener in urllib while a shard is fetched that limits both, follows few redirects, connects to no private address (a
list may name hosts of the machine's own network), skips what its server opts out, and pauses as hosts ask.
"""

from __future__ import annotations

import copy
import http.client
import ipaddress
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from probemb.data.remote.deadline import Answer, Deadline, WebHandler

CHUNK = 1 << 18
OPT_OUT = {"noai", "noimageai", "noindex", "noimageindex", "none"}  # "none" is noindex and nofollow
PLACEHOLDERS = (  # redirects for removed images, whose placeholders would be stored as pictures
    ("imgur.com", "/removed.png"),
    ("yimg.com", "/photo_unavailable"),
    ("redditstatic.com", "/image_removed"),
)


@dataclass(frozen=True)
class Limits:
    """Limits for one address.

    seconds    in total: redirects, waiting and the transfer
    patience   seconds without a byte
    size       bytes of the answer
    redirects  followed at most
    private    also contact hosts in private networks and this machine
    agents     names, in lower case, under which a server's X-Robots-Tag may opt out; with none nobody opts out
    """

    seconds: float = 60.0
    patience: float = 10.0
    size: int = 32 << 20
    redirects: int = 5
    private: bool = False
    agents: tuple[str, ...] = ()


class Refused(OSError):
    """The reason why there is no image: `cause` for the histogram, and details. str() is "cause|details"."""

    def __init__(self, cause: str, detail: str = ""):
        super().__init__(f"{cause}|{' '.join(detail.split())[:200]}")
        self.cause = cause


class _Budget(Deadline):
    """The remaining time for one address, and the hosts that may be contacted."""

    def __init__(self, limits: Limits):
        super().__init__(limits.seconds)
        self.limits = limits

    def left(self) -> float:
        try:
            return min(super().left(), self.limits.patience)
        except TimeoutError:
            raise Refused("too slow", f"not finished in {self.limits.seconds:g} s") from None

    def share(self, addresses: int) -> float:
        return self.left()

    def check(self, address: str, server: tuple[str, int]) -> None:
        is_global = ipaddress.ip_address(address.partition("%")[0]).is_global
        if not (self.limits.private or is_global or (server[0].lower(), server[1]) in proxies()):
            raise Refused("private address", address)


def proxies() -> set[tuple[str, int]]:
    """Host and port of the environment's proxies, which may stand in a private network."""
    found = set()
    for scheme, value in urllib.request.getproxies().items():
        with suppress(ValueError):  # no address, or no port
            parts = urllib.parse.urlsplit(value if "://" in value else f"//{value}")
            if scheme in ("http", "https") and parts.hostname:
                ports = (parts.port,) if parts.port else (80, 443)
                found |= {(parts.hostname, port) for port in ports}
    return found


class _Answer(Answer):
    def read(self, amt: int | None = None) -> bytes:
        """The body, or at most `amt` bytes of it. Raises Refused: too large, or cut off."""
        if amt is not None:
            return super().read(amt)
        size = self.deadline.limits.size
        if self.length is not None and self.length > size:
            raise Refused("too many bytes", f"{self.length:,}")
        parts, count = [], 0
        while part := super().read(CHUNK):
            parts.append(part)
            count += len(part)
            if count > size:
                raise Refused("too many bytes", f"more than {size:,}")
        if self.length:
            raise Refused("cut off", f"{self.length:,} bytes missing")
        return b"".join(parts)


class _Redirects(urllib.request.HTTPRedirectHandler):
    max_repeats = 2

    def __init__(self, limits: Limits):
        self.limits, self.max_redirections = limits, limits.redirects

    def http_error_302(self, request, answer, code, message, headers):
        target = headers.get("Location") or headers.get("URI") or ""
        scheme = urllib.parse.urlsplit(target).scheme
        if scheme not in ("", "http", "https"):
            answer.close()
            raise Refused("redirect to another scheme", scheme)
        _respect(headers, self.limits.agents)
        return super().http_error_302(request, answer, code, message, headers)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302

    def redirect_request(self, request, answer, code, message, headers, address):
        parts = urllib.parse.urlsplit(address)
        host = parts.hostname or ""
        if any(host.endswith(name) and parts.path.startswith(path) for name, path in PLACEHOLDERS):
            raise Refused("image removed", host)
        return super().redirect_request(request, answer, code, message, headers, address)


class BoundedOpener(urllib.request.OpenerDirector):
    """urllib's opener for http and https within `limits`; every failure becomes `Refused`."""

    def __init__(self, limits: Limits):
        super().__init__()
        self.limits = limits
        for handler in (
            urllib.request.ProxyHandler(),
            urllib.request.UnknownHandler(),
            urllib.request.HTTPDefaultErrorHandler(),
            urllib.request.HTTPErrorProcessor(),
            _Redirects(limits),
            WebHandler(_Answer),
        ):
            self.add_handler(handler)
        self.stopped = False  # set when nothing can be stored any more: further requests fail at once
        self._pauses: dict[str, float] = {}  # until when a host asks not to be asked

    def open(self, request, data=None, timeout=None):
        """As urllib's; a nested open is a redirect, and shares the time of the first."""
        if isinstance(timeout, _Budget):
            return super().open(request, data, timeout)
        host = urllib.parse.urlsplit(getattr(request, "full_url", request)).netloc
        for may_repeat in (True, False):
            if self.stopped:
                raise Refused("stopped")
            pause = self._pauses.get(host, 0) - time.monotonic()
            if pause > self.limits.seconds:
                raise Refused("HTTP 429", f"the host asks for a pause of {pause:.0f} s more")
            time.sleep(max(0, pause))
            budget = _Budget(self.limits)
            try:
                answer = super().open(copy.copy(request), data, budget)  # a proxy's handler changes a request
                _respect(answer.headers, self.limits.agents)
                break
            except Exception as error:
                if isinstance(error, urllib.error.HTTPError) and error.code in (429, 503):
                    pause = _seconds(error.headers.get("Retry-After"))
                    self._pauses[host] = max(self._pauses.get(host, 0), time.monotonic() + pause)
                    if may_repeat and pause:
                        error.close()
                        continue
                raise _explain(error, budget) from None
        read = answer.read

        def explained(*args):
            try:
                return read(*args)
            except Exception as error:
                raise _explain(error, budget) from None

        answer.read = explained
        return answer


def _respect(headers: http.client.HTTPMessage, agents: tuple[str, ...]) -> None:
    """Raise Refused where X-Robots-Tag opts out: a rule for everyone, or below the name of one of the agents."""
    for value in headers.get_all("X-Robots-Tag", []) if agents else ():
        agent = "*"
        for part in value.lower().split(","):
            name, named, rule = map(str.strip, part.partition(":"))
            if name.startswith(("max-", "unavailable_after")):  # rules with values
                continue
            if named:
                agent = name
            if agent in ("*", *agents) and (rule if named else name) in OPT_OUT:
                raise Refused("opted out", value)


def _seconds(retry_after: str | None) -> float:
    """The pause of a Retry-After header, in seconds or as a date; 0 for what is neither."""
    try:
        if retry_after and retry_after.strip().isdigit():
            return float(retry_after)
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (TypeError, ValueError):
        return 0.0


def _explain(error: Exception, budget: _Budget) -> Refused:
    """The failure as a cause for the histogram."""
    if isinstance(error, urllib.error.HTTPError):
        error.close()
        if error.code < 400:
            return Refused("redirects", str(error.msg))
        return Refused(f"HTTP {error.code}", str(error.reason))
    if isinstance(error, urllib.error.URLError):
        if not isinstance(error.reason, Exception):  # of UnknownHandler
            return Refused("not a web address", str(error.reason))
        error = error.reason
    if isinstance(error, Refused):
        return error
    if isinstance(error, socket.gaierror):
        return Refused("host not found", str(error))
    if isinstance(error, TimeoutError):
        late = time.monotonic() > budget.end - 0.02  # the last read had only what was left
        if late:
            return Refused("too slow")
        return Refused("no answer", str(error) or f"nothing in {budget.limits.patience:g} s")
    if isinstance(error, ssl.SSLError):
        return Refused("TLS", getattr(error, "verify_message", "") or str(error))
    if isinstance(error, http.client.IncompleteRead):
        return Refused("cut off", "the body ends early")
    if isinstance(error, (ConnectionError, http.client.RemoteDisconnected)):
        return Refused("connection", str(error))
    if isinstance(error, (http.client.HTTPException, ValueError)):
        return Refused("not HTTP", f"{type(error).__name__} {error}")
    return Refused("connection", f"{type(error).__name__} {error}")


@contextmanager
def bounded(limits: Limits) -> Iterator[BoundedOpener]:
    """Apply `limits` to everything that urllib opens in this process."""
    before = urllib.request._opener
    opener = BoundedOpener(limits)
    urllib.request.install_opener(opener)
    try:
        yield opener
    finally:
        urllib.request.install_opener(before)
