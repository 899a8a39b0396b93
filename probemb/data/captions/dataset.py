"""Images with captions, as all readers return them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from probemb.data.image_loader import Images
from probemb.data.reading import all_located, check_unique
from probemb.errors import UserError


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
        located: where the images lie, or the error to raise where they are needed.
    """

    captions: list[list[str]]
    image_ids: list[int | str]
    caption_ids: list[list[int]] | None = None
    scenes: list[tuple] | None = None
    classes: list[str] | None = None
    split: str | None = None
    source: str = ""
    located: Images | UserError | None = None

    def __len__(self) -> int:
        return len(self.captions)

    @property
    def images(self) -> Images:
        """The locations of the images. Raises UserError if any is missing; captions can be used without images."""
        return all_located(self.located)

    @property
    def n_captions(self) -> int:
        """Number of all captions, M."""
        return sum(map(len, self.captions))

    def only(self, rows: Sequence[int]) -> CaptionDataset:
        """The same data with these images alone, in this order."""

        def some(values: list | None) -> list | None:
            return values and [values[i] for i in rows]

        return replace(
            self,
            captions=some(self.captions),
            image_ids=some(self.image_ids),
            caption_ids=some(self.caption_ids),
            scenes=some(self.scenes),
            classes=some(self.classes),
            located=replace(self.images, places=some(self.images.places)),
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


def assemble(entries: Sequence[Entry], source: str | Path, split: str | None, located, **more) -> CaptionDataset:
    """A `CaptionDataset` of all entries. Raises UserError: no entries, no caption, or duplicate ids."""
    if not entries:
        raise UserError(f"{source} holds no captioned image.", "Name a file that lists images with their captions.")
    for entry in entries:
        if not entry.captions:
            raise UserError(f"The image {entry.id} of {source} has no caption.", "Add one, or remove the image.")
    ids, captions, caption_ids = map(list, zip(*entries))
    check_unique(ids, "image id", source)
    if None in caption_ids:
        caption_ids = None
    else:
        check_unique((number for row in caption_ids for number in row), "caption id", source)
    return CaptionDataset(captions, ids, caption_ids, split=split, source=str(source), located=located, **more)
