"""Answer queries: compose texts and images into one normal, and find the closest items of an index.

K parts, D dimensions.
"""

import math
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as TooLate
from dataclasses import dataclass
from pathlib import Path
from threading import BoundedSemaphore, Lock
from typing import NamedTuple
from uuid import uuid4

import torch
from PIL import Image
from torch import Tensor

from probemb import models
from probemb.compose import Product, as_query, compose
from probemb.data.failures import BadSample, BadShard
from probemb.data.images import MAX_PIXELS as MAX_JPEG_PIXELS
from probemb.data.images import decode_image
from probemb.data.remote import WEB, FetchPolicy, Remote, fetch_range, is_remote
from probemb.data.shards.samples import MAX_IMAGE_BYTES
from probemb.errors import UserError, count
from probemb.evaluation.embedding import Embedder
from probemb.gaussian import Gaussian
from probemb.machine import CPU, Device
from probemb.search import CANDIDATES, Index, is_exact, rerank, search_weighted

MAX_PARTS = 8
MAX_TEXT = 2_000  # characters
MIN_WEIGHT, MAX_WEIGHT = 0.001, 10  # of a part; with far smaller ones variances overflow
WITHOUT = 0.5  # weight of a part to leave out: a whole one often takes more precision away than there is
MAX_TOP = 1_000
MAX_PIXELS = 16_000_000  # decoded at full size; a JPEG may have 64 million, and is decoded smaller
SIDE = 1024  # least side of a JPEG that is decoded smaller; more than models take
QUERIES = 8  # with images at a time; more are refused, so that they cannot occupy all threads of a server
SECONDS = 20.0  # for decoding the images of a query, waiting included
CORES_PER_DECODER = 4  # the rest of the cores stay free for the model
MAX_NEIGHBOURS = 2_048  # among which certain enough items are searched; FAISS' limit on a GPU
MAX_REMOTE_BYTES = 32 << 20
POLICY = FetchPolicy(attempts=1, timeout=10.0)  # of a picture on a web server

_decoders = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // CORES_PER_DECODER), "decoding")
_places = BoundedSemaphore(QUERIES)


class Busy(UserError):
    """Too many queries with images at once; the same query may succeed later."""

    def __init__(self):
        super().__init__("Too many images are being searched with at once.", "Try again in a moment.")


class QueryImage(NamedTuple):
    """An encoded image of a query: its name in messages, and a function that reads it (UserError)."""

    name: str
    read: Callable[[], bytes]


@dataclass(frozen=True)
class SearchRequest:
    """A query and its limits. Raises UserError: empty, too large, or a number is out of range.

    Attributes:
        texts, images: the parts, at least one in all.
        weights: of every part, texts first, MIN_WEIGHT to MAX_WEIGHT; one below 0 takes the part away. None: all 1.
        top: number of results.
        max_uncertainty: a query above it is refused.
        max_item_uncertainty: items above it are left out.
        coverage: percent of queries whose own item should be among the results, 50 to 99; in place of `top`.
    """

    texts: Sequence[str] = ()
    images: Sequence[QueryImage] = ()
    weights: Sequence[float] | None = None
    top: int = 10
    max_uncertainty: float | None = None
    max_item_uncertainty: float | None = None
    coverage: int | None = None

    def __post_init__(self):
        object.__setattr__(self, "texts", [text.strip() for text in self.texts])
        parts = len(self.texts) + len(self.images)
        if not parts:
            raise UserError("The query is empty.", "Write a text or give an image.")
        if parts > MAX_PARTS:
            raise UserError(f"The query has {parts} parts, more than {MAX_PARTS}.", "Leave some out.")
        if not all(self.texts):
            raise UserError("One of the texts is empty.", "Leave it out.")
        if any("\ud800" <= character <= "\udfff" for text in self.texts for character in text):
            raise UserError("A text of the query is not UTF-8.", "Write it in UTF-8.")
        if too_long := next((text for text in self.texts if len(text) > MAX_TEXT), None):
            raise UserError(f"A text has {len(too_long):,} characters, more than {MAX_TEXT:,}.", "Shorten it.")
        weights = [1.0] * parts if self.weights is None else list(self.weights)
        object.__setattr__(self, "weights", weights)
        if len(weights) != parts:
            what = f"The query has {count(parts, 'part')} and {count(len(weights), 'weight')}."
            raise UserError(what, "Give one for every part.")
        for weight in weights:
            if not MIN_WEIGHT <= abs(weight) <= MAX_WEIGHT:
                remedy = f"Give {MIN_WEIGHT} to {MAX_WEIGHT}, negative to leave it out."
                raise UserError(f"The weight of a part is {weight:g}.", remedy)
        if not any(weight > 0 for weight in weights):
            raise UserError("The query says only what to leave out.", "Give a text or an image to look for, too.")
        if not 1 <= self.top <= MAX_TOP:
            raise UserError(f"{self.top} results were requested.", f"Request 1 to {MAX_TOP:,}.")
        if self.coverage is not None and not 50 <= self.coverage <= 99:
            raise UserError(f"A coverage of {self.coverage} % was requested.", "Request 50 to 99 %.")
        for of, value in ("the query", self.max_uncertainty), ("a result", self.max_item_uncertainty):
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise UserError(f"The largest uncertainty of {of} is {value}.", "Give a number from 0 on.")


