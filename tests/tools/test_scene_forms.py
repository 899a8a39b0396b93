"""`make_scenes --boxes`: the published forms, and that what they say is true of the pictures."""

import itertools
import re
from collections import Counter
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
from PIL import Image

from tools.make_scenes.captions import draw_captions
from tools.make_scenes.drawing import boxes, render
from tools.make_scenes.forms import CROP, FEATURES, REGIONS, choose_regions
from tools.make_scenes.world import COLOURS, SHAPES, scene


def share(box, other):
    """Share of a box that lies in another one."""
    width = max(0, min(box[2], other[2]) - max(box[0], other[0]))
    height = max(0, min(box[3], other[3]) - max(box[1], other[1]))
    return width * height / ((box[2] - box[0]) * (box[3] - box[1]))


def test_regions_are_crops_of_the_picture(boxed_scenes):
    folder = boxed_scenes / "regions"
    features = np.load(folder / "dev_ims.npy", allow_pickle=False)
    assert features.shape == (8, REGIONS, FEATURES)
    assert features.dtype == np.float32
    assert (folder / "dev_ids.txt").read_text().split() == [str(i) for i in range(8)]
    captions = (folder / "dev_caps.txt").read_text().splitlines()
    for i in range(8):
        one = scene("0 val", i)
        assert captions[5 * i : 5 * i + 5] == [caption.text for caption in draw_captions(one)]
        picture, regions, things = render(one, 48), choose_regions(one, 48), boxes(one, 48)
        assert {*things, (0, 0, 48, 48)} <= set(regions)
        assert len(set(regions)) == REGIONS
        for feature, box in zip(features[i], regions):
            crop = picture.resize((CROP, CROP), Image.Resampling.BILINEAR, box=box)
            np.testing.assert_allclose(feature[:-5], np.asarray(crop).ravel() / 127.5 - 1, atol=0.02)
            left, top, right, bottom = np.array(box) / 48
            placed = [left, top, right, bottom, (right - left) * (bottom - top)]
            np.testing.assert_allclose(feature[-5:], placed, atol=1e-3)
            if box not in things and box != (0, 0, 48, 48):
                assert sum(share(box, thing) for thing in things) < 0.6


def test_phrases_are_marked_in_the_captions(boxed_scenes):
    folder = boxed_scenes / "entities"
    types = Counter()
    for split, i in itertools.product(("val", "test"), range(8)):
        number, one = int((folder / f"{split}.txt").read_text().split()[i]), scene(f"0 {split}", i)
        lines = (folder / "Sentences" / f"{number}.txt").read_text().splitlines()
        root = ElementTree.parse(folder / "Annotations" / f"{number}.xml").getroot()
        placed = {}
        for row in root.iter("object"):
            box = row.find("bndbox")
            if box is not None:
                corners = [int(box.find(corner).text) for corner in ("xmin", "ymin", "xmax", "ymax")]
                for name in row.iter("name"):
                    placed.setdefault(name.text, []).append(corners)
        for line, caption in zip(lines, draw_captions(one), strict=True):
            plain = re.sub(r"\[/EN#\d+/\w+ ([^\]]+)\]", r"\1", line)
            assert plain.replace(" ,", ",").replace(" .", ".") == caption.text
            for number_of_phrase, kind, phrase in re.findall(r"\[/EN#(\d+)/(\w+) ([^\]]+)\]", line):
                types[kind] += 1
                check_phrase(kind, phrase, placed.get(number_of_phrase, []), one)
    assert set(types) == {"exact", "kind", "shape", "colour", "object", "scene"}


def check_phrase(kind, phrase, placed, one):
    """The boxes are those of as many objects as the phrase says, which have its shape and colour."""
    if kind == "scene":
        assert placed == []
        assert not set(phrase.split()) & set(SHAPES)
        return
    word = phrase.split()[0]
    number = {"two": 2, "three": 3, "several": None}.get(word, 1)
    assert len(placed) == number or (number is None and len(placed) > 1)
    spots = boxes(one, 48)
    for box in placed:
        left, top, right, bottom = box[0] - 1, box[1] - 1, box[2], box[3]  # whole pixels around the exact box
        close = [i for i, at in enumerate(spots) if np.abs(np.array(at) - [left, top, right, bottom]).max() < 1.001]
        assert len(close) == 1
        shape, colour = one.things[close[0]].shape, one.things[close[0]].colour
        assert not {w.removesuffix("s") for w in phrase.replace("crosses", "cross").split()} & (
            {w.removesuffix("s") for w in SHAPES} - {shape.removesuffix("s")}
        )
        assert not set(phrase.split()) & (set(COLOURS) - {colour})


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
