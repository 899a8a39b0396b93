"""Flickr30k Entities: phrases of Flickr30k's captions and their boxes.

FOLDER/Sentences/ID.txt      captions, one a line, with marked phrases: [/EN#283585/people Two young guys] with ...
FOLDER/Annotations/ID.xml    objects, each with the ids of its phrases and a box, or without one (scene, nobndbox)
FOLDER/test.txt, ...         ids of a split's images, one a line; train.txt, val.txt
FOLDER/flickr30k-images/ID.jpg, or another folder of images

Boxes count pixels from 1 with both ends included; here they become half-open and count from 0. Source: Plummer et al.,
IJCV 2017.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from pathlib import Path
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from probemb.data.boxes.geometry import Box, clipped
from probemb.data.boxes.phrases import MAX_PHRASES, MAX_SIDE, MAX_TEXT, Phrase, PhraseDataset
from probemb.data.captions.dataset import check_unique, choose_split, read_text, resolve_split, split_name
from probemb.data.captions.image_files import is_inside, locate
from probemb.errors import UserError

MAX_FILE = 4 << 20  # bytes of one image's annotations, of which the largest published ones have some 10 KiB
MAX_DEPTH = 16  # of elements
NO_ENTITY = "0"  # the id of phrases that mean nothing to be seen
_MARKED = re.compile(r"\[/EN#(\d{1,18})((?:/[\w-]+)+) ([^\[\]]+)\]")
_SPLITS = ("train", "val", "test")
_FETCH = "Fetch the annotations of Flickr30k Entities again."


def find_entities(path: Path) -> Path | None:
    """The folder with Annotations and Sentences: this one, or the only one of its subfolders that has both."""
    found = [one for one in (path, *sorted(path.glob("*/"))) if all((one / x).is_dir() for x in _FOLDERS)]
    return found[0] if found else None


_FOLDERS = ("Annotations", "Sentences")


def read_entities(path: Path, split: str | None, images: Path | None, sample: int | None = None) -> PhraseDataset:
    """Phrases of a split that have at least one box. Raises UserError."""
    ids, split = _ids_of_split(path, split)
    ids = sampled(ids, sample)
    located, missing = locate([(f"{one}.jpg",) for one in ids], ids, str(path), images, [path, path.parent])
    if located is None:
        raise UserError(
            f"None of the {len(ids):,} images of {path} is there, {missing[0]}.jpg for one.",
            "Name the folder of Flickr30k's images with --images.",
        )
    sizes, phrases, without_box = [], [], 0
    for row, one in enumerate(ids):
        size, boxes = read_annotation(path / "Annotations" / f"{one}.xml")
        sizes.append(size)
        mentioned = read_sentences(path / "Sentences" / f"{one}.txt")
        for number, kind, text in mentioned:
            if number in boxes and number != NO_ENTITY:
                phrases.append(Phrase(row, text, kind, tuple(boxes[number])))
            else:
                without_box += 1
    if not phrases:
        raise UserError(f"No phrase of {path} has a box.", _FETCH)
    return PhraseDataset(located, ids, sizes, phrases, without_box, split, str(path))


def _ids_of_split(path: Path, split: str | None) -> tuple[list[str], str | None]:
    """The images' ids: those of the split's list, or of all sentences without a split or lists."""
    known = [name for name in _SPLITS if (path / f"{name}.txt").is_file()]
    split = resolve_split(None if split is None else split_name(split), known)
    parts = choose_split(split, known, str(path)) if split is not None else ()
    if split is None:
        ids = sorted(file.stem for file in (path / "Sentences").glob("*.txt"))
    else:
        text = b"\n".join(read_text(path / f"{part}.txt") for part in parts).decode("utf-8-sig", "replace")
        ids = [line.strip() for line in text.splitlines() if line.strip()]
    for one in ids:
        if not is_inside(one) or "/" in one:
            raise UserError(f"{path} lists {one[:100]!r}, which is no id of an image.", _FETCH)
    check_unique(ids, "image id", str(path))
    if not ids:
        raise UserError(f"{path} lists no image.", _FETCH)
    return ids, split


def sampled(ids: list[str], sample: int | None) -> list[str]:
    """So many of the ids, chosen by a hash of each, in the order of the list."""
    if sample is None or sample >= len(ids):
        return ids
    chosen = set(sorted(ids, key=lambda one: blake2b(one.encode(), digest_size=8).digest())[:sample])
    return [one for one in ids if one in chosen]


# --------------------------------------------------------------------------------------------------------- sentences


def read_sentences(file: Path) -> list[tuple[str, str, str]]:
    """(id, type, text) of every marked phrase, caption after caption. Raises UserError."""
    try:
        text = _read(file).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{file} is not a text in UTF-8.", _FETCH) from None
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if "[/EN" in _MARKED.sub("", line):
            raise UserError(f"Line {number} of {file} has a phrase that is not [/EN#ID/TYPE text].", _FETCH)
        for entity, kinds, phrase in _MARKED.findall(line):
            if phrase.strip():
                found.append((entity, kinds[1:], " ".join(phrase.split())[:MAX_TEXT]))
    if len(found) > MAX_PHRASES:
        raise UserError(f"{file} has {len(found):,} phrases, more than {MAX_PHRASES:,}.", _FETCH)
    return found


# ------------------------------------------------------------------------------------------------------- annotations


def read_annotation(file: Path) -> tuple[tuple[int, int], dict[str, list[Box]]]:
    """(width, height) of an image, and the boxes of each entity's id. Raises UserError."""
    root = parse_xml(_read(file), file)
    try:
        size = tuple(_number(root.find(f"size/{side}"), side) for side in ("width", "height"))
        if not all(0 < side <= MAX_SIDE for side in size):
            raise ValueError(f"the image has {size[0]} x {size[1]} pixels")
        boxes: dict[str, list[Box]] = {}
        for number, one in enumerate(root.iter("object")):
            if number >= MAX_PHRASES:
                raise ValueError(f"it has more than {MAX_PHRASES:,} objects")
            placed = one.find("bndbox")
            box = None if placed is None else _box(placed, size)
            for name in one.iter("name"):
                if box is not None:
                    boxes.setdefault((name.text or "").strip(), []).append(box)
    except ValueError as error:
        raise UserError(f"{file} is no annotation of Flickr30k Entities: {error}.", _FETCH) from None
    return size, boxes


