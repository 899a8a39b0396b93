"""The "precomp" files of VSE++, SCAN and VSRN: captions, five lines an image, optional ids, and features of regions."""

import importlib.util
import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from probemb.data.captions.dataset import (
    CaptionDataset,
    Entry,
    assemble,
    check_unique,
    choose_split,
    is_id,
    only_file,
    read_text,
    resolve_split,
)
from probemb.data.captions.image_files import is_inside, locate
from probemb.data.captions.webdataset import read_scenes
from probemb.data.regions import ENDING, read_regions
from probemb.data.shards.samples import MAX_CAPTION_CHARS
from probemb.errors import UserError

SCENES = "_scenes.jsonl"
PER_IMAGE = 5  # captions of an image in a precomp file
_CAPS = re.compile(r"(?P<prefix>.*?)(?P<name>[A-Za-z0-9]+)_caps\.txt(\.gz)?")
_PRECOMP_SPLITS = {"test": ("testall", "test"), "val": ("dev", "val"), "train": ("train",)}
_COCO_NAMES = (
    "train2014/COCO_train2014_{:012d}.jpg", "val2014/COCO_val2014_{:012d}.jpg", "COCO_train2014_{:012d}.jpg",
    "COCO_val2014_{:012d}.jpg", "train2017/{:012d}.jpg", "val2017/{:012d}.jpg", "{:012d}.jpg",
)  # fmt: skip


def read_with_regions(path: Path, split: str | None, images: Path | None) -> CaptionDataset:
    """`read_precomp` of captions with `NAME_ims.npy` beside them, whose regions stand in for the images' pixels.

    Raises UserError, also where an image folder is given, which would not be used.
    """
    if images is not None:
        raise UserError(
            f"{path} is read with its regions, so that the image folder {images} would not be used.",
            "Leave the image folder out, or name the format precomp to read pixels.",
        )
    path, split = _find_caps(path, split, with_regions=True)
    regions = regions_beside(path)
    found = read_precomp(path, split, None, locate_images=False)
    found = replace(found, located=read_regions(regions, list(map(str, found.image_ids)), PER_IMAGE), missing=())
    return replace(found, scenes=_scenes_beside(path, found))


def regions_beside(caps: Path) -> Path:
    """The array that belongs to a caption file."""
    return caps.with_name(caps.name.partition("_caps.")[0] + ENDING)


def _scenes_beside(caps: Path, found: CaptionDataset) -> list[tuple] | None:
    """Scenes and stated captions, from `NAME_scenes.jsonl` of the synthetic world. Raises UserError: other captions."""
    path = caps.with_name(caps.name.partition("_caps.")[0] + SCENES)
    if not path.is_file():
        return None
    try:
        metas = [json.loads(line) for line in read_text(path).decode().splitlines()]
    except ValueError:
        metas = []
    scenes = read_scenes(metas, found.captions) if len(metas) == len(found) else None
    if scenes is None:
        raise UserError(f"{path} does not describe the scenes of {caps.name}.", "Write both again, or remove it.")
    return scenes


