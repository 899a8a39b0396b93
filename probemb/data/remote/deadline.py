"""Connections to web servers with one deadline for all reads and writes; urllib's time-out applies to each read.

urllib gets a `Deadline` as its time-out, and passes it, through proxies, to the code that makes the connection.
"""

from __future__ import annotations

import http.client
import queue
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable


class Deadline:
    """The moment at which all waiting for a server ends."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self.restart()

    def restart(self) -> None:
        self.end = time.monotonic() + self._seconds

    def left(self) -> float:
        """Seconds left. Raises TimeoutError."""
        left = self.end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def share(self, addresses: int) -> float:
        """Seconds for the next of a host's remaining addresses."""
        return self.left() / addresses

    def check(self, address: str, server: tuple[str, int]) -> None:
        """Hook: raises OSError for a forbidden address of a server (host, port)."""


class Answer(http.client.HTTPResponse):
    """A server's response. Reads of the body also end at `deadline`, unless it is restarted."""

    def __init__(self, sock: _Socket | _TLSSocket, *args, **more):
        super().__init__(sock, *args, **more)
        self.deadline = sock.deadline


class _Timed:
    """Mixin: a socket's reads and writes end at the deadline."""

    deadline: Deadline

    def read(self, *args):  # of TLS
        self.settimeout(self.deadline.left())
        return super().read(*args)

    def recv_into(self, *args):
        self.settimeout(self.deadline.left())
        return super().recv_into(*args)

    def sendall(self, *args):
        self.settimeout(self.deadline.left())
        return super().sendall(*args)


class _Socket(_Timed, socket.socket):
    pass


class _TLSSocket(_Timed, ssl.SSLSocket):
    pass


def _look_up(address: tuple[str, int], deadline: Deadline) -> list[tuple]:
    """A host's addresses. The system's resolver has no deadline, so a thread asks it, which may be left behind."""
    answer: queue.SimpleQueue[list[tuple] | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answer.put(socket.getaddrinfo(*address, type=socket.SOCK_STREAM))
        except UnicodeError as error:  # not a host name
            answer.put(socket.gaierror(socket.EAI_NONAME, str(error)))
        except Exception as error:
            answer.put(error)

    threading.Thread(target=ask, name="host name", daemon=True).start()
    try:
        found = answer.get(timeout=deadline.left())
    except queue.Empty:
        raise TimeoutError("no answer from the name server") from None
    if isinstance(found, Exception):
        raise found
    return found


def _connect(address: tuple[str, int], deadline: Deadline, *_) -> _Socket:
    """A connection to the first address of the host that answers."""
    found = _look_up(address, deadline)
    problem = OSError("the host has no address")
    for number, (family, kind, protocol, _, place) in enumerate(found):
        try:
            deadline.check(place[0], address)
            connection = _Socket(family, kind, protocol)
        except OSError as error:
            problem = error
            continue
        try:
            connection.deadline = deadline
            connection.settimeout(deadline.share(len(found) - number))
            connection.connect(place)
            return connection
        except OSError as error:
            connection.close()
            problem = error
    raise problem


class _HTTP(http.client.HTTPConnection):
    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self._create_connection = _connect

    def connect(self):
        super().connect()
        self.sock.settimeout(self.timeout.left())  # for the whole TLS handshake


class _HTTPS(http.client.HTTPSConnection, _HTTP):  # in this order: its connect() starts with that of _HTTP
    def connect(self):
        super().connect()
        self.sock.deadline = self.timeout


class WebHandler(urllib.request.AbstractHTTPHandler):
    """urllib's handler of http and https; responses are of the type `answer`."""

    http_request = https_request = urllib.request.AbstractHTTPHandler.do_request_

    def __init__(self, answer: type[Answer] = Answer):
        super().__init__()
        self._answer = answer

    def http_open(self, request):
        return self.do_open(self._connection(_HTTP), request)

    def https_open(self, request):
        tls = ssl.create_default_context()
        tls.sslsocket_class = _TLSSocket
        tls.set_alpn_protocols(["http/1.1"])
        return self.do_open(self._connection(_HTTPS), request, context=tls)

    def _connection(self, kind: type[_HTTP]) -> Callable[..., _HTTP]:
        def make(*args, **more) -> _HTTP:
            connection = kind(*args, **more)
            connection.response_class = self._answer
            return connection

        return make
