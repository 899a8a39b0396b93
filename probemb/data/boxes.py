"""Images with phrases and the boxes they refer to (Flickr30k Entities, Visual Genome), and proposals: candidate boxes.

Boxes are (left, top, right, bottom) in pixels: x from `left` up to `right`, y from `top` up to `bottom`, from 0 on.
"""

import heapq
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import product
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import numpy as np
import torch
from torch import Tensor

from probemb.data import reading
from probemb.data.image_loader import Images, locate
from probemb.data.regions import REGIONS, RegionImages, read_regions
from probemb.errors import UserError

Box = tuple[float, float, float, float]
MAX_SIDE = 100_000  # pixels of an image


def as_size(width: object, height: object) -> tuple[int, int]:
    if not all(type(side) is int and 0 < side <= MAX_SIDE for side in (width, height)):
        raise ValueError(f"an image has {str(width)[:20]} x {str(height)[:20]} pixels")
    return width, height


def area(box: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def iou(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of boxes (N, 4) and (M, 4) -> (N, M) float64 in [0, 1]; 0 where both are empty."""
    from torchvision.ops import box_iou  # takes seconds to import

    return box_iou(a.double(), b.double()).nan_to_num(0.0)


def enclosing(boxes: Iterable[Box]) -> Box:
    lefts, tops, rights, bottoms = zip(*boxes)
    return min(lefts), min(tops), max(rights), max(bottoms)


def clipped(box: Box, width: float, height: float) -> Box | None:
    """The part of a box that lies in an image; None if it has less than one pixel in width or height."""
    left, top = max(box[0], 0.0), max(box[1], 0.0)
    right, bottom = min(box[2], width), min(box[3], height)
    return (left, top, right, bottom) if right - left >= 1 and bottom - top >= 1 else None


MAX_PHRASES = 5_000  # of an image
MAX_TEXT = 1_000  # characters of a phrase


class Phrase(NamedTuple):
    """A phrase without marks."""

    image: int
    text: str
    kind: str  # its type, such as "people" or "clothing/bodyparts"; "" where the data has none
    boxes: tuple[Box, ...]  # that it refers to, at least one


@dataclass(frozen=True)
class PhraseDataset:
    """N images and their phrases."""

    images: Images
    image_ids: list[str]
    sizes: list[tuple[int, int]]  # width and height in pixels, as the annotations have them
    phrases: list[Phrase]  # image after image
    without_box: int = 0  # number of phrases without a box, which are left out
    split: str | None = None  # the one that was asked for; None: everything
    source: str = ""  # for messages

    def __len__(self) -> int:
        return len(self.image_ids)

    def by_image(self) -> list[list[int]]:
        """The indices of the phrases of each image."""
        rows: list[list[int]] = [[] for _ in self.image_ids]
        for i, phrase in enumerate(self.phrases):
            rows[phrase.image].append(i)
        return rows


def find_phrases(
    data: str | Path, split: str | None = None, images: str | Path | None = None, sample: int | None = None
) -> PhraseDataset:
    """List images and phrases without decoding any image.

    Args:
        data: a folder of one of FORMATS, or a folder around one; or the file of Visual Genome.
        split: of Flickr30k Entities, as `reading.choose_split` has it; Visual Genome has none.
        images: folder of the images; by default searched beside the annotations.
        sample: so many of the images, chosen by a hash of their names.

    Raises UserError: nothing of the kind is there; malformed data; missing images.
    """
    path = Path(data)
    folders = [path.parent] if path.name == DESCRIPTIONS else [path, *sorted(path.glob("*/"))]
    found = [
        (read, one) for names, read in FORMATS.items() for one in folders if all((one / x).exists() for x in names)
    ]
    if len(found) != 1:
        kinds = reading.listed([reading.listed(names) for names in FORMATS], "or")
        what = f"{path} holds {'several kinds of' if found else 'no'} phrases with boxes."
        raise UserError(what, f"Name one folder with {kinds}, or make one: `python -m tools.make_scenes DIR --boxes`.")
    read, folder = found[0]
    result = read(folder, split, None if images is None else Path(images), sample)
    if not result.phrases:
        raise UserError(f"No phrase of {result.source} has a box in its image.", "Fetch the annotations again.")
    return result


def _name_hash(name: object) -> bytes:
    return blake2b(str(name).encode(), digest_size=8).digest()


# Flickr30k Entities. Source: Plummer et al., IJCV 2017
ENTITIES = ("Annotations", "Sentences")
MAX_BYTES = 4 << 20  # of one image's annotations, of which the largest published ones have some 10 KiB
NO_ENTITY = "0"  # the id of phrases that refer to nothing visible
_MARKED = re.compile(r"\[/EN#(\d{1,18})((?:/[\w-]+)+) ([^\[\]]+)\]")


def read_entities(path: Path, split: str | None, images: Path | None, sample: int | None = None) -> PhraseDataset:
    """Phrases of a split of Flickr30k Entities that have at least one box.

    FOLDER/Sentences/ID.txt      captions, one a line, with marked phrases: [/EN#283585/people Two young guys] with ...
    FOLDER/Annotations/ID.xml    objects, each with the ids of its phrases and a box, or without one (scene, nobndbox)
    FOLDER/test.txt, ...         ids of a split's images, one a line; train.txt, val.txt
    FOLDER/flickr30k-images/ID.jpg, or another folder of images

    Boxes count pixels from 1 with both ends included; here they become half-open and count from 0.
    """
    lists = {name: path / f"{name}.txt" for name in ("train", "val", "test") if (path / f"{name}.txt").is_file()}
    split, parts = reading.choose_split(split, lists, path)
    if split is None:
        ids = sorted(file.stem for file in (path / "Sentences").glob("*.txt"))
    else:
        lines = (line for part in parts for line in reading.read_lines(lists[part]))
        ids = reading.parse_all(path, "Flickr30k Entities", lines, reading.as_inside)
    reading.check_unique(ids, "image id", path)
    if sample is not None:
        ids = heapq.nsmallest(sample, ids, key=_name_hash)
    located = locate([(f"{one}.jpg",) for one in ids], ids, path, images, [path, path.parent])
    sizes, phrases, without_box = [], [], 0
    for row, one in enumerate(ids):
        size, boxes = _read_annotation(path / "Annotations" / f"{one}.xml")
        sizes.append(size)
        sentences = reading.parse_lines(path / "Sentences" / f"{one}.txt", "a text with marked phrases", _marked)
        for number, kind, text in [phrase for line in sentences for phrase in line][:MAX_PHRASES]:
            if number in boxes and number != NO_ENTITY:
                phrases.append(Phrase(row, text, kind, tuple(boxes[number])))
            else:
                without_box += 1
    return PhraseDataset(located, ids, sizes, phrases, without_box, split, str(path))


def _marked(line: str) -> list[tuple[str, str, str]]:
    """(id, type, text) of every marked phrase of a caption."""
    if "[/EN" in _MARKED.sub("", line):
        raise ValueError("a phrase is not [/EN#ID/TYPE text]")
    marked = [(entity, kinds[1:], " ".join(text.split())) for entity, kinds, text in _MARKED.findall(line)]
    return [(entity, kinds, text[:MAX_TEXT]) for entity, kinds, text in marked if text]


def _read_annotation(file: Path) -> tuple[tuple[int, int], dict[str, list[Box]]]:
    """(width, height) of an image, and the boxes of each entity's id."""
    text, boxes = reading.read_text(file, MAX_BYTES), {}
    with reading.checked(file, "an annotation of Flickr30k Entities"):
        if "<!DOCTYPE" in text:  # its entities could grow without bound or name other files
            raise ValueError("it declares a document type")
        root = ElementTree.fromstring(text)
        size = as_size(*(int(root.findtext(f"size/{side}", "")) for side in ("width", "height")))
        for one in root.iter("object"):
            if (place := one.find("bndbox")) is None:
                continue
            left, top, right, bottom = (int(place.findtext(x, "")) for x in ("xmin", "ymin", "xmax", "ymax"))
            if (box := clipped((left - 1.0, top - 1.0, float(right), float(bottom)), *size)) is not None:
                for name in one.iter("name"):
                    boxes.setdefault((name.text or "").strip(), []).append(box)
    return size, boxes


# Visual Genome. Source: Krishna et al., IJCV 2017
DESCRIPTIONS, SIZES = "region_descriptions.json", "image_data.json"
MAX_ENTRY = 16 << 20  # characters of one image's entry
_PIECE = 1 << 20
_BETWEEN = re.compile(r"[\s,]*")


def read_visual_genome(path: Path, split: str | None, images: Path | None, sample: int | None = None) -> PhraseDataset:
    """Every region of Visual Genome as a phrase with one box.

    FOLDER/region_descriptions.json    [{"id": 1, "regions": [{"region_id", "phrase", "x", "y", "width", "height"}]}]
    FOLDER/image_data.json             [{"image_id": 1, "width": 800, "height": 600}]
    FOLDER/VG_100K/1.jpg, VG_100K_2/…  the images

    The published file of descriptions has a gigabyte; it is read one image at a time.
    """

    def parse_regions(row: dict) -> tuple[int, list[tuple[str, Box]]] | None:
        regions = []
        for one in reading.as_list(row["regions"], "the regions", MAX_PHRASES):
            x, y, width, height = (float(one[name]) for name in ("x", "y", "width", "height"))
            if text := " ".join(reading.as_text(one["phrase"], "a phrase").split())[:MAX_TEXT]:
                regions.append((text, (x, y, x + width, y + height)))
        number = reading.as_id(row.get("id", row.get("image_id")), "the id of the image")
        return (number, regions) if regions else None

    def parse_size(row: dict) -> tuple[int, tuple[int, int]]:
        number = reading.as_id(row.get("image_id", row.get("id")), "the id of the image")
        return number, as_size(row["width"], row["height"])

    reading.choose_split(split, (), path)
    file = path / DESCRIPTIONS
    rows = reading.parse_each(file, "a list of regions", stream_list(file), parse_regions)
    rows = sorted(rows if sample is None else heapq.nsmallest(sample, rows, key=lambda row: _name_hash(row[0])))
    ids = [str(number) for number, _ in rows]
    reading.check_unique(ids, "image id", file)
    about = path / SIZES
    sizes = dict(reading.parse_all(about, "a list of images with their sizes", reading.read_json(about), parse_size))
    if unknown := [number for number, _ in rows if number not in sizes]:
        raise UserError(f"{about} does not know the image {unknown[0]}.", "Fetch that file again.")
    names = [(f"VG_100K/{one}.jpg", f"VG_100K_2/{one}.jpg", f"{one}.jpg") for one in ids]
    located = locate(names, ids, file, images, [path])
    regions = [(i, text, clipped(box, *sizes[number])) for i, (number, some) in enumerate(rows) for text, box in some]
    phrases = [Phrase(i, text, "", (box,)) for i, text, box in regions if box is not None]
    chosen = [sizes[number] for number, _ in rows]
    return PhraseDataset(located, ids, chosen, phrases, len(regions) - len(phrases), None, str(file))


def stream_list(file: Path) -> Iterator[object]:
    """The entries of a JSON list, one at a time; memory is bounded by the largest."""
    decode = json.JSONDecoder().raw_decode
    with reading.checked(file, "a list in JSON"), open(file, encoding="utf-8-sig") as opened:
        text = opened.read(_PIECE).lstrip()
        if not text.startswith("["):
            raise ValueError("it does not begin with [")
        at = 1
        while True:
            at = _BETWEEN.match(text, at).end()
            if text.startswith("]", at):
                return
            try:
                found, at = decode(text, at)
            except ValueError:
                piece = opened.read(_PIECE)
                if not piece or len(text) - at > MAX_ENTRY:
                    raise
                text, at = text[at:] + piece, 0
            else:
                yield found


FORMATS = {ENTITIES: read_entities, (DESCRIPTIONS,): read_visual_genome}  # what a folder holds -> its reader


class CropTriplet(NamedTuple):
    """Crops A and B of an image and their union C, captioned "a and b"."""

    image: int
    boxes: tuple[Box, Box, Box]
    captions: tuple[str, str, str]


def crop_triplets(data: PhraseDataset, largest: float, candidates: int = 10) -> list[CropTriplet]:
    """One triplet for each image with two regions below an area.

    Of the `candidates` largest regions with an area below the share `largest` of the image, A is the largest, and B the
    one with the smallest IoU with A. Source: probabilistic VSE++, §4.6.
    """
    found = []
    for image, rows in enumerate(data.by_image()):
        width, height = data.sizes[image]
        regions = [(data.phrases[row].text, box) for row in rows for box in data.phrases[row].boxes]
        fitting = [region for region in regions if area(region[1]) < largest * width * height]
        (a, box_a), *others = sorted(fitting, key=lambda region: -area(region[1]))[:candidates] or [("", None)]
        if others:
            shared = iou(torch.tensor([box_a]), torch.tensor([box for _, box in others]))[0]
            b, box_b = others[int(shared.argmin())]
            found.append(CropTriplet(image, (box_a, box_b, enclosing([box_a, box_b])), (a, b, f"{a} and {b}")))
    return found


# ---------------------------------------------------------------------------------------------------------- proposals

MAX_PROPOSALS = 10_000  # of an image
_WRITE = "Write features, boxes and ids together with `python -m tools.write_regions --proposals`."


@dataclass(frozen=True)
class Proposals:
    """Candidate boxes of the images of a dataset, for their phrases."""

    boxes: list[list[Box]]  # of each image
    dropped: int = 0  # number of those of which nothing lies in the image
    source: str = ""
    features: RegionImages | None = None  # of the boxes, for models that read regions: (P, W) of each image
    rows: list[list[int]] | None = None  # for each image the rows of `features` that belong to its boxes

    @property
    def total(self) -> int:
        return sum(map(len, self.boxes))


def grid_windows(width: int, height: int, scales: Sequence[float], ratios: Sequence[float], step: float) -> list[Box]:
    """Sliding windows over an image of width x height pixels.

    `scales`: square roots of the windows' area over that of the image, in (0, 1]. `ratios`: width over height, where
    the image is taken for square. `step`: between neighbours, as a share of the window's side.
    """

    def starts(side: float) -> list[float]:
        """Of windows with this side (a share): from 0 to 1 - side, at most `step` sides apart."""
        free = 1 - side
        gaps = -int(-free / (step * side) // 1) if free > 1e-9 else 0
        return [free * i / gaps for i in range(gaps + 1)] if gaps else [free / 2]

    found: dict[Box, None] = {}
    for scale, ratio in product(scales, ratios):
        w, h = min(1.0, scale * ratio**0.5), min(1.0, scale / ratio**0.5)
        for top, left in product(starts(h), starts(w)):
            box = (left * width, top * height, (left + w) * width, (top + h) * height)
            found[tuple(round(at, 3) for at in box)] = None
    return list(found)


def grid_proposals(data: PhraseDataset, scales: Sequence[float], ratios: Sequence[float], step: float) -> Proposals:
    """`grid_windows` of every image. Raises UserError: too many windows, or none."""
    shared = {size: grid_windows(*size, scales, ratios, step) for size in set(data.sizes)}
    most = max(map(len, shared.values()))
    if not 0 < most <= MAX_PROPOSALS:
        raise UserError(f"The grid has {most:,} windows an image.", "Give other scales, or another step.")
    return Proposals([shared[size] for size in data.sizes], 0, "grid")


def read_proposals(file: str | Path, data: PhraseDataset, top: int | None) -> Proposals:
    """Proposals of a JSON file, {image id: [[left, top, right, bottom], ...]}, of each image the first `top` ones.

    Parts of boxes outside the image are cut off. Raises UserError: an image without proposals; malformed boxes.
    """
    path, content = Path(file), reading.read_json(Path(file))
    remedy = "Write {image id: [[left, top, right, bottom], ...]} in pixels, as JSON."
    with reading.checked(path, "a file of proposals", remedy):
        _refuse_missing(path, data, {one for one, boxes in content.items() if boxes})
        found = [_inside(content[one][:top], size, one) for one, size in zip(data.image_ids, data.sizes)]
    return Proposals([boxes for boxes, _, _ in found], sum(dropped for _, _, dropped in found), str(path))


def read_region_proposals(file: str | Path, data: PhraseDataset, top: int | None) -> Proposals:
    """Proposals with their features, for the images of a dataset; boxes and ids lie beside the features.

    NAME_ims.npy      (N, P, W) features of the proposals of N images, as `read_regions` reads them
    NAME_boxes.npy    (N, P, 4) float32 or float64, their boxes in pixels, half-open; zeros where an image has fewer
    NAME_ids.txt      the images' ids, one a line

    `file` is NAME_ims.npy; of each image the first `top` proposals count. Raises UserError: files that do not belong
    together, an image that they do not have, malformed boxes.
    """
    path = Path(file)
    stem = path.name.removesuffix(REGIONS)
    ids_file, boxes_file = path.with_name(f"{stem}_ids.txt"), path.with_name(f"{stem}_boxes.npy")
    ids = reading.read_lines(ids_file)
    reading.check_unique(ids, "image id", ids_file)
    images, row_of = read_regions(path, ids), {one: row for row, one in enumerate(ids)}
    _refuse_missing(path, data, row_of)
    chosen = [row_of[one] for one in data.image_ids]
    with reading.checked(boxes_file, "an array of the regions' boxes", _WRITE):
        boxes = reading.read_npy(boxes_file, mapped=True)
        if boxes.dtype.kind != "f" or boxes.shape != (len(ids), images.shape[0], 4):
            raise ValueError(f"it holds {boxes.dtype} {boxes.shape}")
        found = [_inside(boxes[row], size, ids[row], top) for row, size in zip(chosen, data.sizes)]
    features = replace(images, places=[images.places[row] for row in chosen])
    kept, rows, dropped = zip(*found)
    return Proposals(list(kept), sum(dropped), str(path), features, list(rows))


def _refuse_missing(path: Path, data: PhraseDataset, known: Iterable[str]) -> None:
    if missing := [one for one in data.image_ids if one not in known]:
        what = f"{path} has no proposals for {len(missing):,} of the {len(data):,} images, {missing[0]} for one."
        raise UserError(what, "Add them, or evaluate a split that the file covers.")


def _inside(boxes_P4, size: tuple[int, int], name: str, top: int | None = None) -> tuple[list[Box], list[int], int]:
    """The boxes that lie in an image, their rows, and how many do not; rows of zeros are none. Raises ValueError."""
    boxes = np.array(boxes_P4, np.float64)
    if boxes.shape[1:] != (4,):
        raise ValueError(f"a box of image {name} has not four numbers")
    rows = (boxes != 0).any(1).nonzero()[0][:top]
    if len(rows) > MAX_PROPOSALS or not np.isfinite(boxes).all() or (boxes[rows, :2] >= boxes[rows, 2:]).any():
        raise ValueError(f"image {name} has an empty box, one that is not finite, or more than {MAX_PROPOSALS:,}")
    placed = [(row, box) for row in rows.tolist() if (box := clipped(tuple(boxes[row].tolist()), *size))]
    if not placed:
        raise ValueError(f"no box of image {name} lies in it")
    return [box for _, box in placed], [row for row, _ in placed], len(rows) - len(placed)
