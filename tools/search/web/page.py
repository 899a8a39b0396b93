"""Search page: a small web application around `Searcher`s, for one machine or a trusted network.

GET /                the page
GET /about           facts about the indexes, and limits of a query
POST /search         a form with index (a name; by default the first), text, image, like (INDEX/ROW: an item's picture),
                     weight (one for every part in this order, below 0 to leave it out), top, max_uncertainty,
                     max_item_uncertainty, min_precision, fits (yes, no or empty), max_score, more (general, specific
                     or empty)
                     -> the answer
GET /picture/INDEX/ROW  a thumbnail of an item; …/large: up to 1600 pixels; 503 with Retry-After under load. INDEX is
                        the identity of the index, as browsers keep pictures and another index here has others

Against requests by other sites through a visitor's browser, the Host header must name this server (against DNS
rebinding) and a form must come from this page. Pictures are re-encoded, so that no untrusted bytes reach the browser.
Only the page's own script may run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from probemb.cli.results import finite
from probemb.errors import UserError
from probemb.reports.text import printable, web_link
from tools.search.web.about import describe
from tools.search.web.guard import guard, handle_errors, host_check
from tools.search.web.pace import Pace
from tools.search.web.thumbnails import serve_pictures

if TYPE_CHECKING:
    from flask import Flask

    from tools.search.query import Searcher
    from tools.search.wish import StoredImage

STATIC = Path(__file__).with_name("static")
FORM_BYTES = 256 << 10  # of all texts of a form


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
    from flask import Flask, jsonify, request, send_file

    from tools.search.wish import MAX_PARTS, MAX_TEXT, MAX_TOP, MAX_WEIGHT, WITHOUT, QueryImage, Wish

    app = Flask("probemb search", static_folder=str(STATIC), static_url_path="/static")
    app.config.update(MAX_CONTENT_LENGTH=max_upload, MAX_FORM_MEMORY_SIZE=FORM_BYTES, MAX_FORM_PARTS=2 * MAX_PARTS + 16)
    app.json.sort_keys = False
    guard(app, host_check(host, names))
    handle_errors(app, max_upload)
    pace = Pace()
    of_identity = {searcher.identity: searcher for searcher in searchers.values()}
    serve_pictures(app, of_identity)
    about = {
        "indexes": [{"name": printable(name), **describe(searcher)} for name, searcher in searchers.items()],
        "max_upload": max_upload, "max_results": MAX_TOP, "max_text": MAX_TEXT, "max_parts": MAX_PARTS,
        "max_weight": MAX_WEIGHT, "without": WITHOUT,
    }  # fmt: skip
    named = dict(zip((one["name"] for one in about["indexes"]), searchers.values()))

    @app.get("/")
    def page():
        return send_file(STATIC / "page.html")

    @app.get("/about")
    def about_this():
        return jsonify(about)

    @app.post("/search")
    def search():
        with pace.turn(request.content_length):
            form, uploads = request.form, [file for file in request.files.getlist("image") if file.filename]
        if len(uploads) > MAX_PARTS:
            raise UserError(f"The query has more than {MAX_PARTS} parts.", "Leave some out.")
        name = form.get("index") or next(iter(named))
        if name not in named:
            raise UserError(f"There is no index '{name[:100]}' here.", "Reload the page, and choose another one.")
        wish = Wish(
            texts=form.getlist("text"),
            images=[
                *(QueryImage(file.filename[:100], file.read()) for file in uploads),
                *(stored_image(of_identity, like) for like in form.getlist("like")),
            ],
            top=read_number(form, "top", int, 24),
            max_uncertainty=read_number(form, "max_uncertainty", float),
            max_item_uncertainty=read_number(form, "max_item_uncertainty", float),
            min_precision=read_number(form, "min_precision", float),
            fits=None if (fits := read_choice(form, "fits", ("yes", "no"))) is None else fits == "yes",
            more=read_choice(form, "more", ("general", "specific")),
            max_score=read_number(form, "max_score", float),
            weights=[parse_number("weight", text, float) for text in form.getlist("weight")] or None,
        )
        return jsonify(finite({"index": name, **shown(named[name].answer(wish), named[name].identity)}))

    return app


def stored_image(searchers: Mapping[str, Searcher], like: str) -> StoredImage:
    """The picture of INDEX/ROW, INDEX an identity. Raises UserError: there is none."""
    found = re.fullmatch(r"(\w{1,40})/(\d{1,15})", like, re.ASCII)
    if not found or found[1] not in searchers:
        raise UserError(
            "The result to search with is of an index that is not here, or was built anew.", "Search for it again."
        )
    return searchers[found[1]].stored_image(int(found[2]))


def read_number(form, name: str, kind: Callable, default=None):
    """A number of a form; `default` if it is absent or empty. Raises UserError."""
    text = form.get(name, "").strip()
    return parse_number(name, text, kind) if text else default


def parse_number(name: str, text: str, kind: Callable):
    """A number. Raises UserError."""
    try:
        if len(text) > 40:
            raise ValueError
        return kind(text)
    except ValueError:
        raise UserError(f"{name} is '{text[:40]}', which is no number.", "Correct it.") from None


def read_choice(form, name: str, choices: tuple[str, str]) -> str | None:
    """One of two words of a form; None if it is absent or empty. Raises UserError."""
    text = form.get(name, "")
    if text not in ("", *choices):
        raise UserError(f"{name} is '{text[:40]}', neither {choices[0]} nor {choices[1]}.", "Correct it.")
    return text or None


def shown(answer: dict, identity: str) -> dict:
    """An answer for the page: printable texts, and addresses of pictures instead of shards."""
    for result in answer["results"]:
        result["picture"] = f"/picture/{identity}/{result['row']}" if result.pop("shard") else None
        result["key"] = printable(result["key"])
        result["captions"] = [printable(caption) for caption in result["captions"]]
        result["url"] = web_link(result["url"])
    for name in ("texts", "unknown_words"):
        answer["query"][name] = [printable(text) for text in answer["query"][name]]
    return answer
