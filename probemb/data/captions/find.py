"""Images with their captions, from any of the FORMATS: shards, published annotation files, tables and folders."""

import csv
import hashlib
import importlib.util
import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from probemb.data import reading
from probemb.data.image_loader import (
    CLASS_FILES,
    REGIONS,
    Images,
    Place,
    find_files,
    find_tars,
    is_image,
    locate,
    read_regions,
    read_samples,
    walk_pictures,
)
from probemb.data.shards.samples import IMAGE_EXTENSIONS, MAX_CAPTION_CHARS, MAX_TEXT_BYTES, Sample
from probemb.errors import UserError

TRUTH = "truth.npz"  # beside shards
MAKE_SCENES = "make the synthetic data with `python -m tools.make_scenes data/scenes`"
KARPATHY, TABLE = "a Karpathy json", "a table of images and captions"
DRAWN, HELD_OUT = ("train", "val"), 0.1  # splits that data without any can be given by draw, and the share of val
PER_IMAGE = 5  # captions of an image in a precomp file
_SPLIT_OF_TAR = re.compile(r"([A-Za-z]+)[-_.]")


class Truth(NamedTuple):
    """Every true match of images and texts."""

    images: dict[str, int]  # the row of each image's id, as a text
    texts: dict[str, int]  # the column of each text
    matches: np.ndarray  # (N, T) bool
    ambiguity: np.ndarray  # (T,) float64, the share of all images of its world that a text fits


@dataclass(frozen=True)
class CaptionDataset:
    """N images and their captions."""

    captions: list[list[str]]  # of each image, at least one, but for images that were asked for without
    image_ids: list[int | str]  # COCO's ids if known, else names; unique
    caption_ids: list[list[int]] | None = None  # COCO's annotation ids, in the shape of `captions`, if known
    truth: Truth | None = None  # of all images and captions, perhaps of more, if known
    classes: list[str] | None = None  # of each image, where images and captions of a class match each other
    split: str | None = None  # the one that was asked for; None: everything
    drawn: bool = False  # the split, as the data has none
    source: str = ""  # for messages
    located: Images | UserError | None = None  # or the error to raise where the images are needed

    def __len__(self) -> int:
        return len(self.captions)

    @property
    def images(self) -> Images:
        """Raises UserError if any is missing; captions can be used without images."""
        if isinstance(self.located, UserError):
            raise self.located
        return self.located

    @property
    def n_captions(self) -> int:
        return sum(map(len, self.captions))

    def only(self, rows: Sequence[int]) -> "CaptionDataset":
        lists = {name: getattr(self, name) for name in ("captions", "image_ids", "caption_ids", "classes")}
        chosen = {name: values and [values[i] for i in rows] for name, values in lists.items()}
        if isinstance(located := self.located, Images):
            located = replace(located, places=[located.places[i] for i in rows])
        return replace(self, located=located, **chosen)

    def class_numbers(self) -> list[int]:
        """The number of each image's class, from 0. Raises UserError: the data has no classes."""
        if self.classes is None:
            remedy = "Name data with classes, such as CUB, or by-class of scenes made with --class-captions."
            raise UserError(f"{self.source} does not say of which class its images are.", remedy)
        numbers = {name: number for number, name in enumerate(sorted(set(self.classes)))}
        return [numbers[name] for name in self.classes]

    def flat(self) -> list[str]:
        """All M captions."""
        return [text for texts in self.captions for text in texts]

    def owner(self) -> list[int]:
        """The index of its image for each of the M captions."""
        return [index for index, texts in enumerate(self.captions) for _ in texts]


class Entry(NamedTuple):
    """An image: COCO's id or a name, its captions, and their ids and its class if known."""

    id: int | str
    captions: list[str]
    caption_ids: list[int] | None = None
    label: str | None = None


class Listing(NamedTuple):
    """The images with captions of a path, as a reader gives them."""

    entries: list[Entry]
    located: Images | UserError  # see `CaptionDataset`
    split: str | None
    source: Path
    truth: Path | None = None  # the file that may hold it


