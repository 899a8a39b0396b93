"""Visual Genome: descriptions of regions, and the triplets of crops A, B and their union.

FOLDER/region_descriptions.json    [{"id": 1, "regions": [{"region_id", "phrase", "x", "y", "width", "height"}]}]
FOLDER/image_data.json             [{"image_id": 1, "width": 800, "height": 600}]
FOLDER/VG_100K/1.jpg, VG_100K_2/…  the images

The published file of descriptions has a gigabyte; it is read one image at a time. Source: Krishna et al., IJCV 2017;
triplets: probabilistic VSE++, §4.6.
"""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch

from probemb.data.boxes.geometry import Box, clipped, enclosing, iou
from probemb.data.boxes.phrases import MAX_PHRASES, MAX_SIDE, MAX_TEXT, Phrase, PhraseDataset
from probemb.data.captions.dataset import check_unique, is_id
from probemb.data.captions.image_files import locate
from probemb.errors import UserError

REGIONS, SIZES = "region_descriptions.json", "image_data.json"
MAX_ENTRY = 16 << 20  # characters of one image's entry
_PIECE = 1 << 20
_BETWEEN = re.compile(r"[\s,]*")
_FETCH = "Fetch that file of Visual Genome again."


def find_regions(path: Path) -> Path | None:
    """region_descriptions.json: this file, or in this folder or one of its subfolders."""
    if path.is_file():
        return path if path.name == REGIONS else None
    found = [one / REGIONS for one in (path, *sorted(path.glob("*/"))) if (one / REGIONS).is_file()]
    return found[0] if found else None


def read_visual_genome(file: Path, images: Path | None = None, sample: int | None = None) -> PhraseDataset:
    """Every region as a phrase with one box. Raises UserError.

    Args:
        images: the folder with VG_100K, or with the images themselves; by default searched beside the file.
        sample: so many of the images with regions, chosen by a hash of their ids.
    """
    rows = _entries(file, sample)
    sizes_of = _read_sizes(file.with_name(SIZES))
    ids = [str(number) for number, _ in rows]
    check_unique(ids, "image id", str(file))
    if unknown := [one for one in ids if int(one) not in sizes_of]:
        raise UserError(f"{SIZES} beside {file} does not know the image {unknown[0]}.", _FETCH)
    names = [(f"VG_100K/{one}.jpg", f"VG_100K_2/{one}.jpg", f"{one}.jpg") for one in ids]
    located, _ = locate(names, ids, str(file), images, [file.parent])
    if located is None:
        raise UserError(
            f"None of the {len(ids):,} images of {file} is there, {ids[0]}.jpg for one.",
            "Name the folder that has VG_100K with --images.",
        )
    sizes = [sizes_of[int(one)] for one in ids]
    phrases, outside = [], 0
    for i, (_, regions) in enumerate(rows):
        for text, box in regions:
            inside = clipped(box, *sizes[i])
            outside += inside is None
            if inside is not None:
                phrases.append(Phrase(i, text, "", (inside,)))
    if not phrases:
        raise UserError(f"No region of {file} lies in its image.", _FETCH)
    return PhraseDataset(located, ids, sizes, phrases, outside, None, str(file))


def _entries(file: Path, sample: int | None) -> list[tuple[int, list[tuple[str, Box]]]]:
    """(image id, regions) of all images with regions, or of a sample, which bounds the memory."""
    kept: list[tuple[int, int, list]] = []  # a heap: the largest hash first
    for place, row in enumerate(stream_list(file)):
        number, regions = _entry(row, place, file)
        if not regions:
            continue
        order = -int.from_bytes(blake2b(str(number).encode(), digest_size=8).digest(), "big")
        if sample is None or len(kept) < sample:
            heapq.heappush(kept, (order, number, regions))
        else:
            heapq.heappushpop(kept, (order, number, regions))
    if not kept:
        raise UserError(f"{file} describes no region.", _FETCH)
    return sorted((number, regions) for _, number, regions in kept)


def _entry(row: object, place: int, file: Path) -> tuple[int, list[tuple[str, Box]]]:
    """The image's id and its regions, each a text and a box. Raises UserError."""
    try:
        number = row.get("id", row.get("image_id"))
        if not is_id(number):
            raise ValueError("there is no id of the image")
        if not isinstance(row["regions"], list) or len(row["regions"]) > MAX_PHRASES:
            raise ValueError(f"the regions are not a list of up to {MAX_PHRASES:,}")
        return number, [found for one in row["regions"] if (found := _region(one)) is not None]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"Entry {place} of {file} describes no regions: {error}.", _FETCH) from None


