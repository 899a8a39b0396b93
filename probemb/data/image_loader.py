"""Reads images from files or from byte ranges of tars, and decodes them in worker processes.

Unreadable images are counted and named; above a given share they stop the command.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from PIL import Image

from probemb.data.failures import BadSample, BadShard
from probemb.data.images import decode_image
from probemb.data.pixels import stack
from probemb.data.shards.index import expand_braces, read_index
from probemb.data.shards.samples import MAX_IMAGE_BYTES, Member, walk_tar
from probemb.data.workers import make_loader, read
from probemb.errors import UserError

if TYPE_CHECKING:
    from probemb.data.boxes.geometry import Box


class Place(NamedTuple):
    """The location of an image's bytes; size -1 = the whole file. `name` is unique within the data."""

    name: str
    file: str
    offset: int = 0
    size: int = -1


@dataclass(kw_only=True)
class Images:
    """Listed images, not yet decoded.

    Attributes:
        source: the path given, for messages.
        bad: (name, reason) of samples that were skipped while listing.
        exif: turn images as their EXIF orientation says; draft: sides of which a JPEG may be decoded smaller. See
            `decode_image`.
    """

    places: list[Place]
    source: str
    bad: list[tuple[str, str]] = field(default_factory=list)
    exif: bool = False
    draft: int | None = None

    def __len__(self) -> int:
        return len(self.places)

    def open(self, index: int) -> Image.Image:
        """Decode one image to RGB. Raises BadSample."""
        return decode_image(read_place(self.places[index]), self.draft, exif=self.exif)

    def part(self, index: int, box: Box | None) -> Image.Image:
        """The part of an image in a box of its stored pixels; None for all of it. Raises BadSample."""
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
        if size > MAX_IMAGE_BYTES:
            raise BadSample(f"has {size:,} bytes")
        return os.pread(fd, size, place.offset)
    finally:
        os.close(fd)


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
        raise UserError(
            f"{len(missing):,} of the {len(names):,} names in {data} do not exist, {missing[0]} for one.",
            "Fetch what is missing, or correct the range.",
        )
    return [Path(tar) for tars in found for tar in tars]


def list_members(tar: Path) -> list[Member]:
    """Raises UserError: it cannot be read."""
    try:
        return list(walk_tar(tar))
    except BadShard as error:
        raise UserError(f"{error}.", "Fetch that file again, or leave it out.") from error


def in_both(these: Images, those: Images) -> list[str]:
    """Names of images of `these` that are also in `those`: same size, and same last 4 KiB."""
    ends = {image_digest(place) for place in those.places} - {None}
    return [place.name for place in these.places if image_digest(place) in ends]


def image_digest(place: Place, length: int = 4096) -> tuple[int, bytes] | None:
    """Size and digest of an image's last bytes; None if it cannot be read."""
    try:
        size = os.path.getsize(place.file) if place.size < 0 else place.size
        tail = min(size, length)
        data = read_place(Place(place.name, place.file, place.offset + size - tail, tail))
    except (OSError, BadSample):
        return None
    return size, hashlib.blake2b(data, digest_size=16).digest()


class _Decoded:
    """Map-style dataset: index -> (index, pixels or None, reason if None)."""

    def __init__(self, images: Images, transform: Callable):
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int):
        try:
            image = self.images.open(index)
        except BadSample as error:
            return index, None, str(error)
        try:
            return index, self.transform(image), ""
        except Exception as error:  # one image must not end an evaluation
            return index, None, f"cannot be transformed ({type(error).__name__})"


def _collate(rows: list):
    good = [(index, pixels) for index, pixels, _ in rows if pixels is not None]
    bad = [(index, why) for index, pixels, why in rows if pixels is None]
    return [index for index, _ in good], stack([pixels for _, pixels in good]) if good else None, bad


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
        self._refuse_too_many()
        decoded, pin = _Decoded(self.images, self.transform), torch.cuda.is_available()
        loader = make_loader(decoded, self.workers, batch_size=self.batch_size, collate_fn=_collate, pin_memory=pin)
        with closing(read(loader)) as batches:
            for kept, pixels, bad in batches:
                self.kept += kept
                self.bad += [(self.images.places[index].name, why) for index, why in bad]
                self._refuse_too_many()
                if pixels is not None:
                    yield pixels

    def _refuse_too_many(self) -> None:
        total = len(self.images) + len(self.images.bad)
        refuse_too_many(self.bad, total, self.images.source, self.max_bad, self.option)


def refuse_too_many(bad: list[tuple[str, str]], total: int, source: str, max_bad: float, option: str) -> None:
    """Refuse images of which more than the share `max_bad` are `bad`: names and reasons. Raises UserError."""
    if len(bad) > max_bad * total:
        shown = "; ".join(f"{name}: {why}" for name, why in bad[:3])
        raise UserError(
            f"{len(bad)} of {total} images of {source} cannot be used ({shown}).",
            f"Repair the data, or allow more than {max_bad:.0%} with {option}.",
        )


def describe_bad(bad: Iterable[tuple[str, str]], limit: int = 10) -> str:
    """A sentence about skipped images, or ""."""
    bad = list(bad)
    if not bad:
        return ""
    shown = "; ".join(f"{json.dumps(name, ensure_ascii=False)[1:-1]} ({why})" for name, why in bad[:limit])
    return f"{len(bad)} image{'s' if len(bad) > 1 else ''} left out: {shown}{'; …' if len(bad) > limit else ''}"