# ------------------------------------------------------------------------------------------------ images


def read_image(path: Path) -> QueryImage:
    """A local image file as part of a query. Raises UserError: it cannot be read or decoded."""
    try:
        with open(path, "rb") as file:  # may be an endless pipe or device
            data = file.read(MAX_IMAGE_BYTES + 1)
    except OSError as error:
        raise UserError(f"The image {path} cannot be read ({error.strerror}).", "Check the path.") from None
    if len(data) > MAX_IMAGE_BYTES:
        raise UserError(f"{path} has more than {MAX_IMAGE_BYTES >> 20} MiB.", "Give a smaller image.")
    decode_query(str(path), data)
    return QueryImage(str(path), lambda: data)


def decode_query(name: str, data: bytes) -> Image.Image:
    """Decode an image of a query as viewers show it, a large JPEG at a fraction of its size. Raises UserError."""

    def draft(width: int, height: int) -> tuple[int, int] | None:
        return None if width * height <= MAX_PIXELS else (SIDE, SIDE)

    try:
        return decode_image(data, draft, MAX_JPEG_PIXELS if data.startswith(b"\xff\xd8") else MAX_PIXELS, exif=True)
    except BadSample as error:
        what = f"{name} is not an image that can be searched with: {error}."
        raise UserError(what, "Give a JPEG, PNG or WebP file, neither very large nor very thin.") from None


def read_pixels(images: Sequence[QueryImage], transform: Callable) -> Tensor:
    """Decode the images of a query, (K, 3, H, W), outside of the model's lock; decoders release Python's lock.

    `transform`: PIL image -> (3, H, W). Raises UserError: an image cannot be read or decoded; Busy.
    """
    if not _places.acquire(blocking=False):
        raise Busy
    waiting = []
    try:
        given = [(image.name, image.read()) for image in images]
        end = time.monotonic() + SECONDS
        waiting = [_decoders.submit(lambda image: transform(decode_query(*image)), image) for image in given]
        return torch.stack([future.result(max(0.0, end - time.monotonic())) for future in waiting])
    except TooLate:
        raise Busy from None
    finally:
        for future in waiting:
            future.cancel()
        _places.release()


def read_picture(shard: str, offset: int, size: int) -> bytes:
    """Bytes of an image in a shard, here or on a web server. Raises LookupError: it is not available.

    The address is the one given to `tools.embed`, with the name of a shard listed there. No command (`pipe:`) is run.
    """
    try:
        if not is_remote(shard):
            with open(shard, "rb") as file:
                file.seek(offset)
                data = file.read(size)
            if len(data) != size:
                raise LookupError("the shard has become shorter")
            return data
        source = Remote(shard)
        if source.scheme not in WEB:
            raise LookupError(f"its shard is not a file here and not on a web server ({source.scheme}:)")
        if size > MAX_REMOTE_BYTES:
            raise LookupError(f"it has {size:,} bytes")
        return fetch_range(source, offset, size, POLICY)
    except BadShard as error:
        raise LookupError(f"its shard {str(error).removeprefix(f'{source}: ')}") from None
    except OSError as error:
        raise LookupError(f"the shard cannot be read ({error.strerror})") from None


# ------------------------------------------------------------------------------------------------ queries


