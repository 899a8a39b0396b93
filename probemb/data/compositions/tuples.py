"""The combinations of concepts that the benchmark asks for: drawn (MPC, supplementary A, algorithm A), or published.

A combination is feasible if enough images of every split have all of its concepts, and every split has something to cut
image queries of each from. The published algorithm draws k concepts until it has found enough feasible combinations;
here all of them are found first, and drawn from: the same distribution. MPC's published lists of its COCO benchmark:

FOLDER/2_cat_combinations.json              [[3, 55], ...] COCO's ids of categories; also 3_, 4_, other COMBINATIONS
FOLDER/test_imgs.json                       [391895, ...] COCO's ids of the test images, all of train2017
FOLDER/2_test_cases.json                    {"text_image": [{"images": [245051, 108617], "categories": [3, 55]}, ...]}

All of them also as .json.gz. The lists of training and validation images and of the 100 + 500 unseen pairs are not
published.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np

from probemb.data.compositions.concepts import SPLITS, ConceptImages, Crop
from probemb.data.compositions.dataset import Compositions, Part, Query
from probemb.data.randomness import stream_of
from probemb.data.reading import as_id, as_list, check_unique, checked, parse_all, read_json
from probemb.errors import UserError


class Combinations(NamedTuple):
    """A kind of combinations: how many are drawn, and the file that lists those of k concepts."""

    number: int
    file: str


COMBINATIONS = {
    "seen": Combinations(1000, "{}_cat_combinations.json"),  # asked for in all splits
    "unseen_train": Combinations(100, "{}_unseen_train.json"),  # pairs of another setup
    "unseen_test": Combinations(500, "{}_unseen_test.json"),  # pairs of that setup, of concepts of its training pairs
    "feasible": Combinations(250, "{}_cat_combinations_zero_shot.json"),  # further pairs that are not trained on
    "infeasible": Combinations(250, "{}_cat_combinations_impossible.json"),  # pairs that no image has
}
NUMBERS = {name: kind.number for name, kind in COMBINATIONS.items()}
MINIMUM = (8, 2, 2)  # images of train, val and test that a feasible combination is in
MAX_FEASIBLE = 5_000_000  # combinations; COCO has some ten thousand
MAX_K = 10
MAX_LIST = 2_000_000  # entries
_IS_IMAGE = {"text": False, "image": True}


def no_tuples(k: int = 2) -> np.ndarray:
    return np.empty((0, k), dtype=np.int64)


def sample_tuples(
    found: ConceptImages, k: int = 2, seed: int = 0, numbers: Mapping[str, int] = NUMBERS,
    impossible: set[tuple[int, ...]] | None = None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Draw the benchmark's combinations; a pure function of the data, k and the seed.

    Args:
        numbers: of each kind, fewer where there are no more.
        impossible: pairs that the infeasible ones are drawn from, where the data's makers know them; those that occur
            in an image all the same are left out.

    Returns:
        Combinations of concept numbers, (T, k) int64 in ascending order of the numbers of a row; all but the seen ones
        are empty unless k is 2.

    Raises UserError: a split is missing, or there are more than 5,000,000.
    """

    def shuffled(rows: np.ndarray, name: str) -> np.ndarray:
        return rows[stream_of("tuples", seed, k, name).permutation(len(rows))]

    feasible = feasible_tuples(found, k, MINIMUM)
    seen = shuffled(feasible, "seen")
    drawn = dict.fromkeys(NUMBERS, no_tuples()) | {"seen": seen[: numbers["seen"]]}
    if k != 2:
        return drawn
    unseen, first = shuffled(feasible, "unseen"), numbers["unseen_train"]
    drawn |= {"feasible": seen[numbers["seen"] :], "unseen_train": unseen[:first], "unseen_test": unseen[first:]}
    known = np.isin(drawn["unseen_test"], drawn["unseen_train"]).all(axis=1)
    drawn["unseen_test"] = drawn["unseen_test"][known]
    held = found.holdings().dense().astype(np.float32)
    together = held.T @ held > 0
    rows = [pair for pair in combinations(np.flatnonzero(shown(found)).tolist(), 2) if not together[pair]]
    rows = [pair for pair in rows if impossible is None or pair in impossible]
    drawn["infeasible"] = shuffled(np.array(rows, dtype=np.int64).reshape(-1, 2), "infeasible")
    return {name: rows[: numbers[name]] for name, rows in drawn.items()}


def feasible_tuples(found: ConceptImages, k: int, minimum: tuple[int, int, int]) -> np.ndarray:
    """All combinations of k concepts that so many images of train, val and test have, (T, k), in ascending order.

    Raises UserError: a split is missing, or there are more than 5,000,000.
    """
    missing = [name for name in SPLITS if name not in found.splits]
    if missing:
        raise UserError(
            f"{found.source} has no images in the split {missing[0]}.", "Name the folder that holds all three splits."
        )
    held = found.holdings().dense() & shown(found)  # (N, C)
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
            raise UserError(
                f"{found.source} has more than {MAX_FEASIBLE:,} combinations of {k} concepts.",
                "Ask for shorter combinations.",
            )

    extend((), np.flatnonzero(member.any(axis=0)))
    return np.array(rows, dtype=np.int64).reshape(-1, k)


