"""Images with phrases and the boxes they refer to: Flickr30k Entities and Visual Genome."""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import torch

from probemb.data.boxes.geometry import Box, clipped, enclosing, iou
from probemb.data.image_loader import Images, locate
from probemb.data.reading import (
    as_id,
    as_inside,
    as_list,
    as_text,
    check_unique,
    checked,
    choose_split,
    listed,
    parse_all,
    parse_each,
    parse_lines,
    read_json,
    read_lines,
    read_text,
)  # fmt: skip
from probemb.errors import UserError

MAX_PHRASES = 5_000  # of an image
MAX_TEXT = 1_000  # characters of a phrase
MAX_SIDE = 100_000  # pixels of an image


class Phrase(NamedTuple):
    """A phrase and the boxes it refers to.

    Attributes:
        image: index of its image; text: without marks.
        kind: its type, such as "people" or "clothing/bodyparts"; "" where the data has none.
        boxes: at least one.
    """

    image: int
    text: str
    kind: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class PhraseDataset:
    """N images and their phrases.

    Attributes:
        images: where they lie; image_ids: their names; sizes: (width, height) in pixels, as the annotations have them.
        phrases: image after image; without_box: number of phrases without a box, which are left out.
        split: the one that was asked for; None: everything. source: the path given, for messages.
    """

    images: Images
    image_ids: list[str]
    sizes: list[tuple[int, int]]
    phrases: list[Phrase]
    without_box: int = 0
    split: str | None = None
    source: str = ""

    def __len__(self) -> int:
        return len(self.image_ids)

    def by_image(self) -> list[list[int]]:
        """For each image the indices of its phrases."""
        rows: list[list[int]] = [[] for _ in self.image_ids]
        for i, phrase in enumerate(self.phrases):
            rows[phrase.image].append(i)
        return rows


