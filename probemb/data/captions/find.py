"""Images with their captions, from any of the FORMATS."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from probemb.data.captions.published import (
    CUB_IMAGES,
    CUB_TEXTS,
    Entry,
    Listing,
    read_csv,
    read_cub,
    read_hierarcaps,
    read_karpathy,
    read_precomp,
    read_with_regions,
)
from probemb.data.image_loader import CLASS_FILES, REGIONS, Images, find_tars, read_samples
from probemb.data.reading import AUTO, as_id, check_unique, checked, choose_split, listed, read_npz, split_name
from probemb.data.shards.samples import Sample
from probemb.errors import UserError

TRUTH = "truth.npz"  # beside shards
MAKE_SCENES = "make the synthetic data with `python -m tools.make_scenes data/scenes`"
_SPLIT_OF_TAR = re.compile(r"([A-Za-z]+)[-_.]")


class Truth(NamedTuple):
    """Every true match of images and texts.

    Attributes:
        images, texts: the row of each image's id, as a text, and the column of each text.
        matches: (N, T) bool; ambiguity: (T,) float64, the share of all images of its world that a text fits.
    """

    images: dict[str, int]
    texts: dict[str, int]
    matches: np.ndarray
    ambiguity: np.ndarray


@dataclass(frozen=True)
class CaptionDataset:
    """N images and their captions.

    Attributes:
        captions: for each image its captions, at least one.
        image_ids: COCO's id of each image if known, else a name; unique.
        caption_ids: COCO's annotation id of each caption, in the shape of `captions`; None if unknown.
        truth: of all images and captions, where it is known; may hold more.
        classes: the class of each image, where images and captions of a class are matches of each other; else None.
        split: the one that was asked for; None: everything.
        source: the path given, for messages.
        located: where the images lie, or the error to raise where they are needed.
    """

    captions: list[list[str]]
    image_ids: list[int | str]
    caption_ids: list[list[int]] | None = None
    truth: Truth | None = None
    classes: list[str] | None = None
    split: str | None = None
    source: str = ""
    located: Images | UserError | None = None

    def __len__(self) -> int:
        return len(self.captions)

    @property
    def images(self) -> Images:
        """The locations of the images. Raises UserError if any is missing; captions can be used without images."""
        if isinstance(self.located, UserError):
            raise self.located
        return self.located

    @property
    def n_captions(self) -> int:
        """Number of all captions, M."""
        return sum(map(len, self.captions))

    def only(self, rows: Sequence[int]) -> CaptionDataset:
        """The same data with these images alone, in this order."""
        lists = {name: getattr(self, name) for name in ("captions", "image_ids", "caption_ids", "classes")}
        chosen = {name: values and [values[i] for i in rows] for name, values in lists.items()}
        located = replace(self.images, places=[self.images.places[i] for i in rows])
        return replace(self, located=located, **chosen)

    def class_numbers(self) -> list[int]:
        """The number of each image's class, from 0. Raises UserError: the data has no classes."""
        if self.classes is None:
            remedy = "Name data with classes, such as CUB, or by-class of scenes made with --class-captions."
            raise UserError(f"{self.source} does not say of which class its images are.", remedy)
        numbers = {name: number for number, name in enumerate(sorted(set(self.classes)))}
        return [numbers[name] for name in self.classes]

    def flat(self) -> list[str]:
        """All M captions, image after image."""
        return [text for texts in self.captions for text in texts]

    def owner(self) -> list[int]:
        """The index of its image for each of the M captions."""
        return [index for index, texts in enumerate(self.captions) for _ in texts]


# ------------------------------------------------------------------------------------------------------------- shards


