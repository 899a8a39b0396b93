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

from probemb.data.compositions.coco import MAX_OBJECTS, read_box, read_categories, read_size
from probemb.data.compositions.concepts import SPLITS, ConceptImages, Held, draw_splits
from probemb.data.failures import BadSample
from probemb.data.image_loader import Images, find_tars, walk_samples
from probemb.data.reading import as_list, is_id, read_json, split_name
from probemb.data.shards.samples import parse_sample, read_sample
from probemb.errors import UserError

CATEGORIES = "categories.json"


def shard_splits(path: Path) -> dict[str, list[Path]]:
    """The tars of each split folder; {"": all} where there are no such folders."""
    if found := find_tars(path):
        return {"": found}
    folders = sorted(one for one in path.iterdir() if one.is_dir()) if path.is_dir() else []
    named = {split_name(one.name): one for one in folders}
    return {split: tars for split in SPLITS if split in named and (tars := find_tars(named[split]))}


def read_concept_shards(path: Path, seed: int, test: set[str] | None = None) -> ConceptImages:
    """The images with categories; others are left out. Raises UserError.

    Args:
        seed: of splits that are drawn; test: COCO's ids of the test images, as texts, where they are published.
    """
    folder = path if path.is_dir() else path.parent
    files = (one / name for one in (folder, folder.parent) for name in (CATEGORIES, f"{CATEGORIES}.gz"))
    file = next(filter(Path.is_file, files), None)
    if file is None:
        raise UserError(f"There is no {CATEGORIES} beside {path}.", 'Put it there: [{"id": 1, "name": "person"}, …].')
    categories = read_categories(file, {"categories": read_json(file)})
    number = {one: place for place, one in enumerate(categories)}
    images, held, names, splits = Images(places=[], source=str(path)), [], [], []
    unplaced = boxless = 0
    for split, tars in shard_splits(path).items():
        for _, place, span, opened in walk_samples(tars):
            if place is None or "json" not in span.parts:
                continue
            shard = f"{Path(place.file).stem}:" if len(tars) > 1 else ""
            name = f"{split}/{shard}{span.key}" if split else f"{shard}{span.key}"
            try:
                words = read_sample(opened.fileno(), span._replace(parts={"json": span.parts["json"]}))
                meta = parse_sample({"jpg": b"-", **words}, span.key, need_caption=None).meta
                if meta.get("categories") is None:
                    continue
                held.append(_held(meta, number))
            except (BadSample, ValueError) as error:
                images.bad.append((name, str(error)))
                continue
            boxless += meta.get("boxes") is None
            unplaced += held[-1][1] is None and meta.get("boxes") is not None
            images.places.append(place._replace(name=name))
            names.append(str(meta["image_id"]) if is_id(meta.get("image_id")) else name)
            splits.append(split)
    if not names:
        why = f" ({images.bad[0][0]}: {images.bad[0][1]})" if images.bad else ""
        raise UserError(f"{path} holds no image with categories{why}.", "Name shards with categories in KEY.json.")
    notes = {
        f"{boxless:,} of {len(names):,} images have no boxes": boxless,
        f"The boxes of {unplaced:,} images count pixels of originals whose size is not known": unplaced,
    }
    notes = [f"{note}: whole images stand for their concepts." for note, number in notes.items() if number]
    splits = splits if "" not in splits else draw_splits(names, seed, test)
    return ConceptImages(images, names, held, categories, splits, path, notes)


def _held(meta: dict, number: Mapping[int, int]) -> Held:
    """The concepts of an image and its boxes in stored pixels, None for unknown ones. Raises ValueError: malformed."""
    categories, boxes = as_list(meta["categories"], "its categories"), meta.get("boxes")
    if not all(type(one) is int and one in number for one in categories):
        raise ValueError(f"its categories are not a list of ids of {CATEGORIES}")
    concepts = sorted({number[one] for one in categories})
    if boxes is None or not {"width", "height"} & set(meta):
        return concepts, None
    size = read_size(meta.get("width"), meta.get("height"))
    stored = meta.get("size")
    stored = read_size(*stored) if isinstance(stored, list) and len(stored) == 2 else size
    across, down = stored[0] / size[0], stored[1] / size[1]
    crops = []
    for one in as_list(boxes, "its boxes", MAX_OBJECTS):
        if not isinstance(one, list) or len(one) not in (2, 3) or type(one[0]) is not int or one[0] not in categories:
            raise ValueError("a box is not [category, [x, y, width, height], iscrowd] of one of its categories")
        if (box := read_box(one[1], size)) is not None and not (len(one) == 3 and one[2]):
            crops.append((number[one[0]], (box[0] * across, box[1] * down, box[2] * across, box[3] * down)))
    return concepts, crops
