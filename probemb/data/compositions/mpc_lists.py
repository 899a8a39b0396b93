"""MPC's published lists of its COCO benchmark: combinations of categories, test images, test queries.

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
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from probemb.data.captions.dataset import is_id
from probemb.data.compositions.annotations import read_json
from probemb.errors import UserError

SEEN = "{}_cat_combinations.json"
FEASIBLE, INFEASIBLE = "{}_cat_combinations_zero_shot.json", "{}_cat_combinations_impossible.json"
CASES = "{}_test_cases.json"
TEST_IMAGES = "test_imgs.json"
UNSEEN_TRAIN, UNSEEN_TEST = "{}_unseen_train.json", "{}_unseen_test.json"  # of composed scenes
MAX_LIST = 2_000_000  # entries
_REMEDY = "Name the folder with MPC's lists, or fetch them again."
_MODALITIES = {"text": False, "image": True}


@dataclass(frozen=True)
class TestCase:
    """A published query: which of its parts are images, COCO's ids of an image and of a category for each part."""

    is_image: tuple[bool, ...]
    images: tuple[int, ...]
    categories: tuple[int, ...]


def find_list(folder: Path, name: str) -> Path | None:
    """A list of a folder, also gzipped."""
    return next((file for file in (folder / name, folder / f"{name}.gz") if file.is_file()), None)


def has_lists(folder: Path) -> bool:
    return any(find_list(folder, SEEN.format(k)) for k in range(2, 11))


def read_tuples(folder: Path, name: str, k: int, categories: Mapping[int, int]) -> np.ndarray | None:
    """The combinations of a list as numbers of concepts, (T, k) int64; None if it is not there. Raises UserError.

    Args:
        name: one of SEEN, FEASIBLE, ...; categories: the number of each concept by its id.
    """
    file = find_list(folder, name.format(k))
    if file is None:
        return None
    rows = read_json(file, _REMEDY)
    if not isinstance(rows, list) or len(rows) > MAX_LIST:
        raise UserError(f"{file} is no list of combinations.", _REMEDY)
    found: dict[tuple[int, ...], None] = {}
    for one in rows:
        if not isinstance(one, list) or len(one) != k or not all(type(c) is int and c in categories for c in one):
            raise UserError(f"{file} has {str(one)[:80]}, which is no combination of {k} categories.", _REMEDY)
        concepts = tuple(sorted({categories[c] for c in one}))
        if len(concepts) < k or concepts in found:
            raise UserError(f"{file} has {one} twice, or a category twice.", _REMEDY)
        found[concepts] = None
    return np.array(list(found), dtype=np.int64).reshape(-1, k)


def read_test_images(folder: Path) -> set[str] | None:
    """COCO's ids of the test images, as texts; None if there is no such list. Raises UserError."""
    file = find_list(folder, TEST_IMAGES)
    if file is None:
        return None
    rows = read_json(file, _REMEDY)
    if not isinstance(rows, list) or len(rows) > MAX_LIST or not all(map(is_id, rows)):
        raise UserError(f"{file} is no list of image ids.", _REMEDY)
    return set(map(str, rows))


def read_test_cases(folder: Path, k: int) -> list[TestCase] | None:
    """The published queries; None if there are none of k parts. Raises UserError."""
    file = find_list(folder, CASES.format(k))
    if file is None:
        return None
    content = read_json(file, _REMEDY)
    if not isinstance(content, dict):
        raise UserError(f"{file} holds no test queries.", _REMEDY)
    found = []
    for kinds, rows in content.items():
        is_image = tuple(_MODALITIES.get(kind) for kind in kinds.split("_"))
        if None in is_image or len(is_image) != k or not isinstance(rows, list) or len(rows) > MAX_LIST:
            raise UserError(f"{file} has queries of the kind '{kinds[:40]}'.", _REMEDY)
        for one in rows:
            images, categories = (one.get(key) if isinstance(one, dict) else None for key in ("images", "categories"))
            if not all(isinstance(x, list) and len(x) == k and all(map(is_id, x)) for x in (images, categories)):
                raise UserError(f"{file} has the query {str(one)[:80]}, which is not of {k} parts.", _REMEDY)
            found.append(TestCase(is_image, tuple(images), tuple(categories)))
    return found
