"""Proposals with their features: files that belong together, one image at a time, and what is refused."""

import numpy as np
import pytest

from probemb.data.boxes.proposals import read_region_proposals
from probemb.errors import UserError
from tests.data.boxes.test_visual_genome import dataset


@pytest.fixture
def data():
    return dataset([("a", (0, 0, 40, 40))], [("b", (0, 0, 10, 10))])


def write(folder, boxes=None, ids=("1", "x", "0"), features=None):
    """Three images of three proposals, of which the second has one and the third one outside."""
    if boxes is None:
        boxes = np.zeros((3, 3, 4), np.float32)
        boxes[0, :] = [[0, 0, 10, 20], [-5, 5, 200, 50], [30, 40, 70, 80]]
        boxes[1, 0] = boxes[2, 0] = [1, 2, 3, 4.5]
        boxes[2, 1] = [300, 300, 400, 400]
        boxes[2, 2] = [0, 0, 100, 100]
    features = np.arange(3 * 3 * 5, dtype=np.float32).reshape(3, 3, 5) if features is None else features
    np.save(folder / "test_ims.npy", features)
    np.save(folder / "test_boxes.npy", boxes)
    (folder / "test_ids.txt").write_text("".join(f"{one}\n" for one in ids))
    return folder / "test_ims.npy"


def test_each_image_has_its_own_boxes_and_features(data, tmp_path):
    found = read_region_proposals(write(tmp_path), data, None)
    assert found.boxes == [[(1, 2, 3, 4.5), (0, 0, 100, 100)], [(0, 0, 10, 20), (0, 5, 100, 50), (30, 40, 70, 80)]]
    assert found.rows == [[0, 2], [0, 1, 2]]
    assert (found.total, found.dropped) == (5, 1)
    assert found.features.open(0).tolist() == np.arange(30, 45).reshape(3, 5).tolist()  # image 0 is the last row
    assert found.features.open(1).tolist() == np.arange(15).reshape(3, 5).tolist()
    first = read_region_proposals(tmp_path / "test_ims.npy", data, 1)
    assert first.rows == [[0], [0]]


def _reversed():
    boxes = np.zeros((3, 3, 4), np.float32)
    boxes[:, 0] = [5, 0, 5, 9]
    return boxes


REFUSED = {
    "shape": ({"boxes": np.zeros((3, 2, 4), np.float32)}, r"its shape is \(3, 2, 4\), not \(3, 3, 4\)"),
    "objects": ({"boxes": np.full((3, 3, 4), None, object)}, "it holds Python objects"),
    "empty": ({"boxes": _reversed()}, "is empty or not finite"),
    "ids": ({"ids": ("0", "1")}, "3 rows, but test_ids.txt beside it 2 ids"),
    "other split": ({"ids": ("7", "1", "8")}, "no regions for 1 of the 2 images, 0 for one"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_do_not_belong_together(data, tmp_path, case):
    options, what = REFUSED[case]
    with pytest.raises(UserError, match=what):
        read_region_proposals(write(tmp_path, **options), data, None)