def _region(one: dict) -> tuple[str, Box] | None:
    """Text and box; None for a region without a text. Raises ValueError, KeyError, TypeError."""
    if not isinstance(one["phrase"], str):
        raise ValueError("a phrase is not a text")
    x, y, width, height = (one[name] for name in ("x", "y", "width", "height"))
    if not all(type(at) is int and abs(at) <= MAX_SIDE for at in (x, y, width, height)):
        raise ValueError("a box is not of whole numbers of pixels")
    text = " ".join(one["phrase"].split())[:MAX_TEXT]
    return (text, (float(x), float(y), float(x + width), float(y + height))) if text else None


def _read_sizes(file: Path) -> dict[int, tuple[int, int]]:
    sizes = {}
    for place, row in enumerate(stream_list(file)):
        try:
            number, size = row.get("image_id", row.get("id")), (row["width"], row["height"])
            if not is_id(number) or not all(type(side) is int and 0 < side <= MAX_SIDE for side in size):
                raise ValueError("the id, width or height is not a whole number")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"Entry {place} of {file} is no image with its size: {error}.", _FETCH) from None
        sizes[number] = size
    return sizes


def stream_list(file: Path) -> Iterator[object]:
    """The entries of a JSON list, one at a time; memory is bounded by the largest. Raises UserError."""
    decode = json.JSONDecoder().raw_decode
    text, at, begun = "", 0, False  # what is read and not yet decoded begins at `at`
    if file.exists() and not file.is_file():
        raise UserError(f"{file} is not a regular file.", _FETCH)
    try:
        with open(file, encoding="utf-8-sig") as opened:
            while True:
                piece = opened.read(_PIECE)
                text, at = text[at:] + piece, 0
                if not begun and text.strip():
                    at = text.index("[") + 1 if text.lstrip().startswith("[") else 0
                    if not at:
                        raise UserError(f"{file} is not a list in JSON.", _FETCH)
                    begun = True
                while begun:
                    at = _BETWEEN.match(text, at).end()
                    if text.startswith("]", at):
                        return
                    try:
                        found, at = decode(text, at)
                    except ValueError as error:
                        if len(text) - at > MAX_ENTRY or (not piece and at < len(text)):
                            raise UserError(f"{file} is not JSON or too large: {error}.", _FETCH) from None
                        break
                    yield found
                if not piece:
                    raise UserError(f"{file} ends before its list does.", _FETCH)
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}).", _FETCH) from None
    except (UnicodeDecodeError, RecursionError):
        raise UserError(f"{file} is not JSON in UTF-8.", _FETCH) from None


# ---------------------------------------------------------------------------------------------------------- triplets


@dataclass(frozen=True)
class CropTriplet:
    """Crops A and B of an image and their union C, each with its box and its caption; C's is "a and b"."""

    image: int
    boxes: tuple[Box, Box, Box]
    captions: tuple[str, str, str]


def crop_triplets(data: PhraseDataset, largest: float, candidates: int = 10) -> list[CropTriplet]:
    """One triplet for each image with two regions below an area.

    Of the `candidates` largest regions with an area below the share `largest` of the image, A is the largest, and B the
    one with the smallest IoU with A. Source: probabilistic VSE++, §4.6.
    """
    found = []
    for image, rows in enumerate(data.by_image()):
        width, height = data.sizes[image]
        regions = [(_area(box), data.phrases[row].text, box) for row in rows for box in data.phrases[row].boxes]
        fitting = [region for region in regions if region[0] < largest * width * height]
        fitting = sorted(fitting, key=lambda region: -region[0])[:candidates]
        if len(fitting) < 2:
            continue
        (_, a, box_a), others = fitting[0], fitting[1:]
        shared = iou(torch.tensor([box_a]), torch.tensor([box for _, _, box in others]))[0]
        _, b, box_b = others[int(shared.argmin())]
        found.append(CropTriplet(image, (box_a, box_b, enclosing([box_a, box_b])), (a, b, f"{a} and {b}")))
    return found


def _area(box: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])
