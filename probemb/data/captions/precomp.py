"""The "precomp" files of VSE++, SCAN and VSRN: captions, five lines an image, optional ids, and features of regions."""

from __future__ import annotations

import importlib.util
import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from probemb.data.captions.dataset import CaptionDataset, Entry, assemble
from probemb.data.captions.webdataset import read_scenes
from probemb.data.reading import (
    as_inside,
    check_unique,
    checked,
    choose_split,
    is_id,
    locate,
    only_file,
    parse_all,
    read_bytes,
    read_json,
    read_lines,
    read_npy,
    read_text,
)
from probemb.data.regions import ENDING, read_regions
from probemb.data.shards.samples import MAX_CAPTION_CHARS
from probemb.errors import UserError

PER_IMAGE = 5  # captions of an image in a precomp file
_CAPS = re.compile(r"(?P<prefix>.*?)(?P<name>[A-Za-z0-9]+)_caps\.txt(\.gz)?")
_NAMES = {"test": ("testall", "test"), "val": ("dev", "val")}  # of the files of a split, the preferred one first
_CANONICAL = {name: split for split, names in _NAMES.items() for name in names}
_COCO_NAMES = (
    "train2014/COCO_train2014_{:012d}.jpg", "val2014/COCO_val2014_{:012d}.jpg", "COCO_train2014_{:012d}.jpg",
    "COCO_val2014_{:012d}.jpg", "train2017/{:012d}.jpg", "val2017/{:012d}.jpg", "{:012d}.jpg",
)  # fmt: skip


def read_precomp(path: Path, split: str | None, images: Path | None) -> CaptionDataset:
    """`NAME_caps.txt`, five lines an image, with the ids of the images or captions beside it, if any.

    `NAME_ids.txt` (one image id a line, or one for each caption) as SCAN and VSE++ ship it, or `coco_NAME_ids.npy` of
    COCO annotation ids as PCME does. Images are found by COCO's names, by ID.jpg, or through `id_mapping.json`. Without
    ids, images cannot be located and are named by their number. Raises UserError.
    """
    file, split = _find_caps(path, split, regions=False)
    entries, has_ids = _read_captions(file)
    names = [str(entry.id) for entry in entries]
    if not has_ids:
        ids = f"{_stem(file)}_ids.txt"
        return assemble(entries, file, split, UserError(
            f"Nothing beside {file} says which images its captions belong to.",
            f"Put {ids} with one image id a line there, or name a Karpathy json.",
        ))  # fmt: skip
    mapping = _read_mapping(file)
    candidates = [_candidates(entry.id, mapping) for entry in entries]
    located = locate(candidates, names, file, images, [file.parent, file.parent.parent])
    return assemble(entries, file, split, located)


def read_with_regions(path: Path, split: str | None, images: Path | None) -> CaptionDataset:
    """`read_precomp` of captions with `NAME_ims.npy` beside them, whose regions stand in for the images' pixels.

    `NAME_scenes.jsonl` has the scenes and stated captions of the synthetic world. Raises UserError.
    """
    if images is not None:
        raise UserError(
            f"{path} is read with its regions, so that the image folder {images} would not be used.",
            "Leave the image folder out, or name the format precomp to read pixels.",
        )
    file, split = _find_caps(path, split, regions=True)
    entries, _ = _read_captions(file)
    names = [str(entry.id) for entry in entries]
    data = assemble(entries, file, split, read_regions(file.with_name(_stem(file) + ENDING), names, PER_IMAGE))
    truth = file.with_name(f"{_stem(file)}_scenes.jsonl")
    if not truth.is_file():
        return data
    scenes = read_scenes(parse_all(truth, "a list of scenes", read_lines(truth), json.loads, "line"), data.captions)
    if scenes is None:
        raise UserError(f"{truth} does not describe the scenes of {file.name}.", "Write both again, or remove it.")
    return replace(data, scenes=scenes)


def _stem(file: Path) -> str:
    return file.name.partition("_caps.")[0]


def _find_caps(path: Path, split: str | None, regions: bool) -> tuple[Path, str | None]:
    """The caption file and its split, None where none was asked for; `regions`: one with regions beside it."""
    folder = path if any(path.glob("*_caps.txt*")) else path / "precomp"
    files = [path] if path.is_file() else sorted(file for file in folder.glob("*") if _CAPS.fullmatch(file.name))
    if regions:
        files = [file for file in files if file.with_name(_stem(file) + ENDING).is_file()]
    names = [found["name"] if (found := _CAPS.fullmatch(file.name)) else "" for file in files]
    split, _ = choose_split(split, filter(None, [*(_CANONICAL.get(name, name) for name in names), *names]), path)
    for wanted in _NAMES.get(split, (split,)):
        matching = [file for file, name in zip(files, names) if wanted in (None, name)]
        if matching or split is None:
            break
    return only_file(matching, path, "*_caps.txt" + (f" with *{ENDING} beside it" if regions else "")), split


