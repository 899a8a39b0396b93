"""Search page: a small web application around `Searcher`s, for one machine or a trusted network.

GET /                the page
GET /about           facts about the indexes, and limits of a query
POST /search         a form with index (a name; by default the first), text, image, like (INDEX/ROW: an item's picture),
                     weight (one for every part in this order, below 0 to leave it out), top, max_uncertainty,
                     max_item_uncertainty, coverage (percent, in place of top) -> the answer
GET /picture/INDEX/ROW  a thumbnail of an item; …/large: up to 1600 pixels; 503 with Retry-After under load. INDEX is
                        the identity of the index, as browsers keep pictures and another index here has others

Against requests by other sites through a visitor's browser, the Host header must name this server (against DNS
rebinding) and a form must come from this page. Pictures are re-encoded, so that no untrusted bytes reach the browser.
Only the page's own script may run.
"""

import io
import ipaddress
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import BoundedSemaphore, Lock
from urllib.parse import urlsplit

from flask import Flask, Response, abort, jsonify, request, send_from_directory
from waitress import create_server
from waitress.channel import HTTPChannel
from waitress.server import BaseWSGIServer
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

from probemb.data.failures import BadSample
from probemb.data.images import decode_image
from probemb.data.remote import is_remote
from probemb.errors import UserError
from probemb.reports.results import finite
from probemb.reports.text import printable, web_link
from tools.search.query import (
    MAX_PARTS,
    MAX_TEXT,
    MAX_TOP,
    MAX_WEIGHT,
    QUERIES,
    Busy,
    QueryImage,
    Searcher,
    SearchRequest,
)  # fmt: skip

HERE = Path(__file__).parent
FILES = ("page.html", "page.css", "page.js")
LIMITS = {"max_uncertainty": float, "max_item_uncertainty": float, "coverage": int}
FORM_BYTES = 256 << 10  # of all texts of a form
LARGE_FORM = 64 << 10  # bytes; larger ones are taken apart one after the other
GAP = 0.02  # seconds from one large form to the next
SMALL, LARGE = 480, 1600  # pixels of the longer side of a picture
PICTURES = 12  # threads for pictures; the rest stay free for searches while a shard's server is slow
SAMPLED = 64  # gallery items whose uncertainties say what is usual
THREADS = 32  # of which PICTURES and twice QUERIES at most are taken by pictures and uploads
CONNECTIONS = 200  # beyond these, a new one takes the place of the one whose request is incomplete for longest
HEADER_SECONDS, BODY_SECONDS = 10.0, 60.0  # from a request's first byte to the end of its header, and of its body
UNREAD_SECONDS = 30.0  # in which a client reads nothing of its answer
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}