def read_shards(path: Path, split: str | None, images: Path | None = None) -> Listing:
    """KEY.json may have "image_id", each caption as {"id", "caption"}, and "class", the image's, if all have it."""
    tars, split = _find_shards(path, split)
    located, entries = read_samples(tars, ("txt", "json"), _entry)
    if len({entry.id for entry in entries}) < len(entries):  # keys are unique in a tar
        named = zip(entries, located.places)
        entries = [entry._replace(id=place.name) if isinstance(entry.id, str) else entry for entry, place in named]
    return Listing(entries, located, split, path, tars[0].with_name(TRUTH))


def _find_shards(path: Path, split: str | None) -> tuple[list[Path], str | None]:
    tars = find_tars(path)
    named = [((found := _SPLIT_OF_TAR.match(tar.name)) and reading.split_name(found[1]), tar) for tar in tars]
    if not tars and path.is_dir():
        for folder in sorted(filter(Path.is_dir, path.iterdir())):
            if not any((folder / name).exists() for name in CLASS_FILES):  # labelled shards have no captions
                named += [(reading.split_name(folder.name), tar) for tar in find_tars(folder)]
    if not named:
        what = "holds no webdataset shards" if path.is_dir() else "does not exist"
        raise UserError(f"The data path {path} {what}.", f"Name shards with captions, or {MAKE_SCENES}.")
    if tars and not path.is_dir() and split == reading.AUTO:
        split = None
    if tars and path.is_dir() and split and reading.split_name(path.resolve().name) == reading.split_name(split):
        return tars, reading.split_name(split)
    known = [name for name, _ in named if name]
    if split in DRAWN and not set(known) & set(reading.USUAL_SPLITS):
        known = []  # but for names of corpora
    split, parts = _choose(split, known, path)
    if split is None and not tars and len(parts) > 1:
        raise UserError(f"{path} holds the splits {', '.join(parts)}.", "Name one of them.")
    return [tar for name, tar in named if split is None or name in parts], split


def _entry(sample: Sample) -> Entry:
    number, rows = sample.meta.get("image_id"), sample.meta.get("captions") or ()
    rows = [row for row in rows if isinstance(row, dict) and row["caption"].strip()]  # empty ones are dropped
    ids = [reading.as_id(row["id"], "a caption id") for row in rows if "id" in row]
    name = sample.key if number is None else reading.as_id(number, "the image_id")
    return Entry(name, sample.captions, ids if len(ids) == len(sample.captions) else None, sample.meta.get("class"))


def _choose(split: str | None, known: Sequence[str], path: Path) -> tuple[str | None, Sequence[str]]:
    """`reading.choose_split`, but (None, ()), all of it, for one of DRAWN of data without splits."""
    drawn = not known and split is not None and reading.split_name(split) in DRAWN
    return (None, ()) if drawn else reading.choose_split(split, known, path)


def _locate(candidates: Sequence[Sequence[str]], names: Sequence[str], *where) -> Images | UserError:
    """`locate`, or its error."""
    try:
        return locate(candidates, names, *where)
    except UserError as error:
        return error


def read_karpathy(path: Path, split: str | None, images: Path | None) -> Listing:
    """`{"images": [{"filename", "filepath", "split", "cocoid", "sentences": [{"raw", "sentid"}]}]}`.

    COCO's ids are used if "cocoid" is present; else an image is named by its file. Another JSON may be a list of rows,
    or COCO's own captions, {"images": [{"id", "file_name"}], "annotations": [{"id", "image_id", "caption"}]}.
    """
    if path.is_dir():
        path = reading.only_file(sorted(path.glob("dataset*.json*")), path, KARPATHY)
    content = reading.read_json(path)
    if isinstance(content, list):
        return read_table(path, split, images)
    if isinstance(content, dict) and "annotations" in content:
        return _read_coco(path, content, split, images)
    with reading.checked(path, KARPATHY, "Name dataset_coco.json, dataset_flickr30k.json or one like them."):
        rows = content["images"]
    parsed = reading.parse_all(path, KARPATHY, rows, _karpathy_image, "image")
    split, parts = reading.choose_split(split, (part for part, _, _ in parsed), path)
    reading.check_unique((entry.id for _, _, entry in parsed), "image id", path)
    names = [name for part, name, _ in parsed if part in parts]
    located = _locate([(name, PurePosixPath(name).name) for name in names], names, path, images, [path.parent])
    return Listing([entry for part, _, entry in parsed if part in parts], located, split, path)


