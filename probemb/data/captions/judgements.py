"""Human judgements of pairs of images and captions: "does the caption describe the image or part of it?"

table          a header and lines of `image, caption_image, caption_index, yes, no`, separated by tabs
CrowdFlower    Flickr8k's CrowdFlowerAnnotations.txt: `NAME.jpg, NAME.jpg#k, share of yes, yes, no`, separated by tabs

Either may be gzipped. Caption k of an image is its k-th one in the data, from 0. N images, M captions, P judged pairs.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch
from torch import Tensor

from probemb.data.captions.dataset import CaptionDataset, read_text
from probemb.errors import UserError

COLUMNS = ("image", "caption_image", "caption_index", "yes", "no")
_ENDINGS = (".jpg", ".jpeg", ".png")
_COUNT, _INDEX = re.compile(r"[0-9]{1,6}"), re.compile(r"[0-9]{1,4}")
_REMEDY = "Correct that line, or fetch the file again."


@dataclass(frozen=True, eq=False)
class Judgements:
    """Judged pairs of images and captions that the data holds.

    Attributes:
        image: (P,) int64, the image's row; caption: (P,) int64, the caption's row among all M.
        own: (P,) bool, whether the caption belongs to the image.
        yes, no: (P,) int64, people who said so; their sum is at least 1.
        names: of each pair, "IMAGE<tab>CAPTION_IMAGE#k".
        unknown: judged pairs of images or captions that the data does not hold.
    """

    image: Tensor
    caption: Tensor
    own: Tensor
    yes: Tensor
    no: Tensor
    names: list[str]
    unknown: int = 0

    def __len__(self) -> int:
        return len(self.names)

    @property
    def accepted(self) -> Tensor:
        """(P,) bool: a majority said yes."""
        return self.yes > self.no

    @property
    def share(self) -> Tensor:
        """(P,) float64, the share of yes."""
        return self.yes.double() / (self.yes + self.no)

    def image_names(self) -> list[str]:
        """The name of each pair's image."""
        return [name.partition("\t")[0] for name in self.names]

    def only(self, keep: Tensor) -> Judgements:
        """The pairs of a (P,) bool mask."""
        rows = keep.nonzero().flatten()
        tensors = (x[rows] for x in (self.image, self.caption, self.own, self.yes, self.no))
        return Judgements(*tensors, [self.names[i] for i in rows.tolist()], self.unknown)

    def among(self, owner: Tensor, kept: Sequence[int]) -> Judgements:
        """The pairs of the images in `kept` and their captions, with rows counted among these.

        Args:
            owner: (M,) int64, each caption's image in the data; kept: ascending indices of images.
        """
        left = torch.zeros(int(owner.max()) + 1, dtype=torch.bool)
        left[torch.as_tensor(kept, dtype=torch.int64)] = True
        captions_left = left[owner]
        found = self.only(left[self.image] & captions_left[self.caption])
        rows = left.cumsum(0)[found.image] - 1, captions_left.cumsum(0)[found.caption] - 1
        return Judgements(*rows, found.own, found.yes, found.no, found.names, self.unknown + len(self) - len(found))


class _Line(NamedTuple):
    image: str
    caption_image: str
    caption_index: int
    yes: int
    no: int


def read_judgements(path: str | Path, captions: CaptionDataset) -> Judgements:
    """The judged pairs of a file that `captions` holds, in the file's order; votes for a repeated pair are added up.

    Images are known by their names without folder and ending.

    Raises UserError: the file cannot be read or has a malformed line; no pair is in the data; a judged name belongs to
    several images of the data.
    """
    path, votes, unknown = Path(path), {}, set()
    rows, ambiguous = _rows_by_name(captions)
    starts, total = [], 0
    for texts in captions.captions:
        starts.append(total)
        total += len(texts)
    for line in _read(path):
        for name in (line.image, line.caption_image):
            if name in ambiguous:
                raise UserError(
                    f"{captions.source} has several images of the name {name}, which {path} judges.",
                    "Name data in which each name belongs to one image, such as one split.",
                )
        image, other = rows.get(line.image), rows.get(line.caption_image)
        if image is None or other is None or line.caption_index >= len(captions.captions[other]):
            unknown.add(line[:3])
            continue
        found = votes.setdefault((image, starts[other] + line.caption_index, image == other), [0, 0, line])
        found[0] += line.yes
        found[1] += line.no
    if not votes:
        raise UserError(
            f"None of the {len(unknown):,} judged pairs of {path} is in {captions.source}"
            f"{f' ({captions.split})' if captions.split else ''}.",
            "Name the data and the split that were judged: of Flickr8k --split test.",
        )
    image, caption, own = (torch.tensor(column) for column in zip(*votes))
    yes, no, lines = zip(*votes.values())
    names = [f"{line.image}\t{line.caption_image}#{line.caption_index}" for line in lines]
    return Judgements(image, caption, own, torch.tensor(yes), torch.tensor(no), names, len(unknown))