def make_app(
    searchers: Mapping[str, Searcher], host: str = "127.0.0.1", names: Sequence[str] = (), max_upload: int = 16 << 20
) -> Flask:
    """The application.

    Args:
        searchers: by the names of their indexes.
        host: address that it is bound to.
        names: further host names of this server.
        max_upload: bytes of one request.
    """
    app = Flask("probemb search", static_folder=None)
    app.config.update(MAX_CONTENT_LENGTH=max_upload, MAX_FORM_MEMORY_SIZE=FORM_BYTES, MAX_FORM_PARTS=2 * MAX_PARTS + 16)
    app.json.sort_keys = False
    check_origin(app, host_check(host, names))
    handle_errors(app, max_upload)
    of_identity = {searcher.identity: searcher for searcher in searchers.values()}
    serve_pictures(app, of_identity)
    named = {printable(name): searcher for name, searcher in searchers.items()}
    about = {
        "indexes": [{"name": name, **describe(searcher)} for name, searcher in named.items()],
        "max_upload": max_upload, "max_results": MAX_TOP, "max_text": MAX_TEXT, "max_weight": MAX_WEIGHT,
    }  # fmt: skip

    @app.get("/")
    def page():
        return send_from_directory(HERE, "page.html")

    @app.get("/static/<name>")
    def static(name: str):
        return send_from_directory(HERE, name) if name in FILES else abort(404)

    @app.get("/about")
    def about_indexes():
        return jsonify(about)

    @app.post("/search")
    def search():
        with form_turn(request.content_length):
            form, uploads = request.form, [file for file in request.files.getlist("image") if file.filename]
        if len(uploads) > MAX_PARTS:
            raise UserError(f"The query has more than {MAX_PARTS} parts.", "Leave some out.")
        name = form.get("index") or next(iter(named))
        if name not in named:
            raise UserError(f"There is no index '{name[:100]}' here.", "Reload the page, and choose another one.")
        asked = SearchRequest(
            [text for text in form.getlist("text") if text.strip()],
            [
                *(QueryImage(file.filename[:100], file.read) for file in uploads),
                *(stored_image(of_identity, like) for like in form.getlist("like")),
            ],
            weights=[parse_number("weight", text, float) for text in form.getlist("weight")] or None,
            top=parse_number("top", form.get("top", "24"), int),
            **{name: parse_number(name, form[name], kind) for name, kind in LIMITS.items() if form.get(name)},
        )
        answer = named[name].answer(asked)
        for result in answer["results"]:
            there = result.pop("shard")
            result["picture"] = f"/picture/{named[name].identity}/{result['row']}" if there else None
            result["key"], result["url"] = printable(result["key"]), web_link(result["url"])
            result["captions"] = [printable(caption) for caption in result["captions"]]
        for texts in ("texts", "unknown_words"):
            answer["query"][texts] = [printable(text) for text in answer["query"][texts]]
        return jsonify(finite({"index": name, **answer}))

    return app


