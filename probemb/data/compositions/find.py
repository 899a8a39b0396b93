"""Finds the data of composed retrieval in any of its formats, and the combinations of concepts to ask for.

Images with at least one category are read, as the benchmark has it. Crops are taken of single objects only, not of
groups (`iscrowd`). All JSON files may be gzipped.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import combinations
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from probemb.data import reading
from probemb.data.boxes import Box, area, as_size, clipped
from probemb.data.compositions.dataset import SPLITS, AttributeChanges, Compositions, Part, Query, no_tuples
from probemb.data.image_loader import Images, find_tars, locate, read_samples
from probemb.data.randomness import stream_of
from probemb.data.shards.samples import Sample
from probemb.errors import UserError

Setup = Literal["seen", "unseen"]
MAX_K = 10
COMBINATIONS = {  # how many are drawn, and the file that lists those of k concepts
    "seen": (1000, "{}_cat_combinations.json"),  # asked for in all splits
    "unseen_train": (100, "{}_unseen_train.json"),  # pairs of another setup
    "unseen_test": (500, "{}_unseen_test.json"),  # pairs of that setup, of concepts of its training pairs
    "feasible": (250, "{}_cat_combinations_zero_shot.json"),  # further pairs that are not trained on
    "infeasible": (250, "{}_cat_combinations_impossible.json"),  # pairs that no image has
}
MINIMUM = (8, 2, 2)  # images of train, val and test that a feasible combination is in
CATEGORIES = "categories.json"
SHARES = (4, 1, 1)  # of the images, in the order of SPLITS (MPC, supplementary A)
MAX_CONCEPTS = 2_000  # of annotated images; COCO has 80, LVIS 1,203
MAX_OBJECTS = 10_000  # of an image
MAX_FEASIBLE = 5_000_000  # combinations; COCO has some ten thousand
MAKE = "Name the data itself, or make some with `python -m tools.make_scenes data/scenes --compositions 15000`."
OBJECTS = "a file of objects in COCO's form, such as instances_train2017.json"


def find_compositions(
    data: str | Path, split: str, k: int = 2, *, setup: Setup = "seen", images: str | Path | None = None,
    lists: str | Path | None = None, seed: int = 0,
) -> Compositions:  # fmt: skip
    """List the images, concepts and combinations of k concepts of one split, without decoding any image.

    Args:
        data: shards with categories (as `make_scenes --compositions` writes them), COCO's instances_*.json or a folder
            with it, or the folder of Fashion200k, where k is of no meaning.
        setup: "seen" has the same combinations in all splits; "unseen" has others in "test", of the same concepts.
        images: folder of COCO's or Fashion200k's images; by default searched beside the data.
        lists: folder of MPC's published lists; by default searched beside shards, else combinations are drawn.
        seed: of drawn splits and combinations.

    Raises UserError: nothing of the kind is there, with what was looked for; malformed data; no combinations.
    """
    path, split, pictures = Path(data), reading.split_name(split), None if images is None else Path(images)
    if any(path.glob(LABELS)):
        return read_fashion200k(path, split, pictures)
    folder = None if lists is None else Path(lists)
    if folder and not folder.is_dir():
        raise UserError(f"There is no folder {lists}.", "Check the path.")
    if folder is None and any(path.glob(COMBINATIONS["seen"][1].format("*") + "*")):
        folder = path
    test = None if folder is None else read_test_images(folder)
    instances = find_instances(path)
    if pictures and not instances:
        raise UserError(f"{path} holds its images itself; {images} would not be used.", "Leave the images out.")
    found = read_coco(instances, pictures, seed, test) if instances else read_concept_shards(path, seed, test)
    here, notes = found.of_split(split), [*found.notes]
    tuples = sample_tuples(found, k, seed) if folder is None else published_tuples(found, folder, k, split, notes)
    names = ["seen", "feasible", "infeasible"]
    if setup == "unseen":
        if not len(tuples["unseen_train"]):
            tuples = sample_tuples(found, k, seed) | {"infeasible": tuples["infeasible"]}
        names = ["unseen_test" if split == "test" else "unseen_train", "", "infeasible"]
    has_crops = np.array([len(one) > 0 for one in here.crops])
    rows = [tuples.get(name, no_tuples()) for name in names]
    usable = [one[has_crops[one].all(axis=1)] for one in rows]
    if left_out := sum(map(len, rows)) - sum(map(len, usable)):
        notes.append(f"{left_out:,} combinations are left out: no image query in '{split}' has one of their concepts.")
    if not len(usable[0]):
        what = f"{found.source} has no {setup} combinations of {k} concepts in the split '{split}'."
        raise UserError(what, "Ask for another number of concepts, or use more data.")
    here = replace(here, tuples=usable[0], unseen=usable[1], infeasible=usable[2], notes=tuple(notes))
    if folder is None or split != "test" or setup == "unseen":
        return here
    return with_published_queries(here, folder, tuples["seen"])


def draw_splits(names: list[str], seed: int, test: set[str] | None = None) -> list[str]:
    """The split of each image: 4:1:1 in the order of a hash of seed and name.

    test: names of the test images where they are published; the others are divided 4:1.
    """
    free = [row for row, name in enumerate(names) if test is None or name not in test]
    free.sort(key=lambda row: blake2b(f"split/{seed}/{names[row]}".encode(), digest_size=16).digest())
    shares = np.cumsum(SHARES if test is None else SHARES[:2])
    splits = np.full(len(names), "test", "<U5")
    for split, rows in zip(SPLITS, np.split(np.array(free, np.int64), len(free) * shares[:-1] // shares[-1])):
        splits[rows] = split
    return splits.tolist()


def _categories(rows: object) -> dict[int, str]:
    """The name of each category by its id, in the order of the ids. Raises ValueError and the like."""
    rows = reading.as_list(rows, "they", MAX_CONCEPTS)
    named = {reading.as_id(row["id"], "an id"): reading.as_text(row["name"], "a name") for row in rows}
    if not all(name.strip() and name.isprintable() and len(name) <= 200 for name in named.values()):
        raise ValueError("a category has no printable name of up to 200 characters")
    return dict(sorted(named.items()))


def _box(box: list, size: tuple[int, int]) -> Box | None:
    """[x, y, width, height] as (left, top, right, bottom) inside an image; None if less than a pixel is."""
    left, top, width, height = map(float, box)
    if not math.isfinite(left + top + width + height):
        raise ValueError("a box is not finite")
    return clipped((left, top, left + width, top + height), *size)


# --------------------------------------------------------------------------------------------------------------- COCO
# {"images": [{"id", "file_name", "width", "height"}], "categories": [{"id", "name"}],
#  "annotations": [{"image_id", "category_id", "bbox": [x, y, width, height], "iscrowd"}]}


def find_instances(path: Path) -> Path | None:
    """instances_*.json: this file, or train2017's or else the only one of a folder or its `annotations`."""
    if path.is_file():
        return path if path.name.removesuffix(".gz").endswith(".json") else None
    files = sorted(path.glob("instances_*.json*")) or sorted(path.glob("annotations/instances_*.json*"))
    usual = [file for file in files if file.name.startswith("instances_train2017.json")] or files
    return reading.only_file(usual, path, "instances_*.json") if usual else None