def shown(found: ConceptImages) -> np.ndarray:
    """Mask of the concepts with image queries in every split: (C,) bool."""
    result = np.zeros((len(SPLITS), len(found.concepts)), dtype=bool)
    for split, (numbers, crops) in zip(found.splits, found.held):
        result[SPLITS.index(split), numbers if crops is None else [number for number, _ in crops]] = True
    return result.all(axis=0)


# --------------------------------------------------------------------------------------------------- published lists


def has_lists(folder: Path) -> bool:
    return any(folder.glob(COMBINATIONS["seen"].file.format("*") + "*"))


def _read_list(folder: Path, name: str) -> tuple[Path, object]:
    """The content of a list, also gzipped; None if it is not there. Raises UserError."""
    file = next((file for file in (folder / name, folder / f"{name}.gz") if file.is_file()), None)
    return (folder / name, None) if file is None else (file, read_json(file))


def read_test_images(folder: Path) -> set[str] | None:
    """COCO's ids of the test images, as texts; None if there is no such list. Raises UserError."""
    file, content = _read_list(folder, "test_imgs.json")
    with checked(file, "a list of image ids"):
        return content if content is None else {str(as_id(one, "an id")) for one in content}


def read_tuples(folder: Path, name: str, k: int, number: Mapping[int, int]) -> np.ndarray:
    """The combinations of a list as numbers of concepts, (T, k) int64, none if it is not there. Raises UserError.

    Args:
        name: of COMBINATIONS; number: of each concept by its id.
    """
    file, content = _read_list(folder, COMBINATIONS[name].file.format(k))

    def parse(row: list) -> tuple[int, ...]:
        concepts = tuple(sorted({number[one] for one in row}))
        if len(row) != k or len(concepts) < k:
            raise ValueError(f"{str(row)[:80]} is no combination of {k} categories")
        return concepts

    rows = parse_all(file, "a list of combinations", content or (), parse)
    check_unique(rows, "combination", file)
    return np.array(rows, dtype=np.int64).reshape(-1, k)


def published_tuples(found: ConceptImages, lists: Path, k: int, split: str) -> tuple[dict[str, np.ndarray], list[str]]:
    """The combinations of the lists that images here have, and sentences on those that are left out.

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
    number = found.number
    held = {part: found.split(part).holdings() for part in set().union(*needed.values())}
    everywhere, kept, notes = found.holdings(), {}, []
    for name, parts in needed.items():
        rows = read_tuples(lists, name, k, number)
        if parts:
            here = [all(len(held[part].with_all(row)) for part in parts) for row in rows]
            why = f"no image in {' or '.join(sorted(parts))} has them"
        else:
            here, why = [not len(everywhere.with_all(row)) for row in rows], "an image has them"
        kept[name] = rows[np.array(here, dtype=bool)]
        if left_out := len(rows) - len(kept[name]):
            file = COMBINATIONS[name].file.format(k)
            notes.append(f"{left_out:,} of the {len(rows):,} of {file} are left out: {why}.")
    if not len(kept["seen"]):
        what = f"No combination of {lists / COMBINATIONS['seen'].file.format(k)} has an image in train and in {split}."
        raise UserError(what, "Use more images, or ask for another number of concepts.")
    return kept, notes


def published_queries(
    data: Compositions, here: ConceptImages, lists: Path, seen: np.ndarray
) -> tuple[list[Query] | None, list[str]]:
    """The published test queries whose images and targets are here; None where there is no list of them.

    A part that is an image is the largest crop of its category in the published image.

    Args:
        seen: (T, k) combinations that training images have; queries of others would pass for seen ones.
    """
    file, content = _read_list(lists, f"{data.k}_test_cases.json")
    if content is None:
        return None, []
    row_of = {name: row for row, name in enumerate(here.names)}
    number = here.number
    trained, what = set(map(tuple, seen.tolist())), "a list of queries by the kinds of their parts"

    def parse(case: tuple[str, dict]) -> Query | None:
        is_image = [_IS_IMAGE[kind] for kind in case[0].split("_")]
        concepts = [number.get(as_id(one, "a category"), -1) for one in case[1]["categories"]]
        images = [row_of.get(str(as_id(one, "an image"))) for one in case[1]["images"]]
        parts = [_part(data, *one) for one in zip(concepts, images, is_image, strict=True)]
        asked = tuple(sorted(concepts))
        if len(parts) != data.k or None in parts or asked not in trained or not len(data.targets(asked)):
            return None
        return Query(tuple(parts), asked)

    with checked(file, what):
        cases = [(kinds, row) for kinds, rows in content.items() for row in as_list(rows, "the queries", MAX_LIST)]
    found, total = parse_all(file, what, cases, parse), len(cases)
    why = "their images or targets are not here, or no training image has their combination"
    note = f"{total - len(found):,} of {total:,} published queries are left out: {why}."
    return found or None, [note] if len(found) < total else []


def _part(data: Compositions, concept: int, image: int | None, is_image: bool) -> Part | None:
    """None: the concept or the image is not here."""
    if concept < 0 or (is_image and image is None):
        return None
    if not is_image:
        return data.text_part(concept)
    crops = data.crops[concept]
    in_image = [crops[row] for row in np.flatnonzero(crops.owners == image)]
    return Part(concept, *max(in_image, key=_area)) if in_image else None


def _area(crop: Crop) -> float:
    left, top, right, bottom = crop.box or (0.0, 0.0, 0.0, 0.0)
    return (right - left) * (bottom - top)
