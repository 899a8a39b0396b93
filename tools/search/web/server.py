"""The web server."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from probemb.errors import UserError

if TYPE_CHECKING:
    from flask import Flask

THREADS = 16


def make_server(app: Flask, host: str, port: int, max_upload: int):
    """A waitress server, bound but not running. Raises UserError: the address is in use or invalid."""
    from waitress import create_server

    logging.getLogger("waitress.queue").setLevel(logging.ERROR)  # "task queue depth": a page requests 24 pictures
    try:
        return create_server(
            app, host=host, port=port, threads=THREADS, ident=None, connection_limit=200, channel_timeout=30,
            max_request_body_size=max_upload + (1 << 20), max_request_header_size=16 << 10,
        )  # fmt: skip
    except (OSError, ValueError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"The page cannot be served at {host}:{port} ({reason}).", "Choose another --port or --host."
        ) from None


def addresses(server) -> list[str]:
    """The URLs of a server: several if its name resolves to several addresses."""
    pairs = getattr(server, "effective_listen", None) or [(server.effective_host, server.effective_port)]
    return [f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/" for host, port in pairs]
