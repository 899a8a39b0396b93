"""Readers of annotation files: Karpathy's json, HierarCaps, any CSV, CUB, and "precomp" files of VSE++ and SCAN."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import urlsplit

from probemb.data.image_loader import REGIONS, Images, locate, read_regions
from probemb.data.reading import (
    as_id,
    as_inside,
    check_unique,
    checked,
    choose_split,
    only_file,
    parse_all,
    read_bytes,
    read_json,
    read_lines,
    read_npy,
    read_text,
    split_name,
)
from probemb.data.shards.samples import MAX_CAPTION_CHARS
from probemb.errors import UserError

KARPATHY, HIERARCAPS = "a Karpathy json", "HierarCaps' table"
PER_IMAGE = 5  # captions of an image in a precomp file


class Entry(NamedTuple):
    """An image: COCO's id or a name, its captions, and their ids and its class if known."""

    id: int | str
    captions: list[str]
    caption_ids: list[int] | None = None
    label: str | None = None


class Listing(NamedTuple):
    """The images with captions of a path, the images' locations or the error to raise where they are needed, the split
    (None: all), the file, and the one that holds their truth, if there is one.
    """

    entries: list[Entry]
    located: Images | UserError
    split: str | None
    source: Path
    truth: Path | None = None


def _locate(candidates: Sequence[Sequence[str]], names: Sequence[str], *where) -> Images | UserError:
    """`locate`, with its error in place of the images: captions can be used without."""
    try:
        return locate(candidates, names, *where)
    except UserError as error:
        return error


def read_karpathy(path: Path, split: str | None, images: Path | None) -> Listing:
    """`{"images": [{"filename", "filepath", "split", "cocoid", "sentences": [{"raw", "sentid"}]}]}`.

    COCO's ids are used if "cocoid" is present; else an image is named by its file. Raises UserError.
    """
    if path.is_dir():
        path = only_file(sorted(path.glob("dataset*.json*")), path, KARPATHY)
    content = read_json(path)
    with checked(path, KARPATHY, "Name dataset_coco.json, dataset_flickr30k.json or one like them."):
        rows = content["images"]
    parsed = parse_all(path, KARPATHY, rows, _karpathy_image, "image")
    split, parts = choose_split(split, (part for part, _, _ in parsed), path)
    check_unique((entry.id for _, _, entry in parsed), "image id", path)
    names = [name for part, name, _ in parsed if part in parts]
    located = _locate([(name, PurePosixPath(name).name) for name in names], names, path, images, [path.parent])
    return Listing([entry for part, _, entry in parsed if part in parts], located, split, path)


def _karpathy_image(row: dict) -> tuple[str, str, Entry]:
    """Split, file name and captions of an image."""
    name = as_inside(f"{row['filepath']}/{row['filename']}" if row.get("filepath") else row["filename"])
    sentences = [sentence for sentence in row["sentences"] if sentence["raw"].strip()]
    texts = [sentence["raw"].strip()[:MAX_CAPTION_CHARS] for sentence in sentences]
    split = split_name(str(row["split"]))
    if row.get("cocoid") is None:
        return split, name, Entry(str(PurePosixPath(name).with_suffix("")), texts)
    ids = [as_id(sentence["sentid"], "the sentid") for sentence in sentences]
    return split, name, Entry(as_id(row["cocoid"], "the cocoid"), texts, ids)


def read_hierarcaps(path: Path, split: str | None, images: Path | None) -> Listing:
    """`id,captions,image_url`, the captions of an image from general to specific, separated by " => ".

    Images are named, and looked for, by the file name in their URL. Raises UserError.
    """
    if path.is_dir():
        path = only_file(sorted(path.glob("hierarcaps*.csv")), path, HIERARCAPS)
    split, _ = choose_split(split, (), path)

    def parse(row: dict) -> Entry:
        texts = [text.strip() for text in row["captions"].split("=>") if text.strip()]
        return Entry(as_inside(PurePosixPath(urlsplit(row["image_url"]).path).name), texts)

    entries = parse_all(path, HIERARCAPS, csv.DictReader(io.StringIO(read_text(path)), strict=True), parse, "row")
    names = [entry.id for entry in entries]
    return Listing(entries, _locate([[name] for name in names], names, path, images, [path.parent]), split, path)