def _instances(file: Path, *names: str) -> tuple[dict[int, str], list[list]]:
    """The categories of an instances file, and its lists of these names. Raises UserError."""
    content = reading.read_json(file)
    with reading.checked(file, OBJECTS):
        return _categories(content["categories"]), [reading.as_list(content[name], f"the {name}") for name in names]


def read_coco(file: Path, images: Path | None, seed: int, test: set[str] | None = None) -> Compositions:
    """The images of an instances file, which lie in the folder `images`, in one around it, or beside the file.

    seed, test: as of `draw_splits`. Raises UserError: malformed, or images are missing.
    """
    categories, (rows, annotations) = _instances(file, "images", "annotations")
    number, held, crops = {one: place for place, one in enumerate(categories)}, defaultdict(list), defaultdict(list)

    def parse_image(row: dict) -> tuple[int, tuple[tuple[int, int], str]]:
        about = as_size(row["width"], row["height"]), reading.as_inside(row["file_name"])
        return reading.as_id(row["id"], "the id"), about

    def parse(row: dict) -> None:
        image, concept = row["image_id"], number[row["category_id"]]
        box = _box(row["bbox"], known[image][0])
        held[image].append(concept)
        if box is not None and not row.get("iscrowd"):
            crops[image].append((concept, box))

    known = dict(reading.parse_all(file, OBJECTS, rows, parse_image, "image"))
    reading.parse_all(file, OBJECTS, annotations, parse, "annotation")
    if not held:
        raise reading.malformed(file, OBJECTS, "no image is annotated")
    chosen = [one for one in known if one in held]
    ids = [str(one) for one in chosen]
    folder = file.name.removesuffix(".gz").removesuffix(".json").removeprefix("instances_")
    beside = [file.parent, file.parent.parent, file.parent / folder, file.parent.parent / folder]
    names = [(known[one][1], f"{folder}/{known[one][1]}") for one in chosen]
    return Compositions(
        source=str(file), images=locate(names, ids, file, images, beside), names=ids, number=number,
        splits=draw_splits(ids, seed, test), concepts=tuple(categories.values()),
        held=[sorted(set(held[one])) for one in chosen], cut=[crops[one] for one in chosen],
    )  # fmt: skip


