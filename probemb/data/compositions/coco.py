"""COCO's objects: instances_train2017.json and the images, in a folder, a zip or a tar.

{"images": [{"id", "file_name", "width", "height"}], "categories": [{"id", "name"}],
 "annotations": [{"image_id", "category_id", "bbox": [x, y, width, height], "iscrowd"}]}

Images with at least one annotation are read, as the benchmark has it. An image has the categories of all its
annotations; crops are taken of single objects only, not of groups (`iscrowd`). Splits are drawn 4:1:1, or the test
images are those of MPC's list and the others are divided 4:1.
"""

from __future__ import annotations

import struct
import zipfile
from collections import defaultdict
from pathlib import Path, PurePosixPath

from probemb.data.boxes.geometry import Box
from probemb.data.captions.dataset import is_id, missing_images
from probemb.data.captions.image_files import is_inside, locate
from probemb.data.compositions.annotated import ConceptImages, draw_splits
from probemb.data.compositions.annotations import MAX_OBJECTS, Rows, read_box, read_categories, read_json, read_size
from probemb.data.image_loader import Images, Place, list_members
from probemb.errors import UserError

USUAL = "instances_train2017.json"  # of which the benchmark is made
_FETCH = "Give COCO's instances_train2017.json, from annotations_trainval2017.zip."
_LOCAL_HEADER = struct.Struct("<4s5HIIIHH")  # of a zip


def find_instances(path: Path) -> Path | None:
    """instances_*.json: this file, or train2017's or else the only one of a folder or its `annotations`."""
    if path.is_file():
        return path if path.name.removesuffix(".gz").endswith(".json") else None
    for folder in (path, path / "annotations"):
        files = sorted(folder.glob("instances_*.json*"))
        usual = [file for file in files if file.name.startswith(USUAL)]
        if usual or len(files) == 1:
            return (usual or files)[0]
        if files:
            raise UserError(
                f"{folder} holds {len(files)} files instances_*.json.", f"Name one of them, such as {files[0]}."
            )
    return None


def read_coco(file: Path, images: Path | None, seed: int, test: set[str] | None = None) -> ConceptImages:
    """The images of an instances file. Raises UserError: malformed, or images are missing.

    Args:
        images: the folder (of train2017, or with it inside), zip or tar of the images; by default searched beside.
        seed, test: of the splits, see `draw_splits`; test: ids as texts.
    """
    content = read_json(file, _FETCH)
    try:
        names, sizes, files = _images(content)
        categories = read_categories(content["categories"])
        objects = _objects(content["annotations"], sizes, categories)
    except (ValueError, KeyError, TypeError) as error:
        why = f"there is no {error}" if isinstance(error, KeyError) else error
        raise UserError(f"{file} holds no object annotations in COCO's form: {why}.", _FETCH) from None
    chosen = [one for one in names if objects[one]]
    if not chosen:
        raise UserError(f"{file} annotates no image.", _FETCH)
    number, rows = {one: place for place, one in enumerate(categories)}, Rows()
    for place, one in enumerate(chosen):
        boxes = [(number[category], box) for category, box in objects[one] if box is not None]
        rows.add(place, sorted({number[category] for category, _ in objects[one]}), boxes)
    ids = [str(one) for one in chosen]
    found = _locate([files[one] for one in chosen], ids, file, images)
    return ConceptImages(
        images=found,
        names=ids,
        concepts=tuple(categories.values()),
        concept_ids=tuple(categories),
        splits=draw_splits(ids, seed, test),
        source=str(file),
        **rows.arrays(),
    )


def read_sizes(file: Path) -> dict[int, tuple[int, int]]:
    """(width, height) of the images that any of COCO's JSON files lists, by id. Raises UserError."""
    try:
        return _images(read_json(file, "Name one of COCO's JSON files."))[1]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{file} lists no images with their sizes.", "Name one of COCO's JSON files.") from None


def _images(content: dict) -> tuple[list[int], dict[int, tuple[int, int]], dict[int, str]]:
    sizes, files = {}, {}
    for one in content["images"]:
        number, name = one["id"], one["file_name"]
        if not is_id(number) or number in sizes:
            raise ValueError(f"the image id {str(number)[:40]} is none, or occurs twice")
        if not isinstance(name, str) or not is_inside(name):
            raise ValueError(f"the image {str(name)[:100]!r} does not lie in the image folder")
        sizes[number], files[number] = read_size(one["width"], one["height"]), name
    return list(sizes), sizes, files


def _objects(rows: list, sizes: dict, categories: dict) -> dict[int, list[tuple[int, Box | None]]]:
    """(category, box) of the annotations of each image; the box is None for groups and for less than a pixel."""
    found: dict[int, list[tuple[int, Box | None]]] = defaultdict(list)
    for one in rows:
        image, category = one["image_id"], one["category_id"]
        if not is_id(image) or not is_id(category) or image not in sizes or category not in categories:
            raise ValueError("an annotation is of an unknown image or category")
        box = read_box(one["bbox"], sizes[image])
        found[image].append((category, None if one.get("iscrowd") else box))
        if len(found[image]) > MAX_OBJECTS:
            raise ValueError(f"the image {image} has more than {MAX_OBJECTS:,} annotations")
    return found


def _locate(files: list[str], ids: list[str], file: Path, images: Path | None) -> Images:
    if images is not None and images.is_file():
        inside = _in_zip(images) if zipfile.is_zipfile(images) else _in_tar(images)
        missing = [name for name in files if PurePosixPath(name).name not in inside]
        if missing:
            raise missing_images(str(file), missing, len(files))
        places = [inside[PurePosixPath(name).name]._replace(name=one) for name, one in zip(files, ids)]
        return Images(places=places, source=str(file))
    folder = file.name.removesuffix(".gz").removesuffix(".json").removeprefix("instances_")
    beside = [file.parent, file.parent.parent, file.parent / folder, file.parent.parent / folder]
    found, _ = locate([(name, f"{folder}/{name}") for name in files], ids, str(file), images, beside)
    if found is None:
        raise UserError(
            f"None of the {len(files):,} images of {file} is there, {files[0]} for one.",
            "Name the folder, zip or tar of the images.",
        )
    return found


def _in_tar(path: Path) -> dict[str, Place]:
    return {
        PurePosixPath(one.name).name: Place(one.name, str(path), one.offset, one.size) for one in list_members(path)
    }


def _in_zip(path: Path) -> dict[str, Place]:
    """The places of a zip's files by name; COCO's zips store images as they are. Raises UserError."""
    remedy = "Fetch it again, or unpack it and name the folder."
    found = {}
    try:
        with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
            for one in archive.infolist():
                if one.is_dir():
                    continue
                if one.compress_type != zipfile.ZIP_STORED or one.flag_bits & 1:
                    raise UserError(f"{path} holds {one.filename[:100]!r} compressed or encrypted.", remedy)
                file.seek(one.header_offset)
                header = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
                start = one.header_offset + _LOCAL_HEADER.size + header[-2] + header[-1]
                found[PurePosixPath(one.filename).name] = Place(one.filename, str(path), start, one.file_size)
    except (OSError, ValueError, struct.error, zipfile.BadZipFile, NotImplementedError) as error:
        raise UserError(f"{path} is no zip that can be read: {str(error)[:200]}.", remedy) from None
    return found
