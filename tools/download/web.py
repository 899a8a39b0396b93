"""Requests to untrusted servers with limits on time, bytes, redirects and hosts.

img2dataset fetches through `urllib.request.urlopen`, whose time-out applies to each read separately and whose answers
are unlimited: a server that sends a byte now and then blocks a thread indefinitely, and one that never stops fills the
memory. `install` replaces the opener behind it, which is the one place where img2dataset's requests are changed. A
list may name hosts of the machine's own network, so the address is checked when a connection is made, after every
redirect too.
"""

import copy
import http.client
import ipaddress
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from email.message import Message

CHUNK = 1 << 18
CAUSES = {  # the first that fits names an error
    socket.gaierror: "host not found",
    TimeoutError: "no answer",
    ssl.SSLError: "TLS",
    http.client.IncompleteRead: "cut off",
    ConnectionError: "connection",
    http.client.HTTPException: "not HTTP",
    ValueError: "not HTTP",
    Exception: "connection",
}


@dataclass(frozen=True)
class Limits:
    """Limits for one address.

    seconds    in total: redirects, waiting and the transfer
    patience   seconds without a byte
    size       bytes of the answer
    private    also contact hosts in private networks and this machine
    opted_out  whether the headers of a redirect forbid the image, too
    """

    seconds: float = 60.0
    patience: float = 10.0
    size: int = 32 << 20
    private: bool = False
    opted_out: Callable[[Message], bool] | None = None


class Refused(OSError):
    """The reason why there is no image, as "cause|detail"; causes are counted."""


class _Budget:
    """The remaining time for one address, and the hosts that may be contacted. urllib takes it for a time-out."""

    def __init__(self, limits: Limits):
        self.limits, self.end = limits, time.monotonic() + limits.seconds

    def left(self) -> float:
        """Seconds for the next wait. Raises TimeoutError."""
        left = self.end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return min(left, self.limits.patience)

    def check(self, address: str, server: tuple[str, int]) -> None:
        """Raises Refused for a private address of a server (host, port)."""
        is_global = ipaddress.ip_address(address.partition("%")[0]).is_global
        if not (self.limits.private or is_global or (server[0].lower(), server[1]) in _proxies()):
            raise Refused(f"private address|{address}")


def _proxies() -> set[tuple[str, int]]:
    """Host and port of the environment's proxies, which may stand in a private network."""
    servers = set()
    for scheme, value in urllib.request.getproxies().items():
        with suppress(ValueError):  # no address, or no port
            parts = urllib.parse.urlsplit(value if "://" in value else f"//{value}")
            if scheme in ("http", "https") and parts.hostname:
                servers |= {(parts.hostname, port) for port in ((parts.port,) if parts.port else (80, 443))}
    return servers


class _Timed:
    """Mixin: a socket's reads and writes end with the budget."""

    budget: _Budget

    def read(self, *args):  # of TLS
        self.settimeout(self.budget.left())
        return super().read(*args)

    def recv_into(self, *args):
        self.settimeout(self.budget.left())
        return super().recv_into(*args)

    def sendall(self, *args):
        self.settimeout(self.budget.left())
        return super().sendall(*args)


class _Socket(_Timed, socket.socket):
    pass


class _TLSSocket(_Timed, ssl.SSLSocket):
    pass


def _connect(server: tuple[str, int], budget: _Budget, *_) -> _Socket:
    """A connection to the first address of the host that is allowed and answers."""
    problem = OSError("the host has no address")
    for family, kind, protocol, _, place in socket.getaddrinfo(*server, type=socket.SOCK_STREAM):
        try:
            budget.check(place[0], server)
            connection = _Socket(family, kind, protocol)
        except OSError as error:
            problem = error
            continue
        try:
            connection.budget = budget
            connection.settimeout(budget.left())
            connection.connect(place)
            return connection
        except OSError as error:
            connection.close()
            problem = error
    raise problem


class _HTTP(http.client.HTTPConnection):
    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self._create_connection, self.response_class = _connect, _Answer

    def connect(self):
        super().connect()
        self.sock.settimeout(self.timeout.left())  # for the whole TLS handshake