def read_objects(file: str | Path, image_ids: Sequence[int | str]) -> Tensor:
    """Multi-hot object categories of each image of COCO, (N, L) uint8, the labels for plausible matches (PMRP).

    All zero for an image without annotations. `file`: instances_val2014.json, or another with "categories" and
    "annotations". Raises UserError: missing or malformed; none of the images occurs in it.
    """
    path, row_of = Path(file), {name: row for row, name in enumerate(image_ids)}
    categories, (annotations,) = _instances(path, "annotations")
    number = {one: place for place, one in enumerate(categories)}

    def parse(row: dict) -> tuple[int, int] | None:
        place = number[row["category_id"]]
        return (row_of[row["image_id"]], place) if row["image_id"] in row_of else None

    pairs = reading.parse_all(path, OBJECTS, annotations, parse, "annotation")
    if not pairs:
        raise reading.malformed(path, OBJECTS, f"none of the {len(image_ids):,} images is annotated")
    labels = torch.zeros(len(image_ids), len(number), dtype=torch.uint8)
    labels[tuple(torch.tensor(pairs).T)] = 1
    return labels


# ------------------------------------------------------------------------------------------------------------- shards
# KEY.jpg, KEY.json    {"categories": [1, 18], "boxes": [[18, [x, y, w, h], 0], ...], "width": 640, "height": 480}
# categories.json      beside the shards or one folder above: [{"id": 1, "name": "person"}, ...]
# The third value of a box is COCO's `iscrowd`, which may be left out. width and height are those of the image that the
# boxes count pixels of; the stored one has the "size" [w, h], or the same. Without boxes, or where their image's size
# is unknown, the whole image stands for each of its categories. Splits are folders (train/*.tar, …), or drawn.


def shard_splits(path: Path) -> dict[str, list[Path]]:
    """The tars of each split folder; {"": all} where there are no such folders. Raises UserError: there are none."""
    if found := find_tars(path):
        return {"": found}
    folders = {reading.split_name(one.name): one for one in sorted(path.glob("*/"))}
    if splits := {split: tars for split in SPLITS if split in folders and (tars := find_tars(folders[split]))}:
        return splits
    raise UserError(
        f"{path} holds no data of composed retrieval: no shards (*.tar, train/*.tar), instances_*.json or {LABELS}.",
        MAKE,
    )


