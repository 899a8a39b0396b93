"""Finds images with their captions in any of the published formats.

    find_captions("data/flickr8k", split="val")                              webdataset shards
    find_captions("dataset_coco.json", split="train", images="data/coco")    Karpathy's json and image folders
    find_captions("data/coco/precomp", split="test")                         caption files of VSE++ and SCAN, "precomp"

Nothing is decoded here. The format is recognised by the content.
"""

from __future__ import annotations

import gzip
from pathlib import Path

from probemb.data.captions.dataset import CaptionDataset, listed, split_name
from probemb.data.image_loader import find_tars
from probemb.errors import UserError, nearest

FORMATS = ("webdataset", "karpathy", "precomp")
__all__ = ["FORMATS", "CaptionDataset", "find_captions"]


def find_captions(
    data: str | Path, split: str | None = None, images: str | Path | None = None, format: str | None = None
) -> CaptionDataset:
    """List images and captions without decoding any image.

    Args:
        data: shards (a folder, a pattern or one tar; `train-*.tar` or `train/*.tar` say the split by their names), a
            Karpathy json (dataset_coco.json, dataset_flickr30k.json, …), a `*_caps.txt` or a folder with one of them;
            text files also gzipped.
        split: "train", "val" ("dev"), "test", or another that the data names; None takes all, or all of the file;
            "auto" takes "test" of data that has several splits, and else all.
            Karpathy's "restval" belongs to "train". Of precomp files "test" is testall_caps.txt where that is there.
        images: the folder of the images of a json or caption file, for COCO the one that holds train2014 and val2014.
            By default those folders are looked for beside the file.
        format: "webdataset", "karpathy" or "precomp"; by default recognised by the content.

    Raises UserError: the path, the split or the images that the data names are not there; the data has another shape
    than its format, an image without a caption, ids that occur twice, or names that lead out of the folder.
    """
    if format is not None and format not in FORMATS:
        raise UserError(
            f"'{format}' is no format of captions.{nearest(format, FORMATS)}", f"Use {listed(FORMATS, 'or')}."
        )
    if not str(data).strip() or "\0" in str(data):
        raise UserError("The data path is empty.", "Name shards with captions, a Karpathy json or a *_caps.txt.")
    split = None if split is None else split_name(split)
    format = format or _recognise(data)
    if images is not None:
        if str(data).endswith((".json", ".txt")) and not Path(data).exists():
            raise UserError(f"The data path {data} does not exist.", "Check the spelling.")
        if format == "webdataset":
            raise UserError(
                f"{data} holds its images itself, so that the image folder {images} would not be used.",
                "Leave the image folder out, or name a Karpathy json or a *_caps.txt as the data.",
            )
        if not Path(images).is_dir():
            raise UserError(f"The image folder {images} does not exist.", "Name the folder that holds the images.")
    if format == "webdataset":
        from probemb.data.captions.webdataset import read_shards

        return read_shards(data, split)
    if not Path(data).exists():
        raise UserError(f"The data path {data} does not exist.", "Check the spelling.")
    from probemb.data.captions.karpathy import read_karpathy
    from probemb.data.captions.precomp import read_precomp

    read = read_karpathy if format == "karpathy" else read_precomp
    return read(Path(data), split, None if images is None else Path(images))


def _recognise(data: str | Path) -> str:
    path = Path(data)
    if path.is_dir():
        found = []
        if find_tars(path) or any(path.glob("*/*.tar")):
            found.append("webdataset")
        if any(path.glob("*_caps.txt*")) or any(path.glob("precomp/*_caps.txt*")):
            found.append("precomp")
        if any(path.glob("dataset*.json*")):
            found.append("karpathy")
        if len(found) > 1:
            raise UserError(f"{path} holds captions in several formats: {listed(found)}.", "Say which with the format.")
        if not found:
            raise UserError(
                f"{path} holds no webdataset shards, no *_caps.txt and no Karpathy json.",
                "Name the data itself, or make the embedded data with `python -m tools.make_scenes data/scenes`.",
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
    return "karpathy" if head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"[") else "precomp"
