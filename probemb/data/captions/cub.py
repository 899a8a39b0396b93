"""CUB-200-2011 with the captions of Reed et al.: birds of 200 classes, ten captions an image, splits by class.

FOLDER/text_c10/CLASS/NAME.txt     the captions, one a line; CLASS is 001.Black_footed_Albatross, ...
FOLDER/trainvalclasses.txt         a CLASS a line; testclasses.txt, and for hyperparameters trainclasses1.txt,
                                   valclasses1.txt, ... (beside text_c10, or one folder above)
FOLDER/images.txt                  "NUMBER CLASS/NAME.jpg" lines (also in FOLDER/CUB_200_2011, as published)
FOLDER/images/CLASS/NAME.jpg       the images (also in FOLDER/CUB_200_2011)
FOLDER/seen_test_images.txt        optional: CLASS/NAME.jpg lines, images of the training classes that are held out

Source: Wah et al. 2011; Reed et al. 2016; the class splits of Xian et al. 2017, as PCME uses them (§4.1.2).
"""

import re
from pathlib import Path, PurePosixPath

from probemb.data.captions.dataset import (
    CaptionDataset,
    Entry,
    assemble,
    check_unique,
    choose_split,
    listed,
    read_text,
    resolve_split,
)
from probemb.data.captions.image_files import is_inside, locate
from probemb.data.shards.samples import MAX_CAPTION_CHARS
from probemb.errors import UserError

CAPTIONS = "text_c10"
PUBLISHED = "CUB_200_2011"
HELD_OUT = "seen_test_images.txt"
MAX_CAPTIONS = 100  # of an image; ten are published
_CLASS_LIST = re.compile(r"(trainval|train|val|test)classes(\d?)\.txt")
_FETCH = "Put the files of CUB_200_2011 and of its captions (text_c10) there as they are published."


def caption_folder(path: Path) -> Path | None:
    """The folder of the caption files below a data folder, or None."""
    found = [folder for folder in (path / CAPTIONS, *sorted(path.glob(f"*/{CAPTIONS}"))) if folder.is_dir()]
    return found[0] if found else None


def read_cub(path: Path, split: str | None, images: Path | None) -> CaptionDataset:
    """The images of a split, with the class of each.

    The splits are "train" (trainvalclasses.txt without the held-out images), "val" (the held-out images, of the same
    classes), "test" (other classes), and "train1", "val1", ... of the lists with numbers. Raises UserError.
    """
    texts = caption_folder(path) if path.is_dir() else None
    if texts is None:
        raise UserError(f"{path} holds no folder {CAPTIONS}.", _FETCH)
    every = _read_images(_find("images.txt", [path, path / PUBLISHED]))
    splits = _read_splits(path, texts.parent)
    split = resolve_split(split, splits)
    if split == "val" and split not in splits:
        numbered = "name train1 and val1 as the splits, " if "val1" in splits else ""
        raise UserError(
            f"{path} has no split 'val', only {listed(sorted(splits))}: {HELD_OUT} names no image.",
            f"Put that file there, {numbered}or train without validation (--no-data.validation).",
        )
    parts = choose_split(split, splits, str(path))
    chosen = [name for name in every if any(_is_in(name, *splits[part]) for part in parts)]
    entries = [Entry(str(PurePosixPath(name).with_suffix("")), _captions_of(texts, name)) for name in chosen]
    folders = [path, path / PUBLISHED]
    located, missing = locate([(name,) for name in chosen], chosen, str(path), images, folders)
    classes = [PurePosixPath(name).parts[0] for name in chosen]
    return assemble(entries, source=str(path), split=split, located=located, missing=missing, classes=classes)


def _find(name: str, folders: list[Path]) -> Path:
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"There is no {name} in {folders[0]}.", _FETCH)


def _lines(path: Path) -> list[str]:
    try:
        text = read_text(path).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a text in UTF-8.", "Fetch that file again.") from None
    return [line.strip() for line in text.splitlines() if line.strip()]


def _read_images(path: Path) -> list[str]:
    """CLASS/NAME.jpg of all images, in the order of the file."""
    names = []
    for number, line in enumerate(_lines(path), 1):
        name = line.partition(" ")[2].strip()
        if not is_inside(name) or len(PurePosixPath(name).parts) != 2:
            raise UserError(
                f"Line {number} of {path} is not a number and CLASS/NAME.jpg: {line[:100]!r}.", "Fetch that file again."
            )
        names.append(name)
    check_unique(names, "image", str(path))
    return names


def _read_splits(*folders: Path) -> dict[str, tuple[frozenset[str], frozenset[str] | None, frozenset[str]]]:
    """By split: its classes, its images if not all of these, and the images that it leaves out."""
    lists = {}
    for folder in reversed(folders):  # the first folder wins
        for file in sorted(folder.glob("*classes*.txt")):
            if found := _CLASS_LIST.fullmatch(file.name):
                lists["trainval" if found[0] == "trainclasses.txt" else f"{found[1]}{found[2]}"] = file
    if "trainval" not in lists or "test" not in lists:
        raise UserError(f"{folders[0]} has no trainvalclasses.txt and testclasses.txt beside {CAPTIONS}.", _FETCH)
    held_out = next((folder / HELD_OUT for folder in folders if (folder / HELD_OUT).is_file()), None)
    held = frozenset(_lines(held_out)) if held_out else frozenset()
    classes = {name: frozenset(_lines(file)) for name, file in lists.items()}
    _refuse_shared(classes, "trainval", "test", lists)
    splits = {"train": (classes["trainval"], None, held)}
    if held:
        splits["val"] = (classes["trainval"], held, frozenset())
    splits["test"] = (classes["test"], None, frozenset())
    for name in sorted(name for name in lists if name[-1].isdigit()):
        splits[name] = (classes[name], None, held)
        if name.startswith("val") and f"train{name[3:]}" in classes:
            _refuse_shared(classes, f"train{name[3:]}", name, lists)
    return splits


def _refuse_shared(classes: dict[str, frozenset[str]], one: str, other: str, lists: dict[str, Path]) -> None:
    if shared := classes[one] & classes[other]:
        raise UserError(
            f"{lists[one]} and {lists[other]} both have the class {min(shared)}.",
            "Name the lists of one set of splits.",
        )


def _is_in(name: str, classes: frozenset[str], only: frozenset[str] | None, without: frozenset[str]) -> bool:
    return name.partition("/")[0] in classes and (only is None or name in only) and name not in without


def _captions_of(texts: Path, name: str) -> list[str]:
    path = texts / PurePosixPath(name).with_suffix(".txt")
    if not path.is_file():
        raise UserError(f"The captions of {name} are missing: {path}.", _FETCH)
    captions = [line[:MAX_CAPTION_CHARS] for line in _lines(path)]
    if len(captions) > MAX_CAPTIONS:
        raise UserError(f"{path} has {len(captions)} captions, more than {MAX_CAPTIONS}.", "Fetch that file again.")
    return captions
