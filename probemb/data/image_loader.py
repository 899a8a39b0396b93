"""Images in files, in byte ranges of tars, or as precomputed regions: found, read, and decoded in worker processes.

Unreadable images are counted and named; above a given share they stop the command.
"""

import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache, partial
from glob import glob
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image

from probemb.data.failures import BadSample, BadShard
from probemb.data.images import decode_image
from probemb.data.pixels import stack
from probemb.data.reading import MALFORMED, checked, read_npy, reason
from probemb.data.shards import samples
from probemb.data.shards.index import expand_braces, read_index
from probemb.data.workers import make_loader, read
from probemb.errors import UserError

T = TypeVar("T")
REGIONS = "_ims.npy"  # end of the name of a file of regions
CLASS_FILES = ("classes.json", "classes.txt")  # beside labelled images
_IMAGE_FOLDERS = ("images", "flickr30k-images", "flickr30k_images", "Flicker8k_Dataset", "")


class Place(NamedTuple):
    """The location of an image's bytes; size -1 = the whole file. `name` is unique within the data."""

    name: str
    file: str
    offset: int = 0
    size: int = -1


@dataclass(kw_only=True)
class Images:
    """Listed images, not yet decoded."""

    places: list[Place]
    source: str  # the path given, for messages
    bad: list[tuple[str, str]] = field(default_factory=list)  # name and reason of samples skipped while listing
    exif: bool = False  # as `decode_image` has it, like `draft`
    draft: int | None = None

    def __len__(self) -> int:
        return len(self.places)

    def open(self, index: int) -> Image.Image:
        """Decode one image to RGB. Raises BadSample."""
        return decode_image(read_place(self.places[index]), self.draft, exif=self.exif)

    def part(self, index: int, box: Sequence[float] | None) -> Image.Image:
        """The part of an image in a box (left, top, right, bottom) of its stored pixels. Raises BadSample."""
        image = self.open(index)
        if box is None:
            return image
        left, top = max(0, math.floor(box[0])), max(0, math.floor(box[1]))  # all pixels that the box touches
        right, bottom = min(image.width, math.ceil(box[2])), min(image.height, math.ceil(box[3]))
        if right <= left or bottom <= top:
            place = tuple(round(at) for at in box)
            raise BadSample(f"the box {place} lies outside of its {image.width}x{image.height}")
        return image.crop((left, top, right, bottom))


def read_place(place: Place) -> bytes:
    """Read the bytes at a place; fewer where the file ends before. Raises BadSample: no regular file, or too large."""
    try:
        fd = os.open(place.file, os.O_RDONLY | os.O_NONBLOCK)  # would block on a named pipe
    except OSError as error:
        raise BadSample(f"cannot be opened ({error.strerror})") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise BadSample("is not a regular file")
        size = status.st_size if place.size < 0 else place.size
        if size > samples.MAX_IMAGE_BYTES:
            raise BadSample(f"has {size:,} bytes")
        return os.pread(fd, size, place.offset)
    except OSError as error:
        raise BadSample(f"cannot be read ({error.strerror})") from None
    finally:
        os.close(fd)


def image_digest(place: Place, length: int = 4096) -> tuple[int, bytes] | None:
    """Size and digest of an image's last bytes; None if it cannot be read."""
    try:
        size = os.path.getsize(place.file) if place.size < 0 else place.size
        tail = min(size, length)
        data = read_place(Place(place.name, place.file, place.offset + size - tail, tail))
    except (OSError, BadSample):
        return None
    return size, hashlib.blake2b(data, digest_size=16).digest()


def find_tars(data: str | Path) -> list[Path]:
    """Tars of a folder (those of its index.json, if any), of a pattern with wildcards and braces, or one tar; perhaps
    none. Raises UserError if only some of the names of a brace range exist.
    """
    path = Path(data)
    if path.is_dir():
        if (path / "index.json").is_file():
            return [shard.path for shard in read_index(path)]
        return sorted(path.glob("*.tar"))
    if path.is_file():
        return [path]
    names = expand_braces(str(data))
    found = [[name] if os.path.isfile(name) else sorted(glob(name)) for name in names]
    missing = [name for name, tars in zip(names, found) if not tars]
    if 0 < len(missing) < len(names):
        what = f"{len(missing):,} of the {len(names):,} names in {data} do not exist, {missing[0]} for one."
        raise UserError(what, "Fetch what is missing, or correct the range.")
    return [Path(tar) for tars in found for tar in tars]


def list_members(tar: Path) -> list[samples.Member]:
    try:
        return list(samples.walk_tar(tar))
    except BadShard as error:
        raise UserError(f"{error}.", "Fetch that file again, or leave it out.") from error


