"""Precomputed features of regions that stand in for the pixels of images: the `NAME_ims.npy` of SCAN and VSRN."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from probemb.data.failures import BadSample
from probemb.data.image_loader import Images, Place, read_place
from probemb.data.reading import checked, read_npy

REGIONS = "_ims.npy"  # end of the name of a file of regions


@dataclass(kw_only=True)
class RegionImages(Images):
    """Images of which precomputed features of regions stand in for pixels; a place is a row of their file."""

    shape: tuple[int, int]  # (R, W)
    dtype: np.dtype  # of the file

    def open(self, index: int) -> torch.Tensor:
        """(R, W) float32. Raises BadSample."""
        place = self.places[index]
        data = read_place(place)
        if len(data) != place.size:
            raise BadSample("its row is cut off")
        row = np.frombuffer(data, self.dtype).astype(np.float32).reshape(self.shape)
        if not np.isfinite(row).all():
            raise BadSample("its regions hold NaN or infinity")
        return torch.from_numpy(row)


def read_regions(path: Path, names: Sequence[str], per_image: int = 1) -> RegionImages:
    """The regions of images with these names, in the order of the rows of `NAME_ims.npy` of SCAN and VSRN.

    The array is (N, R, W): N images, R regions of W numbers (36 x 2048 as published), one row an image or `per_image`
    equal ones. A region of zeros alone does not exist; so images may have fewer than R.
    """
    with checked(path, "an array of regions", "Name an array of (images, regions, numbers) of float32 or float16."):
        array = read_npy(path, mapped=True)
        if array.dtype.newbyteorder("=") not in ("float32", "float16") or not array.flags.c_contiguous:
            raise ValueError(f"it holds {array.dtype}{'' if array.flags.c_contiguous else ', in the order of Fortran'}")
        if array.ndim != 3 or not array.size or array.shape[0] not in (len(names), per_image * len(names)):
            raise ValueError(f"its shape is {array.shape}, and there are {len(names):,} images, each of one row or "
                             f"{per_image} equal ones")  # fmt: skip
        step, size = len(array) // len(names), array[0].nbytes
        for i in {0, len(names) // 2, len(names) - 1}:
            if len({row.tobytes() for row in array[i * step : (i + 1) * step]}) > 1:
                raise ValueError(f"the {step} rows of {names[i]} differ")
        places = [Place(name, str(path), array.offset + i * step * size, size) for i, name in enumerate(names)]
    return RegionImages(places=places, source=str(path), shape=array.shape[1:], dtype=array.dtype)
