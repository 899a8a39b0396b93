"""The command that writes the synthetic world: what it writes, twice the same, and what it leaves alone."""

import dataclasses
import hashlib
import shutil

import numpy as np
import pytest

from probemb.data.captions.find import find_captions
from probemb.data.images import decode_image
from probemb.data.words import find_vocabulary
from probemb.errors import UserError
from probemb.evaluation.embedding import exact_match, true_ambiguity
from tests.world import iterate_samples
from tools.make_scenes.captions import ambiguity, draw_captions, match_matrix
from tools.make_scenes.command import Plan, make
from tools.make_scenes.drawing import render
from tools.make_scenes.world import scene

PLAN = Plan(train=25, val=8, classes_images=24, size=32, shard_size=10, boxes=True)
SMALL_BY_CLASS = Plan(train=0, val=0, classes_images=0, size=16, class_captions=96)


def digests(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("made") / "deep" / "scenes"
    assert make(PLAN, out, workers=2)
    return out


def test_samples_are_scenes_with_true_captions(made):
    samples = list(iterate_samples(made / "train"))
    assert [sample.key for sample in samples] == [f"{i:08d}" for i in range(25)]
    for index, sample in enumerate(samples):
        captions = draw_captions(scene("0 train", index))
        assert [caption.text for caption in captions] == sample.captions
        assert len(captions) == 5
        drawn = np.asarray(render(scene("0 train", index), 32)).astype(int)
        stored = np.asarray(decode_image(sample.image)).astype(int)
        assert np.abs(drawn - stored).mean() < 8  # JPEG
        assert match_matrix([scene("0 train", index)], [caption.predicate for caption in captions]).all()


def test_the_truth_is_that_of_the_scenes_also_of_some(made):
    some, drawn = find_captions(made / "val").only([5, 2]), [scene("0 val", i) for i in (5, 2)]
    stated = [caption.predicate for one in drawn for caption in draw_captions(one)]
    np.testing.assert_array_equal(exact_match(some), match_matrix(drawn, stated))
    assert true_ambiguity(some).tolist() == [ambiguity(one) for one in stated]
    assert find_captions(made / "train").truth is None


@pytest.mark.parametrize("arrays", [None, {"matches": np.ones((8, 3), bool)}, {"images": np.array([{}], object)}])
def test_a_file_that_is_no_truth_is_refused(made, tmp_path, arrays):
    file = shutil.copytree(made / "val", tmp_path / "val") / "truth.npz"
    if arrays is None:
        file.write_bytes(b"PK\x03\x04 cut off")
    else:
        np.savez(file, **{**np.load(made / "val" / "truth.npz"), **arrays})
    with pytest.raises(UserError, match=r"truth\.npz is not the truth of images and captions"):
        find_captions(tmp_path / "val")


def test_the_same_arguments_give_the_same_bytes(made, tmp_path):
    assert make(PLAN, tmp_path / "again", workers=1)
    assert digests(tmp_path / "again") == digests(made)


def test_scenes_by_class(tmp_path):
    """48 classes in train and val, 16 others in test; every word of these was seen."""
    out = tmp_path / "scenes"
    assert make(SMALL_BY_CLASS, out, workers=1)
    found = {split: find_captions(out / "by-class", split) for split in ("train", "val", "test")}
    assert {split: len(one) for split, one in found.items()} == {"train": 96, "val": 12, "test": 24}
    train, test = set(found["train"].classes), set(found["test"].classes)
    assert (len(train), len(test)) == (48, 16)
    assert set(found["val"].classes) < train
    assert not train & test
    for place in (0, 1):  # colours, shapes
        assert {name.split()[place] for name in test} == {name.split()[place] for name in train}
    for one in found.values():
        assert all(name in captions[0] for name, captions in zip(one.classes, one.captions))
    assert find_vocabulary([out / "by-class"]) == out / "vocabulary.txt"
    assert not make(SMALL_BY_CLASS, out, workers=1)


def test_a_foreign_folder_and_other_arguments_are_refused(tmp_path):
    small, out = Plan(train=4, val=0, classes_images=0, size=16, shard_size=4), tmp_path / "out"
    make(small, out, workers=1)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.txt").write_text("mine")
    before = digests(tmp_path)
    for plan, folder in ((dataclasses.replace(small, seed=5), out), (small, tmp_path / "foreign")):
        with pytest.raises(UserError, match="already holds"):
            make(plan, folder, workers=1)
    assert digests(tmp_path) == before
