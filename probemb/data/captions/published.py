"""Captions of images in annotation files: Karpathy's json, HierarCaps' table, CUB's folders of texts."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from probemb.data.captions.dataset import CaptionDataset, Entry, assemble
from probemb.data.reading import (
    as_id,
    as_inside,
    as_list,
    as_text,
    check_unique,
    checked,
    choose_split,
    locate,
    only_file,
    parse_all,
    read_json,
    read_lines,
    read_text,
    split_name,
)
from probemb.data.shards.samples import MAX_CAPTION_CHARS
from probemb.errors import UserError

KARPATHY, HIERARCAPS = "a Karpathy json", "HierarCaps' table"


def read_karpathy(path: Path, split: str | None, images: Path | None) -> CaptionDataset:
    """`{"images": [{"filename", "filepath", "split", "cocoid", "sentences": [{"raw", "sentid"}]}]}`.

    COCO's ids are used if "cocoid" is present; else an image is named by its file. Raises UserError.
    """
    if path.is_dir():
        path = only_file(sorted(path.glob("dataset*.json*")), path, KARPATHY)
    content = read_json(path)
    with checked(path, KARPATHY, "Name dataset_coco.json, dataset_flickr30k.json or one like them."):
        rows = as_list(content["images"], "the images")
    parsed = parse_all(path, KARPATHY, rows, _karpathy_image, "image")
    split, parts = choose_split(split, (part for part, _, _ in parsed), path)
    check_unique((entry.id for _, _, entry in parsed), "image id", path)
    entries = [entry for part, _, entry in parsed if part in parts]
    names = [name for part, name, _ in parsed if part in parts]
    candidates = [(name, PurePosixPath(name).name) for name in names]
    return assemble(entries, path, split, locate(candidates, names, path, images, [path.parent]))


def _karpathy_image(row: dict) -> tuple[str, str, Entry]:
    """Split, file name and captions of an image."""
    name, is_coco = as_text(row["filename"], "the filename"), row.get("cocoid") is not None
    name = as_inside(f"{as_text(row['filepath'], 'the filepath')}/{name}" if row.get("filepath") else name)
    texts, ids = [], []
    for sentence in as_list(row["sentences"], "the sentences"):
        text = as_text(sentence["raw"], "the caption").strip()[:MAX_CAPTION_CHARS]
        if text:
            texts.append(text)
            ids.append(as_id(sentence["sentid"], "the sentid") if is_coco else None)
    number = as_id(row["cocoid"], "the cocoid") if is_coco else str(PurePosixPath(name).with_suffix(""))
    return split_name(as_text(row["split"], "the split")), name, Entry(number, texts, ids if is_coco else None)


def read_hierarcaps(path: Path, split: str | None, images: Path | None) -> CaptionDataset:
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
    return assemble(entries, path, split, locate([[name] for name in names], names, path, images, [path.parent]))


# --------------------------------------------------------------------------------------------------------------- CUB

_CUB_TEXTS, _CUB_FOLDER, _CUB_HELD_OUT = "text_c10", "CUB_200_2011", "seen_test_images.txt"
_CUB_LIST = re.compile(r"(trainval|train|val|test)classes(\d?)\.txt")
_CUB_REMEDY = "Put the files of CUB_200_2011 and of its captions (text_c10) there as they are published."


def read_cub(path: Path, split: str | None, images: Path | None) -> CaptionDataset:
    """CUB-200-2011 with the captions of Reed et al.: birds of 200 classes, splits by class.

    FOLDER/text_c10/CLASS/NAME.txt     the captions, one a line; CLASS is 001.Black_footed_Albatross, ...
    FOLDER/trainvalclasses.txt         a CLASS a line; testclasses.txt, and for hyperparameters trainclasses1.txt,
                                       valclasses1.txt, ... (beside text_c10, or one folder above)
    FOLDER/images.txt                  "NUMBER CLASS/NAME.jpg" lines (also in FOLDER/CUB_200_2011, as published)
    FOLDER/images/CLASS/NAME.jpg       the images (also in FOLDER/CUB_200_2011)
    FOLDER/seen_test_images.txt        optional: CLASS/NAME.jpg lines, images of the training classes that are held out

    The splits are "train" (trainvalclasses.txt without the held-out images), "val" (the held-out images, of the same
    classes), "test" (other classes), and "train1", "val1", ... of the lists with numbers. Sources: Wah et al. 2011;
    Reed et al. 2016; the class splits of Xian et al. 2017, as PCME uses them (§4.1.2). Raises UserError.
    """
    texts = next(filter(Path.is_dir, (path / _CUB_TEXTS, *sorted(path.glob(f"*/{_CUB_TEXTS}")))), path / _CUB_TEXTS)
    folders = [path, path / _CUB_FOLDER, texts.parent]

    def lines(name: str) -> list[str]:
        file = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if file is None:
            raise UserError(f"There is no {name} in {path}.", _CUB_REMEDY)
        return read_lines(file)

    rows = [line.partition(" ")[2].strip() for line in lines("images.txt")]
    names = parse_all(path / "images.txt", "a list of NUMBER CLASS/NAME.jpg", rows, as_inside, "line")
    lists = {file.name for folder in folders for file in folder.glob("*classes*.txt") if _CUB_LIST.fullmatch(file.name)}
    classes = {"".join(_CUB_LIST.fullmatch(name).groups()): set(lines(name)) for name in sorted(lists)}
    if "train" in classes:
        classes.setdefault("trainval", classes["train"])
    if not {"trainval", "test"} <= set(classes):
        raise UserError(f"{path} has no trainvalclasses.txt and testclasses.txt beside {_CUB_TEXTS}.", _CUB_REMEDY)
    held_out = {line for folder in folders for line in _optional_lines(folder / _CUB_HELD_OUT)}
    members = {one: {name for name in names if name.partition("/")[0] in of} for one, of in classes.items()}
    splits = {"train": members["trainval"] - held_out, "val": members["trainval"] & held_out, "test": members["test"]}
    splits |= {one: of - held_out for one, of in members.items() if one[-1].isdigit()}
    split, parts = choose_split(split, (one for one, of in splits.items() if of), path)
    chosen = [name for name in names if any(name in splits[part] for part in parts)]
    entries = []
    for name in chosen:
        captions = [line[:MAX_CAPTION_CHARS] for line in read_lines(texts / PurePosixPath(name).with_suffix(".txt"))]
        entries.append(Entry(str(PurePosixPath(name).with_suffix("")), captions))
    located = locate([(name,) for name in chosen], chosen, path, images, folders[:2])
    return assemble(entries, path, split, located, classes=[PurePosixPath(name).parts[0] for name in chosen])


def _optional_lines(path: Path) -> list[str]:
    return read_lines(path) if path.is_file() else []