def read_shards(path: Path, split: str | None, images: Path | None = None) -> Listing:
    """Images and captions of shards.

    KEY.json may have "image_id", each caption as {"id", "caption"}, and "class", the name of the image's class, if all
    have it. Unusable samples are in `images.bad`, with name and reason. Raises UserError: no shards, no such split,
    damaged shards, or no captioned image.
    """
    if images is not None:
        raise UserError(f"{path} holds its images itself.", "Leave the image folder out, or name an annotation file.")
    tars, split = _find_shards(path, split)
    located, entries = read_samples(tars, ("txt", "json"), _entry)
    if not entries:
        why = f" ({': '.join(located.bad[0])})" if located.bad else ""
        remedy = "Name shards with KEY.txt or KEY.json beside each image."
        raise UserError(f"{path} holds no image with a caption{why}.", remedy)
    if len({entry.id for entry in entries}) < len(entries):  # keys are unique in a tar
        named = zip(entries, located.places)
        entries = [entry._replace(id=place.name) if isinstance(entry.id, str) else entry for entry, place in named]
    return Listing(entries, located, split, path, tars[0].with_name(TRUTH))


def _find_shards(path: Path, split: str | None) -> tuple[list[Path], str | None]:
    """The tars and their split, None where none was asked for."""
    tars = find_tars(path)
    named = [((found := _SPLIT_OF_TAR.match(tar.name)) and split_name(found[1]), tar) for tar in tars]
    if not tars and path.is_dir():
        for folder in sorted(filter(Path.is_dir, path.iterdir())):
            if not any((folder / name).exists() for name in CLASS_FILES):  # labelled shards have no captions
                named += [(split_name(folder.name), tar) for tar in find_tars(folder)]
    if not named:
        what = "holds no webdataset shards" if path.is_dir() else "does not exist"
        raise UserError(f"The data path {path} {what}.", f"Name shards with captions, or {MAKE_SCENES}.")
    if tars and not path.is_dir() and split == AUTO:
        split = None
    if tars and path.is_dir() and split and split_name(path.resolve().name) == split_name(split):
        return tars, split_name(split)
    split, parts = choose_split(split, filter(None, (name for name, _ in named)), path)
    if split is None and not tars and len(parts) > 1:
        raise UserError(f"{path} holds the splits {', '.join(parts)}.", "Name one of them.")
    return [tar for name, tar in named if split is None or name in parts], split


def _entry(sample: Sample) -> Entry:
    """Raises ValueError: malformed ids."""
    number, rows = sample.meta.get("image_id"), sample.meta.get("captions") or ()
    rows = [row for row in rows if isinstance(row, dict) and row["caption"].strip()]  # empty ones are dropped
    ids = [as_id(row["id"], "a caption id") for row in rows if "id" in row]
    name = sample.key if number is None else as_id(number, "the image_id")
    return Entry(name, sample.captions, ids if len(ids) == len(sample.captions) else None, sample.meta.get("class"))


# ------------------------------------------------------------------------------------------------------------ formats


class Format(NamedTuple):
    """A format of captions.

    Attributes:
        title: for messages; holds: what it is recognised by in a folder; endings: of a file's name.
        read: gives the images and captions of a path, a split and a folder of images.
    """

    title: str
    holds: tuple[str, ...]
    endings: tuple[str, ...]
    read: Callable[[Path, str | None, Path | None], Listing]


FORMATS = {
    "webdataset": Format("webdataset shards", ("*.tar", "*/*.tar"), (".tar",), read_shards),
    "karpathy": Format("a Karpathy json", ("dataset*.json*",), (".json", ".json.gz"), read_karpathy),
    "precomp": Format("*_caps.txt", ("*_caps.txt*", "precomp/*_caps.txt*"), (".txt", ".txt.gz"), read_precomp),
    "regions": Format(f"*_caps.txt with *{REGIONS}", (f"*{REGIONS}", f"precomp/*{REGIONS}"), (), read_with_regions),
    "cub": Format(f"CUB's {CUB_TEXTS}", (CUB_TEXTS, CUB_IMAGES), (), read_cub),
    "hierarcaps": Format("HierarCaps' table", ("hierarcaps*.csv",), (), read_hierarcaps),
    "csv": Format(
        "a CSV of images and captions", ("captions.[ct]sv",), (".csv", ".tsv", ".csv.gz", ".tsv.gz"), read_csv
    ),
}
FormatName = Literal[tuple(FORMATS)]


