"""Arrays of regions and the texts beside them, as SCAN and VSRN read them: written aside, then renamed."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from math import prod
from pathlib import Path

import numpy as np

from probemb.data.captions.dataset import CaptionDataset
from probemb.data.captions.precomp import PER_IMAGE
from probemb.errors import UserError
from probemb.files import replace_file, replace_text

SPLITS = {"val": "dev"}  # the published files' name of a split
BOXES, IDS, CAPTIONS, REGIONS = "boxes.npy", "ids.txt", "caps.txt", "ims.npy"


def file_of(out: Path, split: str, ending: str) -> Path:
    """OUT/NAME_ENDING. Raises UserError: the split's name cannot be part of a file's name."""
    name = SPLITS.get(split, split)
    if not (name.isascii() and name.isalnum()):
        raise UserError(f"The split '{split}' cannot be part of a file's name.", "Name train, val or test.")
    return out / f"{name}_{ending}"


def refuse_existing(files: Iterable[Path]) -> None:
    """Raise UserError: one of the files is there."""
    for file in files:
        if file.exists():
            raise UserError(f"{file} exists.", "Remove it, or choose another --out.")


def refuse_full_disk(out: Path, n: int, shape: tuple[int, int], dtype: str) -> None:
    """Raise UserError: the array does not fit on the disk."""
    size = n * prod(shape) * np.dtype(dtype).itemsize
    folder = next(p for p in (out, *out.absolute().parents) if p.exists())
    free = shutil.disk_usage(folder).free
    if size > free:
        raise UserError(
            f"The regions of {n:,} images take {size / 1e9:.2f} GB, and {folder} has {free / 1e9:.2f} GB left.",
            "Make room, choose another --out, or write fewer regions with --grid.",
        )


def write_array(file: Path, shape: tuple[int, ...], dtype: str, blocks: Iterable[np.ndarray]) -> int:
    """Write blocks (B, *shape) one behind the other, so that memory holds one of them; returns the number of rows.

    The number of rows is put into the header at the end, for which numpy leaves room.

    Raises:
        UserError: a number that the type cannot hold; the file cannot be written. There is no file then.
    """
    rows = 0

    def write(aside: Path) -> None:
        nonlocal rows
        with open(aside, "wb") as opened:
            _header(opened, (0, *shape), dtype)
            for block in blocks:
                with np.errstate(over="ignore"):
                    kept = np.ascontiguousarray(block, dtype)
                if not np.isfinite(kept).all():
                    raise UserError(
                        f"Features of image {rows} ff. are not finite numbers in {dtype}.",
                        "Write them with --dtype float32, or check the weights.",
                    )
                opened.write(kept.data)
                rows += len(kept)
            opened.seek(0)
            _header(opened, (rows, *shape), dtype)

    try:
        replace_file(file, write)
    except OSError as error:
        what = f"{file} cannot be written ({error.strerror or error})."
        raise UserError(what, "Make room, or choose another --out.") from None
    return rows


def _header(opened, shape: tuple[int, ...], dtype: str) -> None:
    described = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(opened, described)


def write_captions(out: Path, split: str, data: CaptionDataset) -> int:
    """Write five lines an image, fewer captions filled with empty lines; returns how many did not fit."""
    lines = []
    for captions in data.captions:
        kept = [" ".join(caption.split()) for caption in captions[:PER_IMAGE]]
        lines += kept + [""] * (PER_IMAGE - len(kept))
    replace_text(file_of(out, split, CAPTIONS), "".join(f"{line}\n" for line in lines))
    return sum(max(0, len(captions) - PER_IMAGE) for captions in data.captions)


def write_ids(out: Path, split: str, ids: list[str]) -> None:
    """Write the images' ids, one a line."""
    replace_text(file_of(out, split, IDS), "".join(f"{one}\n" for one in ids))