# Names of a CSV's columns: those of open_clip's --csv-img-key and --csv-caption-key, and others that are common.
_CSV = {"image": ("filepath", "image", "filename", "file_name", "image_path", "path"),
        "caption": ("title", "caption", "text", "comment"), "split": ("split",)}  # fmt: skip


def read_csv(path: Path, split: str | None, images: Path | None) -> Listing:
    """A line for each caption, with the path of its image, and maybe its split, in columns named as in _CSV.

    Separators are tabs (open_clip's), commas, "|" or ";", whichever the first line has most of. Absolute paths must
    lead into the folder of the images. HierarCaps' table is recognised by its columns. Raises UserError.
    """
    path = only_file(sorted(path.glob("captions.[ct]sv")), path, "a CSV") if path.is_dir() else path
    text = read_text(path)
    head = text.partition("\n")[0]
    if "captions" in head and "image_url" in head:
        return read_hierarcaps(path, split, images)
    found = csv.DictReader(io.StringIO(text), delimiter=max("\t,|;", key=head.count), strict=True)
    names = {(name or "").strip().lower(): name for name in found.fieldnames or ()}
    column = {what: next((names[one] for one in known if one in names), None) for what, known in _CSV.items()}
    if not (column["image"] and column["caption"]):
        remedy = f"Name the columns in its first line: {' or '.join(_CSV['image'][:3])}, and title or caption."
        raise UserError(f"{path} has no column of images, or none of captions ({head[:80].strip()}).", remedy)

    def parse(row: dict) -> tuple[str, str, str] | None:
        image, caption = row[column["image"]].strip(), row[column["caption"]].strip()[:MAX_CAPTION_CHARS]
        if os.path.isabs(image):
            image = os.path.relpath(image, os.path.abspath(images or path.parent))
        part = split_name(row[column["split"]].strip()) if column["split"] else ""
        return (as_inside(image), caption, part) if caption else None

    rows, entries = parse_all(path, "a CSV of images and captions", found, parse, "row"), {}
    split, parts = choose_split(split, {part for *_, part in rows} - {""}, path)
    for image, caption, part in rows:
        if part in parts or split is None:
            entries.setdefault(image, Entry(image, [])).captions.append(caption)
    candidates = [(image, PurePosixPath(image).name) for image in entries]
    return Listing([*entries.values()], _locate(candidates, [*entries], path, images, [path.parent]), split, path)


# --------------------------------------------------------------------------------------------------------------- CUB

CUB_TEXTS, CUB_IMAGES = "text_c10", "CUB_200_2011"
_CUB_LIST = re.compile(r"(trainval|train|val|test)classes(\d?)\.txt")


def read_cub(path: Path, split: str | None, images: Path | None) -> Listing:
    """CUB-200-2011 with the captions of Reed et al.: birds of 200 classes, splits by class.

    text_c10/CLASS/NAME.txt            the captions, one a line; CLASS is 001.Black_footed_Albatross, ...
    trainvalclasses.txt, ...           a CLASS a line; testclasses.txt, and trainclasses1.txt, valclasses1.txt, ...
    images.txt, images/CLASS/NAME.jpg  "NUMBER CLASS/NAME.jpg" lines, and the images
    seen_test_images.txt               optional: CLASS/NAME.jpg lines, images of the training classes that are held out

    Each lies in the folder, in CUB_200_2011, or beside text_c10. The splits are "train" (trainvalclasses.txt without
    the held-out images), "val" (the held-out images), "test" (other classes), and "train1", "val1", ... of the lists
    with numbers. Sources: Wah et al. 2011; Reed et al. 2016; the class splits of Xian et al. 2017, as PCME uses them
    (§4.1.2). Raises UserError.
    """
    texts = next(filter(Path.is_dir, (path / CUB_TEXTS, *sorted(path.glob(f"*/{CUB_TEXTS}")))), path / CUB_TEXTS)
    folders = [path, path / CUB_IMAGES, texts.parent]
    files = {file.name: file for folder in reversed(folders) for file in folder.glob("*.txt")}
    for name in ("images.txt", "trainvalclasses.txt", "testclasses.txt"):
        if name not in files:
            remedy = f"Put the files of {CUB_IMAGES} and of its captions ({CUB_TEXTS}) there as they are published."
            raise UserError(f"There is no {name} in {path}.", remedy)
    rows = [line.partition(" ")[2].strip() for line in read_lines(files["images.txt"])]
    names = parse_all(files["images.txt"], "a list of NUMBER CLASS/NAME.jpg", rows, as_inside, "line")
    held_out = set(read_lines(files["seen_test_images.txt"])) if "seen_test_images.txt" in files else set()
    members = {}
    for file in files.values():
        if found := _CUB_LIST.fullmatch(file.name):
            classes = set(read_lines(file))
            members["".join(found.groups())] = {name for name in names if name.partition("/")[0] in classes}
    seen = members["trainval"]
    splits = {"train": seen - held_out, "val": seen & held_out, "test": members["test"]}
    splits |= {one: some - held_out for one, some in members.items() if one[-1].isdigit()}
    split, parts = choose_split(split, (one for one, some in splits.items() if some), path)
    chosen = [name for name in names if any(name in splits[part] for part in parts)]
    entries = []
    for name in map(PurePosixPath, chosen):
        captions = [line[:MAX_CAPTION_CHARS] for line in read_lines(texts / name.with_suffix(".txt"))]
        entries.append(Entry(str(name.with_suffix("")), captions, label=name.parts[0]))
    return Listing(entries, _locate([[name] for name in chosen], chosen, path, images, folders[:2]), split, path)


