"""Search page: a small web application around a `Searcher`, for one machine or a trusted network.

GET /                the page
POST /search         a form with text, image, top, max_uncertainty, max_item_uncertainty, min_precision,
                     fits (yes, no or empty), max_score -> the answer
GET /picture/ROW     a thumbnail of an item; /picture/ROW/large up to 1600 pixels; 503 with Retry-After under load

Against requests by other sites through a visitor's browser, the Host header must name this server (against DNS
rebinding) and a form must come from this page. Pictures are re-encoded, so that no untrusted bytes reach the browser.
Only the page's own script may run.
"""

from __future__ import annotations

import io
import ipaddress
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import BoundedSemaphore, Lock
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from probemb.errors import UserError
from probemb.reports.text import printable
from tools.search.scoring import SCORES

if TYPE_CHECKING:
    from flask import Flask

    from tools.search.query import Searcher

STATIC = Path(__file__).with_name("static")
SMALL, LARGE = 480, 1600  # pixels of the longer side
FORM_BYTES = 256 << 10  # of all texts of a form
THREADS = 16
PICTURES = 12  # threads for pictures; the rest stay free for searches while a shard's server is slow
SAMPLED = 64  # gallery items whose uncertainties set the ends of the sliders
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


def make_app(
    searcher: Searcher, host: str = "127.0.0.1", names: Sequence[str] = (), max_upload: int = 16 << 20
) -> Flask:
    """The application.

    Args:
        host: address that it is bound to.
        names: further host names of this server.
        max_upload: bytes of one request.
    """
    from flask import Flask, jsonify, render_template, request

    from tools.search.query import MAX_PARTS, MAX_TEXT, MAX_TOP, QueryImage, Wish

    app = Flask("probemb search", template_folder=str(STATIC), static_folder=str(STATIC), static_url_path="/static")
    app.config.update(MAX_CONTENT_LENGTH=max_upload, MAX_FORM_MEMORY_SIZE=FORM_BYTES, MAX_FORM_PARTS=MAX_PARTS + 16)
    app.json.sort_keys = False
    guard(app, host_check(host, names))
    handle_errors(app, max_upload)
    serve_pictures(app, searcher)
    about = describe(searcher) | {"max_upload": max_upload, "max_results": MAX_TOP, "max_text": MAX_TEXT}

    @app.get("/")
    def page():
        return render_template("page.html", about=about)

    @app.get("/about")
    def about_this():
        return jsonify(about)

    @app.post("/search")
    def search():
        form, uploads = request.form, [file for file in request.files.getlist("image") if file.filename]
        if len(uploads) > MAX_PARTS:
            raise UserError(f"The query has more than {MAX_PARTS} parts.", "Leave some out.")
        wish = Wish(
            texts=form.getlist("text"),
            images=[QueryImage(file.filename[:100], file.read()) for file in uploads],
            top=read_number(form, "top", int, 24),
            max_uncertainty=read_number(form, "max_uncertainty", float),
            max_item_uncertainty=read_number(form, "max_item_uncertainty", float),
            min_precision=read_number(form, "min_precision", float),
            fits=read_choice(form, "fits"),
            max_score=read_number(form, "max_score", float),
        )
        return jsonify(shown(searcher.answer(wish)))

    return app


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
        foreign = origin is not None and urlsplit(origin).netloc.lower() != request.host.lower()
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
    from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

    @app.errorhandler(UserError)
    def user_error(error):
        return problem(400, error.what, error.remedy)

    @app.errorhandler(RequestEntityTooLarge)
    def too_large(_):
        what = f"The upload is too large: the limit is {max_upload / (1 << 20):g} MiB."
        return problem(413, what, "Choose a smaller image, or fewer parts.")

    @app.errorhandler(HTTPException)
    def other(error):
        return problem(error.code, f"{error.name}.", "Go back to the page.")


def serve_pictures(app: Flask, searcher: Searcher) -> None:
    """Add the pictures of items."""
    from flask import Response, abort

    decoding = Lock()  # one large picture at a time: memory stays bounded
    places = BoundedSemaphore(PICTURES)

    @app.get("/picture/<int:row>")
    def picture(row: int):
        return jpeg(row, SMALL)

    @app.get("/picture/<int:row>/large")
    def large_picture(row: int):
        return jpeg(row, LARGE)

    def jpeg(row: int, side: int) -> Response:
        if row >= len(searcher.index):
            abort(404)
        if not places.acquire(blocking=False):  # waiting would occupy a thread too
            response, code = problem(503, "Too many pictures were requested at once.", "Try again in a moment.")
            response.headers["Retry-After"] = "1"
            return response, code
        try:
            fetched = searcher.fetched_picture(row)  # outside the lock: a slow server must not delay the others
            with decoding:
                data = shrink(fetched or searcher.picture(row), side)
        except LookupError as error:
            return problem(404, f"The picture is not there: {error}.", "Put the shards back where they were indexed.")
        finally:
            places.release()
        return Response(data, mimetype="image/jpeg", headers={"Cache-Control": "private, max-age=3600"})