class QueryEncoder:
    """A model for queries, which several indexes and threads may share.

    Args:
        loaded: `probemb.models.LoadedModel`, on `device`.
        name: as it is shown.

    Attributes:
        composer: the module that the model was trained to compose with; None: the product of normals (MPC).
        weighs: True if parts can have weights, and be taken away.
    """

    def __init__(self, loaded, name: str, device: Device = CPU):
        model, tokenizer, transforms = loaded
        self.name, self.loaded = name, loaded
        self.match_model = model.match_model
        self.composer = getattr(model, "composer", None)
        self.composer_name = "product" if self.composer is None else model.config["composer"]
        self.weighs = self.composer is None or self.composer.weighs
        self.embedder = Embedder(model, tokenizer, transforms.evaluate, device)
        self._one_at_a_time = Lock()  # bounds memory and protects the tokenizer's cache

    def embed(self, texts: Sequence[str], images: Sequence[QueryImage] = ()) -> Gaussian:
        """The parts of a query, texts first, (K, D). Raises UserError: an undecodable image; Busy."""
        pixels = read_pixels(images, self.loaded.transforms.evaluate) if images else None
        with self._one_at_a_time:
            parts = [self.embedder.texts(texts)] if texts else []
            return Gaussian.cat([*parts, *([self.embedder.pixels([pixels])] if images else [])])

    def compose(self, parts: Gaussian, weights: Sequence[float]) -> Product:
        """Parts (K, D) as one query (D,) with its mean at unit length, as the gallery's. Raises UserError."""
        weights = None if all(weight == 1 for weight in weights) else weights
        if weights is None and len(parts) == 1:
            return Product(parts[0], parts.mean.new_zeros(()))
        product = compose(parts, weights=weights) if self.composer is None else self._compose_as_trained(parts, weights)
        return Product(as_query(product.gaussian), product.log_normaliser)

    def _compose_as_trained(self, parts: Gaussian, weights: Sequence[float] | None) -> Product:
        device = next((one.device for one in self.composer.parameters()), parts.mean.device)
        with torch.no_grad():
            product = self.composer(Gaussian(parts.mean[None], parts.log_var[None]).to(device), weights)
        composed = product.gaussian[0].to("cpu")
        if not self.composer.probabilistic:
            composed = Gaussian(composed.mean, torch.full_like(composed.mean, models.POINT_LOG_VAR))
        return Product(composed, product.log_normaliser[0].cpu())