def read_concept_shards(path: Path, seed: int, test: set[str] | None = None) -> Compositions:
    """The images with categories; others are left out. seed, test: as of `draw_splits`. Raises UserError."""
    of_split = shard_splits(path)
    folder = path if path.is_dir() else path.parent
    files = [one / name for one in (folder, folder.parent) for name in (CATEGORIES, f"{CATEGORIES}.gz")]
    if (file := next(filter(Path.is_file, files), None)) is None:
        raise UserError(f"{path} holds no data of composed retrieval: no {CATEGORIES} beside its shards.", MAKE)
    content = reading.read_json(file)
    with reading.checked(file, "a list of categories"):
        categories = _categories(content)
    number = {one: place for place, one in enumerate(categories)}

    def parse(sample: Sample) -> tuple | None:
        if (held := sample.meta.get("categories")) is None:
            return None
        concepts = sorted({number[one] for one in reading.as_list(held, "its categories")})
        return sample.meta.get("image_id"), concepts, _crops(sample.meta, number)

    images, names, splits, held, cut = Images(places=[], source=str(path)), [], [], [], []
    for split, tars in of_split.items():
        found, rows = read_samples(tars, ("json",), parse, need_caption=None)
        prefix = f"{split}/" if split else ""
        images.bad += [(prefix + name, why) for name, why in found.bad]
        for place, (one, concepts, crops) in zip(found.places, rows):
            name = prefix + place.name.replace(".tar:", ":")
            images.places.append(place._replace(name=name))
            names.append(str(one) if reading.is_id(one) else name)
            held.append(concepts)
            cut.append(crops)
            splits.append(split)
    if not names:
        why = f" ({images.bad[0][0]}: {images.bad[0][1]})" if images.bad else ""
        raise UserError(f"{path} holds no image with categories{why}.", "Name shards with categories in KEY.json.")
    without = "images have no boxes, or those of originals of an unknown size: all of an image stands for its concepts."
    return Compositions(
        source=str(path), images=images, names=names, number=number, concepts=tuple(categories.values()), held=held,
        cut=cut, splits=splits if "" not in splits else draw_splits(names, seed, test),
        notes=(f"{cut.count(None):,} of {len(cut):,} {without}",) if None in cut else (),
    )  # fmt: skip


def _crops(meta: dict, number: dict[int, int]) -> list[tuple[int, Box]] | None:
    """The boxes of an image in stored pixels, None for unknown ones."""
    if meta.get("boxes") is None or not {"width", "height"} & set(meta):
        return None
    size = as_size(meta["width"], meta["height"])
    stored = as_size(*meta.get("size", size))
    across, down = stored[0] / size[0], stored[1] / size[1]
    found = []
    for category, box, *crowd in reading.as_list(meta["boxes"], "its boxes", MAX_OBJECTS):
        if (at := _box(box, size)) is not None and not any(crowd):
            found.append((number[category], (at[0] * across, at[1] * down, at[2] * across, at[3] * down)))
    return found


# -------------------------------------------------------------------------------------------------------- Fashion200k
# labels/dress_train_detect_all.txt, dress_test_detect_all.txt, ...    PATH TAB SCORE TAB description
# women/dresses/.../51727804_0.jpeg                                    the images, by PATH
# test_queries.txt                                                     "PATH PATH" lines: source and target
# Sources: Han et al., ICCV 2017; pairs and test queries: Vo et al., CVPR 2019 (TIRG); MPC, supplementary C.

LABELS = "labels/*_detect_all.txt"
MAX_WORDS, MAX_WORD = 64, 100  # of a description, and its characters


def read_fashion200k(path: Path, split: str, images: Path | None = None) -> AttributeChanges:
    """The images of "train" or "test", and the published test queries. Raises UserError."""
    named = {file: file.name.removesuffix("_detect_all.txt").rpartition("_")[2] for file in sorted(path.glob(LABELS))}
    reading.choose_split(split, named.values(), path)
    files = [file for file, of in named.items() if of == split]

    def label(line: str) -> tuple[str, str] | None:
        name, _, description = line.split("\t")
        words = [word[:MAX_WORD] for word in description.split()][:MAX_WORDS]
        return (reading.as_inside(name), " ".join(words)) if words else None

    rows = [row for file in files for row in reading.parse_lines(file, "a list of PATH, score and description", label)]
    if not rows:
        raise UserError(f"The labels of {path} list no image in the split '{split}'.", "Fetch the labels again.")
    names, texts = map(list, zip(*rows))
    located = locate([(name,) for name in names], names, path, images, [path])
    number = {text: place for place, text in enumerate(sorted(set(texts)))}
    result = AttributeChanges(
        source=str(path), images=located, names=names, splits=[split] * len(names), concepts=tuple(number),
        held=[[number[text]] for text in texts], cut=[None] * len(names),
    )  # fmt: skip
    file = path / "test_queries.txt"
    if split != "test" or not file.is_file():
        return result
    row_of = {name: row for row, name in enumerate(names)}

    def parse(line: str) -> Query:
        source, target = (row_of[name] for name in line.split())
        (changed,) = result.held[target]
        return Query(result.change(source, changed), (changed,))

    what = "a list of source and target images of the test labels"
    return replace(result, queries=reading.parse_lines(file, what, parse))


