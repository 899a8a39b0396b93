"""`make_scenes --compositions`: what the pictures hold is what is drawn, and the lists are true of them."""

import dataclasses
import hashlib
from itertools import combinations

import numpy as np
import pytest

from probemb.data.compositions import find_compositions
from probemb.data.compositions.shards import read_concept_shards
from probemb.data.scenes import boxes, render
from probemb.data.scenes.composed import composed_concepts, composed_scene, groups, impossible_pairs, scene_concepts
from probemb.errors import UserError
from tools.make_scenes import Plan, make

PLAN = Plan(train=0, val=0, classes_images=0, size=16, compositions=1200, shard_size=500)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("made") / "scenes"
    assert make(PLAN, out, workers=1)
    return out


def scenes(split, count):
    return [composed_scene(0, split, i) for i in range(count)]


def test_concepts_are_those_of_the_objects_and_the_camera():
    names = composed_concepts()
    assert len(set(names)) == 67
    for one in scenes("test", 200):
        expected = {f"{thing.colour} {thing.shape}" for thing in one.things}
        assert len(expected) == len(one.things)  # all different
        expected |= {"drawing"} & {one.medium}
        expected |= {f"{one.light} picture"} - {"normal picture"}
        assert {names[concept] for concept in scene_concepts(one)} == expected
        assert len({thing.cell for thing in one.things}) == len(one.things)
        assert any({names.index(f"{t.colour} {t.shape}") for t in one.things} <= set(group) for group in groups(0))


def test_impossible_pairs_are_in_no_picture():
    never = impossible_pairs(0)
    assert len(never) > 400
    for one in scenes("train", 3000):
        assert not never & set(combinations(scene_concepts(one), 2))
    assert impossible_pairs(1) != never


def test_shards_say_what_the_pictures_show(made):
    found = read_concept_shards(made / "compositions", 0)
    assert [found.splits.count(split) for split in ("train", "val", "test")] == [800, 200, 200]
    held, everyone = found.holdings(), [*scenes("train", 800), *scenes("val", 200), *scenes("test", 200)]
    assert [sorted(held[i]) for i in range(len(found))] == [scene_concepts(one) for one in everyone]
    drawn = np.asarray(render(everyone[0], 16)).astype(int)
    assert np.abs(np.asarray(found.images.open(0)).astype(int) - drawn).mean() < 12  # JPEG
    for concept, crops in enumerate(found.crops()):
        for crop in crops:
            one = everyone[crop.image]
            if concept >= 64:  # a setting: an empty corner
                for other in boxes(one, 16):
                    assert min(crop.box[2], other[2]) <= max(crop.box[0], other[0]) or min(
                        crop.box[3], other[3]
                    ) <= max(crop.box[1], other[1])
            else:
                [place] = [i for i, t in enumerate(one.things) if f"{t.colour} {t.shape}" == found.concepts[concept]]
                np.testing.assert_allclose(crop.box, boxes(one, 16)[place], atol=2e-3)


@pytest.mark.parametrize(("split", "k"), [("train", 2), ("test", 3)])
def test_the_lists_are_true_of_the_pictures(made, split, k):
    data = find_compositions(made / "compositions", split, k)
    everyone = [set(scene_concepts(one)) for one in scenes(split, len(data))]
    least = 8 if split == "train" else 2
    assert len(data.tuples) > (100 if k == 2 else 2)
    for row in [*data.tuples, *data.unseen]:
        expected = [i for i, mine in enumerate(everyone) if set(row.tolist()) <= mine]
        assert data.targets(row).tolist() == expected
        assert len(expected) >= least
    if k == 2:
        assert 200 < len(data.infeasible) <= 250
        assert {tuple(row) for row in data.infeasible.tolist()} <= impossible_pairs(0)


def test_the_unseen_setup_asks_for_other_pairs_of_the_same_concepts(made):
    train, val, test = (
        find_compositions(made / "compositions", one, setup="unseen") for one in ("train", "val", "test")
    )
    assert np.array_equal(train.tuples, val.tuples)
    assert not {tuple(row) for row in train.tuples.tolist()} & {tuple(row) for row in test.tuples.tolist()}
    assert set(test.tuples.ravel().tolist()) <= set(train.tuples.ravel().tolist())
    with pytest.raises(UserError, match="has no 5_cat_combinations"):
        find_compositions(made / "compositions", "test", 5)


def test_the_same_arguments_give_the_same_bytes(tmp_path):
    plan = dataclasses.replace(PLAN, compositions=48)
    for name, workers in (("one", 1), ("two", 2)):
        assert make(plan, tmp_path / name, workers)
    files = sorted(file for file in (tmp_path / "one").rglob("*") if file.is_file())
    assert len(files) > 10
    for file in files:
        other = tmp_path / "two" / file.relative_to(tmp_path / "one")
        assert hashlib.sha256(other.read_bytes()).digest() == hashlib.sha256(file.read_bytes()).digest()
