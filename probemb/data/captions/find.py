"""Finds images with their captions in any of the published formats, recognised by their content.

find_captions("data/flickr8k", split="val")                              webdataset shards
find_captions("dataset_coco.json", split="train", images="data/coco")    Karpathy's json and image folders
find_captions("data/coco/precomp", split="test")                         caption files of VSE++ and SCAN, "precomp"
find_captions("data/f30k_precomp", split="train")                        the same with SCAN's regions, *_ims.npy
find_captions("data/cub", split="train")                                 CUB-200-2011 with ten captions an image
find_captions("hierarcaps_test.csv", images="data/coco/val2014")         captions from general to specific, HierarCaps
"""

import gzip
from pathlib import Path

from probemb.data.captions.dataset import CaptionDataset, listed, split_name
from probemb.data.image_loader import find_tars
from probemb.errors import UserError, nearest

FORMATS = ("webdataset", "karpathy", "precomp", "regions", "cub", "hierarcaps")
__all__ = ["FORMATS", "CaptionDataset", "find_captions"]


def find_captions(
    data: str | Path, split: str | None = None, images: str | Path | None = None, format: str | None = None,
    exif: bool = False,
) -> CaptionDataset:  # fmt: skip
    """List images and captions without decoding any image.

    Args:
        data: shards (a folder, a pattern or one tar; `train-*.tar` or `train/*.tar` name the split), a Karpathy json
            (dataset_coco.json, …), a `*_caps.txt` or a folder with one of them, or CUB's; text files also gzipped.
        split: "train" (with Karpathy's "restval"), "val" ("dev"), "test", or another that the data names; None: all;
            "auto": "test" of data with several splits, else all. Of precomp files "test" prefers testall_caps.txt.
        images: image folder of a json or caption file, for COCO the one with train2014 and val2014; by default searched
            beside the file.
        format: one of FORMATS; recognised by default: caption files with `*_ims.npy` beside them are "regions", unless
            `images` are named.
        exif: turn images as their EXIF orientation says.

    Raises UserError: the path, the split or the images do not exist; malformed data, an image without a caption,
    duplicate ids, or names that lead out of the folder.
    """
    if format is not None and format not in FORMATS:
        raise UserError(
            f"'{format}' is no format of captions.{nearest(format, FORMATS)}", f"Use {listed(FORMATS, 'or')}."
        )
    if not str(data).strip() or "\0" in str(data):
        raise UserError("The data path is empty.", "Name shards with captions, a Karpathy json or a *_caps.txt.")
    split = None if split is None else split_name(split)
    format = format or _recognise(data, images)
    is_text = format != "webdataset" or (images is not None and str(data).endswith((".json", ".txt", ".csv")))
    if is_text and not Path(data).exists():
        raise UserError(f"The data path {data} does not exist.", "Check the spelling.")
    if images is not None:
        if format == "webdataset":
            raise UserError(
                f"{data} holds its images itself, so that the image folder {images} would not be used.",
                "Leave the image folder out, or name a Karpathy json or a *_caps.txt as the data.",
            )
        if not Path(images).is_dir():
            raise UserError(f"The image folder {images} does not exist.", "Name the folder that holds the images.")
    if format == "webdataset":
        from probemb.data.captions.webdataset import read_shards

        return _turned(read_shards(data, split), exif)
    from probemb.data.captions.cub import read_cub
    from probemb.data.captions.hierarcaps import read_hierarcaps
    from probemb.data.captions.karpathy import read_karpathy
    from probemb.data.captions.precomp import read_precomp, read_with_regions

    readers = {"karpathy": read_karpathy, "precomp": read_precomp, "regions": read_with_regions, "cub": read_cub}
    read = {**readers, "hierarcaps": read_hierarcaps}[format]
    return _turned(read(Path(data), split, None if images is None else Path(images)), exif)


def _turned(found: CaptionDataset, exif: bool) -> CaptionDataset:
    if found.located is not None:
        found.located.exif = exif
    return found


def _recognise(data: str | Path, images: str | Path | None) -> str:
    found = _kind_of_files(data)
    if found == "precomp" and images is None:
        from probemb.data.captions.precomp import regions_beside

        path = Path(data)
        arrays = (
            [regions_beside(path)] if path.is_file() else [*path.glob("*_ims.npy"), *path.glob("precomp/*_ims.npy")]
        )
        if any(array.is_file() for array in arrays):
            return "regions"
    return found


def _kind_of_files(data: str | Path) -> str:
    path = Path(data)
    if path.is_dir():
        holds = {
            "webdataset": find_tars(path) or any(path.glob("*/*.tar")),
            "precomp": any(path.glob("*_caps.txt*")) or any(path.glob("precomp/*_caps.txt*")),
            "karpathy": any(path.glob("dataset*.json*")),
            "hierarcaps": any(path.glob("hierarcaps*.csv")),
            "cub": (path / "text_c10").is_dir(),
        }
        found = [name for name, there in holds.items() if there]
        if not found and any(path.glob("*/text_c10")):  # scenes with --boxes have a folder cub beside their shards
            found = ["cub"]
        if len(found) > 1:
            raise UserError(
                f"{path} holds captions in several formats: {listed(found)}.",
                f"Name the files of one, or {listed(found, 'or')} as the format where the command takes one.",
            )
        if not found:
            raise UserError(
                f"{path} holds no webdataset shards, no *_caps.txt, no Karpathy json and no text_c10.",
                "Name the data itself, or make the synthetic data with `python -m tools.make_scenes data/scenes`.",
            )
        return found[0]
    if not path.is_file():
        return "webdataset"  # perhaps a pattern; its reader reports what is missing
    try:
        with open(path, "rb") as file:
            head = file.read(512)
        if head[:2] == b"\x1f\x8b":
            with gzip.open(path) as file:
                head = file.read(512)
    except Exception as error:
        raise UserError(f"{path} cannot be read: {error}.", "Check the file, or fetch it again.") from None
    if path.suffix == ".tar" or head[257:262] == b"ustar":
        return "webdataset"
    if b"\0" in head:
        raise UserError(
            f"{path} holds no captions: it is neither a tar nor a text.", "Name shards, a Karpathy json or a caps.txt."
        )
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if start[:15].lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise UserError(
            f"{path} is a web page, not captions.",
            "Fetch the annotation file again: the server may have answered with an error or a login page.",
        )
    if b"captions,image_url" in start.partition(b"\n")[0]:
        return "hierarcaps"
    if {".csv", ".tsv"} & set(path.suffixes):
        raise UserError(
            f"{path} is a table, which is not a supported caption format.",
            "Write a Karpathy json, or five captions an image as NAME_caps.txt with NAME_ids.txt beside it.",
        )
    is_json = start[:1] in (b"{", b"[") or path.name.endswith((".json", ".json.gz"))
    return "karpathy" if is_json else "precomp"
