"""Finds images with their captions in any of the published formats.

find_captions("data/flickr8k", split="val")                              webdataset shards
find_captions("dataset_coco.json", split="train", images="data/coco")    Karpathy's json and image folders
find_captions("data/coco/precomp", split="test")                         caption files of VSE++ and SCAN, "precomp"
find_captions("data/f30k_precomp", split="train")                        the same with SCAN's regions, *_ims.npy
find_captions("data/cub", split="train")                                 CUB-200-2011 with ten captions an image
find_captions("hierarcaps_test.csv", images="data/coco/val2014")         captions from general to specific, HierarCaps
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from probemb.data.captions.dataset import CaptionDataset
from probemb.data.captions.precomp import read_precomp, read_with_regions
from probemb.data.captions.published import read_cub, read_hierarcaps, read_karpathy
from probemb.data.captions.webdataset import read_shards
from probemb.data.image_loader import Images
from probemb.data.reading import listed
from probemb.errors import UserError


class Format(NamedTuple):
    """A format of captions.

    Attributes:
        title: for messages; holds: what it is recognised by in a folder; endings: of a file's name.
        read: gives the data of a path, a split and a folder of images.
        below: what it is recognised by in a folder that holds no other format.
    """

    title: str
    holds: tuple[str, ...]
    endings: tuple[str, ...]
    read: Callable[[Path, str | None, Path | None], CaptionDataset]
    below: tuple[str, ...] = ()


FORMATS = {
    "webdataset": Format("webdataset shards", ("*.tar", "*/*.tar"), (".tar",), read_shards),
    "karpathy": Format("a Karpathy json", ("dataset*.json*",), (".json", ".json.gz"), read_karpathy),
    "precomp": Format("*_caps.txt", ("*_caps.txt*", "precomp/*_caps.txt*"), (".txt", ".txt.gz"), read_precomp),
    "regions": Format("*_caps.txt with *_ims.npy", ("*_ims.npy", "precomp/*_ims.npy"), (), read_with_regions),
    "cub": Format("CUB's text_c10", ("text_c10",), (), read_cub, ("*/text_c10",)),
    "hierarcaps": Format("HierarCaps' table", ("hierarcaps*.csv",), (".csv", ".csv.gz"), read_hierarcaps),
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
    found = FORMATS[format or _recognise(path, folder)].read(path, split, folder)
    if isinstance(found.located, Images):
        found.located.exif = exif
    return found


def _recognise(path: Path, images: Path | None) -> str:
    """The name of the format. Raises UserError: a folder holds none, or several."""
    if not path.is_dir():
        found = next((name for name, one in FORMATS.items() if path.name.endswith(one.endings)), "webdataset")
        array = path.with_name(path.name.partition("_caps.")[0] + "_ims.npy")
        return "regions" if found == "precomp" and images is None and array.is_file() else found
    found = [name for name, one in FORMATS.items() if any(any(path.glob(held)) for held in one.holds)]
    found = found or [name for name, one in FORMATS.items() if any(any(path.glob(held)) for held in one.below)]
    if {"precomp", "regions"} <= set(found):
        found.remove("precomp" if images is None else "regions")
    if len(found) != 1:
        titles = [FORMATS[name].title for name in found or FORMATS]
        raise UserError(
            f"{path} holds {'captions in several formats: ' + listed(titles) if found else 'no captions'}.",
            f"Name the files of one, or {listed(found, 'or')} as the format where the command takes one."
            if found
            else f"Name {listed(titles, 'or')}, or make the synthetic data with `python -m tools.make_scenes "
            "data/scenes`.",
        )
    return found[0]
