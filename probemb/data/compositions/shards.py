"""Webdataset shards whose samples say which categories an image has, and where.

KEY.jpg, KEY.json    {"categories": [1, 18], "boxes": [[18, [x, y, w, h], 0], ...], "width": 640, "height": 480}
categories.json      beside the shards or one folder above: [{"id": 1, "name": "person"}, ...]

The third value of a box is COCO's `iscrowd` (1: a group, of which no crop is taken); it may be left out. width and
height are those of the image that the boxes count pixels of; the stored one has the "size" [w, h], or the same. Without
boxes, or where their image's size is unknown, the whole image stands for each of its categories. Splits are folders
(train/*.tar, val/*.tar, test/*.tar), or drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from probemb.data.boxes.geometry import Box
from probemb.data.captions.dataset import is_id, split_name
from probemb.data.compositions.annotated import SPLITS, ConceptImages, draw_splits
from probemb.data.compositions.annotations import (
    MAX_OBJECTS,
    Rows,
    read_box,
    read_categories,
    read_json,
    read_size,
    scaled,
)
from probemb.data.failures import BadSample
from probemb.data.image_loader import Images, Place, find_tars, list_members
from probemb.data.shards.samples import IMAGE_EXTENSIONS, group_members, parse_sample, read_sample
from probemb.errors import UserError

CATEGORIES = ("categories.json", "categories.json.gz")
Sizes = Mapping[int, tuple[int, int]]  # (width, height) by COCO's id of the image


def find_categories(path: Path) -> Path | None:
    """categories.json beside shards, or one folder above."""
    folder = path if path.is_dir() else path.parent
    places = (one / name for one in (folder, folder.parent) for name in CATEGORIES)
    return next(filter(Path.is_file, places), None)


def shard_splits(path: Path) -> dict[str, list[Path]]:
    """The tars of each split folder; {"": all} where there are no such folders."""
    if found := find_tars(path):
        return {"": found}
    folders = sorted(one for one in path.iterdir() if one.is_dir()) if path.is_dir() else []
    named = {split_name(one.name): one for one in folders}
    return {split: tars for split in SPLITS if split in named and (tars := find_tars(named[split]))}


def read_concept_shards(
    path: Path, seed: int, test: set[str] | None = None, sizes: Sizes | None = None
) -> ConceptImages:
    """The images with categories; others are left out. Raises UserError.

    Args:
        seed: of splits that are drawn; test: COCO's ids of the test images, as texts, where they are published.
        sizes: of the original images, for boxes that count their pixels.
    """
    file = find_categories(path)
    if file is None:
        raise UserError(
            f"There is no categories.json beside {path}.", "Put it there: [{'id': 1, 'name': 'person'}, …]."
        )
    try:
        categories = read_categories(read_json(file, "Fetch that file again."))
    except ValueError as error:
        raise UserError(f"{file} does not list categories: {error}.", "Fetch that file again.") from None
    number = {one: place for place, one in enumerate(categories)}
    images, rows, names, splits = Images(places=[], source=str(path)), Rows(), [], []
    unplaced = boxless = 0
    for split, tars in shard_splits(path).items():
        for tar in tars:
            members = list_members(tar)
            with open(tar, "rb") as opened:
                for span in group_members(members):
                    image = next((span.parts[ext] for ext in IMAGE_EXTENSIONS if ext in span.parts), None)
                    if image is None or "json" not in span.parts:
                        continue
                    name = "/".join(filter(None, (split, f"{tar.stem}:{span.key}" if len(tars) > 1 else span.key)))
                    try:
                        words = read_sample(opened.fileno(), span._replace(parts={"json": span.parts["json"]}))
                        meta = parse_sample({"jpg": b"-", **words}, span.key, need_caption=None).meta
                        found = _objects(meta, number, sizes)
                    except (BadSample, ValueError) as error:
                        images.bad.append((name, str(error)))
                        continue
                    if found is None:
                        continue
                    concepts, boxes = found
                    unplaced += boxes is None and meta.get("boxes") is not None
                    boxless += meta.get("boxes") is None
                    rows.add(len(names), concepts, boxes)
                    images.places.append(Place(name, str(tar), image.offset, image.size))
                    names.append(str(meta["image_id"]) if is_id(meta.get("image_id")) else name)
                    splits.append(split)
    if not names:
        why = f" ({images.bad[0][0]}: {images.bad[0][1]})" if images.bad else ""
        raise UserError(f"{path} holds no image with categories{why}.", "Name shards with categories in KEY.json.")
    notes = []
    if boxless:
        notes.append(f"{boxless:,} of {len(names):,} images have no boxes: whole images stand for their concepts.")
    if unplaced:
        notes.append(
            f"The boxes of {unplaced:,} images count pixels of originals whose size is not known: whole images stand "
            "for their concepts."
        )
    if "" in splits:
        splits = draw_splits(names, seed, test)
    concepts, ids = tuple(categories.values()), tuple(categories)
    return ConceptImages(
        images, names, concepts, ids, splits=splits, source=str(path), notes=tuple(notes), **rows.arrays()
    )


def _objects(
    meta: dict, number: Mapping[int, int], sizes: Sizes | None
) -> tuple[list[int], list[tuple[int, Box]] | None] | None:
    """The concepts of an image and its boxes in stored pixels, None for unknown ones; None without categories.

    Raises ValueError: malformed.
    """
    categories, boxes = meta.get("categories"), meta.get("boxes")
    if categories is None:
        return None
    if not isinstance(categories, list) or not all(type(one) is int and one in number for one in categories):
        raise ValueError("its categories are not a list of ids of categories.json")
    concepts = sorted({number[one] for one in categories})
    size = _box_size(meta, sizes)
    if boxes is None or size is None:
        return concepts, None
    stored = read_size(*meta["size"]) if isinstance(meta.get("size"), list) and len(meta["size"]) == 2 else size
    if not isinstance(boxes, list) or len(boxes) > MAX_OBJECTS:
        raise ValueError(f"its boxes are not a list of up to {MAX_OBJECTS:,}")
    found = []
    for one in boxes:
        if not isinstance(one, list) or len(one) not in (2, 3) or type(one[0]) is not int or one[0] not in categories:
            raise ValueError("a box is not [category, [x, y, width, height], iscrowd] of one of its categories")
        box = read_box(one[1], size)
        if box is not None and not (len(one) == 3 and one[2]):
            found.append((number[one[0]], scaled(box, size, stored)))
    return concepts, found


def _box_size(meta: dict, sizes: Sizes | None) -> tuple[int, int] | None:
    if "width" in meta or "height" in meta:
        return read_size(meta.get("width"), meta.get("height"))
    return (sizes or {}).get(meta.get("image_id")) if type(meta.get("image_id")) is int else None
