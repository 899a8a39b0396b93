"""Images in files or in byte ranges of tars: found, read, and decoded in worker processes.

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

import torch
from PIL import Image

from probemb.data.failures import BadSample, BadShard
from probemb.data.images import decode_image, stack
from probemb.data.reading import MALFORMED, reason
from probemb.data.shards import samples
from probemb.data.shards.index import expand_braces, read_index
from probemb.data.workers import make_loader, read
from probemb.errors import UserError

T = TypeVar("T")
CLASS_FILES = ("classes.json", "classes.txt")  # beside labelled images
_IMAGE_FOLDERS = ("images", "flickr30k-images", "flickr30k_images", "Flicker8k_Dataset", "")
_OTHER_PICTURES = ("gif", "bmp", "tif", "tiff", "heic", "heif", "avif", "jfif")  # which are not decoded


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


def is_image(name: str, endings: Sequence[str] = samples.IMAGE_EXTENSIONS) -> bool:
    base = name.rsplit("/", 1)[-1]
    return not base.startswith(".") and base.rpartition(".")[2].lower() in endings


def walk_pictures(folder: Path) -> Iterator[str]:
    """Paths of the images in a folder and those inside it, below the folder, in order; also those not decoded. Follows
    links, but reads no folder twice.
    """
    seen: set[str] = set()
    for root, folders, names in os.walk(folder, followlinks=True):
        again = os.path.realpath(root) in seen
        seen.add(os.path.realpath(root))
        folders[:] = sorted(name for name in folders if not name.startswith(".") and not again)
        names = [] if again else names
        below = os.path.relpath(root, folder)
        for name in sorted(names):
            if is_image(name, (*samples.IMAGE_EXTENSIONS, *_OTHER_PICTURES)):
                yield os.path.normpath(os.path.join(below, name))


def images_under(path: Path) -> list[Place]:
    """The images of tars, or of a folder and the folders in it, named by their paths inside."""
    if tars := find_tars(path):
        prefix = "{}:" if len(tars) > 1 else ""
        members = ((tar, member) for tar in tars for member in list_members(tar) if is_image(member.name))
        return [Place(prefix.format(tar.name) + one.name, str(tar), one.offset, one.size) for tar, one in members]
    # Not `walk_pictures`, which reads a folder once: two classes may be links to one.
    folders = ["", *sorted(one.name for one in path.glob("[!.]*/"))] if path.is_dir() else []
    names = (os.path.join(folder, name) for folder in folders for name in sorted(os.listdir(path / folder)))
    return [Place(name, str(path / name)) for name in names if is_image(name)]


def find_files(candidates: Sequence[Sequence[str]], images: Path | None, beside: Sequence[Path]) -> list[str | None]:
    """For each image the first existing one of its candidates below the folder `images`, or beside the annotations; in
    upper or lower case, if no file has just this name.
    """
    roots = [images] if images is not None else [folder / name for folder in beside for name in _IMAGE_FOLDERS]

    @cache
    def names_in(folder: str) -> dict[str, str]:  # one listing per folder, not one `stat` for each of 100,000 images
        names = os.listdir(folder) if os.path.isdir(folder) else ()
        return {name.lower(): name for name in sorted(names)} | {name: name for name in names}

    def find(group: Sequence[str]) -> str | None:
        for path in (os.path.join(root, path) for root in roots for path in group):
            folder, name = os.path.split(path)
            if found := names_in(folder).get(name, names_in(folder).get(name.lower())):
                return os.path.join(folder, found)
        return None

    return list(map(find, candidates))


def locate(
    candidates: Sequence[Sequence[str]], names: Sequence[str], source: Path, images: Path | None, beside: Sequence[Path]
) -> Images:
    """The location of each image of an annotation file, as `find_files`. Raises UserError: images are missing."""
    found = find_files(candidates, images, beside)
    if missing := [name for name, file in zip(names, found) if file is None]:
        where = os.path.abspath(images or beside[0])
        what = f"{len(missing):,} of the {len(names):,} images of {source} are missing in {where}: {missing[0]} is one."
        remedy = "Name the folder that holds them with --images (--data.images in finetuning), or fetch them."
        raise UserError(what, remedy)
    return Images(places=[Place(name, file) for name, file in zip(names, found)], source=str(source))


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
