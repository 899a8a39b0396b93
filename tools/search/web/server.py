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


class Channel(HTTPChannel):
    """A connection that is closed if a request takes too long to arrive, however steadily it trickles in."""

    def __init__(self, server, sock, addr, adj, map=None):
        self.began = time.monotonic()  # of the request that is arriving, or of the wait for one
        super().__init__(server, sock, addr, adj, map=map)
        waiting = [one for one in server.active_channels.values() if one.is_waiting()]
        if len(server.active_channels) > CONNECTIONS and len(waiting) > 1:
            min(waiting, key=lambda one: one.began).will_close = True

    def is_waiting(self) -> bool:
        """Whether it waits for its client and not for an answer."""
        return not (self.requests or self.total_outbufs_len or self.will_close)

    def received(self, data: bytes) -> bool:
        if self.request is None:
            self.began = time.monotonic()
        return super().received(data)

    def readable(self) -> bool:
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
