"""Images with captions, as all readers return them, and checks of splits, ids and files."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from probemb.data.image_loader import Images
from probemb.errors import UserError, nearest

SPLIT_NAMES = {"dev": "val", "valid": "val", "validation": "val"}  # other names of a split
AUTO = "auto"  # `test` where the data has several of USUAL_SPLITS, else all of it
USUAL_SPLITS = ("train", "restval", "val", "test")
SPLIT_PARTS = {"train": ("train", "restval")}  # COCO's restval: images of val2014 that Karpathy gave to training
MAX_ID = 2**63 - 1
MAX_FILE_BYTES = 1 << 30  # of an annotation file, unpacked


@dataclass(frozen=True)
class CaptionDataset:
    """N images and their captions.

    Attributes:
        captions: for each image its captions, at least one.
        image_ids: COCO's id of each image if known, else a name; unique.
        caption_ids: COCO's annotation id of each caption, in the shape of `captions`; None if unknown.
        scenes: (scene, captions with predicates) of each image of the synthetic world; None for other data.
        classes: the class of each image, where images and captions of a class are matches of each other; else None.
        split: the one that was asked for; None: everything.
        source: the path given, for messages.
        located: where the images lie; None if any is missing.
        missing: paths or ids of missing images.
    """

    captions: list[list[str]]
    image_ids: list[int | str]
    caption_ids: list[list[int]] | None = None
    scenes: list[tuple] | None = None
    classes: list[str] | None = None
    split: str | None = None
    source: str = ""
    located: Images | None = None
    missing: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.captions)

    @property
    def images(self) -> Images:
        """The locations of the images. Raises UserError if any is missing; captions can be used without images."""
        if self.located is None:
            raise missing_images(self.source, self.missing, len(self))
        return self.located

    @property
    def n_captions(self) -> int:
        """Number of all captions, M."""
        return sum(map(len, self.captions))

    def only(self, rows: Sequence[int]) -> CaptionDataset:
        """The same data with these images alone, in this order."""
        ids, scenes, classes, located = self.caption_ids, self.scenes, self.classes, self.images
        return replace(
            self,
            captions=[self.captions[i] for i in rows],
            image_ids=[self.image_ids[i] for i in rows],
            caption_ids=ids and [ids[i] for i in rows],
            scenes=scenes and [scenes[i] for i in rows],
            classes=classes and [classes[i] for i in rows],
            located=replace(located, places=[located.places[i] for i in rows]),
        )

    def class_numbers(self) -> list[int]:
        """The number of each image's class, from 0. Raises UserError: the data has no classes."""
        if self.classes is None:
            raise UserError(
                f"{self.source} does not say of which class its images are.",
                "Name data with classes, such as CUB, or by-class of scenes made with --class-captions.",
            )
        numbers = {name: number for number, name in enumerate(sorted(set(self.classes)))}
        return [numbers[name] for name in self.classes]

    def flat(self) -> list[str]:
        """All M captions, image after image."""
        return [text for texts in self.captions for text in texts]

    def owner(self) -> list[int]:
        """The index of its image for each of the M captions."""
        return [index for index, texts in enumerate(self.captions) for _ in texts]


class Entry(NamedTuple):
    """One image of an annotation file."""

    id: int | str
    captions: list[str]
    caption_ids: list[int] | None = None


def split_name(name: str) -> str:
    """The canonical name of a split: "val" for "dev" and "validation"."""
    return SPLIT_NAMES.get(name, name)


def resolve_split(split: str | None, known: Iterable[str]) -> str | None:
    """AUTO as a split of data with the `known` ones, or None for all data; any other split unchanged."""
    if split != AUTO:
        return split
    return "test" if len(set(known) & set(USUAL_SPLITS)) > 1 else None


