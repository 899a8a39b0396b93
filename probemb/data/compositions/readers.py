"""Categories, objects and boxes of images: COCO's instances files, and webdataset shards.

instances_train2017.json, with its images beside it
    {"images": [{"id", "file_name", "width", "height"}], "categories": [{"id", "name"}],
     "annotations": [{"image_id", "category_id", "bbox": [x, y, width, height], "iscrowd"}]}

KEY.jpg, KEY.json    {"categories": [1, 18], "boxes": [[18, [x, y, w, h], 0], ...], "width": 640, "height": 480}
categories.json      beside the shards or one folder above: [{"id": 1, "name": "person"}, ...]
    The third value of a box is COCO's `iscrowd`, which may be left out. width and height are those of the image that
    the boxes count pixels of; the stored one has the "size" [w, h], or the same. Without boxes, or where their image's
    size is unknown, the whole image stands for each of its categories. Splits are folders (train/*.tar, …), or drawn.

Images with at least one category are read, as the benchmark has it. Crops are taken of single objects only, not of
groups (`iscrowd`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from probemb.data.boxes import Box, as_size, clipped
from probemb.data.compositions.dataset import SPLITS, Compositions
from probemb.data.image_loader import Images, find_tars, locate, read_samples
from probemb.data.reading import (
    as_id,
    as_inside,
    as_list,
    as_text,
    checked,
    is_id,
    malformed,
    parse_all,
    read_json,
    split_name,
)
from probemb.data.shards.samples import Sample
from probemb.errors import UserError

CATEGORIES = "categories.json"
SHARES = (4, 1, 1)  # of the images, in the order of SPLITS (MPC, supplementary A)
MAX_CONCEPTS = 2_000  # of annotated images; COCO has 80, LVIS 1,203
MAX_OBJECTS = 10_000  # of an image
OBJECTS = "a file of objects in COCO's form, such as instances_train2017.json"


def draw_splits(names: list[str], seed: int, test: set[str] | None = None) -> list[str]:
    """The split of each image: 4:1:1 in the order of a hash of seed and name.

    test: names of the test images where they are published; the others are divided 4:1.
    """
    free = [row for row, name in enumerate(names) if test is None or name not in test]
    free.sort(key=lambda row: blake2b(f"split/{seed}/{names[row]}".encode(), digest_size=16).digest())
    shares = SHARES if test is None else SHARES[:2]
    ends = [len(free) * sum(shares[: place + 1]) // sum(shares) for place in range(len(shares))]
    splits = ["test"] * len(names)
    for split, start, end in zip(SPLITS, [0, *ends], ends):
        for row in free[start:end]:
            splits[row] = split
    return splits


def _categories(rows: object) -> dict[int, str]:
    """The name of each category by its id, in the order of the ids. Raises ValueError and the like."""
    named = {as_id(row["id"], "an id"): as_text(row["name"], "a name") for row in as_list(rows, "they", MAX_CONCEPTS)}
    if not all(name.strip() and name.isprintable() and len(name) <= 200 for name in named.values()):
        raise ValueError("a category has no printable name of up to 200 characters")
    return dict(sorted(named.items()))


def _box(box: list, size: tuple[int, int]) -> Box | None:
    """[x, y, width, height] as (left, top, right, bottom) inside an image; None if less than a pixel is."""
    left, top, width, height = map(float, box)
    if not math.isfinite(left + top + width + height):
        raise ValueError("a box is not finite")
    return clipped((left, top, left + width, top + height), *size)


# --------------------------------------------------------------------------------------------------------------- COCO


def find_instances(path: Path) -> Path | None:
    """instances_*.json: this file, or train2017's or else the only one of a folder or its `annotations`."""
    if path.is_file():
        return path if path.name.removesuffix(".gz").endswith(".json") else None
    files = sorted(path.glob("instances_*.json*")) or sorted(path.glob("annotations/instances_*.json*"))
    usual = [file for file in files if file.name.startswith("instances_train2017.json")] or files
    if len(usual) > 1:
        raise UserError(f"{path} holds {len(files)} files instances_*.json.", f"Name one of them, such as {files[0]}.")
    return usual[0] if usual else None


def _instances(file: Path, *names: str) -> tuple[dict[int, str], list[list]]:
    """The categories of an instances file, and its lists of these names. Raises UserError."""
    content = read_json(file)
    with checked(file, OBJECTS):
        return _categories(content["categories"]), [as_list(content[name], f"the {name}") for name in names]


