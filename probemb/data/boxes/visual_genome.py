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
from pathlib import Path

import torch

from probemb.data.boxes.geometry import Box, clipped, enclosing, iou
from probemb.data.boxes.phrases import MAX_PHRASES, MAX_SIDE, MAX_TEXT, Phrase, PhraseDataset, name_hash
from probemb.data.reading import (
    all_located,
    as_id,
    as_list,
    as_text,
    check_unique,
    checked,
    choose_split,
    locate,
    parse_all,
    parse_each,
    read_json,
)
from probemb.errors import UserError

REGIONS, SIZES = "region_descriptions.json", "image_data.json"
MAX_ENTRY = 16 << 20  # characters of one image's entry
_PIECE = 1 << 20
_BETWEEN = re.compile(r"[\s,]*")


def read_visual_genome(path: Path, split: str | None, images: Path | None, sample: int | None = None) -> PhraseDataset:
    """Every region as a phrase with one box. Raises UserError.

    Args:
        images: the folder with VG_100K, or with the images themselves; by default searched beside the file.
        sample: so many of the images with regions, chosen by a hash of their ids.
    """
    choose_split(split, (), path)
    file = path / REGIONS
    rows = parse_each(file, "a list of regions", stream_list(file), _described)
    rows = sorted(rows if sample is None else heapq.nsmallest(sample, rows, key=lambda row: name_hash(str(row[0]))))
    ids = [str(number) for number, _ in rows]
    check_unique(ids, "image id", file)
    content = read_json(path / SIZES)
    sizes_of = dict(parse_all(path / SIZES, "a list of images with their sizes", content, _image_size))
    if unknown := [one for one in ids if int(one) not in sizes_of]:
        raise UserError(f"{path / SIZES} does not know the image {unknown[0]}.", "Fetch that file again.")
    names = [(f"VG_100K/{one}.jpg", f"VG_100K_2/{one}.jpg", f"{one}.jpg") for one in ids]
    located = all_located(locate(names, ids, file, images, [path]))
    sizes = [sizes_of[int(one)] for one in ids]
    phrases, outside = [], 0
    for i, (_, regions) in enumerate(rows):
        for text, box in regions:
            inside = clipped(box, *sizes[i])
            outside += inside is None
            if inside is not None:
                phrases.append(Phrase(i, text, "", (inside,)))
    if not phrases:
        raise UserError(f"No region of {file} lies in its image.", "Fetch the files of Visual Genome again.")
    return PhraseDataset(located, ids, sizes, phrases, outside, None, str(file))


def _described(row: dict) -> tuple[int, list[tuple[str, Box]]] | None:
    """The image's id and its regions, each a text and a box; None without regions."""
    regions = [found for one in as_list(row["regions"], "the regions", MAX_PHRASES) if (found := _region(one))]
    number = as_id(row.get("id", row.get("image_id")), "the id of the image")
    return (number, regions) if regions else None


def _region(one: dict) -> tuple[str, Box] | None:
    """Text and box; None for a region without a text."""
    text = " ".join(as_text(one["phrase"], "a phrase").split())[:MAX_TEXT]
    x, y, width, height = numbers = [one[name] for name in ("x", "y", "width", "height")]
    if not all(type(at) is int and abs(at) <= MAX_SIDE for at in numbers):
        raise ValueError("a box is not of whole numbers of pixels")
    return (text, (float(x), float(y), float(x + width), float(y + height))) if text else None


def _image_size(row: dict) -> tuple[int, tuple[int, int]]:
    size = row["width"], row["height"]
    if not all(type(side) is int and 0 < side <= MAX_SIDE for side in size):
        raise ValueError(f"the image has {size[0]} x {size[1]} pixels")
    return as_id(row.get("image_id", row.get("id")), "the id of the image"), size


def stream_list(file: Path) -> Iterator[object]:
    """The entries of a JSON list, one at a time; memory is bounded by the largest. Raises UserError."""
    decode = json.JSONDecoder().raw_decode
    with checked(file, "a list in JSON"), open(file, encoding="utf-8-sig") as opened:
        text = opened.read(_PIECE).lstrip()
        if not text.startswith("["):
            raise ValueError("it does not begin with [")
        at = 1
        while True:
            at = _BETWEEN.match(text, at).end()
            if text.startswith("]", at):
                return
            try:
                found, at = decode(text, at)
            except ValueError:
                piece = opened.read(_PIECE)
                if not piece or len(text) - at > MAX_ENTRY:
                    raise
                text, at = text[at:] + piece, 0
            else:
                yield found


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