class _HTTPS(http.client.HTTPSConnection, _HTTP):  # in this order: its connect() starts with that of _HTTP
    def connect(self):
        super().connect()
        self.sock.budget = self.timeout


class _Web(urllib.request.AbstractHTTPHandler):
    http_request = https_request = urllib.request.AbstractHTTPHandler.do_request_

    def http_open(self, request):
        return self.do_open(_HTTP, request)

    def https_open(self, request):
        tls = ssl.create_default_context()
        tls.sslsocket_class = _TLSSocket
        tls.set_alpn_protocols(["http/1.1"])
        return self.do_open(_HTTPS, request, context=tls)


class _Answer(http.client.HTTPResponse):
    def __init__(self, sock: _Socket | _TLSSocket, *args, **more):
        super().__init__(sock, *args, **more)
        self.budget = sock.budget

    def read(self, amt: int | None = None) -> bytes:
        """The body, or at most `amt` bytes of it. Raises Refused."""
        if amt is not None:
            return super().read(amt)
        size, parts, count = self.budget.limits.size, [], 0
        try:
            if (self.length or 0) > size:
                raise Refused(f"too many bytes|{self.length:,}")
            while part := super().read(CHUNK):
                parts.append(part)
                count += len(part)
                if count > size:
                    raise Refused(f"too many bytes|more than {size:,}")
        except Exception as error:
            raise explain(error, self.budget) from None
        if self.length:
            raise Refused(f"cut off|{self.length:,} bytes missing")
        return b"".join(parts)


class _Redirects(urllib.request.HTTPRedirectHandler):
    max_repeats, max_redirections = 2, 5

    def http_error_302(self, request, answer, code, message, headers):
        scheme = urllib.parse.urlsplit(headers.get("Location") or headers.get("URI") or "").scheme
        if scheme not in ("", "http", "https"):
            answer.close()
            raise Refused(f"redirect to another scheme|{scheme}")
        if (forbid := self.parent.limits.opted_out) and forbid(headers):
            answer.close()
            raise Refused("opted out|on a redirect")
        return super().http_error_302(request, answer, code, message, headers)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


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
            _Redirects(),
            _Web(),
        ):
            self.add_handler(handler)

    def open(self, request, data=None, timeout=None):
        """As urllib's; a nested open is a redirect, and shares the time of the first."""
        if isinstance(timeout, _Budget):
            return super().open(request, data, timeout)
        budget = _Budget(self.limits)
        try:
            try:
                return super().open(copy.copy(request), data, budget)  # a proxy's handler changes a request
            except urllib.error.HTTPError as error:
                _wait_as_asked(error, budget)
                return super().open(copy.copy(request), data, budget)
        except Exception as error:
            raise explain(error, budget) from None


def _wait_as_asked(error: urllib.error.HTTPError, budget: _Budget) -> None:
    """Wait as long as a busy host says (Retry-After); raises the error if it says nothing, or more than is left."""
    seconds = error.headers.get("Retry-After") or ""
    said = error.code in (429, 503) and seconds.isdecimal() and len(seconds) < 9
    if not said or time.monotonic() + int(seconds) > budget.end:
        raise error
    error.close()
    time.sleep(int(seconds))


def explain(error: Exception, budget: _Budget) -> Refused:
    """The failure as a cause that can be counted."""
    if isinstance(error, urllib.error.HTTPError):
        error.close()
        return Refused(f"redirects|{error.msg}" if error.code < 400 else f"HTTP {error.code}|{error.reason}")
    if isinstance(error, urllib.error.URLError):
        if not isinstance(error.reason, Exception):  # of UnknownHandler
            return Refused(f"not a web address|{error.reason}")
        error = error.reason
    if isinstance(error, Refused):
        return error
    if isinstance(error, TimeoutError) and time.monotonic() > budget.end - 0.02:  # the last read had what was left
        return Refused(f"too slow|not finished in {budget.limits.seconds:g} s")
    cause = next(cause for kind, cause in CAUSES.items() if isinstance(error, kind))
    return Refused(f"{cause}|{' '.join(str(error).split())[:200]}")


def install(limits: Limits) -> None:
    """Let everything that urllib opens in this process, img2dataset's requests among it, keep to `limits`."""
    urllib.request.install_opener(BoundedOpener(limits))
