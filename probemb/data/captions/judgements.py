"""Human judgements of pairs of images and captions: "does the caption describe the image or part of it?"

table          a header and lines of `image, caption_image, caption_index, yes, no`, separated by tabs
CrowdFlower    Flickr8k's CrowdFlowerAnnotations.txt: `NAME.jpg, NAME.jpg#k, share of yes, yes, no`, separated by tabs

Caption k of an image is its k-th one in the data, from 0. N images, M captions, P judged pairs.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from probemb.data.captions.dataset import CaptionDataset
from probemb.data.image_loader import Images
from probemb.data.reading import parse_lines, read_text
from probemb.errors import UserError

COLUMNS = ("image", "caption_image", "caption_index", "yes", "no")


@dataclass(frozen=True, eq=False)
class Judgements:
    """Judged pairs of images and captions that the data holds."""

    image: Tensor  # (P,) int64, the image's row
    caption: Tensor  # (P,) int64, the caption's row among all M
    own: Tensor  # (P,) bool: the caption belongs to the image
    yes: Tensor  # (P,) int64, people who said so, as `no`; their sum is at least 1
    no: Tensor
    names: list[str]  # of each pair's image
    unknown: int = 0  # number of judged pairs that the data does not hold

    def __len__(self) -> int:
        return len(self.names)

    @property
    def accepted(self) -> Tensor:
        """(P,) bool: a majority said yes."""
        return self.yes > self.no

    @property
    def share(self) -> Tensor:
        """(P,) float64, of yes."""
        return self.yes.double() / (self.yes + self.no)

    def only(self, keep: Tensor) -> "Judgements":
        """The pairs of a (P,) bool mask."""
        rows = keep.nonzero().flatten()
        tensors = (x[rows] for x in (self.image, self.caption, self.own, self.yes, self.no))
        return Judgements(*tensors, [self.names[i] for i in rows.tolist()], self.unknown)

    def among(self, owner: Tensor, kept: Sequence[int]) -> "Judgements":
        """The pairs of the images in `kept` (ascending) and their captions, with rows counted among these.

        `owner`: (M,) int64, each caption's image in the data.
        """
        left = torch.zeros(int(owner.max()) + 1, dtype=torch.bool)
        left[torch.as_tensor(kept, dtype=torch.int64)] = True
        captions_left = left[owner]
        found = self.only(left[self.image] & captions_left[self.caption])
        rows = left.cumsum(0)[found.image] - 1, captions_left.cumsum(0)[found.caption] - 1
        return Judgements(*rows, found.own, found.yes, found.no, found.names, self.unknown + len(self) - len(found))


def read_judgements(path: str | Path, captions: CaptionDataset) -> Judgements:
    """The judged pairs of a file that `captions` holds, in the file's order; votes for a repeated pair are added up.

    Images are known by their names without folder and ending. Raises UserError.
    """
    rows, ambiguous = {}, set()
    files = [place.name for place in captions.located.places] if isinstance(captions.located, Images) else []
    for names in (captions.image_ids, files):
        for row, name in enumerate(_stem(str(name).rpartition(":")[2]) for name in names):  # in several tars: "TAR:KEY"
            if rows.setdefault(name, row) != row:
                ambiguous.add(name)
    starts, votes, unknown = [0, *accumulate(map(len, captions.captions))], {}, set()
    for image, caption_image, index, yes, no in _read(Path(path)):
        if name := ambiguous & {image, caption_image}:
            what = f"{captions.source} has several images of the name {min(name)}, which {path} judges."
            raise UserError(what, "Name data in which each name belongs to one image, such as one split.")
        row, other = rows.get(image), rows.get(caption_image)
        if row is None or other is None or index >= len(captions.captions[other]):
            unknown.add((image, caption_image, index))
            continue
        vote = votes.setdefault((row, starts[other] + index, row == other), [0, 0, image])
        vote[0] += yes
        vote[1] += no
    if not votes:
        split = f" ({captions.split})" if captions.split else ""
        what = f"None of the {len(unknown):,} judged pairs of {path} is in {captions.source}{split}."
        raise UserError(what, "Name the data and the split that were judged: of Flickr8k --split test.")
    image, caption, own = (torch.tensor(column) for column in zip(*votes))
    yes, no, names = zip(*votes.values())
    return Judgements(image, caption, own, torch.tensor(yes), torch.tensor(no), list(names), len(unknown))


def _stem(name: str) -> str:
    return re.sub(r"\.(jpe?g|png)$", "", PurePosixPath(name.strip()).name, flags=re.IGNORECASE)


def _read(path: Path) -> list[tuple[str, str, int, int, int]]:
    """The COLUMNS of every line. Raises UserError."""
    header = read_text(path).partition("\n")[0].rstrip("\r").split("\t")
    is_table = set(COLUMNS) <= set(header)

    def parse(line: str) -> tuple | None:
        parts = line.split("\t")
        if is_table:
            if parts == header:
                return None
            image, of, index, yes, no = (parts[header.index(name)] for name in COLUMNS)
        else:
            image, of, share, yes, no = parts
            of, _, index = of.rpartition("#")
        if not all(re.fullmatch("[0-9]{1,6}", number) for number in (index, yes, no)) or int(yes) + int(no) == 0:
            raise ValueError("the index and the votes are not whole numbers, or nobody judged the pair")
        if not is_table and not abs(float(share) - int(yes) / (int(yes) + int(no))) < 0.01:  # grades of experts
            raise ValueError(f"{share[:40]!r} is not the share of {yes} yes and {no} no")
        return _stem(image), _stem(of), int(index), int(yes), int(no)

    return parse_lines(path, "a list of judgements", parse)
