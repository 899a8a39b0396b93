"""Images with captions: Karpathy's json, precomp caption files, shards; and what is refused."""

import json

import numpy as np
import pytest

from probemb.data.captions.find import find_captions
from probemb.errors import UserError
from tests.world import save, shade, which
from tests.world import write_tar as write

TRAIN, VAL = "COCO_train2014_{:012d}.jpg", "COCO_val2014_{:012d}.jpg"
# file path, COCO id, split: as in dataset_coco.json, where restval lies in val2014
COCO = [
    ("train2014", 9, "train"), ("val2014", 391895, "test"), ("val2014", 42, "restval"), ("val2014", 73, "val"),
    ("train2014", 25, "train"), ("val2014", 60623, "test"),
]  # fmt: skip


def karpathy(rows=COCO):
    images = []
    for number, (folder, cocoid, split) in enumerate(rows):
        name = (TRAIN if folder == "train2014" else VAL).format(cocoid)
        told = [{"raw": f" caption {5 * number + c} ", "sentid": 5 * number + c, "tokens": []} for c in range(5)]
        images.append(
            {"filepath": folder, "filename": name, "cocoid": cocoid, "split": split, "imgid": number, "sentences": told}
        )
    return {"dataset": "coco", "images": images}


def save_images(folder, rows=COCO):
    for sub, cocoid, _ in rows:
        name = (TRAIN if sub == "train2014" else VAL).format(cocoid)
        save(folder / sub / name, shade(cocoid))
    return folder


@pytest.fixture
def coco(tmp_path):
    save_images(tmp_path / "coco")
    return save(tmp_path / "annotations" / "dataset_coco.json", karpathy())


@pytest.mark.parametrize(("split", "ids"), [("train", [9, 42, 25]), ("dev", [73]), (None, [row[1] for row in COCO])])
def test_splits_of_coco(coco, tmp_path, split, ids):
    found = find_captions(coco, split, tmp_path / "coco")
    assert found.image_ids == ids
    assert [which(found.images.open(i)) for i in range(len(found))] == [one % 65536 for one in ids]
    numbers = [[row[1] for row in COCO].index(one) for one in ids]
    assert found.caption_ids == [[5 * n + c for c in range(5)] for n in numbers]
    assert found.captions == [[f"caption {5 * n + c}" for c in range(5)] for n in numbers]
    assert find_captions(coco, split).captions == found.captions  # without its images
    assert found.truth is None
    assert found.split == ("val" if split == "dev" else split)
    assert (len(found), found.n_captions) == (len(ids), 5 * len(ids))
    assert found.flat() == [text for texts in found.captions for text in texts]
    assert found.owner() == [i for i in range(len(ids)) for _ in range(5)]


def test_an_image_that_occurs_twice_is_refused(tmp_path):
    content = karpathy()
    content["images"][1]["cocoid"] = content["images"][2]["cocoid"]
    with pytest.raises(UserError, match="two entries with the image id 42"):
        find_captions(save(tmp_path / "dataset_coco.json", content), "test")


def caps(folder, name, n=3, first=0, ids=None):
    lines = [f"caption {5 * (first + i) + c} ." for i in range(n) for c in range(5)]
    save(folder / f"{name}_caps.txt", "\n".join(lines) + "\n")
    if ids is not None:
        save(folder / f"{name}_ids.txt", "".join(f"{one}\n" for one in ids))
    return folder


def test_precomp_splits_and_coco_images(tmp_path):
    folder = caps(tmp_path / "precomp", "train", ids=[9, 25, 42])
    caps(folder, "testall", 2, ids=[391895, 60623])
    caps(folder, "test", 1, ids=[391895])
    caps(folder, "dev", 1, ids=[73] * 5)  # one id for each caption is common too
    save_images(tmp_path / "images")
    for data in (tmp_path, folder):  # the folder of SCAN, or the one around it
        for split, ids in [("train", [9, 25, 42]), ("test", [391895, 60623]), ("val", [73]), ("dev", [73])]:
            found = find_captions(data, split)
            assert found.image_ids == ids
            assert [which(found.images.open(i)) for i in range(len(found))] == [one % 65536 for one in ids]
            assert found.caption_ids is None
    assert find_captions(folder / "test_caps.txt", "test").image_ids == [391895]
    assert find_captions(folder, "testall").image_ids == [391895, 60623]


def test_annotation_ids_of_another_order_are_refused(tmp_path):
    caps(tmp_path, "coco_test", 1)
    ids = np.array([770337, 771687, 772707, 776154, 781998])
    np.save(tmp_path / "coco_test_ids.npy", ids)
    pytest.importorskip("eccv_caption")
    found = find_captions(tmp_path, "test")
    assert (found.image_ids, found.caption_ids) == ([391895], [ids.tolist()])
    np.save(tmp_path / "coco_test_ids.npy", np.array([770337, 771687, 772707, 776154, 152106]))
    with pytest.raises(UserError, match="is not a list of ids for 1 images"):
        find_captions(tmp_path, "test")


def pair(key, number, text=None, **meta):
    text = [(f"{key}.json", json.dumps(meta).encode())] if meta else [(f"{key}.txt", (text or f"text {key}").encode())]
    return [(f"{key}.png", shade(number)), *text]


def test_shards_named_by_split(tmp_path):
    for name, keys in [("train-0", "ab"), ("train-1", "c"), ("restval-0", "d"), ("val-0", "e"), ("test-0", "f")]:
        write(tmp_path / f"{name}.tar", [part for key in keys for part in pair(key, ord(key))])
    for split, keys in [("train", "dabc"), ("val", "e"), ("dev", "e"), ("test", "f"), ("restval", "d")]:
        found = find_captions(tmp_path, split)
        assert sorted(found.image_ids) == sorted(keys)
        assert [which(found.images.open(i)) for i in range(len(found))] == [ord(key) for key in found.image_ids]
        assert found.captions == [[f"text {key}"] for key in found.image_ids]
        assert found.caption_ids is None
    assert len(find_captions(tmp_path)) == 6
    assert find_captions(f"{tmp_path}/train-{{0..1}}.tar", "train").image_ids == ["a", "b", "c"]


def test_samples_that_cannot_be_used_are_named(tmp_path):
    members = [
        *pair("a", 1),
        ("b.txt", b"captions without an image"),
        ("c.png", shade(3)), ("c.txt", b" \n"),
        *pair("d", 4, captions=["x"], image_id="391895"),
        *pair("f", 6, captions=[{"id": "1", "caption": "x"}]),
        ("g.png", shade(7)),
        ("notes.json", b"[]"),
    ]  # fmt: skip
    found = find_captions(write(tmp_path / "a.tar", members))
    assert found.image_ids == ["a"]
    assert dict(found.images.bad) == {
        "c": "there is no caption",
        "d": "the image_id is not a whole number from 0 on",
        "f": "a caption id is not a whole number from 0 on",
        "g": "there is no caption",
    }