# ------------------------------------------------------------------------------------------------- drawn combinations
# A combination is feasible if enough images of every split have all of its concepts, and every split has something to
# cut image queries of each from. MPC's algorithm (supplementary A) draws k concepts until it has found enough feasible
# combinations; here all of them are found first, and drawn from: the same distribution.


def sample_tuples(
    found: Compositions, k: int = 2, seed: int = 0, impossible: set[tuple[int, ...]] | None = None
) -> dict[str, np.ndarray]:
    """Draw the benchmark's COMBINATIONS, (T, k) int64 with ascending concepts; a pure function of data, k and seed.

    All but the seen ones are empty unless k is 2. `impossible`: pairs that the infeasible ones are drawn from, where
    the data's makers know them; those that occur in an image are left out. Raises UserError: a split is missing.
    """

    def shuffled(rows: np.ndarray, name: str) -> np.ndarray:
        return rows[stream_of("tuples", seed, k, name).permutation(len(rows))]

    numbers = {name: number for name, (number, _) in COMBINATIONS.items()}
    feasible = feasible_tuples(found, k, MINIMUM)
    seen = shuffled(feasible, "seen")
    drawn = dict.fromkeys(numbers, no_tuples()) | {"seen": seen}
    if k == 2:
        train, test = np.split(shuffled(feasible, "unseen"), [numbers["unseen_train"]])
        test = test[np.isin(test, train).all(axis=1)]
        held = dense(found).astype(np.float32)
        together = held.T @ held > 0
        rows = [pair for pair in combinations(np.flatnonzero(shown(found)).tolist(), 2) if not together[pair]]
        rows = [pair for pair in rows if impossible is None or pair in impossible]
        infeasible = shuffled(np.array(rows, dtype=np.int64).reshape(-1, 2), "infeasible")
        drawn |= {"feasible": seen[numbers["seen"] :], "unseen_train": train, "unseen_test": test}
        drawn |= {"infeasible": infeasible}
    return {name: rows[: numbers[name]] for name, rows in drawn.items()}


def feasible_tuples(found: Compositions, k: int, minimum: tuple[int, int, int]) -> np.ndarray:
    """All combinations of k concepts that so many images of train, val and test have, (T, k), in ascending order.

    Raises UserError: a split is missing, or there are more than MAX_FEASIBLE.
    """
    if missing := [name for name in SPLITS if name not in found.splits]:
        what = f"{found.source} has no images in the split {missing[0]}."
        raise UserError(what, "Name the folder that holds all three splits.")
    held = dense(found) & shown(found)  # (N, C)
    member = np.stack([np.array(found.splits) == name for name in SPLITS]).astype(np.float32)  # (3, N)
    least = np.array(minimum)[:, None]
    rows: list[tuple[int, ...]] = []

    def extend(prefix: tuple[int, ...], images: np.ndarray) -> None:
        """Every feasible combination begins with feasible shorter ones."""
        first = prefix[-1] + 1 if prefix else 0
        part = held[images, first:]
        counts = member[:, images] @ part.astype(np.float32)  # (3, C - first), exact below 2^24
        for column in np.flatnonzero((counts >= least).all(axis=0)).tolist():
            longer = (*prefix, first + column)
            if len(longer) < k:
                extend(longer, images[part[:, column]])
            else:
                rows.append(longer)
        if len(rows) > MAX_FEASIBLE:
            what = f"{found.source} has more than {MAX_FEASIBLE:,} combinations of {k} concepts."
            raise UserError(what, "Ask for shorter combinations.")

    extend((), np.arange(len(found)))
    return np.array(rows, dtype=np.int64).reshape(-1, k)


def dense(found: Compositions) -> np.ndarray:
    """The concepts of each image, (N, C) bool."""
    held = np.zeros((len(found), len(found.concepts)), dtype=bool)
    for row, own in zip(held, found.held):
        row[own] = True
    return held


def shown(found: Compositions) -> np.ndarray:
    """(C,) bool: the concepts with image queries in every split."""
    splits = np.array(found.splits)
    return np.array([{*splits[crops.images]} >= {*SPLITS} for crops in found.crops])


# --------------------------------------------------------------------------------------------------- published lists
# MPC's lists of its COCO benchmark (those of other images, and of the 100 + 500 unseen pairs, are not published):
# 2_cat_combinations.json    [[3, 55], ...] COCO's ids of categories; also 3_, 4_, other COMBINATIONS
# test_imgs.json             [391895, ...] COCO's ids of the test images, all of train2017
# 2_test_cases.json          {"text_image": [{"images": [245051, 108617], "categories": [3, 55]}, ...]}