def find_captions(
    data: str | Path, split: str | None = None, images: str | Path | None = None, format: FormatName | None = None,
    exif: bool = False,
) -> CaptionDataset:  # fmt: skip
    """List images and captions without decoding any image.

    Args:
        data: a folder or file of one of FORMATS; also a pattern of tars, of which `train-*.tar` or `train/*.tar` name
            the split. Text files may be gzipped.
        split: "train" (with Karpathy's "restval"), "val" ("dev"), "test", or another that the data names; None: all;
            "auto": "test" of data with several splits, else all. Of precomp files "test" prefers testall_caps.txt.
        images: image folder of an annotation file, for COCO the one with train2014 and val2014; by default searched
            beside the file.
        format: one of FORMATS; recognised by default: caption files with `*_ims.npy` beside them are "regions", unless
            `images` are named.
        exif: turn images as their EXIF orientation says.

    Raises UserError: the path, the split or the images do not exist; malformed data, an image without a caption,
    duplicate ids, or names that lead out of the folder.
    """
    path, folder = Path(data), None if images is None else Path(images)
    entries, located, split, source, truth = FORMATS[format or _recognise(path, folder)].read(path, split, folder)
    if not entries:
        raise UserError(f"{source} holds no captioned image.", "Name a file that lists images with their captions.")
    for entry in entries:
        if not entry.captions:
            raise UserError(f"The image {entry.id} of {source} has no caption.", "Add one, or remove the image.")
    ids, captions, caption_ids, classes = map(list, zip(*entries))
    check_unique(ids, "image id", source)
    caption_ids = None if None in caption_ids else caption_ids
    check_unique((number for row in caption_ids or () for number in row), "caption id", source)
    if isinstance(located, Images):
        located.exif = exif
    return CaptionDataset(
        captions, ids, caption_ids, truth and read_truth(truth, ids, captions),
        classes if all(isinstance(name, str) for name in classes) else None, split, str(source), located,
    )  # fmt: skip


def _recognise(path: Path, images: Path | None) -> str:
    """The name of the format. Raises UserError: a folder holds none, or several."""
    if path.is_dir():
        found = [name for name, one in FORMATS.items() if any(any(path.glob(held)) for held in one.holds)]
    else:
        found = [next((name for name, one in FORMATS.items() if path.name.endswith(one.endings)), "webdataset")]
        if found == ["precomp"] and path.with_name(path.name.partition("_caps.")[0] + REGIONS).is_file():
            found.append("regions")
    if {"precomp", "regions"} <= set(found):
        found.remove("precomp" if images is None else "regions")
    if len(found) == 1:
        return found[0]
    titles = [FORMATS[name].title for name in found or FORMATS]
    if found:
        remedy = f"Name the files of one, or {listed(found, 'or')} as the format where the command takes one."
        raise UserError(f"{path} holds captions in several formats: {listed(titles)}.", remedy)
    raise UserError(f"{path} holds no captions.", f"Name {listed(titles, 'or')}, or {MAKE_SCENES}.")


def read_truth(file: Path, ids: Sequence[int | str], captions: Sequence[Sequence[str]]) -> Truth | None:
    """The truth of an .npz of `Truth`'s arrays, its images and texts as lists; None if there is no such file.

    Raises UserError: malformed, or not of all images and captions.
    """
    if not file.is_file():
        return None
    with checked(file, "the truth of images and captions"):
        images, texts, matches, ambiguity = read_npz(file, "images", "texts", "matches", "ambiguity")
        rows, columns = ({one: i for i, one in enumerate(names.tolist())} for names in (images, texts))
        if matches.dtype != bool or matches.shape != (len(rows), len(columns)) or ambiguity.shape != (len(columns),):
            raise ValueError("its matches or ambiguities are not those of its images and texts")
        if lacking := [*(set(map(str, ids)) - rows.keys()), *(set().union(*captions) - columns.keys())]:
            raise ValueError(f"it does not know {lacking[0]!r}")
    return Truth(rows, columns, matches, ambiguity.astype(np.float64))