def read_coco(file: Path, images: Path | None, seed: int, test: set[str] | None = None) -> Compositions:
    """The images of an instances file. Raises UserError: malformed, or images are missing.

    Args:
        images: the folder of train2017, or the one around it; by default searched beside.
        seed, test: of the splits, see `draw_splits`; test: ids as texts.
    """
    categories, (rows, annotations) = _instances(file, "images", "annotations")
    number, held, crops = {one: place for place, one in enumerate(categories)}, defaultdict(list), defaultdict(list)

    def parse_image(row: dict) -> tuple[int, tuple[tuple[int, int], str]]:
        return as_id(row["id"], "the id"), (as_size(row["width"], row["height"]), as_inside(row["file_name"]))

    def parse(row: dict) -> None:
        image, concept = row["image_id"], number[row["category_id"]]
        box = _box(row["bbox"], known[image][0])
        held[image].append(concept)
        if box is not None and not row.get("iscrowd"):
            crops[image].append((concept, box))

    known = dict(parse_all(file, OBJECTS, rows, parse_image, "image"))
    parse_all(file, OBJECTS, annotations, parse, "annotation")
    if not held:
        raise malformed(file, OBJECTS, "no image is annotated")
    chosen = [one for one in known if one in held]
    ids = [str(one) for one in chosen]
    folder = file.name.removesuffix(".gz").removesuffix(".json").removeprefix("instances_")
    beside = [file.parent, file.parent.parent, file.parent / folder, file.parent.parent / folder]
    names = [(known[one][1], f"{folder}/{known[one][1]}") for one in chosen]
    located = locate(names, ids, file, images, beside)
    return Compositions(
        source=str(file), images=located, names=ids, splits=draw_splits(ids, seed, test), number=number,
        concepts=tuple(categories.values()), held=[sorted(set(held[one])) for one in chosen],
        cut=[crops[one] for one in chosen],
    )  # fmt: skip


def read_objects(file: str | Path, image_ids: Sequence[int | str]) -> Tensor:
    """Multi-hot object categories of each image, (N, L) uint8, the labels for plausible matches (PMRP).

    All zero for an image without annotations.

    Args:
        file: instances_val2014.json, or another JSON with "categories" and "annotations" of that form.
        image_ids: COCO's id of each image.

    Raises UserError: the file is missing, too large or malformed; none of the images occurs in it.
    """
    path, row_of = Path(file), {name: row for row, name in enumerate(image_ids)}
    categories, (annotations,) = _instances(path, "annotations")
    number = {one: place for place, one in enumerate(categories)}

    def parse(row: dict) -> tuple[int, int] | None:
        place = number[row["category_id"]]
        return (row_of[row["image_id"]], place) if row["image_id"] in row_of else None

    pairs = parse_all(path, OBJECTS, annotations, parse, "annotation")
    if not pairs:
        raise malformed(path, OBJECTS, f"none of the {len(image_ids):,} images is annotated")
    labels = torch.zeros(len(image_ids), len(number), dtype=torch.uint8)
    labels[tuple(torch.tensor(pairs).T)] = 1
    return labels


# ------------------------------------------------------------------------------------------------------------- shards


def shard_splits(path: Path) -> dict[str, list[Path]]:
    """The tars of each split folder; {"": all} where there are no such folders."""
    if found := find_tars(path):
        return {"": found}
    folders = {split_name(one.name): one for one in sorted(path.glob("*/"))}
    return {split: tars for split in SPLITS if split in folders and (tars := find_tars(folders[split]))}


def read_concept_shards(path: Path, seed: int, test: set[str] | None = None) -> Compositions:
    """The images with categories; others are left out. Raises UserError.

    Args:
        seed: of splits that are drawn; test: COCO's ids of the test images, as texts, where they are published.
    """
    folder = path if path.is_dir() else path.parent
    files = [one / name for one in (folder, folder.parent) for name in (CATEGORIES, f"{CATEGORIES}.gz")]
    file = next(filter(Path.is_file, files), files[0])
    content = read_json(file)
    with checked(file, "a list of categories"):
        categories = _categories(content)
    number = {one: place for place, one in enumerate(categories)}

    def parse(sample: Sample) -> tuple | None:
        if (held := sample.meta.get("categories")) is None:
            return None
        concepts = sorted({number[one] for one in as_list(held, "its categories")})
        return sample.meta.get("image_id"), concepts, _crops(sample.meta, number)

    images, names, splits, held, cut = Images(places=[], source=str(path)), [], [], [], []
    for split, tars in shard_splits(path).items():
        found, rows = read_samples(tars, ("json",), parse, need_caption=None)
        prefix = f"{split}/" if split else ""
        images.bad += [(prefix + name, why) for name, why in found.bad]
        for place, (one, concepts, crops) in zip(found.places, rows):
            name = prefix + place.name.replace(".tar:", ":")
            images.places.append(place._replace(name=name))
            names.append(str(one) if is_id(one) else name)
            held.append(concepts)
            cut.append(crops)
            splits.append(split)
    if not names:
        why = f" ({images.bad[0][0]}: {images.bad[0][1]})" if images.bad else ""
        raise UserError(f"{path} holds no image with categories{why}.", "Name shards with categories in KEY.json.")
    without = "images have no boxes, or those of originals of an unknown size: all of an image stands for its concepts."
    return Compositions(
        source=str(path), images=images, names=names, number=number, concepts=tuple(categories.values()), held=held,
        cut=cut, splits=splits if "" not in splits else draw_splits(names, seed, test),
        notes=(f"{cut.count(None):,} of {len(cut):,} {without}",) if None in cut else (),
    )  # fmt: skip


def _crops(meta: dict, number: dict[int, int]) -> list[tuple[int, Box]] | None:
    """The boxes of an image in stored pixels, None for unknown ones."""
    if meta.get("boxes") is None or not {"width", "height"} & set(meta):
        return None
    size = as_size(meta["width"], meta["height"])
    stored = as_size(*meta.get("size", size))
    across, down = stored[0] / size[0], stored[1] / size[1]
    found = []
    for category, box, *crowd in as_list(meta["boxes"], "its boxes", MAX_OBJECTS):
        if (at := _box(box, size)) is not None and not any(crowd):
            found.append((number[category], (at[0] * across, at[1] * down, at[2] * across, at[3] * down)))
    return found