def _karpathy_image(row: dict) -> tuple[str, str, Entry]:
    """Split, file name and captions of an image."""
    name = reading.as_inside(f"{row['filepath']}/{row['filename']}" if row.get("filepath") else row["filename"])
    sentences = [sentence for sentence in row["sentences"] if sentence["raw"].strip()]
    texts = [sentence["raw"].strip()[:MAX_CAPTION_CHARS] for sentence in sentences]
    split = reading.split_name(str(row["split"]))
    if row.get("cocoid") is None:
        return split, name, Entry(str(PurePosixPath(name).with_suffix("")), texts)
    ids = [reading.as_id(sentence["sentid"], "the sentid") for sentence in sentences]
    return split, name, Entry(reading.as_id(row["cocoid"], "the cocoid"), texts, ids)


def _read_coco(path: Path, content: dict, split: str | None, images: Path | None) -> Listing:
    with reading.checked(path, "COCO's captions"):
        found = {one: item for one, item in coco_captions(content).items() if item[1]}
    texts, ids = ([[row[key] for row in own] for _, own in found.values()] for key in ("caption", "id"))
    entries = list(map(Entry, found, texts, ids))
    candidates = [[name, *_image_files(one)] for one, (name, _) in found.items()]
    located = _locate(candidates, list(map(str, found)), path, images, [path.parent, path.parent.parent])
    return Listing(entries, located, _choose(split, (), path)[0], path)


def coco_captions(content: dict) -> dict[int, tuple[str, list[dict]]]:
    """File name and captions, {"id", "caption"}, of each image of COCO's. Raises ValueError, KeyError, TypeError."""
    names = {reading.as_id(row["id"], "an image id"): reading.as_inside(row["file_name"]) for row in content["images"]}
    found = {one: (name, []) for one, name in names.items()}
    for row in content["annotations"]:
        if text := " ".join(row["caption"].split())[:MAX_CAPTION_CHARS]:
            found[row["image_id"]][1].append({"id": reading.as_id(row["id"], "an id"), "caption": text})
    return found


# ------------------------------------------------------------------------------------------------- tables and folders

# Names of a table's columns: open_clip's (--csv-img-key, --csv-caption-key), Hugging Face's, and other common ones.
_IMAGE = ("filepath", "image", "filename", "file_name", "image_path", "path", "image_name", "file", "image_url", "url")
_CAPTION = ("title", "caption", "text", "comment", "captions")
_TABLES = (".csv", ".tsv", ".jsonl")
_TABLE_FILES = tuple(ending + packed for ending in (*_TABLES, ".txt") for packed in ("", ".gz"))
_PAIR = re.compile(r"(.+\.\w+)#\d+")  # how Flickr8k.token.txt names a caption


def read_table(path: Path, split: str | None, images: Path | None) -> Listing:
    """A CSV, TSV, JSON lines or list with a row for each image or caption; of a folder, its table, or a table for each
    split (train.csv, ...). Images whose file is missing are left out and named, unless all are missing.
    """
    root, files, named = path, [path], [""]
    if path.is_dir():
        files = sorted(file for ending in _TABLES for file in path.glob(f"*{ending}"))
        named = [next(filter(reading.is_split, re.split(r"[\W_]+", file.stem.lower())), "") for file in files]
        if len(files) == 1 or not all(named):
            files, named = [reading.only_file(files, path, TABLE)], [""]
    else:
        root = path.parent
    captions, parts = {}, {}
    for file, of_file in zip(files, named):
        for image, texts, part in _read_rows(file, images or root):
            captions.setdefault(image, []).extend(texts)
            if parts.setdefault(image, part or of_file) != (part or of_file):
                raise UserError(f"{path} has {image} in two splits.", "Leave it in one of them.")
    split, chosen = _choose(split, [*dict.fromkeys(filter(None, parts.values()))], path)
    names = [image for image, part in parts.items() if split is None or part in chosen]
    same = Counter(PurePosixPath(name).name for name in names)
    candidates = []
    for name in names:
        base = PurePosixPath(name).name
        endings = [""] if is_image(name) else ["", *(f".{ending}" for ending in IMAGE_EXTENSIONS)]
        candidates.append([one + end for one in (name, *[base] * (same[base] == 1)) for end in endings])
    files = find_files(candidates, images, [root])
    located = Images(places=[], source=str(path))
    if not any(files):
        located = _locate(candidates, names, path, images, [root])
    else:
        located.places = [Place(name, file) for name, file in zip(names, files) if file]
        located.bad = [(name, "there is no such file") for name, file in zip(names, files) if not file]
        names = [place.name for place in located.places]
    return Listing([Entry(name, captions[name]) for name in names], located, split, path)


