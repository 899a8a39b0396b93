"""COCO's instances file: a small file set in the published layout, and hostile files."""

import pytest

from probemb.data.compositions.find import read_coco
from probemb.errors import UserError
from tests.world import picture, save

NAMES = {1: "person", 18: "dog", 44: "bottle"}
N = 24


def content():
    """Images 100, 101, ... of 20 x 10; the third one in three has no annotation."""
    ids = [100 + i for i in range(N)]
    objects = [
        (1, [2.0, 1.0, 8.0, 6.0], 0),
        (1, [12.0, 0.0, 20.0, 4.0], 0),  # reaches out of the image
        (18, [0.5, 0.5, 4.5, 4.5], 1),  # of half of the images a group
        (44, [3.0, 3.0, 0.2, 0.2], 0),  # less than a pixel
    ]
    annotations = [
        {"image_id": one, "category_id": category, "bbox": box, "iscrowd": crowd * (1 - one % 2)}
        for one in (one for one in ids if one % 3 != 0)
        for category, box, crowd in objects
    ]
    return {
        "images": [{"id": one, "file_name": f"{one:012d}.jpg", "width": 20, "height": 10} for one in ids],
        "categories": [{"id": one, "name": name} for one, name in NAMES.items()],
        "annotations": annotations,
    }


@pytest.fixture
def folder(tmp_path):
    save(tmp_path / "annotations" / "instances_train2017.json", content())
    for i in range(N):
        save(tmp_path / "train2017" / f"{100 + i:012d}.jpg", picture((10 * i, 0, 0), (20, 10)))
    return tmp_path


def test_images_concepts_and_crops(folder):
    found = read_coco(folder / "annotations" / "instances_train2017.json", None, 0)
    kept = [100 + i for i in range(N) if i % 3 != 2]
    assert found.names == [str(one) for one in kept]
    assert found.concepts == ("person", "dog", "bottle")
    assert [found.splits.count(one) for one in ("train", "val", "test")] == [10, 3, 3]
    assert found.held == [[0, 1, 2]] * len(kept)
    people, dogs, bottles = found.crops
    assert [crop.box for crop in people][:2] == [(2.0, 1.0, 10.0, 7.0), (12.0, 0.0, 20.0, 4.0)]
    assert dogs.images.tolist() == [row for row, one in enumerate(kept) if one % 2]  # no crops of groups
    assert len(bottles) == 0
    for row, one in enumerate(kept):
        image = found.images.open(row)
        assert image.size == (20, 10)
        assert image.getpixel((0, 0))[0] == 10 * (one - 100)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("images", {"width": 10**9}, "in image 1, an image has"),
        ("annotations", {"image_id": 7}, "in annotation 1, there is no 7"),
        ("annotations", {"bbox": [10**400, 2, 3, 4]}, "in annotation 1, int too large"),
    ],
)
def test_hostile_files_are_refused(folder, kind, change, message):
    file, broken = folder / "annotations" / "instances_train2017.json", content()
    broken[kind][0].update(change)
    save(file, broken)
    with pytest.raises(UserError, match=message):
        read_coco(file, None, 0)