def _read_captions(file: Path) -> tuple[list[Entry], bool]:
    """The captions of every image, and whether the images' ids are known; else they are numbers."""
    lines = read_text(file).split("\n")
    if not lines[-1].strip():
        lines.pop()
    lines = [line.strip()[:MAX_CAPTION_CHARS] for line in lines]
    if not lines or len(lines) % PER_IMAGE:
        raise UserError(
            f"{file} has {len(lines)} lines, which is not {PER_IMAGE} for each image.",
            "Name a *_caps.txt with five captions an image, one a line.",
        )
    total = len(lines) // PER_IMAGE
    image_ids, caption_ids = _read_ids(file, total)
    entries = []
    for i in range(total):
        rows = [k for k in range(PER_IMAGE * i, PER_IMAGE * (i + 1)) if lines[k]]
        numbers = None if caption_ids is None else [caption_ids[k] for k in rows]
        entries.append(Entry(image_ids[i] if image_ids else f"{_stem(file)}:{i}", [lines[k] for k in rows], numbers))
    return entries, image_ids is not None


def _read_ids(file: Path, total: int) -> tuple[list[int | str] | None, list[int] | None]:
    """(id of each image, id of each caption), either None if unknown."""
    beside = next(filter(Path.is_file, _id_files(file)), None)
    if beside is None:
        return None, None
    lines = PER_IMAGE * total
    # dev_caps and test_caps are the first part of PCME's splits
    ids = _numbers_of_npy(beside)[: max(lines, total)] if beside.suffix == ".npy" else _lines_of_ids(beside)
    if len(ids) == total:
        return ids, None
    remedy = f"Put the ids that belong to {file.name} there."
    if len(ids) != lines:
        raise UserError(f"{beside} has {len(ids)} ids, but {file} has {total} images.", remedy)
    if all(len(set(ids[i : i + PER_IMAGE])) == 1 for i in range(0, lines, PER_IMAGE)):
        return ids[::PER_IMAGE], None
    if not all(map(is_id, ids)):
        raise UserError(f"{beside} does not give five captions in a row the same image.", remedy)
    check_unique(ids, "caption id", beside)
    known = _image_of_caption()
    image_ids = [known.get(str(one)) for one in ids]
    if None in image_ids:
        return None, ids
    for i in range(0, lines, PER_IMAGE):
        if len(set(image_ids[i : i + PER_IMAGE])) > 1:
            raise UserError(
                f"The captions {ids[i]} to {ids[i + PER_IMAGE - 1]} of {beside} do not belong to one image of COCO.",
                remedy,
            )
    return image_ids[::PER_IMAGE], ids


def _id_files(file: Path) -> Iterator[Path]:
    """Possible id files of a caption file: coco_test_ids.npy belongs to coco_precomp_testall_caps.txt.gz."""
    parts = _CAPS.fullmatch(file.name)
    if parts is None:
        return
    prefixes = dict.fromkeys([parts["prefix"], parts["prefix"].replace("precomp_", "")])
    if not parts["prefix"] and "coco" in f"{file.parent.parent.name}/{file.parent.name}":
        prefixes["coco_"] = None
    of_pcme = {"testall": "test", "val": "dev"}.get(parts["name"])
    for prefix in prefixes:
        for ending in ("txt", "txt.gz", "npy"):
            yield file.parent / f"{prefix}{parts['name']}_ids.{ending}"
        if of_pcme:
            yield file.parent / f"{prefix}{of_pcme}_ids.npy"


def _lines_of_ids(path: Path) -> list[int | str]:
    ids = parse_all(path, "a list of the ids of images", read_lines(path), as_inside, "line")
    return [int(one) for one in ids] if all(one.isascii() and one.isdigit() and len(one) < 19 for one in ids) else ids


def _numbers_of_npy(path: Path) -> list[int]:
    with checked(path, "a row of ids"):
        array = read_npy(io.BytesIO(read_bytes(path)))
        if array.ndim != 1 or array.dtype.kind not in "iu" or (len(array) and int(array.min()) < 0):
            raise ValueError(f"it is {array.dtype} {array.shape}")
    return array.tolist()


def _image_of_caption() -> dict[str, int]:
    """COCO's image of each annotation id of Karpathy's test split, from the package eccv_caption."""
    spec = importlib.util.find_spec("eccv_caption")
    path = spec and Path(spec.origin).parent / "data" / "original_caption_to_image.json"
    images_of = json.loads(path.read_text()) if path and path.is_file() else {}
    return {caption: images[0] for caption, images in images_of.items()}


def _read_mapping(file: Path) -> dict[str, str]:
    """`id_mapping.json` of VSE∞: image id -> path below the image folder. Empty if there is none."""
    files = (folder / "id_mapping.json" for folder in (file.parent, file.parent.parent))
    path = next(filter(Path.is_file, files), None)
    mapping = {} if path is None else read_json(path)
    with checked(path or file, "a mapping of ids to images"):
        return {number: as_inside(name) for number, name in mapping.items()}


def _candidates(one: int | str, mapping: dict[str, str]) -> tuple[str, ...]:
    """Possible paths of an image below the image folder."""
    mapped = (mapping[str(one)],) if str(one) in mapping else ()
    if isinstance(one, str):
        return (*mapped, one, f"{one}.jpg")
    return (*mapped, *(name.format(one) for name in _COCO_NAMES), f"{one}.jpg")
