"""Finds images with their captions in any of the FORMATS: those of `captions/dataset.py`, and of single benchmarks."""

import importlib.util
import io
import json
import re
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Literal

from probemb.data import reading
from probemb.data.captions import dataset
from probemb.data.captions.dataset import CaptionDataset, Entry, Format, Listing, image_files, list_captions, try_locate
from probemb.data.regions import REGIONS, read_regions
from probemb.data.shards.samples import MAX_CAPTION_CHARS, clean_captions
from probemb.errors import UserError

PER_IMAGE = 5  # captions of an image in a precomp file

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
    (§4.1.2).
    """
    texts = next(filter(Path.is_dir, (path / CUB_TEXTS, *sorted(path.glob(f"*/{CUB_TEXTS}")))), path / CUB_TEXTS)
    folders = [path, path / CUB_IMAGES, texts.parent]
    files = {file.name: file for folder in reversed(folders) for file in folder.glob("*.txt")}
    for name in ("images.txt", "trainvalclasses.txt", "testclasses.txt"):
        if name not in files:
            remedy = f"Put the files of {CUB_IMAGES} and of its captions ({CUB_TEXTS}) there as they are published."
            raise UserError(f"There is no {name} in {path}.", remedy)
    rows = [line.partition(" ")[2].strip() for line in reading.read_lines(files["images.txt"])]
    names = reading.parse_all(files["images.txt"], "a list of NUMBER CLASS/NAME.jpg", rows, reading.as_inside, "line")
    held_out = set(reading.read_lines(files["seen_test_images.txt"])) if "seen_test_images.txt" in files else set()
    members = {}
    for file in files.values():
        if found := _CUB_LIST.fullmatch(file.name):
            classes = set(reading.read_lines(file))
            members["".join(found.groups())] = {name for name in names if name.partition("/")[0] in classes}
    seen = members["trainval"]
    splits = {"train": seen - held_out, "val": seen & held_out, "test": members["test"]}
    splits |= {one: some - held_out for one, some in members.items() if one[-1].isdigit()}
    split, parts = reading.choose_split(split, (one for one, some in splits.items() if some), path)
    chosen = [name for name in names if any(name in splits[part] for part in parts)]
    entries = []
    for name in map(PurePosixPath, chosen):
        captions = clean_captions(reading.read_lines(texts / name.with_suffix(".txt")))
        entries.append(Entry(str(name.with_suffix("")), captions, label=name.parts[0]))
    return Listing(entries, try_locate([[name] for name in chosen], chosen, path, images, folders[:2]), split, path)


# ----------------------------------------------------------------------------------------------------------- precomp

_CAPS = re.compile(r"(?P<prefix>.*?)(?P<name>[A-Za-z0-9]+)_caps\.txt(\.gz)?")
_PRECOMP_FILES = ("_caps.txt", "_caps.txt.gz")
_FILES_OF = {"test": ("testall", "test"), "val": ("dev", "val")}  # the files of a split, the preferred one first
_PCME = {"testall": "test", "val": "dev"}  # its names of these files


def read_precomp(path: Path, split: str | None, images: Path | None, regions: bool = False) -> Listing:
    """`NAME_caps.txt` of VSE++ and SCAN, five lines an image, with the ids of the images or captions beside it, if any.

    `NAME_ids.txt` (one image id a line, or one for each caption) as SCAN and VSE++ ship it, or `coco_NAME_ids.npy` of
    COCO annotation ids as PCME does. Images are found by COCO's names, by ID.jpg, or through `id_mapping.json`. Without
    ids, images cannot be located and are named by their number. With `regions`, those of `NAME_ims.npy` stand in for
    the images' pixels.
    """
    file, split = _find_caps(path, split, regions)
    entries, has_ids = _read_captions(file)
    if regions:
        located = read_regions(file.with_name(_stem(file) + REGIONS), [str(entry.id) for entry in entries], PER_IMAGE)
        return Listing(entries, located, split, file, file.with_name(f"{_stem(file)}_truth.npz"))
    if not has_ids:
        what = f"Nothing beside {file} says which images its captions belong to."
        remedy = f"Put {_stem(file)}_ids.txt with one image id a line there, or name a Karpathy json."
        return Listing(entries, UserError(what, remedy), split, file)
    folders = [file.parent, file.parent.parent]
    mapping = next(filter(Path.is_file, (folder / "id_mapping.json" for folder in folders)), None)  # of VSE-infinity
    with reading.checked(mapping or file, "a mapping of ids to images"):
        known = {key: reading.as_inside(name) for key, name in (reading.read_json(mapping) if mapping else {}).items()}
    candidates = [[*filter(None, [known.get(str(entry.id))]), *image_files(entry.id)] for entry in entries]
    return Listing(entries, try_locate(candidates, [str(e.id) for e in entries], file, images, folders), split, file)


def _stem(file: Path) -> str:
    return file.name.partition("_caps.")[0]


def _has_regions(path: Path) -> bool:
    if path.is_file():
        return path.with_name(_stem(path) + REGIONS).is_file()
    return any(any(path.glob(place)) for place in (f"*{REGIONS}", f"precomp/*{REGIONS}"))


def _find_caps(path: Path, split: str | None, regions: bool) -> tuple[Path, str | None]:
    """The caption file and its split, None where none was asked for; `regions`: one with regions beside it."""
    folder = path if any(path.glob("*_caps.txt*")) else path / "precomp"
    files = [path] if path.is_file() else sorted(file for file in folder.glob("*") if _CAPS.fullmatch(file.name))
    if regions:
        files = [file for file in files if file.with_name(_stem(file) + REGIONS).is_file()]
    names = [found["name"] if (found := _CAPS.fullmatch(file.name)) else "" for file in files]
    canonical = {name: key for key, several in _FILES_OF.items() for name in several}
    split, _ = reading.choose_split(split, filter(None, [*(canonical.get(name, name) for name in names), *names]), path)
    if split is not None:
        wanted = next((name for name in _FILES_OF.get(split, (split,)) if name in names), None)
        files = [file for file, name in zip(files, names) if name == wanted]
    return reading.only_file(files, path, "*_caps.txt" + (f" with *{REGIONS} beside it" if regions else "")), split


def _read_captions(file: Path) -> tuple[list[Entry], bool]:
    """The captions of every image, and whether the images' ids are known."""
    lines = [line.strip()[:MAX_CAPTION_CHARS] for line in reading.read_text(file).removesuffix("\n").split("\n")]
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
    with reading.checked(beside, "a row of ids"):
        if of_pcme:  # dev_caps and test_caps are the first part of PCME's splits
            stored = reading.read_npy(io.BytesIO(reading.read_bytes(beside))).tolist()
            ids = [reading.as_id(one, "an id") for one in stored[:lines]]
        else:
            ids = [reading.as_inside(line) for line in reading.read_lines(beside)]
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


# ------------------------------------------------------------------------------------------------------------ formats

_read_regions = partial(read_precomp, regions=True)
FORMATS = {
    **dataset.FORMATS,
    "precomp": Format("*_caps.txt", ("*_caps.txt*", "precomp/*_caps.txt*"), _PRECOMP_FILES, read_precomp),
    "regions": Format(f"*_caps.txt with *{REGIONS}", (), (), _read_regions, True),  # see `_has_regions`
    "cub": Format(f"CUB's {CUB_TEXTS}", (CUB_TEXTS, CUB_IMAGES), (), read_cub),
}
FormatName = Literal[tuple(FORMATS)]


def find_captions(data: str | Path, split: str | None = None, images=None, format=None, **more) -> CaptionDataset:
    """`list_captions` of any format; of precomp files the split "test" prefers testall_caps.txt.

    `*_caps.txt` with `*_ims.npy` beside them are "regions", unless `images` are named. Raises UserError.
    """
    path = Path(data)
    if format is None:
        format = dataset.recognise(path, FORMATS)
        if format == "precomp" and images is None and _has_regions(path):
            format = "regions"
    return list_captions(path, split, images, format, **more, formats=FORMATS)