def _read_rows(file: Path, root: Path) -> list[tuple[str, list[str], str]]:
    """The image, the captions, and the split or "", of each row of a table; images are named by their paths in `root`.

    The fields of a CSV are separated by tabs if its first line has one, else by the first of `,|;` in it. Two columns
    need no names: `x.jpg,a caption`. HierarCaps has `captions`, separated by "=>", and URLs, whose file names count.
    """
    text = reading.read_text(file).lstrip()
    head, fields = text.partition("\n")[0], None
    mark = "\t" if "\t" in head else (re.findall(r"[,|;]", head) or [","])[0]
    if head.startswith(("{", "[")):
        rows = reading.read_json(file) if head[0] == "[" else reading.parse_lines(file, TABLE, json.loads)
        rows = reading.parse_all(file, TABLE, rows, dict, "row")
        names = list(dict.fromkeys(name for row in rows for name in row))
    else:
        with reading.checked(file, TABLE):
            rows, names = None, next(csv.reader([head], delimiter=mark), [])
        if len(names) == 2 and is_image(_PAIR.sub(r"\1", names[0].strip())):
            fields = names = ["image", "caption"]
    known = {name.strip().lower(): name for name in names}
    image, caption = (next((known[one] for one in some if one in known), None) for some in (_IMAGE, _CAPTION))
    if image is None or caption is None:
        remedy = f"Name both in its first line: {', '.join(_IMAGE[:2])} or {_IMAGE[2]}, and title or caption."
        what = f"{file} has no column of images, or none of captions: its first line is {head[:80].strip()!r}."
        raise UserError(what, remedy)
    if rows is None:
        rows = csv.DictReader(io.StringIO(text), fields, restval="", delimiter=mark, strict=True)

    def parse(row: dict) -> tuple[str, list[str], str]:
        given, more = row[caption], row.get(None, [])  # fields that the first line has no names for
        if more and caption != names[-1]:
            raise ValueError(f"it has more fields than the first line: put texts that contain {mark!r} in quotes")
        given = given if isinstance(given, list) else [mark.join([given, *more])] if more else [given]
        texts = [reading.as_text(one, "a caption") for one in given]
        if caption == "captions":
            texts = [one for text in texts for one in text.split("=>")]
        texts = [text.strip()[:MAX_CAPTION_CHARS] for text in texts if text.strip()]
        part = reading.split_name(str(row.get(known.get("split")) or "").strip())
        return _inside(row[image], file.parent, root), texts, part

    return reading.parse_all(file, TABLE, rows, parse, "row")


def _inside(given: object, folder: Path, root: Path) -> str:
    """The path below `root` of an image that a table in `folder` names. Raises UserError: it lies elsewhere."""
    name = _PAIR.sub(r"\1", reading.as_text(given, "the name of an image").strip().replace("\\", "/"))
    if "://" in name:
        name = PurePosixPath(urlsplit(name).path).name
    elif name.startswith("/") or ".." in PurePosixPath(name).parts:
        name = os.path.relpath(os.path.join(os.path.abspath(folder), name), os.path.abspath(root))
        if name.startswith("../"):
            remedy = "Name the folder that all images are in with --images (--data.images in finetuning)."
            raise UserError(f"The image {given} lies outside of {os.path.abspath(root)}.", remedy)
    return reading.as_inside(name)