def describe(searcher: Searcher) -> dict:
    """Facts about an index for the page; `items` and `queries` are usual uncertainties, lowest and highest."""
    index, model = searcher.index, searcher.encoder.name
    rows = sorted({i * len(index) // SAMPLED for i in range(SAMPLED)})
    items = sorted(float(index.uncertainty[row]) for row in rows)
    captions = [caption for row in rows for caption in list(index.item(row).get("captions") or [])[:1]]
    texts, queries = [caption[:200] for caption in captions if caption.strip()], []
    for start in range(0, len(texts), 8):
        queries += searcher.encoder.embed(texts[start : start + 8]).uncertainty().tolist()
    queries = queries or items
    return {
        "model": printable(Path(model).resolve().name if Path(model).exists() else model),  # no path of this machine
        "identity": searcher.identity,
        "count": len(index),
        "kind": index.kind,
        "items": [items[0], items[-1]],
        "queries": [min(queries), max(queries)],
        "calibrated": searcher.calibration and {
            name: searcher.calibration[name]
            for name in ("kind", "gallery", "within", "precision", "max_uncertainty", "coverage")
        },
        "weighs": searcher.encoder.weighs,
        "matches": searcher.encoder.match_model.matches and searcher.encoder.composer is None,
    }  # fmt: skip


def stored_image(searchers: Mapping[str, Searcher], like: str) -> QueryImage:
    """The picture of INDEX/ROW, INDEX an identity. Raises UserError: there is none."""
    found = re.fullmatch(r"(\w{1,40})/(\d{1,15})", like, re.ASCII)
    if not found or found[1] not in searchers:
        what = "The result to search with is of an index that is not here, or was rebuilt."
        raise UserError(what, "Search for it again.")
    return searchers[found[1]].stored_image(int(found[2]))


def parse_number(name: str, text: str, kind: Callable):
    """A number of a form. Raises UserError."""
    try:
        if len(text) > 40:
            raise ValueError
        return kind(text)
    except ValueError:
        raise UserError(f"{name} is '{text[:40]}', which is no number.", "Correct it.") from None


_form, _waiting = Lock(), BoundedSemaphore(QUERIES)


@contextmanager
def form_turn(size: int | None) -> Iterator[None]:
    """Take large forms apart one at a time, GAP apart, so that many uploads leave the processor to other requests.

    `size`: bytes of the form, None if not known. Raises Busy: too many wait, of which each occupies a thread.
    """
    if size is not None and size <= LARGE_FORM:
        yield
        return
    if not _waiting.acquire(blocking=False):
        raise Busy
    try:
        with _form:
            try:
                yield
            finally:
                time.sleep(GAP)
    finally:
        _waiting.release()


# ------------------------------------------------------------------------------------------------ pictures


def serve_pictures(app: Flask, searchers: Mapping[str, Searcher]) -> None:
    """Add the pictures of items. `searchers` by the identity of their indexes."""
    decoding = Lock()  # one large picture at a time: memory stays bounded
    places = BoundedSemaphore(PICTURES)

    @app.get("/picture/<index>/<int:row>", defaults={"side": SMALL})
    @app.get("/picture/<index>/<int:row>/large", defaults={"side": LARGE})
    def picture(index: str, row: int, side: int):
        searcher = searchers.get(index)
        if searcher is None:
            return problem(404, "The picture is of another index.", "Search again.")
        if row >= len(searcher.index):
            abort(404)
        if not places.acquire(blocking=False):  # waiting would occupy a thread too
            return problem(503, "Too many pictures were requested at once.", "Try again in a moment.")
        try:
            fetched = None
            if is_remote(searcher.index.item(row).get("shard") or ""):
                fetched = searcher.picture(row)  # outside the lock: a slow server must not delay the others
            with decoding:
                data = shrink(fetched or searcher.picture(row), side)
        except LookupError as error:
            return problem(404, f"The picture is not there: {error}.", "Put the shards back where they were indexed.")
        finally:
            places.release()
        return Response(data, mimetype="image/jpeg", headers={"Cache-Control": "private, max-age=3600"})


def shrink(data: bytes, side: int) -> bytes:
    """An image, upright, as a JPEG of at most `side` pixels a side. Raises LookupError: it cannot be decoded."""

    def draft(width: int, height: int) -> tuple[int, int]:
        scale = min(1.0, side / max(width, height))
        return math.ceil(width * scale), math.ceil(height * scale)

    try:
        image = decode_image(data, draft, exif=True)
    except BadSample as error:
        raise LookupError(str(error)) from None
    image.thumbnail((side, side))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


# ------------------------------------------------------------------------------------------------ requests


def problem(code: int, what: str, remedy: str):
    """An error as JSON."""
    response = jsonify(error=printable(what), remedy=printable(remedy))
    if code == 503:
        response.headers["Retry-After"] = "1"
    return response, code


def check_origin(app: Flask, known: Callable[[str], bool]) -> None:
    """Refuse requests for other hosts and from other sites; set the security headers."""

    @app.before_request
    def refuse():
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

    @app.errorhandler(UserError)
    def user_error(error):
        return problem(503 if isinstance(error, Busy) else 400, error.what, error.remedy)

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


# ------------------------------------------------------------------------------------------------ the server


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
                for more in self.requests[1:]:
                    more.close()
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
        if self.request is not None and self.is_waiting():
            allowed = BODY_SECONDS if self.request.headers_finished else HEADER_SECONDS
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
        what = f"The page cannot be served at {host}:{port} ({reason})."
        raise UserError(what, "Choose another --port or --host.") from None
    for listening in {id(one): one for one in (server, *server._map.values())}.values():
        if isinstance(listening, BaseWSGIServer):  # several if the host has several addresses
            listening.channel_class = Channel
    return server


def addresses(server) -> list[str]:
    """The URLs of a server: several if its name resolves to several addresses."""
    pairs = getattr(server, "effective_listen", None) or [(server.effective_host, server.effective_port)]
    return [f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/" for host, port in pairs]
