"""Categories, objects and boxes in COCO's form: instances_train2017.json and its images.

{"images": [{"id", "file_name", "width", "height"}], "categories": [{"id", "name"}],
 "annotations": [{"image_id", "category_id", "bbox": [x, y, width, height], "iscrowd"}]}

Images with at least one annotation are read, as the benchmark has it. An image has the categories of all its
annotations; crops are taken of single objects only, not of groups (`iscrowd`). Splits are drawn 4:1:1, or the test
images are those of MPC's list and the others are divided 4:1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from probemb.data.boxes.geometry import Box, clipped
from probemb.data.boxes.phrases import MAX_SIDE
from probemb.data.compositions.concepts import ConceptImages, draw_splits
from probemb.data.image_loader import locate
from probemb.data.reading import (
    as_id,
    as_inside,
    as_list,
    as_text,
    check_unique,
    checked,
    malformed,
    parse_all,
    read_json,
)
from probemb.errors import UserError

USUAL = "instances_train2017.json"  # of which the benchmark is made
MAX_CONCEPTS = 2_000  # of annotated images; COCO has 80, LVIS 1,203
MAX_NAME = 200  # characters
MAX_OBJECTS = 10_000  # of an image
OBJECTS = "a file of objects in COCO's form, such as instances_train2017.json"


def find_instances(path: Path) -> Path | None:
    """instances_*.json: this file, or train2017's or else the only one of a folder or its `annotations`."""
    if path.is_file():
        return path if path.name.removesuffix(".gz").endswith(".json") else None
    files = sorted(path.glob("instances_*.json*")) or sorted(path.glob("annotations/instances_*.json*"))
    usual = [file for file in files if file.name.startswith(USUAL)] or files
    if len(files) > 1 and usual == files:
        raise UserError(f"{path} holds {len(files)} files instances_*.json.", f"Name one of them, such as {files[0]}.")
    return usual[0] if usual else None


def read_coco(file: Path, images: Path | None, seed: int, test: set[str] | None = None) -> ConceptImages:
    """The images of an instances file. Raises UserError: malformed, or images are missing.

    Args:
        images: the folder of train2017, or the one around it; by default searched beside.
        seed, test: of the splits, see `draw_splits`; test: ids as texts.
    """
    content, objects = read_json(file), defaultdict(list)

    def parse_image(row: dict) -> tuple[int, tuple[int, int], str]:
        return as_id(row["id"], "the id"), read_size(row["width"], row["height"]), as_inside(row["file_name"])

    rows = parse_all(file, OBJECTS, _list(file, content, "images"), parse_image, "image")
    check_unique((one for one, _, _ in rows), "image id", file)
    sizes, files = {one: size for one, size, _ in rows}, {one: name for one, _, name in rows}
    categories = read_categories(file, content)
    number = {one: place for place, one in enumerate(categories)}

    def parse(row: dict) -> None:
        image, category = row["image_id"], row["category_id"]
        if image not in sizes or category not in categories:
            raise ValueError("it is of an unknown image or category")
        box = read_box(row["bbox"], sizes[image])
        objects[image].append((number[category], None if row.get("iscrowd") else box))

    parse_all(file, OBJECTS, _list(file, content, "annotations"), parse, "annotation")
    if not objects:
        raise malformed(file, OBJECTS, "no image is annotated")
    chosen = [one for one in sizes if one in objects]
    held = [
        (sorted({concept for concept, _ in objects[one]}), [crop for crop in objects[one] if crop[1] is not None])
        for one in chosen
    ]
    ids = [str(one) for one in chosen]
    folder = file.name.removesuffix(".gz").removesuffix(".json").removeprefix("instances_")
    beside = [file.parent, file.parent.parent, file.parent / folder, file.parent.parent / folder]
    names = [(files[one], f"{folder}/{files[one]}") for one in chosen]
    located = locate(names, ids, file, images, beside)
    return ConceptImages(located, ids, held, categories, draw_splits(ids, seed, test), file)


def read_objects(file: str | Path, image_ids: Sequence[int | str]) -> Tensor:
    """Multi-hot object categories of each image, (N, L) uint8, the labels for plausible matches (PMRP).

    All zero for an image without annotations.

    Args:
        file: instances_val2014.json, or another JSON with "categories" and "annotations" of that form.
        image_ids: COCO's id of each image.

    Raises UserError: the file is missing, too large or malformed; none of the images occurs in it.
    """
    path, row_of = Path(file), {name: row for row, name in enumerate(image_ids)}
    content = read_json(path)
    categories = {one: place for place, one in enumerate(read_categories(path, content))}

    def parse(row: dict) -> tuple[int, int] | None:
        place = categories[row["category_id"]]
        return (row_of[row["image_id"]], place) if row["image_id"] in row_of else None

    pairs = parse_all(path, OBJECTS, _list(path, content, "annotations"), parse, "annotation")
    if not pairs:
        raise malformed(path, OBJECTS, f"none of the {len(image_ids):,} images is annotated")
    labels = torch.zeros(len(image_ids), len(categories), dtype=torch.uint8)
    labels[tuple(torch.tensor(pairs).T)] = 1
    return labels


def _list(file: Path, content: object, name: str) -> list:
    with checked(file, OBJECTS):
        return as_list(content[name], f"the {name}")


def read_categories(file: Path, content: object) -> dict[int, str]:
    """The name of each category by its id, in the order of the ids, from [{"id", "name"}]. Raises UserError."""

    def parse(row: dict) -> tuple[int, str]:
        name = as_text(row["name"], "the name")
        if not name.strip() or len(name) > MAX_NAME or not name.isprintable():
            raise ValueError(f"{name[:80]!r} is no name of a concept")
        return as_id(row["id"], "the id"), name

    with checked(file, "a list of categories"):
        rows = as_list(content["categories"], "the categories", MAX_CONCEPTS)
    rows = parse_all(file, "a list of categories", rows, parse, "category")
    check_unique((number for number, _ in rows), "category", file)
    check_unique((name for _, name in rows), "category", file)
    return dict(sorted(rows))


def read_size(width: object, height: object) -> tuple[int, int]:
    """Raises ValueError: no size of an image."""
    if not all(type(side) is int and 0 < side <= MAX_SIDE for side in (width, height)):
        raise ValueError(f"an image has {str(width)[:20]} x {str(height)[:20]} pixels")
    return width, height


def read_box(box: object, size: tuple[int, int]) -> Box | None:
    """[x, y, width, height] as (left, top, right, bottom) inside an image; None if less than a pixel is.

    Raises ValueError: no numbers.
    """
    numbers = isinstance(box, list) and len(box) == 4 and all(type(at) in (int, float) for at in box)
    if not numbers or not all(abs(at) <= 10 * MAX_SIDE for at in box):  # NaN is not
        raise ValueError(f"a box is {str(box)[:80]}, not [x, y, width, height]")
    left, top, width, height = box
    return clipped((left, top, left + width, top + height), *size)
