"""The web server: waitress, whose connections have a deadline for each request and give way to newer ones."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from waitress import create_server
from waitress.channel import HTTPChannel
from waitress.server import BaseWSGIServer

from probemb.errors import UserError

if TYPE_CHECKING:
    from flask import Flask

THREADS = 32  # at most PICTURES of thumbnails.py and twice QUERIES of decoding.py are taken by pictures and uploads
CONNECTIONS = 200  # beyond these, a new one takes the place of the one whose request is incomplete for longest
HEADER_SECONDS, BODY_SECONDS = 10.0, 60.0  # from a request's first byte to the end of its header, and of its body
UNREAD_SECONDS = 30.0  # in which a client reads nothing of its answer


class Channel(HTTPChannel):
    """A connection that is closed if a request takes too long to arrive, however steadily it trickles in, or an answer
    stays unread. It answers one request at a time: a thread that writes several answers would wait for its client.
    """

    def __init__(self, server, sock, addr, adj, map=None):
        self.began = time.monotonic()  # of the request that is arriving, or of the wait for one
        self.pipelined = False  # it has sent requests before it got an answer
        self.read = self.began  # when the client last took something of an answer, or that was begun
        super().__init__(server, sock, addr, adj, map=map)
        waiting = [one for one in server.active_channels.values() if one.is_waiting()]
        if len(server.active_channels) > CONNECTIONS and len(waiting) > 1:
            min(waiting, key=lambda one: one.began).will_close = True

    def is_waiting(self) -> bool:
        """True if it waits for its client and not for an answer."""
        return not (self.requests or self.total_outbufs_len or self.will_close)

    def received(self, data: bytes) -> bool:
        if self.request is None:
            self.began = time.monotonic()
        taken = super().received(data)
        with self.requests_lock:
            if len(self.requests) > 1:  # browsers send the next one after the answer
                for request in self.requests[1:]:
                    request.close()
                del self.requests[1:]
                self.requests[0].headers["CONNECTION"] = "close"
                self.pipelined = True
        return taken

    def service(self) -> None:
        super().service()
        if self.pipelined:
            with self.requests_lock:
                self.close_when_flushed = True
            self.server.pull_trigger()

    def write_soon(self, data) -> int:
        if not self.total_outbufs_len:
            self.read = time.monotonic()
        return super().write_soon(data)

    def send(self, data: bytes, do_close: bool = True) -> int:
        sent = super().send(data, do_close=do_close)
        if sent:
            self.read = time.monotonic()
        return sent

    def writable(self) -> bool:
        return self.connected and bool(super().writable())

    def readable(self) -> bool:
        if self.total_outbufs_len and time.monotonic() > self.read + UNREAD_SECONDS:
            self.handle_close()  # wakes the thread that writes, if it waits
            return False
        request = self.request
        if request is not None and self.is_waiting():
            allowed = BODY_SECONDS if request.headers_finished else HEADER_SECONDS
            if time.monotonic() > self.began + allowed:
                self.will_close = True
        return super().readable()


def make_server(app: Flask, host: str, port: int, max_upload: int):
    """A waitress server, bound but not running. Raises UserError: the address is in use or invalid."""
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)  # "task queue depth": a page requests 24 pictures
    try:
        server = create_server(
            app, host=host, port=port, threads=THREADS, ident=None, connection_limit=2 * CONNECTIONS,
            channel_timeout=30, max_request_body_size=max_upload + (1 << 20), max_request_header_size=16 << 10,
        )  # fmt: skip
    except (OSError, ValueError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"The page cannot be served at {host}:{port} ({reason}).", "Choose another --port or --host."
        ) from None
    for listening in {id(one): one for one in (server, *server._map.values())}.values():
        if isinstance(listening, BaseWSGIServer):  # several if the host has several addresses
            listening.channel_class = Channel
    return server


def addresses(server) -> list[str]:
    """The URLs of a server: several if its name resolves to several addresses."""
    pairs = getattr(server, "effective_listen", None) or [(server.effective_host, server.effective_port)]
    return [f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/" for host, port in pairs]
