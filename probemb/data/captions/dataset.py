"""Images with their captions, from any of the FORMATS: shards, COCO's and Karpathy's files, tables and folders.

`captions/find.py` adds the forms of single benchmarks.
"""

import csv
import hashlib
import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np

from probemb.data import reading
from probemb.data.image_loader import (
    CLASS_FILES,
    Images,
    Place,
    find_files,
    find_tars,
    is_image,
    locate,
    read_samples,
    walk_pictures,
)
from probemb.data.shards.samples import IMAGE_EXTENSIONS, MAX_CAPTION_CHARS, MAX_TEXT_BYTES, Sample, clean_captions
from probemb.errors import UserError

TRUTH = "truth.npz"  # beside shards
MAKE_SCENES = "make the synthetic data with `python -m tools.make_scenes data/scenes`"
KARPATHY, TABLE = "a Karpathy json", "a table of images and captions"
DRAWN, HELD_OUT = ("train", "val"), 0.1  # splits that data without any can be given by draw, and the share of val
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


def try_locate(candidates: Sequence[Sequence[str]], names: Sequence[str], *where) -> Images | UserError:
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
    located = try_locate([(name, PurePosixPath(name).name) for name in names], names, path, images, [path.parent])
    return Listing([entry for part, _, entry in parsed if part in parts], located, split, path)


def _karpathy_image(row: dict) -> tuple[str, str, Entry]:
    """Split, file name and captions of an image."""
    name = reading.as_inside(f"{row['filepath']}/{row['filename']}" if row.get("filepath") else row["filename"])
    sentences = [sentence for sentence in row["sentences"] if sentence["raw"].strip()]
    texts = clean_captions(sentence["raw"] for sentence in sentences)
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
    candidates = [[name, *image_files(one)] for one, (name, _) in found.items()]
    located = try_locate(candidates, list(map(str, found)), path, images, [path.parent, path.parent.parent])
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
        located = try_locate(candidates, names, path, images, [root])
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
        part = reading.split_name(str(row.get(known.get("split")) or "").strip())
        return _inside(row[image], file.parent, root), clean_captions(texts), part

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
        entries.append(Entry(name, clean_captions(texts)))
        located.places.append(Place(name, str(path / name)))
    return Listing(entries, located, split, path)


def image_files(one: int | str) -> list[str]:
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
    has_images: bool = False  # in itself, so that none are looked for


FORMATS = {
    "webdataset": Format("webdataset shards", ("*.tar", "*/*.tar"), (".tar",), read_shards, True),
    "karpathy": Format("a Karpathy json", ("dataset*.json*",), (".json", ".json.gz"), read_karpathy),
    # Where no other is found:
    "table": Format("a CSV, TSV or JSON lines", tuple(f"*{one}" for one in _TABLES), _TABLE_FILES, read_table),
    "folder": Format("images with a .txt beside each", (), (), read_folder, True),
}


def list_captions(
    data: str | Path, split: str | None = None, images: str | Path | None = None, format: str | None = None,
    exif: bool = False, need_caption: bool = True, held_out: float | None = None,
    formats: Mapping[str, Format] = FORMATS,
) -> CaptionDataset:  # fmt: skip
    """List images and captions without decoding any image.

    Args:
        data: a folder or file of one of the `formats`; also a pattern of tars, of which `train-*.tar` or `train/*.tar`
            name the split. Text files may be gzipped.
        split: as `reading.choose_split` has it.
        images: image folder of an annotation file, for COCO the one with train2014 and val2014; by default searched
            beside the file.
        format: by default recognised.
        need_caption: False keeps the images that have none; else these are left out.
        held_out: share of the images that are "val" of data without splits, drawn by their ids, and not "train"; None
            refuses such data if one of these is asked for.

    Raises UserError: the path or the split does not exist, or the data is malformed.
    """
    path, folder = Path(data), None if images is None else Path(images)
    format = format or recognise(path, formats)
    if folder is not None and formats[format].has_images:
        raise UserError(f"{path} holds its images itself; {images} would not be used.", "Leave the image folder out.")
    entries, located, found, source, truth = formats[format].read(path, split, folder)
    rows = [row for row, one in enumerate(entries) if one.captions or not need_caption]
    if need_caption and isinstance(located, Images):
        located.bad += [(str(one.id), "it has no caption") for one in entries if not one.captions]
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


def recognise(path: Path, formats: Mapping[str, Format]) -> str:
    """Raises UserError: a folder holds captions of no format, or of several."""
    if path.is_dir():
        found = [name for name, one in formats.items() if any(any(path.glob(held)) for held in one.holds)]
        if not found and next(walk_pictures(path), None):
            return "folder"
    else:
        found = [name for name, one in formats.items() if path.name.endswith(one.endings)]
        if not found and not path.is_file():
            return "webdataset"  # which says so
    if len(found) > 1 and "table" in found:
        found.remove("table")
    if len(found) == 1:
        return found[0]
    titles = [formats[name].title for name in found or formats]
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
