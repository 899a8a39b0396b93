"""Finds the data of composed retrieval in any of its formats, recognised by its content.

find_compositions("data/composed", "train", k=2)                            composed scenes, or other shards
find_compositions("annotations/instances_train2017.json", "test", k=3)      COCO, with newly drawn combinations
find_compositions("data/coco_small", "test", lists="data/coco_text/mpc")    the published combinations and queries
find_compositions("data/fashion200k", "test")                               Fashion200k, changes of an attribute
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from probemb.data.compositions.coco import find_instances, read_coco
from probemb.data.compositions.concepts import SPLITS, ConceptImages
from probemb.data.compositions.dataset import Compositions
from probemb.data.compositions.fashion200k import LABELS, read_fashion200k
from probemb.data.compositions.shards import read_concept_shards, shard_splits
from probemb.data.compositions.tuples import (
    NUMBERS,
    has_lists,
    no_tuples,
    published_queries,
    published_tuples,
    read_test_images,
    sample_tuples,
)
from probemb.data.reading import listed, split_name
from probemb.errors import UserError

Setup = Literal["seen", "unseen"]


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
    path, split = Path(data), split_name(split)
    if split not in SPLITS:
        raise UserError(f"'{split}' is no split.", f"Use {listed(SPLITS, 'or')}.")
    for given in (data, images, lists):
        if given is not None and not Path(given).exists():
            raise UserError(f"{given} does not exist.", "Check the spelling.")
    pictures = None if images is None else Path(images)
    if any(path.glob(LABELS)):
        return read_fashion200k(path, split, pictures)
    folder = Path(lists) if lists is not None else path if path.is_dir() and has_lists(path) else None
    found = _read(path, pictures, seed, None if folder is None else read_test_images(folder))
    numbers = NUMBERS if setup == "seen" else NUMBERS | {"infeasible": 0}
    if folder is None:
        tuples, notes = sample_tuples(found, k, seed, numbers), []
    else:
        tuples, notes = published_tuples(found, folder, k, split)
        if setup == "unseen" and not len(tuples["unseen_train"]):
            drawn = sample_tuples(found, k, seed, numbers)
            tuples |= {name: drawn[name] for name in ("unseen_train", "unseen_test")}
    name = "seen" if setup == "seen" else "unseen_test" if split == "test" else "unseen_train"
    asked, more = tuples[name], tuples["feasible"] if setup == "seen" else no_tuples()
    if folder is None and len(asked) < numbers[name]:
        notes.append(f"There are {len(asked):,} combinations; the benchmark has {numbers[name]:,}.")
    here = found.split(split)
    crops = here.crops()
    has_crops = np.array([len(one) > 0 for one in crops])
    rows = [one[has_crops[one].all(axis=1)] for one in (asked, more, tuples["infeasible"])]
    if left_out := sum(map(len, (asked, more, tuples["infeasible"]))) - sum(map(len, rows)):
        why = f"'{split}' has no image queries of one of their concepts"
        notes.append(f"{left_out:,} combinations are left out: {why}.")
    if not len(rows[0]):
        kind = "unseen " if setup == "unseen" else ""
        raise UserError(
            f"{found.source} has no {kind}combinations of {k} concepts in the split '{split}'.",
            "Ask for another number of concepts, or use more data.",
        )
    result = Compositions(
        str(found.source),
        split,
        here.images,
        tuple(here.concepts.values()),
        here.holdings(),
        crops,
        *rows,
        notes=(*found.notes, *notes),
    )
    if folder is None or split != "test" or setup == "unseen":
        return result
    queries, left_out = published_queries(result, here, folder, tuples["seen"])
    return replace(result, queries=queries, notes=(*result.notes, *left_out))


def _read(path: Path, images: Path | None, seed: int, test: set[str] | None) -> ConceptImages:
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