def read_number(form, name: str, kind: Callable, default=None):
    """A number of a form; `default` if it is absent or empty. Raises UserError."""
    text = form.get(name, "").strip()
    if not text:
        return default
    try:
        if len(text) > 40:
            raise ValueError
        return kind(text)
    except ValueError:
        raise UserError(f"{name} is '{text[:40]}', which is no number.", "Correct it.") from None


def read_choice(form, name: str) -> bool | None:
    """yes or no of a form; None if it is absent or empty. Raises UserError."""
    text = form.get(name, "")
    if text not in ("", "yes", "no"):
        raise UserError(f"{name} is '{text[:40]}', neither yes nor no.", "Correct it.")
    return None if not text else text == "yes"


def shown(answer: dict) -> dict:
    """An answer for the page: printable texts, and addresses of pictures instead of shards."""
    for result in answer["results"]:
        result["picture"] = f"/picture/{result['row']}" if result.pop("shard") else None
        result["key"] = printable(result["key"])
        result["captions"] = [printable(caption) for caption in result["captions"]]
    answer["query"]["texts"] = [printable(text) for text in answer["query"]["texts"]]
    return answer


def shrink(data: bytes, side: int) -> bytes:
    """An image as a JPEG of at most `side` pixels a side. Raises LookupError: it cannot be decoded."""
    from probemb.data.failures import BadSample
    from probemb.data.images import decode_image

    def draft(width: int, height: int) -> tuple[int, int]:
        scale = min(1.0, side / max(width, height))
        return math.ceil(width * scale), math.ceil(height * scale)

    try:
        image = decode_image(data, draft)
    except BadSample as error:
        raise LookupError(str(error)) from None
    image.thumbnail((side, side))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


def host_check(host: str, names: Sequence[str]) -> Callable[[str], bool]:
    """Whether a Host header means this server: --host, --allow-host, localhost, or a numeric address.

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
    """Whether a server bound to `host` is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def describe(searcher: Searcher) -> dict:
    """Facts for the page: the index, ends of the sliders for queries and items, and calibration curves."""
    index = searcher.index
    rows = sorted({i * len(index) // SAMPLED for i in range(SAMPLED)})
    items = sorted(float(index.uncertainty[row]) for row in rows)
    curves, calibrated = {}, None
    if calibration := searcher.calibration:
        calibrated = {name: getattr(calibration, name) for name in ("kind", "gallery", "within")}
        title, meaning = SCORES[calibration.score]
        calibrated |= {"score": calibration.score, "title": title, "meaning": meaning, "doubts": {}}
        for parts, curve in calibration.curves.items():
            if doubt := calibration.doubt(parts):
                calibrated["doubts"][str(parts)] = printable(f"{doubt}, so nothing is promised.")
            else:
                curves[str(parts)] = {
                    "limits": curve.threshold,
                    "coverage": curve.coverage,
                    "precision": curve.at_least,
                }
    return {
        "model": printable(Path(searcher.name).name if Path(searcher.name).exists() else searcher.name),
        "count": len(index),
        "kind": index.kind,
        "items": [items[0], items[-1]],
        "queries": query_range(searcher, rows),
        "curves": curves,
        "calibrated": calibrated,
        "fits": fits(searcher),
    }


def fits(searcher: Searcher) -> dict | None:
    """The weight for all that fits, and whether the index ranks by it; None if there is no choice."""
    weight = searcher.tolerance
    if weight is None or weight >= 1 or not (searcher.can_rank_by(weight) and searcher.can_rank_by(1.0)):
        return None
    return {"weight": weight, "own": weight == searcher.own_weight}


def query_range(searcher: Searcher, rows: Sequence[int]) -> list[float]:
    """Expected uncertainties of queries of one part: the range over sampled items and their captions."""
    captions = [caption for row in rows for caption in list(searcher.index.item(row).get("captions") or [])[:1]]
    texts = [caption[:200] for caption in captions if caption.strip()]
    u = [float(searcher.index.uncertainty[row]) for row in rows]
    for start in range(0, len(texts), 8):
        u += searcher.embed(texts[start : start + 8], []).uncertainty().tolist()
    return [min(u), max(u)]


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
