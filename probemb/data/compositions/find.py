"""Finds the data of composed retrieval in any of its formats, recognised by its content.

find_compositions("data/composed", "train", k=2)                            composed scenes, or other shards
find_compositions("annotations/instances_train2017.json", "test", k=3)      COCO, its benchmark drawn anew
find_compositions("data/coco_small", "test", lists="data/coco_text/mpc")    the published combinations and queries
find_compositions("data/fashion200k", "test")                               Fashion200k, changes of an attribute
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from probemb.data.captions.dataset import listed, split_name
from probemb.data.compositions import coco, fashion200k, shards
from probemb.data.compositions.annotated import SPLITS, ConceptImages
from probemb.data.compositions.crops import Crops
from probemb.data.compositions.dataset import Compositions
from probemb.data.compositions.mpc_lists import has_lists, read_test_images
from probemb.data.compositions.published import published_queries, published_tuples
from probemb.data.compositions.tuples import TupleNumbers, Tuples, no_tuples, sample_tuples
from probemb.errors import UserError

Setup = Literal["seen", "unseen"]
MAKE_SCENES = "make the synthetic data with `python -m tools.make_scenes data/scenes --compositions 15000`"


def find_compositions(
    data: str | Path, split: str, k: int = 2, *, setup: Setup = "seen", images: str | Path | None = None,
    lists: str | Path | None = None, sizes: str | Path | None = None, numbers: TupleNumbers | None = None,
    seed: int = 0,
) -> Compositions:  # fmt: skip
    """List the images, concepts and combinations of one split, without decoding any image.

    Args:
        data: shards with categories (as `make_scenes --compositions` writes them), COCO's instances_*.json or a folder
            with it, or the folder of Fashion200k.
        split: "train", "val" or "test".
        k: concepts in a combination; of no meaning for Fashion200k.
        setup: "seen" has the same combinations in all splits; "unseen" has others in "test", of the same concepts.
        images: folder, zip or tar of COCO's images, or folder of Fashion200k's; by default searched beside the data.
        lists: folder of MPC's published lists; by default searched beside shards, else combinations are drawn.
        sizes: one of COCO's JSON files with the sizes of the original images, where the boxes of shards are theirs.
        numbers: how many combinations to draw, where there are no lists.
        seed: of drawn splits and combinations.

    Raises UserError: nothing of the kind is there, with what was looked for; malformed data; too few combinations.
    """
    path, split = Path(data), split_name(split)
    if split not in SPLITS:
        raise UserError(f"'{split}' is no split.", f"Use {listed(SPLITS, 'or')}.")
    if not str(data).strip() or "\0" in str(data) or not path.exists():
        raise UserError(f"The data path {str(data)!r} does not exist.", f"Check the spelling, or {MAKE_SCENES}.")
    for given in (images, lists, sizes):
        if given is not None and not Path(given).exists():
            raise UserError(f"{given} does not exist.", "Check the spelling.")
    pictures = None if images is None else Path(images)
    if fashion200k.is_fashion200k(path):
        return fashion200k.read_fashion200k(path, split, pictures)
    folder = Path(lists) if lists is not None else path if path.is_dir() and has_lists(path) else None
    found = _read(path, pictures, seed, folder, sizes)
    numbers = _of_setup(numbers or TupleNumbers(), setup)
    if folder is None:
        return _build(found, split, setup, sample_tuples(found, k, seed, numbers))
    read, notes = published_tuples(found, folder, k, split)
    if setup == "unseen" and not len(read.unseen_train):
        drawn = sample_tuples(found, k, seed, numbers)
        read = replace(read, unseen_train=drawn.unseen_train, unseen_test=drawn.unseen_test)
    result = _build(found, split, setup, read, notes)
    if split != "test" or setup == "unseen":
        return result
    queries, left_out = published_queries(result, found.split(split), folder, read.seen)
    return replace(result, queries=queries, notes=(*result.notes, *left_out))


def _read(path: Path, images: Path | None, seed: int, lists: Path | None, sizes: str | Path | None) -> ConceptImages:
    test = None if lists is None else read_test_images(lists)
    instances = coco.find_instances(path)
    if instances is not None:
        return coco.read_coco(instances, images, seed, test)
    if not shards.shard_splits(path):
        raise UserError(
            f"{path} holds no data of composed retrieval: no shards (*.tar, train/*.tar), no instances_*.json and no "
            "labels/*_detect_all.txt.",
            f"Name the data itself, or {MAKE_SCENES}.",
        )
    if images is not None:
        raise UserError(f"{path} holds its images itself; {images} would not be used.", "Leave the images out.")
    known = None if sizes is None else coco.read_sizes(Path(sizes))
    return shards.read_concept_shards(path, seed, test, known)


def _of_setup(numbers: TupleNumbers, setup: Setup) -> TupleNumbers:
    """Only what is used, so that nothing else can be too few."""
    if setup == "seen":
        return replace(numbers, unseen_train=0, unseen_test=0)
    return replace(numbers, seen=0, feasible=0, infeasible=0)


def _build(
    found: ConceptImages, split: str, setup: Setup, tuples: Tuples, notes: tuple[str, ...] = ()
) -> Compositions:  # fmt: skip
    """One split with its combinations. Raises UserError: there are none."""
    if setup == "seen":
        asked, more = tuples.seen, tuples.feasible
    else:
        asked, more = tuples.unseen_test if split == "test" else tuples.unseen_train, no_tuples(2)
    here, k = found.split(split), tuples.seen.shape[1]
    crops = here.crops()
    kept = [_with_crops(rows, crops) for rows in (asked, more, tuples.infeasible)]
    if left_out := len(asked) + len(more) + len(tuples.infeasible) - sum(map(len, kept)):
        why = f"'{split}' has no image queries of one of their concepts"
        notes = (*notes, f"{left_out:,} combinations are left out: {why}.")
    if not len(kept[0]):
        kind = "unseen " if setup == "unseen" else ""
        raise UserError(
            f"{found.source} has no {kind}combinations of {k} concepts in the split '{split}'.",
            "Ask for another number of concepts, or use more data.",
        )
    return Compositions(
        source=found.source,
        split=split,
        images=here.images,
        concepts=here.concepts,
        holds=here.holdings(),
        crops=crops,
        tuples=kept[0],
        unseen=kept[1],
        infeasible=kept[2],
        notes=(*found.notes, *notes),
    )


def _with_crops(rows: np.ndarray, crops: Sequence[Crops]) -> np.ndarray:
    """Combinations of concepts that have image queries."""
    return rows[np.array([len(one) > 0 for one in crops])[rows].all(axis=1)]