def read_precomp(path: Path, split: str | None, images: Path | None, locate_images: bool = True) -> CaptionDataset:
    """`NAME_caps.txt`, five lines an image, with the ids of the images or captions beside it, if any.

    `NAME_ids.txt` (one image id a line, or one for each caption) as SCAN and VSE++ ship it, or `coco_NAME_ids.npy` of
    COCO annotation ids as PCME does. Images are found by COCO's names, by ID.jpg, or through `id_mapping.json`. Without
    ids, images cannot be located and are named by their number. Raises UserError.
    """
    path, split = _find_caps(path, split) if locate_images else (path, split)
    try:
        lines = read_text(path).decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not a text in UTF-8 (byte {error.start}).", "Name a file with one caption a line."
        ) from None
    if not lines[-1].strip():
        lines.pop()
    lines = [line.strip()[:MAX_CAPTION_CHARS] for line in lines]
    if not lines or len(lines) % PER_IMAGE:
        raise UserError(
            f"{path} has {len(lines)} lines, which is not {PER_IMAGE} for each image.",
            "Name a *_caps.txt with five captions an image, one a line.",
        )
    total = len(lines) // PER_IMAGE
    image_ids, caption_ids = _read_ids(path, total)
    entries = []
    for i in range(total):
        kept = [k for k in range(PER_IMAGE * i, PER_IMAGE * (i + 1)) if lines[k]]
        numbers = None if caption_ids is None else [caption_ids[k] for k in kept]
        entries.append(Entry(i if image_ids is None else image_ids[i], [lines[k] for k in kept], numbers))
    if image_ids is None and images is not None:
        raise UserError(
            f"Nothing beside {path} says which of the images in {images} its captions belong to.",
            f"Put {path.name.partition('_caps.')[0]}_ids.txt with one image id a line there, or name a Karpathy json.",
        )
    if image_ids is None:
        entries = [entry._replace(id=f"{path.name.partition('_caps.')[0]}:{entry.id}") for entry in entries]
        return assemble(entries, source=str(path), split=split, missing=[str(entry.id) for entry in entries])
    if not locate_images:
        return assemble(entries, source=str(path), split=split, missing=[str(one) for one in image_ids])
    mapping = _read_mapping(path)
    candidates = [_candidates(one, mapping) for one in image_ids]
    located, missing = locate(
        candidates, [str(one) for one in image_ids], str(path), images, [path.parent, path.parent.parent]
    )
    return assemble(entries, source=str(path), split=split, located=located, missing=missing)


def _find_caps(path: Path, split: str | None, with_regions: bool = False) -> tuple[Path, str | None]:
    """The caption file and its split, None where none was asked for; `with_regions`: one with regions beside it."""
    if path.is_file():
        if with_regions and not regions_beside(path).is_file():
            raise UserError(f"There is no {regions_beside(path)}.", f"Put the regions beside {path.name}.")
        split = resolve_split(split, ())
        found = _CAPS.fullmatch(path.name)
        if split is not None and (found is None or split not in _names_of(found["name"])):
            choose_split(split, [_names_of(found["name"])[0]] if found else [], str(path))
        return path, split
    folder = path if any(path.glob("*_caps.txt*")) else path / "precomp"
    files = [file for file in sorted(folder.glob("*")) if _CAPS.fullmatch(file.name)]
    alone: list[Path] = []
    if with_regions:
        alone = [file for file in files if not regions_beside(file).is_file()]
        files = [file for file in files if file not in alone]
        if alone and not files:
            raise UserError(f"There is no *{ENDING} beside the captions in {folder}.", "Put the regions there.")
    split = resolve_split(split, (_names_of(_CAPS.fullmatch(file.name)["name"])[0] for file in files))
    if split is None:
        return only_file(files, path, "*_caps.txt"), None
    by_name: dict[str, list[Path]] = {}
    for file in files:
        by_name.setdefault(_CAPS.fullmatch(file.name)["name"], []).append(file)
    for name in _PRECOMP_SPLITS.get(split, (split,)):
        if name in by_name:
            return only_file(by_name[name], path, f"{name}_caps.txt"), split
    for file in alone:
        if split in _names_of(_CAPS.fullmatch(file.name)["name"]):
            raise UserError(f"{file} has no {regions_beside(file).name} beside it.", "Put the split's regions there.")
    choose_split(split, [_names_of(name)[0] for name in by_name], str(path))
    raise AssertionError("a split without a file was chosen")


def _names_of(name: str) -> list[str]:
    """The split names of a caption file."""
    return [split for split, names in _PRECOMP_SPLITS.items() if name in names] + [name]


def _read_ids(path: Path, total: int) -> tuple[list[int | str] | None, list[int] | None]:
    """(id of each image, id of each caption), either None if unknown."""
    beside = next(filter(Path.is_file, _id_files(path)), None)
    if beside is None:
        return None, None
    ids = _numbers_of_npy(beside) if beside.suffix == ".npy" else _lines_of_ids(beside)
    lines = PER_IMAGE * total
    if beside.suffix == ".npy" and len(ids) > lines:
        ids = ids[:lines]  # dev_caps and test_caps are the first part of PCME's splits
    if len(ids) == total:
        return ids, None
    if len(ids) != lines:
        raise UserError(
            f"{beside} has {len(ids)} ids, but {path} has {total} images with {PER_IMAGE} captions each.",
            "Replace the ids by those of these captions, or remove that file.",
        )
    if all(len(set(ids[i : i + PER_IMAGE])) == 1 for i in range(0, lines, PER_IMAGE)):
        return ids[::PER_IMAGE], None
    if not all(map(is_id, ids)):
        raise UserError(f"{beside} does not give five captions in a row the same image.", "Correct that file.")
    check_unique(ids, "caption id", str(beside))
    known = _image_of_caption()
    found = [known.get(str(one)) for one in ids]
    if any(image is None for image in found):
        return None, ids
    for i in range(0, lines, PER_IMAGE):
        if len(set(found[i : i + PER_IMAGE])) > 1:
            raise UserError(
                f"The captions {ids[i]} to {ids[i + PER_IMAGE - 1]} of {beside} do not belong to one image of COCO.",
                f"Put the ids that belong to {path.name} there.",
            )
    return found[::PER_IMAGE], ids


