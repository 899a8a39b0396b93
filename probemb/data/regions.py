"""Precomputed features of images' regions: `NAME_ims.npy` of SCAN and VSRN, read row by row.

An array (N, R, W): N images, R regions of W numbers (36 x 2048 as published), one row an image or five equal ones.
A region of zeros alone does not exist; so images may have fewer than R. Only the array's header is read beforehand.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from probemb.data.failures import BadSample
from probemb.data.image_loader import Images, Place, read_place
from probemb.data.npy import npy_header
from probemb.errors import UserError

if TYPE_CHECKING:
    import torch

ENDING = "_ims.npy"
DTYPES = ("float32", "float16")
MAX_REGIONS, MAX_WIDTH = 4096, 1 << 16
REMEDY = "Name an array of (images, regions, numbers) that np.save has written as float32 or float16."


class Header(NamedTuple):
    """The array in a file: its shape, its type, and where its first number stands."""

    shape: tuple[int, int, int]
    dtype: np.dtype
    offset: int


@dataclass(kw_only=True)
class RegionImages(Images):
    """Images of which regions stand in for pixels: `open` gives (R, W) float32.

    Attributes:
        shape: (R, W).
        dtype: of the file; a place's `offset` is that of the image's row.
    """

    shape: tuple[int, int]
    dtype: np.dtype

    def open(self, index: int) -> torch.Tensor:
        """The regions of one image. Raises BadSample: cut off, or numbers that are not finite."""
        import torch

        place = self.places[index]
        data = read_place(place)
        if len(data) != place.size:
            raise BadSample("its row is cut off")
        row = np.frombuffer(data, self.dtype).astype(np.float32).reshape(self.shape)
        if not np.isfinite(row).all():
            raise BadSample("its regions hold NaN or infinity")
        return torch.from_numpy(row)


def read_regions(path: Path, names: Sequence[str], per_image: int) -> RegionImages:
    """The regions of images with these names, in the order of the rows.

    Args:
        per_image: rows of an image in the form that repeats them, one for each caption.

    Raises:
        UserError: no such array, or its rows are neither one nor `per_image` for each image.
    """
    header = read_header(path)
    rows, *shape = header.shape
    if rows not in (len(names), per_image * len(names)):
        raise UserError(
            f"{path} has {rows:,} rows, but its captions are of {len(names):,} images with {per_image} each.",
            f"Put the array and the captions of one split together: one row for each image, or {per_image} equal ones.",
        )
    size, step = prod(shape) * header.dtype.itemsize, rows // len(names)
    places = [Place(name, str(path), header.offset + i * step * size, size) for i, name in enumerate(names)]
    if step > 1:
        _check_repeated(path, places, step)
    return RegionImages(places=places, source=str(path), shape=tuple(shape), dtype=header.dtype)


def read_header(path: Path) -> Header:
    """Shape and type of an array's file, without its content. Raises UserError: it is not an array of regions."""
    try:
        with open(path, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UserError(f"{path} is not a regular file.", REMEDY)
            shape, fortran, dtype = npy_header(file)
            offset, size = file.tell(), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}).", "Check the file.") from None
    except ValueError as error:
        raise UserError(f"{path} is no array of numpy: {str(error)[:200]}.", REMEDY) from None
    if dtype.hasobject or dtype.newbyteorder("=") not in DTYPES:
        raise UserError(f"{path} holds {'Python objects' if dtype.hasobject else dtype}, not {DTYPES[0]}.", REMEDY)
    if len(shape) != 3 or not (0 < shape[1] <= MAX_REGIONS and 0 < shape[2] <= MAX_WIDTH) or shape[0] < 1:
        raise UserError(f"{path} has the shape {shape}, not (images, regions, numbers).", REMEDY)
    if fortran:
        raise UserError(
            f"{path} is stored in Fortran's order.", "Save it again with np.save(file, np.ascontiguousarray(a))."
        )
    if size != offset + prod(shape) * dtype.itemsize:
        raise UserError(
            f"{path} has {size:,} bytes, but an array of {shape} takes {offset + prod(shape) * dtype.itemsize:,}.",
            "Fetch the file again: it is cut off, or was damaged.",
        )
    return Header(shape, dtype, offset)


def _check_repeated(path: Path, places: Sequence[Place], times: int) -> None:
    """Refuse rows that differ where those of one image should be equal; looks at the first, middle and last image."""
    with open(path, "rb") as file:
        for place in {places[0], places[len(places) // 2], places[-1]}:
            file.seek(place.offset)
            first = file.read(place.size)
            for again in range(1, times):
                if file.read(place.size) != first:
                    raise UserError(
                        f"The rows of {place.name} in {path} differ: row {again + 1} of {times} is another image.",
                        f"Give every image one row, or {times} equal ones.",
                    )
