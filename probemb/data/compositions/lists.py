"""MPC's published lists of its COCO benchmark, as far as the images at hand have them.

FOLDER/2_cat_combinations.json              [[3, 55], ...] COCO's ids of categories; also 3_ and 4_
FOLDER/2_cat_combinations_zero_shot.json    pairs that are not trained on, for the feasibility of combinations
FOLDER/2_cat_combinations_impossible.json   pairs that no image has
FOLDER/test_imgs.json                       [391895, ...] COCO's ids of the test images, all of train2017
FOLDER/2_test_cases.json                    {"text_image": [{"images": [245051, 108617], "categories": [3, 55]}, ...]}

All of them also as .json.gz. The lists of training and validation images and of the 100 + 500 unseen pairs are not
published.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from probemb.data.compositions.concepts import ConceptImages, Crop
from probemb.data.compositions.dataset import Compositions, Part, Query
from probemb.data.reading import as_id, as_list, check_unique, checked, parse_all, read_json
from probemb.errors import UserError

FILES = {  # of combinations of {} concepts, by their name in `NUMBERS`
    "seen": "{}_cat_combinations.json",
    "unseen_train": "{}_unseen_train.json",  # as the next one, of composed scenes
    "unseen_test": "{}_unseen_test.json",
    "feasible": "{}_cat_combinations_zero_shot.json",
    "infeasible": "{}_cat_combinations_impossible.json",
}
MAX_LIST = 2_000_000  # entries
_IS_IMAGE = {"text": False, "image": True}


def has_lists(folder: Path) -> bool:
    return any(folder.glob(FILES["seen"].format("*") + "*"))


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
        name: one of FILES; number: of each concept by its id.
    """
    file, content = _read_list(folder, FILES[name].format(k))

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
    number = {one: place for place, one in enumerate(found.concept_ids)}
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
            notes.append(f"{left_out:,} of the {len(rows):,} of {FILES[name].format(k)} are left out: {why}.")
    if not len(kept["seen"]):
        raise UserError(
            f"{lists} has no {FILES['seen'].format(k)} that the images have.", "Ask for another number of concepts."
        )
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
    number = {one: place for place, one in enumerate(here.concept_ids)}
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
    mine = [crops[row] for row in np.flatnonzero(crops.owners == image)]
    return Part(concept, *max(mine, key=_area)) if mine else None


def _area(crop: Crop) -> float:
    left, top, right, bottom = crop.box or (0.0, 0.0, 0.0, 0.0)
    return (right - left) * (bottom - top)
