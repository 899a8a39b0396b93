"""CUB-200-2011 with captions, in its published layout; and what is refused."""

import pytest

from probemb.data.captions.find import find_captions
from tests.birds import TEST, TRAIN, names, write_cub


@pytest.fixture
def cub(tmp_path):
    return write_cub(tmp_path / "cub")


def which(image):
    return image.getpixel((3, 3))[0]


def test_splits_classes_and_images(cub):
    train, test = find_captions(cub, "train"), find_captions(cub, "test")
    assert (len(train), len(test), test.n_captions) == (9, 3, 30)
    assert sorted(set(train.classes)) == TRAIN
    assert test.classes == TEST * 3
    assert train.class_numbers() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert test.captions[1][3] == "bird 10, caption 3 ."
    assert test.image_ids[1] == names()[10].removesuffix(".jpg")
    assert [which(test.images.open(i)) for i in range(3)] == [9, 10, 11]
    assert find_captions(cub, "train1").classes == sorted(TRAIN[:2] * 3)
    assert set(find_captions(cub, "val1").classes) == {TRAIN[2]}
    assert find_captions(cub, "auto").split == "test"
    assert test.only([2, 0]).classes == TEST * 2