def _box(placed: Element, size: tuple[int, int]) -> Box | None:
    """The half-open box inside the image; None if nothing of it is. Raises ValueError."""
    left, top, right, bottom = (_number(placed.find(name), name) for name in ("xmin", "ymin", "xmax", "ymax"))
    if left > right or top > bottom:
        raise ValueError(f"the box {left} {top} {right} {bottom} ends before it begins")
    return clipped((left - 1.0, top - 1.0, float(right), float(bottom)), *size)


def _number(element: Element | None, what: str) -> int:
    text = "" if element is None else (element.text or "").strip()
    if not re.fullmatch(r"-?[0-9]{1,7}", text):
        raise ValueError(f"{what} is {text[:40]!r}, not a whole number")
    return int(text)


def parse_xml(content: bytes, file: Path) -> Element:
    """The root of an untrusted XML document.

    A document type is refused as such: its entities could grow without bound or name other files. Raises UserError.
    """
    builder, depth = TreeBuilder(), 0

    def start(tag: str, attributes: dict) -> None:
        nonlocal depth
        depth += 1
        if depth > MAX_DEPTH:
            raise UserError(f"{file} has elements {depth} deep.", _FETCH)
        builder.start(tag, attributes)

    def end(tag: str) -> None:
        nonlocal depth
        depth -= 1
        builder.end(tag)

    def refuse(*_: object) -> None:
        raise UserError(f"{file} declares a document type, which annotations have no need of.", _FETCH)

    parser = expat.ParserCreate()
    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler, parser.StartDoctypeDeclHandler = builder.data, refuse
    try:
        parser.Parse(content, True)
    except (expat.ExpatError, LookupError, ValueError) as error:  # the latter two of encodings
        raise UserError(f"{file} is not well-formed XML: {error}.", _FETCH) from None
    return builder.close()


def _read(file: Path) -> bytes:
    try:
        if not file.is_file():
            raise UserError(f"{file} is missing.", _FETCH)
        with open(file, "rb") as opened:
            content = opened.read(MAX_FILE + 1)
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}).", _FETCH) from None
    if len(content) > MAX_FILE:
        raise UserError(f"{file} has more than {MAX_FILE >> 20} MiB.", _FETCH)
    return content
