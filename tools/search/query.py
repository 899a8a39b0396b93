"""Answer queries: compose texts and images into one normal, find the closest items, refuse uncertain queries."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from probemb.errors import UserError
from tools.search.scoring import SCORES, candidate_count, query_scores

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from probemb.cli.device import Device
    from probemb.gaussian import Gaussian
    from probemb.search import Index
    from tools.search.calibration import Calibration

MAX_PARTS = 8
MAX_TEXT = 2_000  # characters
MAX_TOP = 1_000
MAX_NEIGHBOURS = 2_048  # among which certain enough items are searched; FAISS' limit on a GPU


class QueryImage(NamedTuple):
    """An encoded image of a query and its name in messages."""

    name: str
    data: bytes


@dataclass(frozen=True)
class Wish:
    """A query and its limits.

    Attributes:
        texts, images: at least one in all.
        top: number of results.
        max_uncertainty: a query above it is refused.
        max_item_uncertainty: items above it are left out.
        min_precision: a query above the threshold calibrated for this precision is refused.
        fits: True for all that fits, a large variance of an item as a tolerance; False for the closest, by CSD; None as
            the index ranks.
        max_score: a query whose calibrated score is above it is refused.
    """

    texts: Sequence[str] = ()
    images: Sequence[QueryImage] = ()
    top: int = 10
    max_uncertainty: float | None = None
    max_item_uncertainty: float | None = None
    min_precision: float | None = None
    fits: bool | None = None
    max_score: float | None = None


class Found(NamedTuple):
    """A result: row in the gallery, CSD with the weighted variance, uncertainty."""

    row: int
    distance: float
    uncertainty: float


class Searcher:
    """A model and its index; thread-safe.

    Args:
        loaded: `probemb.models.LoadedModel`, on `device`.
        candidates: least number that is re-ranked with an index of means; by default 10 times the results.
        tolerance: weight of the gallery's variances for all that fits; by default the index' own or the calibrated one.
    """

    def __init__(
        self,
        index: Index,
        loaded,
        name: str,
        calibration: Calibration | None = None,
        device: Device | None = None,
        candidates: int | None = None,
        tolerance: float | None = None,
    ):
        from probemb.cli.device import CPU
        from probemb.evaluation.embedding import Embedder
        from probemb.evaluation.predictors import MatchModel

        self.index, self.loaded, self.name, self.calibration = index, loaded, name, calibration
        self.candidates = candidates
        if tolerance is None:
            tolerance = index.weight if index.form == "tolerance" else calibration and calibration.tolerance
        self.tolerance = tolerance
        model, tokenizer, transforms = loaded
        self.match_model = MatchModel.of(model)
        self.embedder = Embedder(model, tokenizer, transforms.evaluate, device or CPU)
        self._one_at_a_time = Lock()  # for the model: bounds memory and protects the tokenizer's cache
        on_gpu = any("Gpu" in type(part).__name__ for part in index.parts)
        self._one_search = Lock() if on_gpu else contextlib.nullcontext()  # FAISS' GPU resources serve one thread

    def embed(self, texts: Sequence[str], images: Sequence[QueryImage]) -> Gaussian:
        """The parts of a query, texts first, (K, D). Raises UserError: an empty, too large or undecodable query."""
        import torch

        from probemb.gaussian import Gaussian

        texts = [text.strip() for text in texts if text.strip()]
        if not texts and not images:
            raise UserError("The query is empty.", "Write a text or give an image.")
        if any("\ud800" <= character <= "\udfff" for text in texts for character in text):
            raise UserError("A text of the query is not UTF-8.", "Write it in UTF-8.")
        if len(texts) + len(images) > MAX_PARTS:
            raise UserError(
                f"The query has {len(texts) + len(images)} parts, more than {MAX_PARTS}.", "Leave some out."
            )
        if too_long := next((text for text in texts if len(text) > MAX_TEXT), None):
            raise UserError(f"A text has {len(too_long):,} characters, more than {MAX_TEXT:,}.", "Shorten it.")
        parts = []
        with self._one_at_a_time:
            if texts:
                parts.append(self.embedder.texts(texts))
            if images:
                pixels = torch.stack([self.embedder.transform(decode_query(image)) for image in images])
                parts.append(self.embedder.pixels([pixels]))
        return Gaussian.cat(parts)

    def answer(self, wish: Wish) -> dict:
        """The answer as plain JSON types (docs/search.md); its captions and keys are untrusted text.

        Raises:
            UserError: as `embed`, or numbers out of range.
        """
        from probemb.compose import as_query, compose

        started = time.perf_counter()
        check_wish(wish)
        weight = self.weight(wish.fits)
        if wish.min_precision is not None and weight != self.own_weight:
            raise UserError(
                "The calibration of this index is of its own ranking, not of this one.",
                "Use --max-uncertainty instead.",
            )
        parts = self.embed(wish.texts, wish.images)
        kinds = ["text"] * (len(parts) - len(wish.images)) + ["image"] * len(wish.images)
        name = self.calibration.score if self.calibration else "u"
        limits = self.limits(name, kinds, wish)
        product = compose(parts)
        query = as_query(product.gaussian) if len(parts) > 1 else product.gaussian
        u = float(query.uncertainty())
        values = {"u": u}
        refused = is_above(values, limits)
        if name != "u" and not refused:  # needs a search
            values[name] = float(self.scores(query[None])[name])
            refused = is_above(values, limits)
        found, looked_at = (
            ([], 0) if refused else self.closest(query[None], wish.top, wish.max_item_uncertainty, weight)
        )
        return {
            "query": {
                "texts": [text.strip() for text in wish.texts if text.strip()],
                "images": len(wish.images),
                "uncertainty": u,
                "parts": [
                    {"kind": kind, "uncertainty": part} for kind, part in zip(kinds, parts.uncertainty().tolist())
                ],
                "log_normaliser": float(product.log_normaliser),
            },
            "weight": weight,
            "limit": limits.get("u"),
            "score": {"name": name, "title": SCORES[name][0], "value": values.get(name), "limit": limits.get(name)},
            "refused": refused,
            "results": [self.describe(rank, one) for rank, one in enumerate(found, 1)],
            "looked_at": looked_at,
            "gallery": len(self.index),
            "seconds": round(time.perf_counter() - started, 4),
        }

    def limits(self, name: str, kinds: Sequence[str], wish: Wish) -> dict[str, float]:
        """Of "u" and the calibrated score `name` the values above which a query of these parts is refused, if any."""
        given = [("u", wish.max_uncertainty)]
        for value, what in ((wish.min_precision, "the precision of its answers"), (wish.max_score, "its score")):
            if value is not None and self.calibration is None:
                raise UserError(
                    f"This index has no calibration, so {what} is unknown.",
                    "Make one with `python -m tools.search --index INDEX --calibrate DATA`, or use --max-uncertainty.",
                )
        if wish.min_precision is not None:
            given.append((name, self.calibration.threshold(kinds, wish.min_precision)))
        given.append((name, wish.max_score))
        limits: dict[str, float] = {}
        for score, limit in given:
            if limit is not None:
                limits[score] = min(limit, limits.get(score, limit))
        return limits

    @property
    def own_weight(self) -> float:
        """The weight of the gallery's variances in the index' own ranking; 1 is CSD."""
        return 1.0 if self.index.form == "mean" else self.index.weight

    def weight(self, fits: bool | None) -> float:
        """The weight for a wish. Raises UserError: it is not known, or the index cannot rank by it."""
        weight = self.own_weight if fits is None else self.tolerance if fits else 1.0
        if weight is None:
            raise UserError(
                "It is not known which weight of the variances finds all that fits.",
                "Give one with --tolerance, such as -1, or calibrate on data whose true matches are all known.",
            )
        if not self.can_rank_by(weight):
            raise UserError(
                f"This index ranks with the variances times {self.own_weight:g}, and cannot with {weight:g}.",
                f"Build another one with `python -m tools.build_index --tolerance {weight:g}`.",
            )
        return weight

    def can_rank_by(self, weight: float) -> bool:
        """Whether the index can rank by a weight of the variances."""
        from probemb.search import is_exact

        return weight == self.own_weight or self.index.form == "mean" or is_exact(self.index)

    def scores(self, query: Gaussian) -> dict[str, Tensor]:
        """Every score of queries (Q, D) in `tools.search.scoring`, (Q,) each, as queries and calibrations use them."""
        k = candidate_count(self.index)
        with self._one_search:
            distances, rows = self._look(query, k, self.own_weight)
        return query_scores(self.index, query, distances, rows, self.match_model)

    def _look(self, query: Gaussian, k: int, weight: float) -> tuple[Tensor, Tensor]:
        """Distances with a weight of the items' variances, CSD for 1, and rows of the k closest items."""
        from probemb.search import rerank, search_weighted
        from probemb.search.index import CANDIDATES

        if self.index.form != "mean":
            return search_weighted(self.index, query, k, weight)
        candidates = max(k, self.candidates or min(CANDIDATES * k, MAX_NEIGHBOURS))
        return rerank(self.index, query, k, candidates, weight)

    def closest(
        self, query: Gaussian, top: int, max_uncertainty: float | None, weight: float
    ) -> tuple[list[Found], int]:
        """At most `top` items, and the number of neighbours that were searched; the query is (1, D)."""
        k = min(top, len(self.index))
        while True:
            with self._one_search:
                distances, rows = self._look(query, k, weight)
            rows = rows[0].tolist()
            u = [float(self.index.uncertainty[row]) if row >= 0 else 0.0 for row in rows]
            found = [
                Found(row, distance, u_row)
                for row, distance, u_row in zip(rows, distances[0].tolist(), u)
                if row >= 0 and (max_uncertainty is None or u_row <= max_uncertainty)
            ]
            if max_uncertainty is None or len(found) >= top or k >= min(len(self.index), MAX_NEIGHBOURS):
                return found[:top], k
            k = min(4 * k, len(self.index), MAX_NEIGHBOURS)

    def describe(self, rank: int, found: Found) -> dict:
        """A result with the metadata of its item."""
        item = self.index.item(found.row)
        return {
            "rank": rank,
            **found._asdict(),
            "key": item["key"],
            "captions": list(item.get("captions") or []),
            "shard": item.get("shard"),
        }

    def picture(self, row: int) -> bytes:
        """The encoded image of an item from its shard. Raises LookupError: it is not available."""
        from tools.search.pictures import read_picture

        item = self.index.item(row)
        if not item.get("shard") or item.get("offset") is None:
            raise LookupError("the index has no picture of this item")
        return read_picture(item["shard"], int(item["offset"]), int(item["size"]))

    def fetched_picture(self, row: int) -> bytes | None:
        """`picture` of an item in a remote shard, else None. Raises LookupError."""
        from probemb.data.remote.sources import is_remote

        return self.picture(row) if is_remote(self.index.item(row).get("shard") or "") else None