class Searcher:
    """An index and the model that made it; thread-safe.

    Args:
        weight: of the items' variances in the ranking; by default the index's own, 1 (CSD) for one of means.
        candidates: least number that is re-ranked with an index of means; by default 10 times the results.
        calibration: content of the index's calibration.json, see `tools.search.calibrate`.

    Raises UserError: the index cannot rank by that weight.
    """

    def __init__(
        self, index: Index, encoder: QueryEncoder, weight: float | None = None, candidates: int | None = None,
        calibration: dict | None = None,
    ):  # fmt: skip
        self.index, self.encoder, self.candidates, self.calibration = index, encoder, candidates, calibration
        self.identity = index.identity or uuid4().hex[:16]  # of pictures' addresses
        own = 1.0 if index.form == "mean" else index.weight
        self.weight = own if weight is None else weight
        if self.weight != own and index.form != "mean" and not is_exact(index):
            what = f"This index ranks with the variances times {own:g}, and cannot with {weight:g}."
            raise UserError(what, f"Build another one with `python -m tools.build_index --tolerance {weight:g}`.")

    def answer(self, request: SearchRequest) -> dict:
        """The answer as plain JSON types (docs/search.md); its captions and keys are untrusted text.

        Raises UserError: an image that cannot be read, parts that cannot be composed; Busy.
        """
        started = time.perf_counter()
        parts = self.encoder.embed(request.texts, request.images)
        kinds = ["text"] * len(request.texts) + ["image"] * len(request.images)
        query, log_normaliser = self.encoder.compose(parts, request.weights)
        u = float(query.uncertainty())
        refused = request.max_uncertainty is not None and u > request.max_uncertainty
        top = request.top if request.coverage is None else self.promised(request.coverage, u, kinds)
        rows, csd = ([], {}) if refused else self.closest(query, top, request.max_item_uncertainty)
        matches = self.matches(query, csd, kinds)
        results = []
        for row, distance in rows:
            item, u_row = self.index.item(row), float(self.index.uncertainty[row])
            results.append({
                "rank": len(results) + 1, "match": matches.get(row), "row": row, "distance": distance,
                "uncertainty": u_row, "key": item["key"], "captions": list(item.get("captions") or []),
                "shard": item.get("shard"), "url": item.get("url"),
            })  # fmt: skip
        return {
            "query": {
                "texts": request.texts,
                "images": len(request.images),
                "uncertainty": u,
                "parts": [
                    {"kind": kind, "uncertainty": part, "weight": weight}
                    for kind, part, weight in zip(kinds, parts.uncertainty().tolist(), request.weights)
                ],
                "composer": self.encoder.composer_name,
                "log_normaliser": float(log_normaliser),
                "unknown_words": models.unknown_words(self.encoder.loaded.tokenizer, request.texts),
            },
            "weight": self.weight,
            "limit": request.max_uncertainty,
            "coverage": request.coverage,
            "refused": refused,
            "results": results,
            "looked_at": len(csd),
            "gallery": len(self.index),
            "seconds": round(time.perf_counter() - started, 4),
        }

    def calibrated(self, kinds: Sequence[str]) -> dict:
        """The calibration for a query of such parts. Raises UserError: there is none."""
        found = self.calibration
        if found is None:
            remedy = "Make one with `python -m tools.search --calibrate DATA`."
            raise UserError("This index has no calibration.", remedy)
        if list(kinds) != [found["kind"]] or found["weight"] != self.weight:
            what = f"one {found['kind']}, ranked with the variances times {found['weight']:g}"
            raise UserError(f"The calibration of this index is of queries of {what}.", "Give a number instead.")
        return found

    def promised(self, coverage: int, u: float, kinds: Sequence[str]) -> int:
        """The number of results that hold the right item for `coverage` percent of queries as uncertain as u.

        Raises UserError: no number does, or there is no calibration.
        """
        found = self.calibrated(kinds)
        results = found["results"][str(coverage)][bisect_left(found["fifths"], u)]
        if results is None:
            what = f"For so uncertain a query not even {MAX_TOP:,} results promise {coverage} %."
            raise UserError(what, "Ask for less, say more in the query, or calibrate on more pairs.")
        return results

    def ranks(self, queries: Gaussian, own: Tensor) -> Tensor:
        """The rank (Q,) that an item at the distance `own` (Q,) of each query would have; infinity beyond MAX_TOP."""
        depth = min(MAX_TOP, len(self.index))
        closer = (self._look(queries, depth)[0] < own[:, None] * (1 - 1e-5)).sum(1).double()
        return torch.where((closer < depth) | (depth == len(self.index)), closer + 1, torch.inf)

    def closest(
        self, query: Gaussian, top: int, max_uncertainty: float | None
    ) -> tuple[list[tuple[int, float]], dict[int, float]]:
        """At most `top` items with their distances, closest first, and CSD by row of all that were looked at; the
        query is (D,).
        """
        k = min(top, len(self.index))
        while True:
            distances, rows = self._look(query[None], k)
            distances, rows = distances[0][rows[0] >= 0], rows[0][rows[0] >= 0]
            u = self.index.uncertainty[rows]
            found = list(zip(rows.tolist(), distances.tolist()))
            if max_uncertainty is not None:
                found = [one for one, certain in zip(found, u.double() <= max_uncertainty) if certain]
            if max_uncertainty is None or len(found) >= top or k >= min(len(self.index), MAX_NEIGHBOURS):
                csd = distances.double() + (1 - self.weight) * u.double()
                return found[:top], dict(zip(rows.tolist(), csd.tolist()))
            k = min(4 * k, len(self.index), MAX_NEIGHBOURS)

    def _look(self, query: Gaussian, k: int) -> tuple[Tensor, Tensor]:
        if self.index.form != "mean":
            return search_weighted(self.index, query, k, self.weight)
        candidates = max(k, self.candidates or min(CANDIDATES * k, MAX_NEIGHBOURS))
        return rerank(self.index, query, k, candidates, self.weight)

    def matches(self, query: Gaussian, csd: dict[int, float], kinds: Sequence[str]) -> dict[int, float]:
        """The probability that an item matches the query (D,) if exactly one item of the gallery does, by row.

        Empty where it is unknown: for a model without a match probability or with a trained composer, and if a part of
        the query is of the gallery's kind. The odds of items outside `csd` are estimated by the index's sample.
        """
        model = self.encoder.match_model
        if not csd or not model.matches or self.index.kind in kinds or self.encoder.composer is not None:
            return {}

        def log_odds(csd: Tensor, rows: Tensor) -> Tensor:
            u = query.uncertainty().double().cpu() + self.index.uncertainty[rows].double()
            return model.log_odds_at(csd.double(), u, self.index.dim)

        rows, (others, means) = torch.tensor(list(csd)), self.index.sample
        seen = log_odds(torch.tensor(list(csd.values())), rows)
        total, unseen = seen.logsumexp(0), ~torch.isin(others, rows)
        if unseen.any():
            others, apart = others[unseen], (means[unseen] - query.mean.cpu()).square().sum(1)
            rest = log_odds(apart + query.uncertainty().cpu() + self.index.uncertainty[others], others)
            total = total.logaddexp(rest.logsumexp(0) + math.log((len(self.index) - len(rows)) / len(others)))
        return dict(zip(csd, (seen - total).exp().tolist()))

    def stored_image(self, row: int) -> QueryImage:
        """The picture of an item as a part of a query. Raises UserError: there is no such item."""
        if row >= len(self.index):
            raise UserError(f"The index has {len(self.index):,} items, and no item {row}.", "Search again.")

        def read() -> bytes:
            try:
                return self.picture(row)
            except LookupError as error:
                remedy = "Put the shards back where they were indexed."
                raise UserError(f"The picture to search with is not there: {error}.", remedy) from None

        return QueryImage(self.index.item(row)["key"], read)

    def picture(self, row: int) -> bytes:
        """The encoded image of an item from its shard. Raises LookupError: it is not available."""
        item = self.index.item(row)
        if not item.get("shard") or item.get("offset") is None:
            raise LookupError("the index has no picture of this item")
        return read_picture(item["shard"], int(item["offset"]), int(item["size"]))