def _id_files(path: Path) -> Iterator[Path]:
    """Possible id files of a caption file: coco_test_ids.npy belongs to coco_precomp_testall_caps.txt.gz."""
    parts = _CAPS.fullmatch(path.name)
    if parts is None:
        return
    prefixes = dict.fromkeys([parts["prefix"], parts["prefix"].replace("precomp_", "")])
    if not parts["prefix"] and "coco" in f"{path.parent.parent.name}/{path.parent.name}":
        prefixes["coco_"] = None
    names = dict.fromkeys([parts["name"], {"testall": "test", "val": "dev"}.get(parts["name"], parts["name"])])
    for prefix in prefixes:
        for name in names:
            own = name == parts["name"]
            for ending in ("txt", "txt.gz", "npy") if own else ("npy",):
                yield path.parent / f"{prefix}{name}_ids.{ending}"


def _lines_of_ids(path: Path) -> list[int | str]:
    text = read_text(path).decode("utf-8-sig", "replace").strip()
    ids: list[int | str] = [line.strip() for line in text.split("\n")]
    if all(one.isascii() and one.isdigit() and len(one) < 19 for one in ids):
        return [int(one) for one in ids]
    for number, one in enumerate(ids):
        if not is_inside(one):
            raise UserError(f"Line {number + 1} of {path} is no id of an image: {one[:100]!r}.", "Correct that file.")
    return ids


def _numbers_of_npy(path: Path) -> list[int]:
    from probemb.data.npy import read_npy

    try:
        array = read_npy(io.BytesIO(read_text(path)))
        if array.ndim != 1 or array.dtype.kind not in "iu" or (len(array) and int(array.min()) < 0):
            raise ValueError(f"{array.dtype} {array.shape}")
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is no row of ids: {str(error)[:200]}.", "Fetch that file again.") from None
    return array.tolist()


def _image_of_caption() -> dict[str, int]:
    """COCO's image of each annotation id of Karpathy's test split, from the package eccv_caption."""
    spec = importlib.util.find_spec("eccv_caption")
    if spec is None:
        return {}
    path = Path(spec.origin).parent / "data" / "original_caption_to_image.json"
    images_of = json.loads(path.read_text()) if path.is_file() else {}
    return {caption: images[0] for caption, images in images_of.items()}


def _read_mapping(path: Path) -> dict[str, str]:
    """`id_mapping.json` of VSE∞: image id -> path below the image folder. Empty if there is none."""
    files = (folder / "id_mapping.json" for folder in (path.parent, path.parent.parent))
    file = next(filter(Path.is_file, files), None)
    if file is None:
        return {}
    try:
        mapping = json.loads(read_text(file).decode("utf-8-sig"))
        if not isinstance(mapping, dict):
            raise ValueError("not an object")
        for name in mapping.values():
            if not isinstance(name, str) or not is_inside(name):
                raise ValueError(f"{str(name)[:200]!r} does not lie in the image folder")
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} does not map ids to images: {error}.", "Fetch that file again.") from None
    return mapping


def _candidates(one: int | str, mapping: dict[str, str]) -> tuple[str, ...]:
    """Possible paths of an image below the image folder."""
    mapped = (mapping[str(one)],) if str(one) in mapping else ()
    if isinstance(one, str):
        return (*mapped, one, f"{one}.jpg")
    return (*mapped, *(name.format(one) for name in _COCO_NAMES), f"{one}.jpg")