def _name_hash(name: str) -> int:
    """The order in which images are sampled."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")


def find_phrases(
    data: str | Path, split: str | None = None, images: str | Path | None = None, sample: int | None = None
) -> PhraseDataset:
    """List images and phrases without decoding any image.

    Args:
        data: a folder of one of FORMATS, or a folder around one; or the file of Visual Genome.
        split: "train", "val", "test" of Flickr30k Entities; None: all images; "auto": "test" of data with several
            splits. Visual Genome has none.
        images: folder of the images; by default searched beside the annotations.
        sample: so many of the images, chosen by their names alone; None: all.

    Raises UserError: nothing of the kind is there; malformed data; missing images; names that lead out of the folder.
    """
    path = Path(data)
    folders = [path.parent] if path.name == REGIONS else [path, *sorted(path.glob("*/"))]
    found = [
        (read, one) for names, read in FORMATS.items() for one in folders if all((one / x).exists() for x in names)
    ]
    if len(found) != 1:
        kinds = listed([listed(names) for names in FORMATS], "or")
        raise UserError(
            f"{path} holds {'several kinds of' if found else 'no'} phrases with boxes.",
            f"Name one folder with {kinds}, or make the synthetic data with `python -m tools.make_scenes data/scenes "
            "--boxes`.",
        )
    read, folder = found[0]
    return read(folder, split, None if images is None else Path(images), sample)


# ------------------------------------------------------------------------------------------------ Flickr30k Entities

FOLDERS = ("Annotations", "Sentences")
MAX_BYTES = 4 << 20  # of one image's annotations, of which the largest published ones have some 10 KiB
NO_ENTITY = "0"  # the id of phrases that refer to nothing visible
_MARKED = re.compile(r"\[/EN#(\d{1,18})((?:/[\w-]+)+) ([^\[\]]+)\]")


def read_entities(path: Path, split: str | None, images: Path | None, sample: int | None = None) -> PhraseDataset:
    """Phrases of a split of Flickr30k Entities that have at least one box. Raises UserError.

    FOLDER/Sentences/ID.txt      captions, one a line, with marked phrases: [/EN#283585/people Two young guys] with ...
    FOLDER/Annotations/ID.xml    objects, each with the ids of its phrases and a box, or without one (scene, nobndbox)
    FOLDER/test.txt, ...         ids of a split's images, one a line; train.txt, val.txt
    FOLDER/flickr30k-images/ID.jpg, or another folder of images

    Boxes count pixels from 1 with both ends included; here they become half-open and count from 0.
    Source: Plummer et al., IJCV 2017.
    """
    lists = {name: path / f"{name}.txt" for name in ("train", "val", "test") if (path / f"{name}.txt").is_file()}
    split, parts = choose_split(split, lists, path)
    if split is None:
        ids = sorted(file.stem for file in (path / "Sentences").glob("*.txt"))
    else:
        lines = (line for part in parts for line in read_lines(lists[part]))
        ids = parse_all(path, "Flickr30k Entities", lines, as_inside)
    check_unique(ids, "image id", path)
    if sample is not None:
        chosen = set(sorted(ids, key=_name_hash)[:sample])
        ids = [one for one in ids if one in chosen]
    located = locate([(f"{one}.jpg",) for one in ids], ids, path, images, [path, path.parent])
    sizes, phrases, without_box = [], [], 0
    for row, one in enumerate(ids):
        size, boxes = _read_annotation(path / "Annotations" / f"{one}.xml")
        sizes.append(size)
        for number, kind, text in _read_sentences(path / "Sentences" / f"{one}.txt"):
            if number in boxes and number != NO_ENTITY:
                phrases.append(Phrase(row, text, kind, tuple(boxes[number])))
            else:
                without_box += 1
    if not phrases:
        raise UserError(f"No phrase of {path} has a box.", "Fetch the annotations of Flickr30k Entities again.")
    return PhraseDataset(located, ids, sizes, phrases, without_box, split, str(path))


def _read_sentences(file: Path) -> list[tuple[str, str, str]]:
    """(id, type, text) of every marked phrase, caption after caption. Raises UserError."""

    def parse(line: str) -> list[tuple[str, str, str]]:
        if "[/EN" in _MARKED.sub("", line):
            raise ValueError("a phrase is not [/EN#ID/TYPE text]")
        marked = [(entity, kinds[1:], " ".join(text.split())) for entity, kinds, text in _MARKED.findall(line)]
        return [(entity, kinds, text[:MAX_TEXT]) for entity, kinds, text in marked if text]

    return [phrase for line in parse_lines(file, "a text with marked phrases", parse) for phrase in line][:MAX_PHRASES]


def _read_annotation(file: Path) -> tuple[tuple[int, int], dict[str, list[Box]]]:
    """(width, height) of an image, and the boxes of each entity's id. Raises UserError."""
    text, boxes = read_text(file, MAX_BYTES), {}
    with checked(file, "an annotation of Flickr30k Entities"):
        if "<!DOCTYPE" in text:  # its entities could grow without bound or name other files
            raise ValueError("it declares a document type")
        try:
            root = ElementTree.fromstring(text)
        except ElementTree.ParseError as error:
            raise ValueError(error) from None
        size = _number(root, "size/width"), _number(root, "size/height")
        if not all(0 < side <= MAX_SIDE for side in size):
            raise ValueError(f"the image has {size[0]} x {size[1]} pixels")
        for one in root.iter("object"):
            if one.find("bndbox") is None:
                continue
            left, top, right, bottom = (_number(one, f"bndbox/{name}") for name in ("xmin", "ymin", "xmax", "ymax"))
            if left > right or top > bottom:
                raise ValueError(f"the box {left} {top} {right} {bottom} ends before it begins")
            box = clipped((left - 1.0, top - 1.0, float(right), float(bottom)), *size)
            for name in one.iter("name") if box is not None else ():
                boxes.setdefault((name.text or "").strip(), []).append(box)
    return size, boxes


def _number(element: ElementTree.Element, path: str) -> int:
    text = element.findtext(path, "").strip()
    if not re.fullmatch(r"-?[0-9]{1,7}", text):
        raise ValueError(f"{path} is {text[:40]!r}, not a whole number")
    return int(text)


# ----------------------------------------------------------------------------------------------------- Visual Genome

REGIONS, SIZES = "region_descriptions.json", "image_data.json"
MAX_ENTRY = 16 << 20  # characters of one image's entry
_PIECE = 1 << 20
_BETWEEN = re.compile(r"[\s,]*")


def read_visual_genome(path: Path, split: str | None, images: Path | None, sample: int | None = None) -> PhraseDataset:
    """Every region of Visual Genome as a phrase with one box. Raises UserError.

    FOLDER/region_descriptions.json    [{"id": 1, "regions": [{"region_id", "phrase", "x", "y", "width", "height"}]}]
    FOLDER/image_data.json             [{"image_id": 1, "width": 800, "height": 600}]
    FOLDER/VG_100K/1.jpg, VG_100K_2/…  the images

    The published file of descriptions has a gigabyte; it is read one image at a time.
    Source: Krishna et al., IJCV 2017.

    Args:
        images: the folder with VG_100K, or with the images themselves; by default searched beside the file.
        sample: so many of the images with regions, chosen by a hash of their ids.
    """
    choose_split(split, (), path)
    file = path / REGIONS
    rows = parse_each(file, "a list of regions", stream_list(file), _described)
    rows = sorted(rows if sample is None else heapq.nsmallest(sample, rows, key=lambda row: _name_hash(str(row[0]))))
    ids = [str(number) for number, _ in rows]
    check_unique(ids, "image id", file)
    content = read_json(path / SIZES)
    sizes_of = dict(parse_all(path / SIZES, "a list of images with their sizes", content, _image_size))
    if unknown := [one for one in ids if int(one) not in sizes_of]:
        raise UserError(f"{path / SIZES} does not know the image {unknown[0]}.", "Fetch that file again.")
    names = [(f"VG_100K/{one}.jpg", f"VG_100K_2/{one}.jpg", f"{one}.jpg") for one in ids]
    located = locate(names, ids, file, images, [path])
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


FORMATS = {FOLDERS: read_entities, (REGIONS,): read_visual_genome}  # what a folder holds -> its reader


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
