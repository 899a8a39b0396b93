"""A query, its limits, and what it may hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from probemb.errors import UserError

if TYPE_CHECKING:
    from PIL import Image

MAX_PARTS = 8
MAX_TEXT = 2_000  # characters
MIN_WEIGHT, MAX_WEIGHT = 0.001, 10  # of a part; with far smaller ones variances overflow
WITHOUT = 0.5  # weight of a part to leave out: a whole one often takes more precision away than there is
MAX_TOP = 1_000
MAX_PIXELS = 16_000_000  # decoded at full size; a JPEG may have 64 million, and is decoded smaller
SIDE = 1024  # least side of a JPEG that is decoded smaller; more than models take


class QueryImage(NamedTuple):
    """An encoded image of a query and its name in messages."""

    name: str
    data: bytes


class StoredImage(NamedTuple):
    """An image of an index as part of a query. `read` fetches it when its turn comes; raises UserError."""

    read: Callable[[], QueryImage]


@dataclass(frozen=True)
class Wish:
    """A query and its limits.

    Attributes:
        texts, images: at least one in all.
        weights: of every part, texts first, MIN_WEIGHT to MAX_WEIGHT; one below 0 takes the part away.
            None if all are 1.
        top: number of results.
        max_uncertainty: a query above it is refused.
        max_item_uncertainty: items above it are left out.
        min_precision: a query above the threshold calibrated for this precision is refused.
        fits: True for all that fits, a large variance of an item as a tolerance; False for the closest, by CSD; None as
            the index ranks.
        more: "general" for items that include the query, "specific" for those that lie in it; None for the closest.
        max_score: a query whose calibrated score is above it is refused.
    """

    texts: Sequence[str] = ()
    images: Sequence[QueryImage | StoredImage] = ()
    top: int = 10
    max_uncertainty: float | None = None
    max_item_uncertainty: float | None = None
    min_precision: float | None = None
    fits: bool | None = None
    max_score: float | None = None
    weights: Sequence[float] | None = None
    more: Literal["general", "specific"] | None = None


def clean_texts(texts: Sequence[str], images: int) -> list[str]:
    """The texts of a query with so many images, stripped. Raises UserError: an empty or too large query."""
    texts = [text.strip() for text in texts if text.strip()]
    if not texts and not images:
        raise UserError("The query is empty.", "Write a text or give an image.")
    if any("\ud800" <= character <= "\udfff" for text in texts for character in text):
        raise UserError("A text of the query is not UTF-8.", "Write it in UTF-8.")
    if len(texts) + images > MAX_PARTS:
        raise UserError(f"The query has {len(texts) + images} parts, more than {MAX_PARTS}.", "Leave some out.")
    if too_long := next((text for text in texts if len(text) > MAX_TEXT), None):
        raise UserError(f"A text has {len(too_long):,} characters, more than {MAX_TEXT:,}.", "Shorten it.")
    return texts


def part_weights(wish: Wish) -> list[float]:
    """The weights of all parts. Raises UserError: they do not fit the parts, or are out of range."""
    parts = sum(bool(text.strip()) for text in wish.texts) + len(wish.images)
    weights = [1.0] * parts if wish.weights is None else list(wish.weights)
    if len(weights) != parts:
        raise UserError(f"The query has {parts} parts and {len(weights)} weights.", "Give one for every part.")
    for weight in weights:
        if not MIN_WEIGHT <= abs(weight) <= MAX_WEIGHT:
            raise UserError(
                f"The weight of a part is {weight:g}.", f"Give {MIN_WEIGHT} to {MAX_WEIGHT}, negative to leave it out."
            )
    if parts and not any(weight > 0 for weight in weights):
        raise UserError("The query says only what to leave out.", "Give a text or an image to look for, too.")
    return weights


def check_wish(wish: Wish) -> None:
    """Refuse numbers out of range. Raises UserError."""
    import math

    part_weights(wish)

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
    """Decode an image of a query as viewers show it, a large JPEG at a fraction of its size. Raises UserError."""
    from probemb.data.images import decode_image

    def draft(width: int, height: int) -> tuple[int, int] | None:
        return None if width * height <= MAX_PIXELS else (SIDE, SIDE)

    with _usable(image) as most:
        return decode_image(image.data, draft, most, exif=True)


def check_image(image: QueryImage) -> None:
    """Refuse an image of a query by its header, which costs nothing. Raises UserError."""
    from probemb.data.images import check_header

    with _usable(image) as most:
        check_header(image.data, most)


@contextmanager
def _usable(image: QueryImage) -> Iterator[int]:
    """The pixels that it may have, for a block that may find the image unusable."""
    from probemb.data.failures import BadSample
    from probemb.data.images import MAX_PIXELS as MAX_STORED

    try:
        yield MAX_STORED if image.data.startswith(b"\xff\xd8") else MAX_PIXELS
    except BadSample as error:
        raise UserError(
            f"{image.name} is not an image that can be searched with: {error}.",
            "Give a JPEG, PNG or WebP file, neither very large nor very thin.",
        ) from None
