"""Pictures of items, decoded, made small and encoded again."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from threading import BoundedSemaphore, Lock
from typing import TYPE_CHECKING

from tools.search.web.guard import problem

if TYPE_CHECKING:
    from flask import Flask

    from tools.search.query import Searcher

SMALL, LARGE = 480, 1600  # pixels of the longer side
PICTURES = 12  # threads for pictures; the rest stay free for searches while a shard's server is slow


def serve_pictures(app: Flask, searchers: Mapping[str, Searcher]) -> None:
    """Add the pictures of items. `searchers` by the identity of their indexes."""
    from flask import Response, abort

    decoding = Lock()  # one large picture at a time: memory stays bounded
    places = BoundedSemaphore(PICTURES)

    @app.get("/picture/<index>/<int:row>")
    def picture(index: str, row: int):
        return jpeg(index, row, SMALL)

    @app.get("/picture/<index>/<int:row>/large")
    def large_picture(index: str, row: int):
        return jpeg(index, row, LARGE)

    def jpeg(index: str, row: int, side: int) -> Response:
        searcher = searchers.get(index)
        if searcher is None:
            return problem(404, "The picture is of another index.", "Search again.")
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


def shrink(data: bytes, side: int) -> bytes:
    """An image, upright, as a JPEG of at most `side` pixels a side. Raises LookupError: it cannot be decoded."""
    from probemb.data.failures import BadSample
    from probemb.data.images import decode_image

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