def read_folder(path: Path, split: str | None, images: Path | None) -> Listing:
    """The images of a folder and of those inside it, with the captions in NAME.txt beside each, one a line, if there is
    one. Folders train, val and test are splits, if all images lie in such.
    """
    names = list(walk_pictures(path))
    firsts = [reading.split_name(name.partition("/")[0]) for name in names]
    known = list(dict.fromkeys(firsts)) if all(map(reading.is_split, firsts)) else []
    split, parts = _choose(split, known, path)
    entries, located = [], Images(places=[], source=str(path))
    for name in [name for name, first in zip(names, firsts) if split is None or first in parts]:
        beside = (path / name).with_suffix(".txt")
        try:
            if not is_image(name):
                raise UserError("it is no JPEG, PNG or WebP.", "")
            texts = reading.read_text(beside, MAX_TEXT_BYTES).split("\n") if beside.is_file() else []
        except UserError as error:
            located.bad.append((name, error.what.rstrip(".")))
            continue
        entries.append(Entry(name, [text.strip()[:MAX_CAPTION_CHARS] for text in texts if text.strip()]))
        located.places.append(Place(name, str(path / name)))
    return Listing(entries, located, split, path)


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
        captions = [line[:MAX_CAPTION_CHARS] for line in reading.read_lines(texts / name.with_suffix(".txt"))]
        entries.append(Entry(str(name.with_suffix("")), captions, label=name.parts[0]))
    return Listing(entries, _locate([[name] for name in chosen], chosen, path, images, folders[:2]), split, path)


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
    candidates = [[*filter(None, [known.get(str(entry.id))]), *_image_files(entry.id)] for entry in entries]
    return Listing(entries, _locate(candidates, [str(e.id) for e in entries], file, images, folders), split, file)


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