# ----------------------------------------------------------------------------------------------------------- precomp

_CAPS = re.compile(r"(?P<prefix>.*?)(?P<name>[A-Za-z0-9]+)_caps\.txt(\.gz)?")
_FILES_OF = {"test": ("testall", "test"), "val": ("dev", "val")}  # the files of a split, the preferred one first
_PCME = {"testall": "test", "val": "dev"}  # its names of these files


def read_precomp(path: Path, split: str | None, images: Path | None) -> Listing:
    """`NAME_caps.txt` of VSE++ and SCAN, five lines an image, with the ids of the images or captions beside it, if any.

    `NAME_ids.txt` (one image id a line, or one for each caption) as SCAN and VSE++ ship it, or `coco_NAME_ids.npy` of
    COCO annotation ids as PCME does. Images are found by COCO's names, by ID.jpg, or through `id_mapping.json`. Without
    ids, images cannot be located and are named by their number. Raises UserError.
    """
    file, split = _find_caps(path, split, regions=False)
    entries, has_ids = _read_captions(file)
    if not has_ids:
        what = f"Nothing beside {file} says which images its captions belong to."
        remedy = f"Put {_stem(file)}_ids.txt with one image id a line there, or name a Karpathy json."
        return Listing(entries, UserError(what, remedy), split, file)
    folders = [file.parent, file.parent.parent]
    mapping = next(filter(Path.is_file, (folder / "id_mapping.json" for folder in folders)), None)  # of VSE-infinity
    with checked(mapping or file, "a mapping of ids to images"):
        known = {key: as_inside(name) for key, name in (read_json(mapping) if mapping else {}).items()}
    candidates = [[*filter(None, [known.get(str(entry.id))]), *_image_files(entry.id)] for entry in entries]
    return Listing(entries, _locate(candidates, [str(e.id) for e in entries], file, images, folders), split, file)


def read_with_regions(path: Path, split: str | None, images: Path | None) -> Listing:
    """`read_precomp` of captions with `NAME_ims.npy` beside them, whose regions stand in for the images' pixels.

    `NAME_truth.npz` has their truth, if it is known. Raises UserError.
    """
    if images is not None:
        remedy = "Leave the image folder out, or name the format precomp to read pixels."
        raise UserError(f"{path} is read with its regions, so that {images} would not be used.", remedy)
    file, split = _find_caps(path, split, regions=True)
    entries, _ = _read_captions(file)
    regions = read_regions(file.with_name(_stem(file) + REGIONS), [str(entry.id) for entry in entries], PER_IMAGE)
    return Listing(entries, regions, split, file, file.with_name(f"{_stem(file)}_truth.npz"))


def _stem(file: Path) -> str:
    return file.name.partition("_caps.")[0]


