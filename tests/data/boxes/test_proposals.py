"""Boxes: overlaps and windows against plain loops; proposals of a file, and what is refused."""

import gzip
import json

import numpy as np
import pytest
import torch

from probemb.data.boxes import grid_windows, iou, read_proposals, read_region_proposals
from probemb.errors import UserError
from tests.data.boxes.test_visual_genome import dataset


def pixels(box):
    return {(x, y) for x in range(int(box[0]), int(box[2])) for y in range(int(box[1]), int(box[3]))}


def test_iou_counts_pixels():
    r = torch.Generator().manual_seed(0)
    corners = torch.randint(0, 12, (14, 2, 2), generator=r).sort(dim=1).values  # some are empty
    boxes = corners.reshape(-1, 4).float()
    found = iou(boxes[:6], boxes[6:])
    for i, a in enumerate(boxes[:6].tolist()):
        for j, b in enumerate(boxes[6:].tolist()):
            both = pixels(a) | pixels(b)
            expected = len(pixels(a) & pixels(b)) / len(both) if both else 0.0
            assert found[i, j] == pytest.approx(expected, abs=1e-6)


def test_windows_cover_the_image_evenly():
    windows = grid_windows(80, 40, [0.5], [1.0], 0.5)
    assert len(windows) == 9
    assert set(windows) == {(x, y, x + 40, y + 20) for x in (0, 20, 40) for y in (0, 10, 20)}
    assert grid_windows(80, 40, [1.0], [1.0], 0.5) == [(0, 0, 80, 40)]
    wide = grid_windows(100, 100, [0.5], [4.0], 1.0)  # as wide as the image, a quarter as high
    assert wide == [(0, y, 100, y + 25) for y in (0, 25, 50, 75)]
    for box in grid_windows(97, 53, [0.3, 0.77, 1.0], [0.5, 1.0, 3.0], 0.37):
        assert 0 <= box[0] < box[2] <= 97.001
        assert 0 <= box[1] < box[3] <= 53.001


@pytest.fixture
def data():
    return dataset([("a", (0, 0, 40, 40))], [("b", (0, 0, 10, 10))])


def test_proposals_of_a_file(data, tmp_path):
    boxes = {"0": [[0, 0, 50.5, 50], [-10, 20, 30, 140], [200, 0, 240, 20]], "1": [[1, 2, 3, 4]], "other": 5}
    file = tmp_path / "proposals.json.gz"
    file.write_bytes(gzip.compress(json.dumps(boxes).encode()))
    found = read_proposals(file, data, None)
    assert found.boxes == [[(0, 0, 50.5, 50), (0, 20, 30, 100)], [(1, 2, 3, 4)]]
    assert (found.total, found.dropped) == (3, 1)
    assert read_proposals(file, data, 1).boxes == [[(0, 0, 50.5, 50)], [(1, 2, 3, 4)]]


@pytest.mark.parametrize("boxes", ["[0, 0, NaN, 5]", "[0, 0, 5], [0, 0, 5], [5, 9, 9], [0, 5, 5]", "[0, 0, 0, 5]"])
def test_malformed_boxes_are_refused(data, tmp_path, boxes):
    (tmp_path / "proposals.json").write_text(f'{{"0": [{boxes}], "1": [[0, 0, 5, 5]]}}')
    with pytest.raises(UserError, match=r"of proposals: .*image 0 has"):
        read_proposals(tmp_path / "proposals.json", data, None)


def write(folder, ids=("1", "x", "0")):
    """Three images of three proposals, of which the second has one and the third one outside."""
    boxes = np.zeros((3, 3, 4), np.float32)
    boxes[0, :] = [[0, 0, 10, 20], [-5, 5, 200, 50], [30, 40, 70, 80]]
    boxes[1, 0] = boxes[2, 0] = [1, 2, 3, 4.5]
    boxes[2, 1] = [300, 300, 400, 400]
    boxes[2, 2] = [0, 0, 100, 100]
    np.save(folder / "test_ims.npy", np.arange(3 * 3 * 5, dtype=np.float32).reshape(3, 3, 5))
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


def test_images_without_regions_are_named(data, tmp_path):
    with pytest.raises(UserError, match="no proposals for 1 of the 2 images, 0 for one"):
        read_region_proposals(write(tmp_path, ids=("7", "1", "8")), data, None)
