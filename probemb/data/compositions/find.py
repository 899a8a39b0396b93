"""Finds the data of composed retrieval in any of its formats, and the combinations of concepts to ask for.

find_compositions("data/composed", "train", k=2)                            composed scenes, or other shards
find_compositions("annotations/instances_train2017.json", "test", k=3)      COCO, with newly drawn combinations
find_compositions("data/coco_small", "test", lists="data/coco_text/mpc")    the published combinations and queries
find_compositions("data/fashion200k", "test")                               Fashion200k, changes of an attribute

A combination is feasible if enough images of every split have all of its concepts, and every split has something to cut
image queries of each from. MPC's algorithm (supplementary A) draws k concepts until it has found enough feasible
combinations; here all of them are found first, and drawn from: the same distribution. MPC's published lists of its COCO
benchmark, also as .json.gz (those of other images, and of the 100 + 500 unseen pairs, are not published):

FOLDER/2_cat_combinations.json              [[3, 55], ...] COCO's ids of categories; also 3_, 4_, other COMBINATIONS
FOLDER/test_imgs.json                       [391895, ...] COCO's ids of the test images, all of train2017
FOLDER/2_test_cases.json                    {"text_image": [{"images": [245051, 108617], "categories": [3, 55]}, ...]}
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Literal

import numpy as np

from probemb.data.boxes import area
from probemb.data.compositions.dataset import SPLITS, Compositions, Part, Query, no_tuples
from probemb.data.compositions.fashion200k import LABELS, read_fashion200k
from probemb.data.compositions.readers import find_instances, read_coco, read_concept_shards, shard_splits
from probemb.data.randomness import stream_of
from probemb.data.reading import as_id, checked, listed, parse_all, read_json, split_name
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
MAX_FEASIBLE = 5_000_000  # combinations; COCO has some ten thousand


def find_compositions(
    data: str | Path, split: str, k: int = 2, *, setup: Setup = "seen", images: str | Path | None = None,
    lists: str | Path | None = None, seed: int = 0,
) -> Compositions:  # fmt: skip
    """List the images, concepts and combinations of one split, without decoding any image.

    Args:
        data: shards with categories (as `make_scenes --compositions` writes them), COCO's instances_*.json or a folder
            with it, or the folder of Fashion200k.
        split: "train", "val" or "test".
        k: concepts in a combination; of no meaning for Fashion200k.
        setup: "seen" has the same combinations in all splits; "unseen" has others in "test", of the same concepts.
        images: folder of COCO's or Fashion200k's images; by default searched beside the data.
        lists: folder of MPC's published lists; by default searched beside shards, else combinations are drawn.
        seed: of drawn splits and combinations.

    Raises UserError: nothing of the kind is there, with what was looked for; malformed data; no combinations.
    """
    path, split, pictures = Path(data), split_name(split), None if images is None else Path(images)
    if split not in SPLITS:
        raise UserError(f"'{split}' is no split.", f"Use {listed(SPLITS, 'or')}.")
    for given in (data, images, lists):
        if given is not None and not Path(given).exists():
            raise UserError(f"{given} does not exist.", "Check the spelling.")
    if any(path.glob(LABELS)):
        return read_fashion200k(path, split, pictures)
    folder = None if lists is None else Path(lists)
    if folder is None and any(path.glob(COMBINATIONS["seen"][1].format("*") + "*")):
        folder = path
    found = _read(path, pictures, seed, None if folder is None else read_test_images(folder))
    here, notes = found.of_split(split), [*found.notes]
    if folder is None:
        tuples = sample_tuples(found, k, seed)
    else:
        tuples = published_tuples(found, folder, k, split, notes)
    if setup == "unseen":
        if folder is not None and not len(tuples["unseen_train"]):
            drawn = sample_tuples(found, k, seed)
            tuples |= {name: drawn[name] for name in ("unseen_train", "unseen_test")}
        infeasible = no_tuples() if folder is None else tuples["infeasible"]
        rows = [tuples["unseen_test" if split == "test" else "unseen_train"], no_tuples(), infeasible]
    else:
        rows = [tuples[name] for name in ("seen", "feasible", "infeasible")]
    has_crops = np.array([len(one) > 0 for one in here.crops])
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


def _read(path: Path, images: Path | None, seed: int, test: set[str] | None) -> Compositions:
    if (instances := find_instances(path)) is not None:
        return read_coco(instances, images, seed, test)
    if not shard_splits(path):
        raise UserError(
            f"{path} holds no data of composed retrieval: no shards (*.tar, train/*.tar), no instances_*.json and no "
            f"{LABELS}.",
            "Name the data itself, or make the synthetic data with `python -m tools.make_scenes data/scenes "
            "--compositions 15000`.",
        )
    if images is not None:
        raise UserError(f"{path} holds its images itself; {images} would not be used.", "Leave the images out.")
    return read_concept_shards(path, seed, test)


# ------------------------------------------------------------------------------------------------- drawn combinations


def sample_tuples(
    found: Compositions, k: int = 2, seed: int = 0, impossible: set[tuple[int, ...]] | None = None
) -> dict[str, np.ndarray]:
    """Draw the benchmark's combinations; a pure function of the data, k and the seed.

    Args:
        impossible: pairs that the infeasible ones are drawn from, where the data's makers know them; those that occur
            in an image all the same are left out.

    Returns:
        Combinations of concept numbers, (T, k) int64 in ascending order of the numbers of a row; all but the seen ones
        are empty unless k is 2.

    Raises UserError: a split is missing, or there are more than 5,000,000.
    """

    def shuffled(rows: np.ndarray, name: str) -> np.ndarray:
        return rows[stream_of("tuples", seed, k, name).permutation(len(rows))]

    numbers = {name: number for name, (number, _) in COMBINATIONS.items()}
    feasible = feasible_tuples(found, k, MINIMUM)
    seen = shuffled(feasible, "seen")
    drawn = dict.fromkeys(numbers, no_tuples()) | {"seen": seen}
    if k == 2:
        unseen = shuffled(feasible, "unseen")
        train, test = np.split(unseen, [numbers["unseen_train"]])
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

    Raises UserError: a split is missing, or there are more than 5,000,000.
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
    """Mask of the concepts with image queries in every split: (C,) bool."""
    splits = np.array(found.splits)
    return np.array([{*splits[crops.images]} >= {*SPLITS} for crops in found.crops])


# --------------------------------------------------------------------------------------------------- published lists


def _read_list(folder: Path, name: str) -> tuple[Path, object]:
    """The content of a list, also gzipped; None if it is not there. Raises UserError."""
    file = next((file for file in (folder / name, folder / f"{name}.gz") if file.is_file()), None)
    return (folder / name, None) if file is None else (file, read_json(file))


def read_test_images(folder: Path) -> set[str] | None:
    """COCO's ids of the test images, as texts; None if there is no such list. Raises UserError."""
    file, content = _read_list(folder, "test_imgs.json")
    with checked(file, "a list of image ids"):
        return content and {str(as_id(one, "an id")) for one in content}


