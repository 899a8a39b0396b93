"""Shards with categories and boxes, published lists, composed scenes, and what is said where nothing is found."""

import gzip
import json

import pytest

from probemb.data.compositions.find import find_compositions, read_concept_shards
from tests.world import picture, write_tar

CATEGORIES = [{"id": 4, "name": "ring"}, {"id": 2, "name": "bear"}, {"id": 9, "name": "fox"}]
N = 24


def row(i, **more):
    """Images of 40 x 20, stored at half of that: all have a bear, two of three a ring, every third a fox."""
    boxes = [[2, [4.0, 4.0, 20.0, 8.0], 0], [2, [0.0, 0.0, 40.0, 20.0], 1]]
    return {
        "image_id": 1000 + i,
        "categories": [2] + [4] * (i % 3 != 0) + [9] * (i % 3 == 0),
        "size": [20, 10],
        "width": 40,
        "height": 20,
        "boxes": boxes + [[4, [10.0, 2.0, 4.0, 4.0]]] * (i % 3 != 0) + [[9, [0.0, 0.0, 0.3, 9.0], 0]] * (i % 3 == 0),
        **more,
    }


def folder_of(tmp_path, rows):
    (tmp_path / "categories.json").write_text(json.dumps(CATEGORIES))
    members = []
    for i, one in enumerate(rows):
        members += [(f"{i:04d}.png", picture((10 * i, 0, 0), (20, 10))), (f"{i:04d}.json", json.dumps(one).encode())]
    write_tar(tmp_path / "0.tar", members)
    return tmp_path


def test_boxes_are_those_of_the_stored_image(tmp_path):
    found = read_concept_shards(folder_of(tmp_path, [row(i) for i in range(6)]), 0)
    assert (found.concepts, found.number) == (("bear", "ring", "fox"), {2: 0, 4: 1, 9: 2})
    assert found.names == [str(1000 + i) for i in range(6)]
    bears, rings, foxes = found.crops
    assert list(bears) == [(i, (2.0, 2.0, 12.0, 6.0)) for i in range(6)]  # half the size, no groups
    assert [crop.image for crop in rings] == [1, 2, 4, 5]
    assert rings[0].box == (5.0, 1.0, 7.0, 3.0)
    assert len(foxes) == 0  # less than a pixel
    assert found.held[:3] == [[0, 2], [0, 1], [0, 1]]
    assert not found.notes


BAD = {
    "an id that is not there": row(1, categories=[7]),
    "an infinite box": row(1, boxes=[[2, [0, 0, float("inf"), 4], 0]]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_samples_are_left_out_and_named(tmp_path, case):
    found = read_concept_shards(folder_of(tmp_path, [row(0), BAD[case], row(2)]), 0)
    assert found.names == ["1000", "1002"]
    assert [name for name, _ in found.images.bad] == ["0001"]


def test_published_lists_are_used_as_far_as_the_images_have_them(tmp_path):
    folder = folder_of(tmp_path, [row(i) for i in range(N)])
    lists = tmp_path / "lists"
    lists.mkdir()

    def put(name, content):
        (lists / f"{name}.json.gz").write_bytes(gzip.compress(json.dumps(content).encode()))

    put("2_cat_combinations", [[4, 2], [4, 9]])
    put("2_cat_combinations_impossible", [[9, 4], [9, 2]])
    put("test_imgs", [1001, 1003, 1004, 77])
    cases = {
        "text_image": [{"images": [1003, 1004], "categories": [2, 4]}, {"images": [1003, 5], "categories": [2, 4]}],
        "image_image": [{"images": [1003, 1003], "categories": [2, 4]}],
    }
    put("2_test_cases", cases)
    data = find_compositions(folder, "test", lists=lists)
    assert [place.name for place in data.images.places] == ["0001", "0003", "0004"]
    assert [data.named(one) for one in data.tuples] == ["bear + ring"]
    assert [data.named(one) for one in data.infeasible] == []  # 'fox' has no crop; with 'bear' it is in images
    [query] = data.queries  # the second is not here, the third has no ring in its image
    assert [part.text for part in query.parts] == ["bear", None]
    assert query.parts[1][1:3] == (2, (5.0, 1.0, 7.0, 3.0))
    assert query.kind == "mixed"
    assert data.targets(query.concepts).tolist() == [0, 2]
    assert any("2 of 3 published queries are left out" in note for note in data.notes)
    assert any("1 of the 2 of 2_cat_combinations.json are left out" in note for note in data.notes)
    train, val = (find_compositions(folder, split, lists=lists) for split in ("train", "val"))
    assert (len(train), len(val), train.queries) == (16, 5, None)