def read_samples(
    tars: Sequence[Path], extensions: Sequence[str], parse: Callable[[samples.Sample], T | None],
    need_caption: bool | None = True,
) -> tuple[Images, list[T]]:  # fmt: skip
    """The images of shards, and `parse` of each one's sample, which has the texts with these extensions.

    Samples without an image, and those of which `parse` gives None, are left out; malformed ones are in `bad`.
    """
    images, parsed = Images(places=[], source=str(tars[0])), []
    for tar in tars:
        prefix, members = f"{tar.name}:" if len(tars) > 1 else "", list_members(tar)
        with open(tar, "rb") as file:
            for span in samples.group_members(members):
                image = next((span.parts[ext] for ext in samples.IMAGE_EXTENSIONS if ext in span.parts), None)
                if image is None:
                    continue
                texts = {ext: span.parts[ext] for ext in extensions if ext in span.parts}
                try:
                    texts = samples.read_sample(file.fileno(), span._replace(parts=texts))
                    value = parse(samples.parse_sample({"jpg": b"-", **texts}, span.key, need_caption))
                except (BadSample, *MALFORMED) as error:
                    images.bad.append((prefix + span.key, reason(error)))
                    continue
                if value is not None:
                    parsed.append(value)
                    images.places.append(Place(prefix + span.key, str(tar), image.offset, image.size))
    return images, parsed


def locate(
    candidates: Sequence[Sequence[str]], names: Sequence[str], source: Path, images: Path | None, beside: Sequence[Path]
) -> Images:
    """The location of each image of an annotation file: the first existing one of its candidates below the folder
    `images`, or beside the annotations. Raises UserError: images are missing.
    """
    roots = [images] if images is not None else [folder / name for folder in beside for name in _IMAGE_FOLDERS]

    @cache
    def names_in(folder: str) -> frozenset[str]:  # one listing per folder, not one `stat` for each of 100,000 images
        return frozenset(os.listdir(folder)) if os.path.isdir(folder) else frozenset()

    def find(group: Sequence[str]) -> str | None:
        paths = (os.path.join(root, path) for root in roots for path in group)
        return next((path for path in paths if os.path.basename(path) in names_in(os.path.dirname(path))), None)

    found = [find(group) for group in candidates]
    if missing := [name for name, file in zip(names, found) if file is None]:
        where = "" if images is None else f" in {images}"
        what = (
            f"{len(missing):,} of the {len(names):,} images of {source} are missing{where}, the first is {missing[0]}."
        )
        remedy = (
            "Name their folder with --images (data.images of finetune.run; COCO's has train2014 in it), fetch them, "
        )
        raise UserError(what, f"{remedy}or remove them from the file.")
    return Images(places=[Place(name, file) for name, file in zip(names, found)], source=str(source))


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


def _decode(images: Images, transform: Callable, rows: list[int]):
    """A batch: the rows that can be used, their pixels or None, and (name, reason) of the others."""
    kept, pixels, bad = [], [], []
    for row in rows:
        try:
            pixels.append(transform(images.open(row)))
            kept.append(row)
        except BadSample as error:
            bad.append((images.places[row].name, str(error)))
    return kept, stack(pixels) if pixels else None, bad


class ImageBatches:
    """Batches of pixels (B, 3, H, W) of every readable image; `kept` and `bad` list the used and unusable ones.

    Raises UserError as soon as more than `max_bad` of all images are unusable; it names the `option` that allows more.
    """

    def __init__(
        self, images: Images, transform: Callable, batch_size: int, workers: int = 0, max_bad: float = 0.05,
        option: str = "--max-bad",
    ):  # fmt: skip
        self.images, self.transform, self.option = images, transform, option
        self.batch_size, self.workers, self.max_bad = batch_size, workers, max_bad
        self.kept: list[int] = []
        self.bad = list(images.bad)

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.kept.clear()
        self.bad[:] = self.images.bad
        limits = len(self.images) + len(self.bad), self.images.source, self.max_bad, self.option
        refuse_too_many(self.bad, *limits)
        decode, pin = partial(_decode, self.images, self.transform), torch.cuda.is_available()
        rows = range(len(self.images))
        loader = make_loader(rows, self.workers, batch_size=self.batch_size, collate_fn=decode, pin_memory=pin)
        with closing(read(loader)) as batches:
            for kept, pixels, bad in batches:
                self.kept += kept
                self.bad += bad
                refuse_too_many(self.bad, *limits)
                if pixels is not None:
                    yield pixels


def refuse_too_many(bad: list[tuple[str, str]], total: int, source: str, max_bad: float, option: str) -> None:
    """Raises UserError if more than the share `max_bad` of the images are `bad`: names and reasons."""
    if len(bad) > max_bad * total:
        shown = "; ".join(f"{name}: {why}" for name, why in bad[:3])
        remedy = f"Repair the data, or allow more than {max_bad:.0%} with {option}."
        raise UserError(f"{len(bad)} of {total} images of {source} cannot be used ({shown}).", remedy)


def describe_bad(bad: Sequence[tuple[str, str]], limit: int = 10) -> str:
    """A sentence about skipped images, or ""."""
    if not bad:
        return ""
    shown = "; ".join(f"{json.dumps(name, ensure_ascii=False)[1:-1]} ({why})" for name, why in bad[:limit])
    return f"{len(bad)} image{'s' if len(bad) > 1 else ''} left out: {shown}{'; …' if len(bad) > limit else ''}"
