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
from pathlib import Path
from xml.etree import ElementTree

from probemb.data.boxes.geometry import Box, clipped
from probemb.data.boxes.phrases import MAX_PHRASES, MAX_SIDE, MAX_TEXT, Phrase, PhraseDataset, name_hash
from probemb.data.reading import (
    all_located,
    as_inside,
    check_unique,
    checked,
    choose_split,
    locate,
    parse_all,
    parse_lines,
    read_lines,
    read_text,
)
from probemb.errors import UserError

FOLDERS = ("Annotations", "Sentences")
MAX_BYTES = 4 << 20  # of one image's annotations, of which the largest published ones have some 10 KiB
NO_ENTITY = "0"  # the id of phrases that mean nothing to be seen
_MARKED = re.compile(r"\[/EN#(\d{1,18})((?:/[\w-]+)+) ([^\[\]]+)\]")


def read_entities(path: Path, split: str | None, images: Path | None, sample: int | None = None) -> PhraseDataset:
    """Phrases of a split that have at least one box. Raises UserError."""
    lists = {name: path / f"{name}.txt" for name in ("train", "val", "test") if (path / f"{name}.txt").is_file()}
    split, parts = choose_split(split, lists, path)
    if split is None:
        ids = sorted(file.stem for file in (path / "Sentences").glob("*.txt"))
    else:
        lines = (line for part in parts for line in read_lines(lists[part]))
        ids = parse_all(path, "Flickr30k Entities", lines, as_inside)
    check_unique(ids, "image id", path)
    if sample is not None:
        chosen = set(sorted(ids, key=name_hash)[:sample])
        ids = [one for one in ids if one in chosen]
    located = all_located(locate([(f"{one}.jpg",) for one in ids], ids, path, images, [path, path.parent]))
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
