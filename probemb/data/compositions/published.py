"""Published combinations and queries, as far as the images at hand have them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from probemb.data.compositions.annotated import ConceptImages
from probemb.data.compositions.crops import Crop
from probemb.data.compositions.dataset import Compositions
from probemb.data.compositions.mpc_lists import (
    FEASIBLE,
    INFEASIBLE,
    SEEN,
    UNSEEN_TEST,
    UNSEEN_TRAIN,
    read_test_cases,
    read_tuples,
)
from probemb.data.compositions.queries import Part, Query, image_part, kind_of
from probemb.data.compositions.tuples import Tuples, no_tuples
from probemb.errors import UserError


def published_tuples(found: ConceptImages, lists: Path, k: int, split: str) -> tuple[Tuples, tuple[str, ...]]:
    """The combinations of the lists that images here have, and sentences on those that are left out.

    Seen ones have an image in "train" and in the split, others in the split that they are asked for in; infeasible ones
    have none in any split. Raises UserError: no list of seen combinations of k.
    """
    needed = {
        SEEN: {"train", split},
        UNSEEN_TRAIN: {"train" if split == "test" else split},
        UNSEEN_TEST: {"test"},
        FEASIBLE: {split},
    }
    numbers = {one: place for place, one in enumerate(found.concept_ids)}
    held = {part: found.split(part).holdings() for part in set().union(*needed.values())}
    kept, notes = {}, []
    for name in (*needed, INFEASIBLE):
        rows = read_tuples(lists, name, k, numbers)
        if rows is None and name == SEEN:
            raise UserError(f"{lists} has no {SEEN.format(k)}.", "Ask for another number of concepts.")
        rows = no_tuples(k) if rows is None else rows
        if name == INFEASIBLE:
            everywhere = found.holdings()
            here = [not len(everywhere.with_all(row)) for row in rows]
            why = "are left out: an image has them"
        else:
            here = [all(len(held[part].with_all(row)) for part in needed[name]) for row in rows]
            why = f"are left out: no image in {' or '.join(sorted(needed[name]))} has them"
        kept[name] = rows[np.array(here, dtype=bool)]
        if len(kept[name]) < len(rows):
            notes.append(f"{len(rows) - len(kept[name]):,} of the {len(rows):,} of {name.format(k)} {why}.")
    return Tuples(*(kept[name] for name in (SEEN, UNSEEN_TRAIN, UNSEEN_TEST, FEASIBLE, INFEASIBLE))), tuple(notes)


def published_queries(
    data: Compositions, here: ConceptImages, lists: Path, seen: np.ndarray
) -> tuple[list[Query] | None, tuple[str, ...]]:  # fmt: skip
    """The published test queries whose images and targets are here; None where there is no list of them.

    A part that is an image is the largest crop of its category in the published image.

    Args:
        seen: (T, k) combinations that training images have; queries of others would pass for seen ones.
    """
    cases = read_test_cases(lists, data.k)
    if cases is None:
        return None, ()
    rows = {name: row for row, name in enumerate(here.names)}
    numbers = {one: place for place, one in enumerate(here.concept_ids)}
    trained, found = set(map(tuple, seen.tolist())), []
    for case in cases:
        concepts = tuple(numbers.get(one, -1) for one in case.categories)
        parts = [
            _part(data, concept, rows.get(str(image))) if shown else _text(data, concept)
            for concept, image, shown in zip(concepts, case.images, case.is_image)
        ]
        asked = tuple(sorted(concepts))
        if None not in parts and asked in trained and len(data.targets(asked)):
            found.append(Query(tuple(parts), asked, kind_of(parts)))
    left_out = len(cases) - len(found)
    note = (
        f"{left_out:,} of {len(cases):,} published queries are left out: their images or targets are not here, or no "
        "training image has their combination."
    )
    return found or None, (note,) if left_out else ()


def _text(data: Compositions, concept: int) -> Part | None:
    return data.text_part(concept) if concept >= 0 else None


def _part(data: Compositions, concept: int, image: int | None) -> Part | None:
    if concept < 0 or image is None:
        return None
    crops = data.crops[concept]
    mine = [crops[row] for row in np.flatnonzero(crops.owners == image)]
    return image_part(concept, max(mine, key=_area)) if mine else None


def _area(crop: Crop) -> float:
    if crop.box is None:
        return 0.0
    left, top, right, bottom = crop.box
    return (right - left) * (bottom - top)
