"""`make_scenes --compositions`: what the pictures hold is what is drawn, and the lists are true of them."""

import numpy as np

from probemb.data.compositions.find import find_compositions, read_concept_shards
from tools.make_scenes.compositions import CONCEPTS, composed_scene, groups, impossible_pairs, scene_concepts
from tools.make_scenes.drawing import boxes, render


def scenes(split, count):
    return [composed_scene(0, split, i) for i in range(count)]


def test_concepts_are_those_of_the_objects_and_the_camera():
    assert len(set(CONCEPTS)) == 67
    for one in scenes("test", 200):
        expected = {f"{thing.colour} {thing.shape}" for thing in one.things}
        assert len(expected) == len(one.things)  # all different
        expected |= {"drawing"} & {one.medium}
        expected |= {f"{one.light} picture"} - {"normal picture"}
        assert {CONCEPTS[concept] for concept in scene_concepts(one)} == expected
        assert len({thing.cell for thing in one.things}) == len(one.things)
        assert any({CONCEPTS.index(f"{t.colour} {t.shape}") for t in one.things} <= set(group) for group in groups(0))


def test_shards_say_what_the_pictures_show(composed_scenes):
    found = read_concept_shards(composed_scenes / "compositions", 0)
    assert [found.splits.count(split) for split in ("train", "val", "test")] == [800, 200, 200]
    everyone = [*scenes("train", 800), *scenes("val", 200), *scenes("test", 200)]
    assert found.held == [scene_concepts(one) for one in everyone]
    drawn = np.asarray(render(everyone[0], 32)).astype(int)
    assert np.abs(np.asarray(found.images.open(0)).astype(int) - drawn).mean() < 12  # JPEG
    for concept, crops in enumerate(found.crops):
        for crop in crops:
            one = everyone[crop.image]
            if concept >= 64:  # a setting: an empty corner
                for other in boxes(one, 32):
                    assert any(min(crop.box[i + 2], other[i + 2]) <= max(crop.box[i], other[i]) for i in (0, 1))
            else:
                [place] = [i for i, t in enumerate(one.things) if f"{t.colour} {t.shape}" == found.concepts[concept]]
                np.testing.assert_allclose(crop.box, boxes(one, 32)[place], atol=2e-3)


def test_enough_pairs_are_asked_for_and_pairs_of_one_place_are_impossible(composed_scenes):
    data = find_compositions(composed_scenes / "compositions", "train", 2)
    assert len(data.tuples) > 100
    assert 200 < len(data.infeasible) <= 250
    assert {tuple(row) for row in data.infeasible.tolist()} <= impossible_pairs(0)
