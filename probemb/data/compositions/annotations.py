"""Categories and boxes in COCO's form, untrusted: what the readers of JSON files and shards share."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from probemb.data.boxes.geometry import Box, clipped
from probemb.data.boxes.phrases import MAX_SIDE
from probemb.data.captions.dataset import is_id, read_text
from probemb.errors import UserError

MAX_CONCEPTS = 2_000  # of annotated images; COCO has 80, LVIS 1,203
MAX_NAME = 200  # characters
MAX_OBJECTS = 10_000  # of an image
WHOLE = (math.nan,) * 4


class Rows:
    """Collects what `ConceptImages` holds as arrays."""

    def __init__(self):
        self.pairs: list[tuple[int, int]] = []
        self.crop_pairs: list[tuple[int, int]] = []
        self.crop_boxes: list[Box] = []

    def add(self, image: int, concepts: Iterable[int], boxes: Iterable[tuple[int, Box]] | None) -> None:
        """The concepts of an image, and the boxes of its objects; None: it has none, so that all of it is shown."""
        concepts = list(concepts)
        self.pairs += [(image, concept) for concept in concepts]
        shown = [(concept, WHOLE) for concept in concepts] if boxes is None else list(boxes)
        self.crop_pairs += [(image, concept) for concept, _ in shown]
        self.crop_boxes += [box for _, box in shown]

    def arrays(self) -> dict[str, np.ndarray]:
        return {
            "pairs": np.array(self.pairs, dtype=np.int64).reshape(-1, 2),
            "crop_pairs": np.array(self.crop_pairs, dtype=np.int64).reshape(-1, 2),
            "crop_boxes": np.array(self.crop_boxes, dtype=np.float32).reshape(-1, 4),
        }


def read_json(path: Path, remedy: str) -> object:
    """The content of an untrusted JSON file, also gzipped. Raises UserError."""
    try:
        return json.loads(read_text(path).decode("utf-8-sig"))
    except (ValueError, RecursionError):
        raise UserError(f"{path} is not JSON in UTF-8.", remedy) from None


def read_categories(rows: object) -> dict[int, str]:
    """The name of each category by its id, in the order of the ids, from [{"id", "name"}]. Raises ValueError."""
    if not isinstance(rows, list) or not 0 < len(rows) <= MAX_CONCEPTS:
        raise ValueError(f"its categories are not a list of up to {MAX_CONCEPTS:,}")
    names: dict[int, str] = {}
    for one in rows:
        if not isinstance(one, dict) or not is_id(one.get("id")) or not is_name(one.get("name")):
            raise ValueError("a category has no id or no name")
        if one["id"] in names or one["name"] in names.values():
            raise ValueError(f"the category {one['id']}, '{one['name']}', occurs twice")
        names[one["id"]] = one["name"]
    return dict(sorted(names.items()))


def is_name(value: object) -> bool:
    """True if a JSON value can be the text of a concept."""
    return isinstance(value, str) and bool(value.strip()) and len(value) <= MAX_NAME and value.isprintable()


def read_box(box: object, size: tuple[int, int]) -> Box | None:
    """[x, y, width, height] as (left, top, right, bottom) inside an image; None if less than a pixel is.

    Raises ValueError: no numbers.
    """
    if not isinstance(box, list) or len(box) != 4 or not all(_is_number(at) for at in box):
        raise ValueError(f"a box is {str(box)[:80]}, not [x, y, width, height]")
    left, top, width, height = box
    return clipped((left, top, left + width, top + height), *size)


def read_size(width: object, height: object) -> tuple[int, int]:
    """Raises ValueError: no size of an image."""
    for side in (width, height):
        if type(side) is not int or not 0 < side <= MAX_SIDE:
            raise ValueError(f"an image has {str(width)[:20]} x {str(height)[:20]} pixels")
    return width, height


def scaled(box: Box, size: tuple[int, int], stored: tuple[int, int]) -> Box:
    """A box of an image of `size` in the pixels of its copy that is stored in another size."""
    across, down = stored[0] / size[0], stored[1] / size[1]
    return box[0] * across, box[1] * down, box[2] * across, box[3] * down


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) <= 10 * MAX_SIDE  # NaN is not