def _find_caps(path: Path, split: str | None, regions: bool) -> tuple[Path, str | None]:
    """The caption file and its split, None where none was asked for; `regions`: one with regions beside it."""
    folder = path if any(path.glob("*_caps.txt*")) else path / "precomp"
    files = [path] if path.is_file() else sorted(file for file in folder.glob("*") if _CAPS.fullmatch(file.name))
    if regions:
        files = [file for file in files if file.with_name(_stem(file) + REGIONS).is_file()]
    names = [found["name"] if (found := _CAPS.fullmatch(file.name)) else "" for file in files]
    canonical = {name: key for key, several in _FILES_OF.items() for name in several}
    split, _ = choose_split(split, filter(None, [*(canonical.get(name, name) for name in names), *names]), path)
    if split is not None:
        wanted = next((name for name in _FILES_OF.get(split, (split,)) if name in names), None)
        files = [file for file, name in zip(files, names) if name == wanted]
    return only_file(files, path, "*_caps.txt" + (f" with *{REGIONS} beside it" if regions else "")), split


def _read_captions(file: Path) -> tuple[list[Entry], bool]:
    """The captions of every image, and whether the images' ids are known; else they are numbers."""
    lines = [line.strip()[:MAX_CAPTION_CHARS] for line in read_text(file).removesuffix("\n").split("\n")]
    if len(lines) % PER_IMAGE:
        what = f"{file} has {len(lines)} lines, which is not {PER_IMAGE} for each image."
        raise UserError(what, "Name a *_caps.txt with five captions an image, one a line.")
    total = len(lines) // PER_IMAGE
    image_ids, caption_ids = _read_ids(file, total)
    entries = []
    for i in range(total):
        rows = [k for k in range(PER_IMAGE * i, PER_IMAGE * (i + 1)) if lines[k]]
        numbers = caption_ids and [caption_ids[k] for k in rows]
        entries.append(Entry(image_ids[i] if image_ids else f"{_stem(file)}:{i}", [lines[k] for k in rows], numbers))
    return entries, image_ids is not None


def _read_ids(file: Path, total: int) -> tuple[list[int | str] | None, list[int] | None]:
    """(id of each image, id of each caption), either None if unknown."""
    if (beside := _id_file(file)) is None:
        return None, None
    lines, of_pcme = PER_IMAGE * total, beside.suffix == ".npy"
    with checked(beside, "a row of ids"):
        if of_pcme:  # dev_caps and test_caps are the first part of PCME's splits
            ids = [as_id(one, "an id") for one in read_npy(io.BytesIO(read_bytes(beside))).tolist()[:lines]]
        else:
            ids = [as_inside(line) for line in read_lines(beside)]
            ids = list(map(int, ids)) if all(re.fullmatch("[0-9]{1,18}", one) for one in ids) else ids
    if len(ids) == total:
        return ids, None
    image_of = list(map(_image_of_caption().get, ids)) if of_pcme else ids
    fives = [set(image_of[i : i + PER_IMAGE]) for i in range(0, lines, PER_IMAGE)]
    if len(ids) != lines or any(len(five) > 1 for five in fives):
        what = f"{beside} is not a list of ids for {total} images, or for {PER_IMAGE} captions in a row of each."
        raise UserError(what, f"Put the ids that belong to {file.name} there.")
    return None if None in image_of else image_of[::PER_IMAGE], ids if of_pcme else None


def _id_file(file: Path) -> Path | None:
    """The file of ids: coco_test_ids.npy belongs to coco_precomp_testall_caps.txt.gz."""
    if (parts := _CAPS.fullmatch(file.name)) is None:
        return None
    name, corpus = parts["name"], parts["prefix"].partition("_")[0]
    patterns = [f"{_stem(file)}_ids.txt*", *(f"{corpus}*{one}_ids.npy" for one in (name, _PCME.get(name, name)))]
    return next((found for pattern in patterns for found in sorted(file.parent.glob(pattern))), None)


def _image_of_caption() -> dict[int, int]:
    """COCO's image of each annotation id of Karpathy's test split, from the package eccv_caption."""
    spec = importlib.util.find_spec("eccv_caption")
    path = spec and Path(spec.origin).parent / "data" / "original_caption_to_image.json"
    images_of = json.loads(path.read_text()) if path and path.is_file() else {}
    return {int(caption): images[0] for caption, images in images_of.items()}


def _image_files(one: int | str) -> list[str]:
    """Possible paths of an image below the image folder."""
    if isinstance(one, str):
        return [one, f"{one}.jpg"]
    name, parts = f"{one:012d}.jpg", ("train", "val")
    return [
        *(f"{part}2014/COCO_{part}2014_{name}" for part in parts), *(f"COCO_{part}2014_{name}" for part in parts),
        *(f"{part}2017/{name}" for part in parts), name, f"{one}.jpg",
    ]  # fmt: skip