def _read_list(folder: Path, name: str) -> tuple[Path, object]:
    """The content of a list; None if it is not there. Raises UserError."""
    file = next((file for file in (folder / name, folder / f"{name}.gz") if file.is_file()), None)
    return (folder / name, None) if file is None else (file, reading.read_json(file))


def read_test_images(folder: Path) -> set[str] | None:
    """COCO's ids of the test images, as texts; None if there is no such list. Raises UserError."""
    file, content = _read_list(folder, "test_imgs.json")
    with reading.checked(file, "a list of image ids"):
        return content and {str(reading.as_id(one, "an id")) for one in content}


def published_tuples(found: Compositions, lists: Path, k: int, split: str, notes: list[str]) -> dict[str, np.ndarray]:
    """The combinations of the lists that images here have; `notes` gets sentences on those that are left out."""
    needed = {  # splits that have an image with all concepts; infeasible ones have none in any
        "seen": {"train", split},
        "unseen_train": {"train" if split == "test" else split},
        "unseen_test": {"test"},
        "feasible": {split},
        "infeasible": set(),
    }
    parts = {part: found.of_split(part) for part in set().union(*needed.values())}
    kept = {}

    def parse(row: list) -> list[int]:
        concepts = sorted({found.number[one] for one in row})
        if len(row) != k or len(concepts) < k:
            raise ValueError(f"{str(row)[:80]} is no combination of {k} categories")
        return concepts

    for name, where in needed.items():
        listed_in = COMBINATIONS[name][1].format(k)
        file, content = _read_list(lists, listed_in)
        rows = reading.parse_all(file, "a list of combinations", content or (), parse)
        if where:
            usable = [row for row in rows if all(len(parts[part].targets(row)) for part in where)]
        else:
            usable = [row for row in rows if not len(found.targets(row))]
        kept[name] = np.array(usable, dtype=np.int64).reshape(-1, k)
        if left_out := len(rows) - len(usable):
            why = f"no image in {' or '.join(sorted(where))} has them" if where else "an image has them"
            notes.append(f"{left_out:,} of the {len(rows):,} of {listed_in} are left out: {why}.")
    return kept


def with_published_queries(data: Compositions, lists: Path, seen: np.ndarray) -> Compositions:
    """The data with the published test queries whose images and targets are here, if there is a list of them.

    A part that is an image is the largest crop of its category in the published image. Queries of other combinations
    than `seen`, those that training images have, would pass for seen ones.
    """
    file, content = _read_list(lists, f"{data.k}_test_cases.json")
    if content is None:
        return data
    row_of = {name: row for row, name in enumerate(data.names)}
    trained, what = set(map(tuple, seen.tolist())), "a list of queries by the kinds of their parts"

    def part(kind: str, concept: int, image: int) -> Part | None:
        """None: the concept or the image is not here."""
        if concept < 0:
            return None
        if not {"text": False, "image": True}[kind]:
            return Part(concept, text=data.concepts[concept])
        crops = data.crops[concept]
        in_image = [crops[row] for row in np.flatnonzero(crops.owners == image)]
        largest = max(in_image, key=lambda crop: area(crop.box or (0, 0, 0, 0)), default=None)
        return largest and Part(concept, *largest)

    def parse(case: tuple[str, dict]) -> Query | None:
        concepts = [data.number.get(one, -1) for one in case[1]["categories"]]
        images = [row_of.get(str(one), -1) for one in case[1]["images"]]
        parts = tuple(map(part, case[0].split("_"), concepts, images))
        asked = tuple(sorted(concepts))
        usable = len(parts) == data.k and None not in parts and asked in trained and len(data.targets(asked))
        return Query(parts, asked) if usable else None

    with reading.checked(file, what):
        cases = [(kinds, row) for kinds, rows in content.items() for row in rows]
    found = reading.parse_all(file, what, cases, parse)
    why = "their images or targets are not here, or no training image has their combination"
    note = f"{len(cases) - len(found):,} of {len(cases):,} published queries are left out: {why}."
    return replace(data, queries=found or None, notes=(*data.notes, *[note] * (len(found) < len(cases))))
