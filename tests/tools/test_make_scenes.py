"""The command that writes the synthetic world: what it writes, twice the same, and what it leaves alone."""

import dataclasses
import hashlib
import json
import re
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from probemb.data.captions.find import find_captions
from probemb.data.images import decode_image
from probemb.data.scenes import (
    class_label,
    class_names,
    match_matrix,
    render,
    sample_from_json,
    scene,
    sized_class_names,
)
from probemb.data.scenes.world import COLOURS, SHAPES
from probemb.data.shards.index import read_index
from probemb.data.words import find_vocabulary
from probemb.errors import UserError
from tests.shards import iterate_samples
from tests.truth import matches
from tools.make_scenes import Plan, make

PLAN = Plan(train=25, val=8, classes_images=70, size=32, shard_size=10)
SMALL_BY_CLASS = Plan(train=0, val=0, classes_images=0, size=16, class_captions=96)


def digests(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("made") / "deep" / "scenes"
    assert make(PLAN, out, workers=2)
    return out


def test_the_files(made):
    assert [(s.name, s.samples) for s in read_index(made / "train")] == [
        ("00000.tar", 10),
        ("00001.tar", 10),
        ("00002.tar", 5),
    ]
    assert sum(shard.samples for shard in read_index(made / "classes")) == 70
    assert (made / "classes" / "classes.txt").read_text().splitlines() == sized_class_names()
    assert [path.name for path in made.parent.iterdir()] == ["scenes"]  # nothing is left beside it


def test_samples_carry_the_truth(made):
    samples = list(iterate_samples([shard.path for shard in read_index(made / "train")]))
    assert [sample.key for sample in samples] == [f"{i:08d}" for i in range(25)]
    scenes, captions = [], []
    for index, sample in enumerate(samples):
        found, stated = sample_from_json(sample.meta)
        assert found == scene("0 train", index)
        assert [caption.text for caption in stated] == sample.captions
        assert len(stated) == 5
        drawn = np.asarray(render(found, 32)).astype(int)
        stored = np.asarray(decode_image(sample.image)).astype(int)
        assert np.abs(drawn - stored).mean() < 8  # JPEG
        scenes.append(found)
        captions += stated
    matrix = match_matrix(scenes, captions)
    assert all(matrix[i // 5, i] for i in range(len(captions)))
    assert matrix.tolist() == [[matches(caption, one) for caption in captions] for one in scenes]


def test_the_vocabulary_counts_the_training_captions(made):
    counts = Counter()
    for sample in iterate_samples(read_index(made / "train")):
        for caption in sample.captions:
            counts.update(re.findall(r"[a-z0-9]+(?:'[a-z]+)?", caption.lower()))
    rows = [line.split("\t") for line in (made / "vocabulary.txt").read_text().splitlines()]
    assert {word: int(count) for word, count in rows} == counts
    assert [int(count) for _, count in rows] == sorted(counts.values(), reverse=True)
    assert find_vocabulary([made / "train"]) == made / "vocabulary.txt"


def test_prompts_are_true_of_some_pictures_of_their_class_and_from_exact_to_vague(made):
    prompts = json.loads((made / "classes" / "prompts.json").read_text())
    assert [*prompts] == sized_class_names()
    assert {len(texts) for texts in prompts.values()} == {80}
    for name, texts in prompts.items():
        colour, shape = name.split()[1:]
        others = {*SHAPES, *COLOURS} - {colour, shape}
        assert not any(others & {*text.rstrip(".").split()} for text in texts)
        assert any(f"{colour} {shape}" in text for text in texts)
        assert any(colour not in text and shape not in text for text in texts)


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
        assert all(class_names()[class_label(scene)] == name for (scene, _), name in zip(one.scenes, one.classes))
    assert find_vocabulary([out / "by-class"]) == out / "vocabulary.txt"
    assert not make(SMALL_BY_CLASS, out, workers=1)


@pytest.mark.parametrize("spoil", ["arguments", "foreign", "cut"])
def test_anything_else_is_refused_and_left_alone(tmp_path, spoil):
    out = tmp_path / "out"
    small = Plan(train=4, val=0, classes_images=0, size=16, shard_size=4)
    if spoil == "foreign":
        out.mkdir()
        (out / "thesis.txt").write_text("mine")
    else:
        make(small, out, workers=1)
    if spoil == "cut":
        (out / "train" / "00000.tar").write_bytes(b"cut")
    before = digests(out)
    with pytest.raises(UserError, match="already holds"):
        make(dataclasses.replace(small, seed=5) if spoil == "arguments" else small, out, workers=1)
    assert digests(out) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_a_set_that_cannot_be_finished_never_appears(tmp_path):
    # The shell's limit on the size of a file ends the writing in the middle of a shard, as a full disk does.
    command = 'ulimit -f 40; exec "$0" -m tools.make_scenes "$1" --train 100 --workers 1'
    ended = subprocess.run(
        ["bash", "-c", command, sys.executable, str(tmp_path / "out")], capture_output=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    assert b"cannot be written" in ended.stderr
    assert list(tmp_path.iterdir()) == []