def published_tuples(found: Compositions, lists: Path, k: int, split: str, notes: list[str]) -> dict[str, np.ndarray]:
    """The combinations of the lists that images here have; `notes` gets sentences on those that are left out.

    Seen ones have an image in "train" and in the split, others in the split that they are asked for in; infeasible ones
    have none in any split. Raises UserError: no list of seen combinations of k.
    """
    needed = {
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
        rows = parse_all(file, "a list of combinations", content or (), parse)
        if where:
            usable = [row for row in rows if all(len(parts[part].targets(row)) for part in where)]
        else:
            usable = [row for row in rows if not len(found.targets(row))]
        kept[name] = np.array(usable, dtype=np.int64).reshape(-1, k)
        if left_out := len(rows) - len(usable):
            why = f"no image in {' or '.join(sorted(where))} has them" if where else "an image has them"
            notes.append(f"{left_out:,} of the {len(rows):,} of {listed_in} are left out: {why}.")
    if not len(kept["seen"]):
        what = f"No combination of {lists / COMBINATIONS['seen'][1].format(k)} has an image in train and in {split}."
        raise UserError(what, "Use more images, or ask for another number of concepts.")
    return kept


def with_published_queries(data: Compositions, lists: Path, seen: np.ndarray) -> Compositions:
    """The data with the published test queries whose images and targets are here; the same where there is no list.

    A part that is an image is the largest crop of its category in the published image.

    Args:
        seen: (T, k) combinations that training images have; queries of others would pass for seen ones.
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

    with checked(file, what):
        cases = [(kinds, row) for kinds, rows in content.items() for row in rows]
    found = parse_all(file, what, cases, parse)
    why = "their images or targets are not here, or no training image has their combination"
    note = f"{len(cases) - len(found):,} of {len(cases):,} published queries are left out: {why}."
    return replace(data, queries=found or None, notes=(*data.notes, *[note] * (len(found) < len(cases))))