def _rows_by_name(captions: CaptionDataset) -> tuple[dict[str, int], set[str]]:
    """The index of the image of each name, and the names of several images."""
    rows: dict[str, int] = {}
    ambiguous = set()
    for row, number in enumerate(captions.image_ids):
        names = {_stem(str(number).rpartition(":")[2])}
        if captions.located is not None:
            names.add(_stem(captions.located.places[row].name.rpartition(":")[2]))  # in several tars: "TAR:KEY"
        for name in names:
            if rows.setdefault(name, row) != row:
                ambiguous.add(name)
    return rows, ambiguous


def _stem(name: str) -> str:
    """The name without folder and ending."""
    name = PurePosixPath(name).name
    head, dot, ending = name.rpartition(".")
    return head if f"{dot}{ending}".lower() in _ENDINGS else name


def _read(path: Path) -> Iterator[_Line]:
    try:
        text = read_text(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a text in UTF-8 (byte {error.start}).", "Name a file of judgements.") from None
    columns, found = None, False
    for number, line in enumerate(io.StringIO(text), 1):
        parts = line.rstrip("\r\n").split("\t")
        if number == 1 and set(COLUMNS) <= set(parts):
            columns = [parts.index(name) for name in COLUMNS]
            continue
        if not line.strip():
            continue
        found = True
        try:
            yield _crowdflower(parts) if columns is None else _table(parts, columns)
        except ValueError as error:
            what = str(error)[:200]
            if number == 1:
                what += f"; nor is it a header with {', '.join(COLUMNS)}"
            raise UserError(f"Line {number:,} of {path} is no judgement: {what}.", _REMEDY) from None
    if not found:
        raise UserError(f"{path} holds no judgements.", "Name a file of judged pairs.")


def _table(parts: list[str], columns: list[int]) -> _Line:
    if len(parts) <= max(columns):
        raise ValueError(f"it has {len(parts)} of at least {max(columns) + 1} columns")
    image, caption_image, index, yes, no = (parts[i] for i in columns)
    return _line(image, caption_image, index, yes, no)


def _crowdflower(parts: list[str]) -> _Line:
    if len(parts) != 5:
        raise ValueError(f"it has {len(parts)} columns instead of 5")
    image, caption, share, yes, no = parts
    caption_image, hash, index = caption.rpartition("#")
    if not hash:
        raise ValueError(f"{caption[:80]!r} is not NAME.jpg#k")
    line = _line(image, caption_image, index, yes, no)
    try:
        agrees = abs(float(share) - line.yes / (line.yes + line.no)) < 0.01
    except ValueError:
        agrees = False
    if not agrees:  # ExpertAnnotations.txt has five columns too: three grades
        raise ValueError(f"{share[:40]!r} is not the share of {line.yes} yes and {line.no} no")
    return line


def _line(image: str, caption_image: str, index: str, yes: str, no: str) -> _Line:
    names = [_stem(name.strip()) for name in (image, caption_image)]
    if not all(names):
        raise ValueError("the name of an image is empty")
    if not _INDEX.fullmatch(index):
        raise ValueError(f"{index[:40]!r} is no number of a caption")
    for count in (yes, no):
        if not _COUNT.fullmatch(count):
            raise ValueError(f"{count[:40]!r} is no number of people")
    if int(yes) + int(no) == 0:
        raise ValueError("nobody judged the pair")
    return _Line(*names, int(index), int(yes), int(no))
