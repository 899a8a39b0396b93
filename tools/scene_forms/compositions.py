"""Composed scenes as shards, and the lists of combinations in MPC's published form: `make_scenes --compositions`.

train/*.tar, val/*.tar, test/*.tar      KEY.jpg, KEY.txt (its concepts), KEY.json (categories, boxes, scene)
categories.json                         the 67 concepts
2_cat_combinations.json                 asked for in all splits; also 3_ and 4_
2_cat_combinations_zero_shot.json       further pairs, never among those
2_cat_combinations_impossible.json      pairs that no picture of this world has
2_unseen_train.json, 2_unseen_test.json another setup: pairs to train on, and other pairs of the same concepts
"""

from __future__ import annotations

import json
from pathlib import Path

from tools.scene_forms.chunk import jpeg

SHARES = {"train": 4, "val": 1, "test": 1}
LENGTHS = (2, 3, 4)


def split_counts(images: int) -> dict[str, int]:
    """Images of each split, 4:1:1."""
    return {split: images * share // sum(SHARES.values()) for split, share in SHARES.items()}


def sample(world: int, split: str, index: int, size: int) -> dict[str, bytes]:
    """Members of one sample, by extension; a pure function of the arguments."""
    from probemb.data.scenes import composed
    from probemb.data.shards.writer import encode_captions

    scene = composed.composed_scene(world, split, index)
    names, held = composed.composed_concepts(), composed.scene_concepts(scene)
    placed = composed.concept_boxes(scene, size)
    row = {
        "categories": [concept + 1 for concept in held],
        "boxes": [[concept + 1, _coco_box(box)] for concept, box in placed],
        "width": size,
        "height": size,
        "scene": scene.to_json(),
    }
    text = encode_captions(names[concept] for concept in held)
    return {"jpg": jpeg(scene, size), "txt": text, "json": json.dumps(row, separators=(",", ":")).encode()}


def _coco_box(box: tuple[float, float, float, float]) -> list[float]:
    left, top, right, bottom = box
    return [round(at, 3) for at in (left, top, right - left, bottom - top)]


def write_lists(folder: Path, seed: int) -> dict[str, int]:
    """Write the categories and the combinations of finished shards; returns how many each list has.

    They are as many as the paper's, or as there are: combinations that 8/2/2 images of train/val/test have.
    """
    from probemb.data.compositions import TupleNumbers, sample_tuples
    from probemb.data.compositions.mpc_lists import FEASIBLE, INFEASIBLE, SEEN, UNSEEN_TEST, UNSEEN_TRAIN
    from probemb.data.compositions.shards import CATEGORIES, read_concept_shards
    from probemb.data.scenes.composed import SETTINGS, composed_concepts, impossible_pairs

    kinds = dict.fromkeys(SETTINGS.values(), "setting")
    rows = [
        {"supercategory": kinds.get(name, "object"), "id": number, "name": name}
        for number, name in enumerate(composed_concepts(), 1)
    ]
    _write(folder / CATEGORIES[0], rows)
    found = read_concept_shards(folder, seed)
    counts = {}
    for k in LENGTHS:
        drawn = sample_tuples(found, k, seed, TupleNumbers(at_most=True), impossible_pairs(seed))
        lists = {SEEN: drawn.seen}
        if k == 2:
            lists |= {FEASIBLE: drawn.feasible, INFEASIBLE: drawn.infeasible}
            lists |= {UNSEEN_TRAIN: drawn.unseen_train, UNSEEN_TEST: drawn.unseen_test}
        for name, tuples in lists.items():
            counts[name.format(k)] = len(tuples)
            _write(folder / name.format(k), [[concept + 1 for concept in one] for one in tuples.tolist()])
    return counts


def _write(file: Path, rows: list) -> None:
    lines = ",\n".join(json.dumps(row) for row in rows)
    file.write_text(f"[{lines}]\n", encoding="utf-8")
