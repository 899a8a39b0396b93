"""`make_scenes --boxes`: the published forms, and that what they say is true of the pictures."""

import hashlib
import json
import re
from collections import Counter
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from probemb.data.scenes import boxes, render, sample_from_json, scene
from probemb.data.scenes.world import COLOURS, SHAPES
from tools.make_scenes import Plan, is_finished, make
from tools.scene_forms import BACKGROUND, CROP, FEATURES, REGIONS, WHOLE

PLAN = Plan(train=20, val=12, classes_images=70, size=48, shard_size=10, boxes=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("made") / "scenes"
    assert make(PLAN, out, workers=1)
    return out


def known(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def share(box, other):
    """Share of a box that lies in another one."""
    width = max(0, min(box[2], other[2]) - max(box[0], other[0]))
    height = max(0, min(box[3], other[3]) - max(box[1], other[1]))
    return width * height / ((box[2] - box[0]) * (box[3] - box[1]))


@pytest.mark.parametrize("split", ["train", "dev", "test"])
def test_regions_are_crops_of_the_picture(made, split):
    features = np.load(made / "regions" / f"{split}_ims.npy", allow_pickle=False)
    rows = known(made / "regions" / f"{split}_scenes.jsonl")
    assert features.shape == (20 if split == "train" else 12, REGIONS, FEATURES)
    assert features.dtype == np.float32
    assert len(rows) == len(features)
    assert (made / "regions" / f"{split}_ids.txt").read_text().split() == [str(i) for i in range(len(rows))]
    captions = (made / "regions" / f"{split}_caps.txt").read_text().splitlines()
    for i, row in enumerate(rows):
        found, stated = sample_from_json(row)
        assert found == scene(f"0 {dict(dev='val').get(split, split)}", i)
        assert captions[5 * i : 5 * i + 5] == [caption.text for caption in stated]
        picture = render(found, 48)
        assert sorted(row["objects"]) == sorted([*range(len(found.things)), WHOLE] + [-2] * (5 - len(found.things)))
        for feature, box, what in zip(features[i], row["regions"], row["objects"]):
            crop = picture.resize((CROP, CROP), Image.Resampling.BILINEAR, box=box)
            np.testing.assert_allclose(feature[:-5], np.asarray(crop).ravel() / 127.5 - 1, atol=0.02)
            left, top, right, bottom = np.array(box) / 48
            np.testing.assert_allclose(
                feature[-5:], [left, top, right, bottom, (right - left) * (bottom - top)], atol=1e-3
            )
            if what >= 0:
                assert box == row["boxes"][what]
            if what == BACKGROUND:
                assert sum(share(box, thing) for thing in row["boxes"]) < 0.6


def test_phrases_are_marked_in_the_captions(made):
    rows = {row["image_id"]: row for row in known(made / "entities" / "scenes.jsonl")}
    listed = [int(line) for split in ("val", "test") for line in (made / f"entities/{split}.txt").read_text().split()]
    assert listed == list(rows)
    types = Counter()
    for number, row in rows.items():
        lines = (made / "entities" / "Sentences" / f"{number}.txt").read_text().splitlines()
        root = ElementTree.parse(made / "entities" / "Annotations" / f"{number}.xml").getroot()
        placed = {}
        for one in root.iter("object"):
            box = one.find("bndbox")
            if box is not None:
                corners = [int(box.find(corner).text) for corner in ("xmin", "ymin", "xmax", "ymax")]
                for name in one.iter("name"):
                    placed.setdefault(name.text, []).append(corners)
        for line, caption in zip(lines, row["captions"], strict=True):
            plain = re.sub(r"\[/EN#\d+/\w+ ([^\]]+)\]", r"\1", line)
            assert plain.replace(" ,", ",").replace(" .", ".") == caption
            for number_of_phrase, kind, phrase in re.findall(r"\[/EN#(\d+)/(\w+) ([^\]]+)\]", line):
                types[kind] += 1
                check_phrase(kind, phrase, placed.get(number_of_phrase, []), row)
    assert set(types) == {"exact", "kind", "shape", "colour", "object", "scene"}


def check_phrase(kind, phrase, placed, row):
    """The boxes are those of as many objects as the phrase says, which have its shape and colour."""
    if kind == "scene":
        assert placed == []
        assert not set(phrase.split()) & set(SHAPES)
        return
    word = phrase.split()[0]
    number = {"two": 2, "three": 3, "several": None}.get(word, 1)
    assert len(placed) == number or (number is None and len(placed) > 1)
    things, spots = row["scene"]["things"], row["boxes"]
    for box in placed:
        left, top, right, bottom = box[0] - 1, box[1] - 1, box[2], box[3]  # whole pixels around the exact box
        close = [i for i, at in enumerate(spots) if np.abs(np.array(at) - [left, top, right, bottom]).max() < 1.001]
        assert len(close) == 1
        shape, colour = things[close[0]][:2]
        assert not {w.removesuffix("s") for w in phrase.replace("crosses", "cross").split()} & (
            {w.removesuffix("s") for w in SHAPES} - {shape.removesuffix("s")}
        )
        assert not set(phrase.split()) & (set(COLOURS) - {colour})


def test_regions_of_visual_genome_describe_their_object(made):
    rows = json.loads((made / "visual_genome" / "region_descriptions.json").read_text())
    sizes = json.loads((made / "visual_genome" / "image_data.json").read_text())
    truth = {row["image_id"]: row for row in known(made / "visual_genome" / "scenes.jsonl")}
    assert [row["id"] for row in rows] == [one["image_id"] for one in sizes] == list(range(1, 13))
    ids = [region["region_id"] for row in rows for region in row["regions"]]
    assert len(set(ids)) == len(ids)
    for row in rows:
        things = truth[row["id"]]["scene"]["things"]
        assert 2 <= len(row["regions"]) == len(things)
        assert Image.open(made / "visual_genome" / "VG_100K" / f"{row['id']}.jpg").size == (48, 48)
        for region, (shape, colour, size, _), box in zip(row["regions"], things, truth[row["id"]]["boxes"]):
            assert region["phrase"] == f"a {size} {colour} {shape}"
            left, top = region["x"], region["y"]
            found = [left, top, left + region["width"], top + region["height"]]
            assert np.abs(np.array(found) - box).max() < 1.001


def test_classes_in_the_form_of_cub(made):
    folder = made / "cub"
    lists = {name: dict(line.split(" ", 1) for line in (folder / f"{name}.txt").read_text().splitlines()) for name in
             ("images", "classes", "image_class_labels", "bounding_boxes", "train_test_split")}  # fmt: skip
    assert len(lists["images"]) == 70
    assert len(lists["classes"]) == 64
    trained, held = ((folder / f"{name}.txt").read_text().split() for name in ("trainvalclasses", "testclasses"))
    assert sorted(trained + held) == list(lists["classes"].values())
    assert len(held) == 16
    for words in (SHAPES, COLOURS):  # nothing that a held-out class is made of is new
        for word in words:
            assert sum(word in name.split(".")[1].split("_") for name in held) == 2
    for number, name in lists["images"].items():
        kind = name.split("/")[0]
        assert lists["classes"][lists["image_class_labels"][number]] == kind
        assert lists["train_test_split"][number] == str(int(kind in trained))
        assert (folder / "images" / name).is_file()
        captions = (folder / "text_c10" / name.replace(".jpg", ".txt")).read_text().splitlines()
        assert len(captions) == 10
        colour, shape = kind.split(".")[1].split("_")
        words = {word for caption in captions for word in re.findall(r"\w+", caption)}
        assert {colour, shape} <= words
        assert not words & (set(COLOURS) - {colour})


def test_boxes_are_where_the_pixels_of_an_object_are():
    """A picture with the object in another colour differs in the box alone, up to its sides."""
    for i in range(12):
        one = replace(scene("boxes", i), medium="photo", focus="sharp", light="normal")
        for number, thing in enumerate(one.things):
            other = "blue" if thing.colour != "blue" else "yellow"
            things = tuple(replace(t, colour=other) if t is thing else t for t in one.things)
            pair = [np.asarray(render(x, 120)).astype(int) for x in (one, replace(one, things=things))]
            rows, columns = np.nonzero(np.abs(pair[0] - pair[1]).max(axis=2) > 24)
            seen = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            assert np.abs(np.array(boxes(one, 120)[number]) - seen).max() < 2.5


def test_the_same_arguments_give_the_same_forms(made, tmp_path):
    small = Plan(train=3, val=2, classes_images=2, size=24, boxes=True)
    for name, workers in (("one", 1), ("two", 2)):
        make(small, tmp_path / name, workers)
    digests = []
    for name in ("one", "two"):
        files = sorted(file for file in (tmp_path / name).rglob("*") if file.is_file())
        digests.append([(f.relative_to(tmp_path / name), hashlib.sha256(f.read_bytes()).digest()) for f in files])
    assert digests[0] == digests[1]
    assert is_finished(small, tmp_path / "one")
    assert not is_finished(Plan(train=3, val=2, classes_images=2, size=24), tmp_path / "one")
