"""Precomputed features of images' regions: `NAME_ims.npy` of SCAN and VSRN, read row by row.

An array (N, R, W): N images, R regions of W numbers (36 x 2048 as published), one row an image or five equal ones.
A region of zeros alone does not exist; so images may have fewer than R. Only the array's header is read beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch

from probemb.data.failures import BadSample
from probemb.data.image_loader import Images, Place, read_place
from probemb.data.reading import checked, npy_header
from probemb.errors import UserError

ENDING = "_ims.npy"
DTYPES = ("float32", "float16")
MAX_REGIONS, MAX_WIDTH = 4096, 1 << 16


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
        place = self.places[index]
        data = read_place(place)
        if len(data) != place.size:
            raise BadSample("its row is cut off")
        row = np.frombuffer(data, self.dtype).astype(np.float32).reshape(self.shape)
        if not np.isfinite(row).all():
            raise BadSample("its regions hold NaN or infinity")
        return torch.from_numpy(row)


def read_regions(path: Path, names: Sequence[str], per_image: int = 1) -> RegionImages:
    """The regions of images with these names, in the order of the rows.

    Args:
        per_image: rows of an image in the form that repeats them, one for each caption.

    Raises UserError: no such array, or its rows are neither one nor `per_image` equal ones for each image.
    """
    remedy = "Name an array of (images, regions, numbers) that np.save has written as float32 or float16."
    if not path.is_file():
        raise UserError(f"There is no file {path}.", remedy)
    with checked(path, "an array of regions", remedy), open(path, "rb") as file:
        shape, fortran, dtype = npy_header(file)
        offset, size = file.tell(), path.stat().st_size
        if dtype.hasobject or dtype.newbyteorder("=") not in DTYPES or fortran:
            order = ", in Fortran's order" if fortran else ""
            raise ValueError(f"it holds {'Python objects' if dtype.hasobject else dtype}{order}")
        if len(shape) != 3 or not (0 < shape[1] <= MAX_REGIONS and 0 < shape[2] <= MAX_WIDTH):
            raise ValueError(f"its shape is {shape}")
        if size != offset + prod(shape) * dtype.itemsize:
            raise ValueError(f"it has {size:,} bytes, and {shape} takes {offset + prod(shape) * dtype.itemsize:,}")
        if shape[0] not in (len(names), per_image * len(names)):
            raise ValueError(
                f"it has {shape[0]:,} rows, but there are {len(names):,} images; one row or {per_image} equal ones "
                "belong to each"
            )
        row, step = prod(shape[1:]) * dtype.itemsize, shape[0] // len(names)
        places = [Place(name, str(path), offset + i * step * row, row) for i, name in enumerate(names)]
        for place in {places[0], places[len(places) // 2], places[-1]}:
            file.seek(place.offset)
            if len({file.read(row) for _ in range(step)}) > 1:
                raise ValueError(f"the {step} rows of {place.name} differ")
    return RegionImages(places=places, source=str(path), shape=shape[1:], dtype=dtype)
