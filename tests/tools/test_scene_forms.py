"""`make_scenes --boxes`: the published forms, and that what they say is true of the pictures."""

import re
from dataclasses import replace

import numpy as np
from PIL import Image

from probemb.data.boxes import find_phrases
from tools.make_scenes.captions import draw_captions
from tools.make_scenes.drawing import boxes, render
from tools.make_scenes.forms import CROP, FEATURES, REGIONS, choose_regions
from tools.make_scenes.world import COLOURS, SHAPES, scene


def common(a, b):
    """The area that two boxes share."""
    return np.prod(np.clip(np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2]), 0, None))


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
                assert sum(common(box, thing) for thing in things) < 0.6 * common(box, box)


def test_phrases_are_in_the_captions_and_have_boxes(boxed_scenes):
    kinds, folder = set(), boxed_scenes / "entities"
    for split in ("val", "test"):
        data = find_phrases(folder, split)
        drawn = [scene(f"0 {split}", i) for i in range(8)]
        for one, number in zip(drawn, (folder / f"{split}.txt").read_text().split(), strict=True):
            lines = (folder / "Sentences" / f"{number}.txt").read_text().splitlines()
            for line, caption in zip(lines, draw_captions(one), strict=True):
                plain = re.sub(r"\[/EN#\d+/\w+ ([^\]]+)\]", r"\1", line)
                assert plain.replace(" ,", ",").replace(" .", ".") == caption.text
                of_scene = " ".join(re.findall(r"\[/EN#\d+/scene ([^\]]+)\]", line))
                assert not set(of_scene.split()) & set(SHAPES)
        assert data.without_box > 0  # of the scene, not of objects
        for phrase in data.phrases:
            one = drawn[phrase.image]
            assert any(phrase.text in caption.text for caption in draw_captions(one))
            check_phrase(phrase, one)
            kinds.add(phrase.kind)
    assert kinds == {"exact", "kind", "shape", "colour", "object"}


def check_phrase(phrase, one):
    """The boxes are those of as many objects as the phrase says, which have its shape and colour."""
    words, spots = phrase.text.split(), boxes(one, 48)
    number = {"two": 2, "three": 3, "several": None}.get(words[0], 1)
    assert len(phrase.boxes) == number or (number is None and len(phrase.boxes) > 1)
    said = {word.replace("crosses", "cross").removesuffix("s") for word in words}
    for box in phrase.boxes:  # whole pixels around the exact box
        close = [i for i, at in enumerate(spots) if np.abs(np.array(at) - box).max() < 1.001]
        assert len(close) == 1
        thing = one.things[close[0]]
        assert not said & {shape.removesuffix("s") for shape in SHAPES if shape != thing.shape}
        assert not set(words) & (set(COLOURS) - {thing.colour})


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
