"""CUB-200-2011 with captions, in its published layout; and what is refused."""

import pytest

from probemb.data.captions.find import find_captions
from tests.world import save, shade, which

CLASSES = ["001.Black_footed_Albatross", "002.Laysan_Albatross", "003.Sooty_Albatross", "014.Indigo_Bunting"]
TRAIN, TEST = CLASSES[:3], CLASSES[3:]
PER_CLASS = 3


def names():
    """CLASS/NAME.jpg of every image."""
    return [f"{one}/{one[4:]}_{i:04d}_{100 * c + i}.jpg" for c, one in enumerate(CLASSES) for i in range(PER_CLASS)]


@pytest.fixture
def cub(tmp_path):
    """CUB_200_2011, and the captions with their lists of classes beside it."""
    out = tmp_path / "cub"
    folder, texts = out / "CUB_200_2011", out / "cvpr2016_cub"
    for number, name in enumerate(names()):
        save(folder / "images" / name, shade(number))
        lines = [f"bird {number}, caption {c} ." for c in range(10)]
        save(texts / "text_c10" / name.replace(".jpg", ".txt"), "\n".join([*lines, "", ""]))
    save(folder / "images.txt", "".join(f"{number} {name}\n" for number, name in enumerate(names(), 1)))
    save(texts / "trainvalclasses.txt", "\n".join(TRAIN) + "\n")
    save(texts / "testclasses.txt", "\n".join(TEST) + "\n")
    save(texts / "trainclasses1.txt", "\n".join(TRAIN[:2]) + "\n")
    save(texts / "valclasses1.txt", TRAIN[2] + "\n")
    return out


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