def choose_split(split: str | None, known: Iterable[str], source: str) -> tuple[str, ...]:
    """The parts that form a split; all for None. Raises UserError, naming the known ones, if there is none."""
    known = list(dict.fromkeys(known))
    if split is None:
        return tuple(known)
    parts = tuple(part for part in SPLIT_PARTS.get(split, (split,)) if part in known)
    if not parts:
        others = f"only {listed(sorted(known))}" if known else "none at all"
        raise UserError(
            f"{source} has no split '{split}', {others}.{nearest(split, known)}",
            "Name one of these splits." if known else "Leave the split out to use all data.",
        )
    return parts


def missing_images(source: str, missing: Sequence[str], total: int) -> UserError:
    return UserError(
        f"{len(missing)} of the {total} images of {source} are missing, the first is {missing[0]}.",
        "Name the folder that holds them (for COCO the one with train2014 and val2014), or fetch them.",
    )


def assemble(
    entries: Sequence[Entry], *, source: str, split: str | None, located: Images | None = None,
    missing: Sequence[str] = (), scenes: list[tuple] | None = None, classes: list[str] | None = None,
) -> CaptionDataset:  # fmt: skip
    """A `CaptionDataset` of all entries. Raises UserError: no entries, no caption, or duplicate ids."""
    for entry in entries:
        if not entry.captions:
            raise UserError(f"The image {entry.id} of {source} has no caption.", "Add one, or remove the image.")
    if not entries:
        raise UserError(f"{source} holds no captioned image.", "Name a file that lists images with their captions.")
    check_unique((entry.id for entry in entries), "image id", source)
    ids = None
    if all(entry.caption_ids is not None for entry in entries):
        ids = [list(entry.caption_ids) for entry in entries]
        check_unique((number for row in ids for number in row), "caption id", source)
    return CaptionDataset(
        captions=[entry.captions for entry in entries],
        image_ids=[entry.id for entry in entries],
        caption_ids=ids,
        scenes=scenes,
        classes=classes,
        split=split,
        source=source,
        located=located,
        missing=tuple(missing),
    )


def check_unique(ids: Iterable[int | str], what: str, source: str) -> None:
    """Raises UserError if an id occurs twice."""
    seen: set[int | str] = set()
    for one in ids:
        if one in seen:
            raise UserError(f"{source} has two entries with the {what} {one}.", "Remove one of them.")
        seen.add(one)


def is_id(value: object) -> bool:
    """True if a JSON value can be a COCO id: a whole number from 0 on, of at most 63 bits."""
    return type(value) is int and 0 <= value <= MAX_ID


def read_text(path: Path) -> bytes:
    """The content of an annotation file, unpacked if it is gzipped. Raises UserError: not readable, or too large."""
    try:
        if not path.is_file():
            what = "is not a regular file" if path.exists() else "does not exist"
            raise UserError(f"{path} {what}.", "Name the annotation file itself.")
        with open(path, "rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else open(path, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except UserError:
        raise
    except (OSError, EOFError) as error:
        why = getattr(error, "strerror", None) or "the gzip data is damaged or cut off"
        raise UserError(f"{path} cannot be read: {why}.", "Check the file, or fetch it again.") from None
    except Exception as error:  # zlib's own errors
        raise UserError(f"{path} cannot be unpacked: {error}.", "Fetch the file again.") from None
    if len(content) > MAX_FILE_BYTES:
        raise UserError(f"{path} has more than {MAX_FILE_BYTES >> 30} GiB.", "Name an annotation file with captions.")
    return content


def only_file(files: Sequence[Path], path: Path, what: str) -> Path:
    """The only file of a list. Raises UserError if there are none or several."""
    if len(files) != 1:
        named = ", ".join(file.name for file in files[:4])
        raise UserError(
            f"{path} holds {len(files)} files that match {what}{': ' if named else ''}{named}.",
            "Name one of the files itself, or a split." if files else "Name a file with captions.",
        )
    return files[0]


def listed(names: Sequence[str], last: str = "and") -> str:
    """The names as "a, b and c" or "a, b or c"."""
    return f" {last} ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
