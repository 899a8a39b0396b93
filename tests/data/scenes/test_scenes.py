"""The synthetic world: the same from the same seed, distributed as stated, drawn as described, and its classes."""

import numpy as np

from probemb.data.scenes import render, scene
from probemb.data.scenes.world import COLOURS, MIDDLE, Scene, Thing


def test_the_sequence_of_scenes_stays_what_it_is():
    # Data that people have made must not change under them: Python guarantees random() for a text seed.
    assert scene("0 val", 7).to_json() == {
        "things": [["triangle", "yellow", "huge", 4]], "medium": "photo", "light": "dark", "focus": "sharp",
        "seed": 1726595376,
    }  # fmt: skip


RGB = {
    "red": (220, 30, 40), "orange": (240, 130, 30), "yellow": (240, 210, 40), "green": (40, 150, 60),
    "blue": (40, 80, 210), "purple": (140, 40, 170), "white": (245, 245, 245), "black": (20, 20, 20),
}  # fmt: skip


def test_objects_have_their_colour():
    for colour in COLOURS:
        one = Scene((Thing("circle", colour, "large", MIDDLE),), "photo", "normal", "sharp", seed=11)
        centre = np.asarray(render(one, 64), int)[28:36, 28:36].mean(axis=(0, 1))
        assert min(RGB, key=lambda name: np.abs(np.array(RGB[name]) - centre).sum()) == colour
