"""Refuse requests for other hosts and from other sites, and answer errors with JSON."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from probemb.errors import UserError
from probemb.reports.text import printable
from tools.search.decoding import Busy
from tools.search.wish import MAX_PARTS, MAX_TEXT

if TYPE_CHECKING:
    from flask import Flask

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}


def problem(code: int, what: str, remedy: str):
    """An error as JSON."""
    from flask import jsonify

    return jsonify(error=printable(what), remedy=printable(remedy)), code


def guard(app: Flask, known: Callable[[str], bool]) -> None:
    """Refuse requests for other hosts and from other sites; set the security headers."""
    from flask import request

    @app.before_request
    def refuse_strangers():
        if not known(request.host):
            return problem(421, "This server is not known by that name.", "Start it with --allow-host NAME.")
        origin, site = request.headers.get("Origin"), request.headers.get("Sec-Fetch-Site", "none")
        try:
            foreign = origin is not None and urlsplit(origin).netloc.lower() != request.host.lower()
        except ValueError:  # no address
            foreign = True
        if foreign or (request.method == "POST" and site not in ("same-origin", "none")):
            return problem(403, "The request comes from another site.", "Use the page of this server.")
        return None

    @app.after_request
    def harden(response):
        response.headers.update(HEADERS)
        response.headers.setdefault("Cache-Control", "no-store")
        return response


def handle_errors(app: Flask, max_upload: int) -> None:
    """Answer errors with JSON."""
    from flask import request
    from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

    @app.errorhandler(Busy)
    def busy(error):
        response, code = problem(503, error.what, error.remedy)
        response.headers["Retry-After"] = "1"
        return response, code

    @app.errorhandler(UserError)
    def user_error(error):
        return problem(400, error.what, error.remedy)

    @app.errorhandler(RequestEntityTooLarge)
    def too_large(_):
        if (request.content_length or 0) <= max_upload:  # it is the form that exceeds its limits
            what = f"The query is too long: a text has at most {MAX_TEXT:,} characters, a query {MAX_PARTS} parts."
            return problem(413, what, "Shorten it.")
        what = f"The upload is too large: the limit is {max_upload / (1 << 20):g} MiB."
        return problem(413, what, "Choose a smaller image, or fewer parts.")

    @app.errorhandler(HTTPException)
    def other(error):
        return problem(error.code, f"{error.name}.", "Go back to the page.")


def host_check(host: str, names: Sequence[str]) -> Callable[[str], bool]:
    """True if a Host header means this server: --host, --allow-host, localhost, or a numeric address.

    On the loopback only loopback addresses count; numeric ones are safe, as DNS rebinding needs a name.
    """
    allowed = {name.lower().rstrip(".") for name in (*names, host)} | {"localhost"}
    loopback = is_loopback(host)

    def known(header: str) -> bool:
        try:
            name = (urlsplit(f"//{header}").hostname or "").rstrip(".")
        except ValueError:
            return False
        if name in allowed:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or not loopback

    return known


def is_loopback(host: str) -> bool:
    """True if a server bound to `host` is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