def is_above(values: dict[str, float], limits: dict[str, float]) -> bool:
    """Whether a known score is above its limit."""
    return any(name in limits and value > limits[name] for name, value in values.items())


def check_wish(wish: Wish) -> None:
    """Refuse numbers out of range. Raises UserError."""
    import math

    if not 1 <= wish.top <= MAX_TOP:
        raise UserError(f"{wish.top} results were requested.", f"Request 1 to {MAX_TOP:,}.")
    for name, value in (
        ("largest uncertainty of the query", wish.max_uncertainty),
        ("largest uncertainty of a result", wish.max_item_uncertainty),
    ):
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise UserError(f"The {name} is {value}.", "Give a number from 0 on.")
    if wish.max_score is not None and not math.isfinite(wish.max_score):
        raise UserError(f"The largest score of the query is {wish.max_score}.", "Give a finite number.")
    if wish.min_precision is not None and not 0 < wish.min_precision <= 1:
        raise UserError(f"The wanted precision is {wish.min_precision}.", "Give a share above 0 and up to 1.")


def read_image(path: Path) -> QueryImage:
    """A local image file as part of a query. Raises UserError: it cannot be read or decoded."""
    from probemb.data.shards.samples import MAX_IMAGE_BYTES

    try:
        with open(path, "rb") as file:  # may be an endless pipe or device
            data = file.read(MAX_IMAGE_BYTES + 1)
    except OSError as error:
        raise UserError(f"The image {path} cannot be read ({error.strerror}).", "Check the path.") from None
    if len(data) > MAX_IMAGE_BYTES:
        raise UserError(f"{path} has more than {MAX_IMAGE_BYTES >> 20} MiB.", "Give a smaller image.")
    image = QueryImage(str(path), data)
    decode_query(image)
    return image


def decode_query(image: QueryImage) -> Image.Image:
    """Decode an image of a query. Raises UserError."""
    from probemb.data.failures import BadSample
    from probemb.data.images import decode_image

    try:
        return decode_image(image.data)
    except BadSample as error:
        raise UserError(
            f"{image.name} is not an image that can be searched with: {error}.",
            "Give a JPEG, PNG or WebP file, neither very large nor very thin.",
        ) from None