def _image_files(one: int | str) -> list[str]:
    """Possible paths of an image below the image folder."""
    if isinstance(one, str):
        return [one, f"{one}.jpg"]
    name, parts = f"{one:012d}.jpg", ("train", "val")
    return [
        *(f"{part}2014/COCO_{part}2014_{name}" for part in parts), *(f"COCO_{part}2014_{name}" for part in parts),
        *(f"{part}2017/{name}" for part in parts), name, f"{one}.jpg",
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ formats


class Format(NamedTuple):
    """A format of captions."""

    title: str  # for messages
    holds: tuple[str, ...]  # patterns of names by which a folder is recognised
    endings: tuple[str, ...]  # of a file's name
    read: Callable[[Path, str | None, Path | None], Listing]  # of a path, a split and a folder of images


_read_regions = partial(read_precomp, regions=True)
FORMATS = {
    "webdataset": Format("webdataset shards", ("*.tar", "*/*.tar"), (".tar",), read_shards),
    "karpathy": Format("a Karpathy json", ("dataset*.json*",), (".json", ".json.gz"), read_karpathy),
    "precomp": Format("*_caps.txt", ("*_caps.txt*", "precomp/*_caps.txt*"), _PRECOMP_FILES, read_precomp),
    "regions": Format(f"*_caps.txt with *{REGIONS}", (f"*{REGIONS}", f"precomp/*{REGIONS}"), (), _read_regions),
    "cub": Format(f"CUB's {CUB_TEXTS}", (CUB_TEXTS, CUB_IMAGES), (), read_cub),
    # Of a folder, where no other is found:
    "table": Format("a CSV, TSV or JSON lines", tuple(f"*{one}" for one in _TABLES), _TABLE_FILES, read_table),
    "folder": Format("images with a .txt beside each", (), (), read_folder),
}
FormatName = Literal[tuple(FORMATS)]


def find_captions(
    data: str | Path, split: str | None = None, images: str | Path | None = None, format: FormatName | None = None,
    exif: bool = False, need_caption: bool = True, held_out: float | None = None,
) -> CaptionDataset:  # fmt: skip
    """List images and captions without decoding any image.

    Args:
        data: a folder or file of one of FORMATS; also a pattern of tars, of which `train-*.tar` or `train/*.tar` name
            the split. Text files may be gzipped.
        split: as `reading.choose_split` has it. Of precomp files "test" prefers testall_caps.txt.
        images: image folder of an annotation file, for COCO the one with train2014 and val2014; by default searched
            beside the file.
        format: by default recognised: caption files with `*_ims.npy` beside them are "regions", unless `images` are
            named.
        need_caption: False keeps the images of tables and folders that have none.
        held_out: share of the images that are "val" of data without splits, drawn by their ids, and not "train"; None
            refuses such data if one of these is asked for.

    Raises UserError: the path or the split does not exist, or the data is malformed.
    """
    path, folder = Path(data), None if images is None else Path(images)
    format = format or _recognise(path, folder)
    if folder is not None and format in ("webdataset", "regions", "folder"):
        raise UserError(f"{path} holds its images itself; {images} would not be used.", "Leave the image folder out.")
    entries, located, found, source, truth = FORMATS[format].read(path, split, folder)
    rows, bare = list(range(len(entries))), [] if not need_caption else [one.id for one in entries if not one.captions]
    if format in ("table", "folder") and bare:
        rows = [row for row in rows if entries[row].captions]
        if isinstance(located, Images):
            located.bad += [(str(name), "it has no caption") for name in bare]
    elif bare:
        raise UserError(f"The image {bare[0]} of {source} has no caption.", "Add one, or remove the image.")
    if not rows:
        why = f" ({': '.join(located.bad[0])})" if isinstance(located, Images) and located.bad else ""
        remedy = "Name data that has images with captions."
        if format == "folder":
            remedy = "Put the captions of x.jpg into x.txt beside it, one a line, or name a CSV of paths and captions."
        raise UserError(f"{source} holds no image{' with a caption' * need_caption}{why}.", remedy)
    ids, captions, caption_ids, classes = map(list, zip(*entries))
    reading.check_unique(ids, "image id", source)
    caption_ids = None if None in caption_ids else caption_ids
    reading.check_unique((number for row in caption_ids or () for number in row), "caption id", source)
    if isinstance(located, Images):
        located.exif = exif
    drawn = found is None and split is not None and (part := reading.split_name(split)) in DRAWN
    if drawn:
        if held_out is None:
            reading.choose_split(split, (), source)  # refuses it
        found, rows = part, _draw(ids, rows, part, held_out)
    dataset = CaptionDataset(
        captions, ids, caption_ids, truth and read_truth(truth, ids, captions),
        classes if all(isinstance(name, str) for name in classes) else None, found, drawn, str(source), located,
    )  # fmt: skip
    return dataset if len(rows) == len(dataset) else dataset.only(rows)


def _draw(ids: Sequence[int | str], rows: Sequence[int], split: str, held_out: float) -> list[int]:
    """Those of the rows that are in a drawn split: the ids with the smallest hashes are val, one at least."""
    digests = {row: hashlib.sha256(str(ids[row]).encode("utf-8", "replace")).digest() for row in rows}
    order = sorted(rows, key=digests.get)
    cut = max(1, round(held_out * len(rows))) if held_out else 0
    return sorted(order[:cut] if split == "val" else order[cut:])


def _recognise(path: Path, images: Path | None) -> str:
    """Raises UserError: a folder holds captions of no format, or of several."""
    if path.is_dir():
        found = [name for name, one in FORMATS.items() if any(any(path.glob(held)) for held in one.holds)]
        if len(found) > 1 and "table" in found:
            found.remove("table")
        if not found and next(walk_pictures(path), None):
            return "folder"
    else:
        found = [name for name, one in FORMATS.items() if path.name.endswith(one.endings)][:1]
        if not found and not path.is_file():
            return "webdataset"  # which says so
        if found == ["precomp"] and path.with_name(path.name.partition("_caps.")[0] + REGIONS).is_file():
            found.append("regions")
    if {"precomp", "regions"} <= set(found):
        found.remove("precomp" if images is None else "regions")
    if len(found) == 1:
        return found[0]
    titles = [FORMATS[name].title for name in found or FORMATS]
    if found:
        remedy = f"Name the files of one, or {reading.listed(found, 'or')} as the format where the command takes one."
        raise UserError(f"{path} holds captions in several formats: {reading.listed(titles)}.", remedy)
    raise UserError(f"{path} holds no captions.", f"Name {reading.listed(titles, 'or')}, or {MAKE_SCENES}.")


def read_truth(file: Path, ids: Sequence[int | str], captions: Sequence[Sequence[str]]) -> Truth | None:
    """The truth of an .npz of `Truth`'s arrays, its images and texts as lists; None if there is no such file."""
    if not file.is_file():
        return None
    with reading.checked(file, "the truth of images and captions"):
        images, texts, matches, ambiguity = reading.read_npz(file, "images", "texts", "matches", "ambiguity")
        rows, columns = ({one: i for i, one in enumerate(names.tolist())} for names in (images, texts))
        if matches.dtype != bool or matches.shape != (len(rows), len(columns)) or ambiguity.shape != (len(columns),):
            raise ValueError("its matches or ambiguities are not those of its images and texts")
        if lacking := [*(set(map(str, ids)) - rows.keys()), *(set().union(*captions) - columns.keys())]:
            raise ValueError(f"it does not know {lacking[0]!r}")
    return Truth(rows, columns, matches, ambiguity.astype(np.float64))
