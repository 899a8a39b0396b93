"""Scenes stay what they are; captions are true and say what their predicate says; matches and ambiguity are exact."""

import itertools
import re

import numpy as np
import pytest

from tools.make_scenes.captions import Pattern, Predicate, ambiguity, draw_captions, match_matrix
from tools.make_scenes.world import CAMERA, COLOURS, RELATIONS, SHAPES, Scene, Thing, scene

WORDS = {  # word -> the predicate's field and value that it stands for
    "photo": ("medium", "photo"),
    "drawing": ("medium", "drawing"),
    "sketch": ("medium", "drawing"),
    "doodle": ("medium", "drawing"),
    "dark": ("light", "dark"),
    "bright": ("light", "bright"),
    "blurry": ("focus", "blurry"),
    "pixelated": ("focus", "pixelated"),
    "resolution": ("focus", "pixelated"),
}


@pytest.fixture(scope="module")
def drawn():
    scenes = [scene("captions", i) for i in range(400)]
    return scenes, [draw_captions(one) for one in scenes]


def test_captions_go_from_exact_to_vague(drawn):
    shares = np.array([[ambiguity(caption.predicate) for caption in captions] for captions in drawn[1][:80]])
    assert (np.diff(np.median(shares, axis=0)) > 0).all()
    assert np.median(shares[:, 0]) < 0.002
    assert np.median(shares[:, -1]) > 0.2


def test_the_text_says_what_the_predicate_says(drawn):
    for caption in itertools.chain(*drawn[1]):
        stated, words = caption.predicate, re.findall(r"[a-z-]+", caption.text)
        assert sorted(word for word in words if word in COLOURS) == sorted(p.colour for p in stated.things if p.colour)
        singular = [re.sub(r"(?<=cross)es$|s$", "", word) if word != "cross" else word for word in words]
        assert sorted(w for w in singular if w in SHAPES) == sorted(p.shape for p in stated.things if p.shape)
        sizes = sorted({"big": "large", "close-up": "huge"}.get(word, word) for word in words)
        assert [w for w in sizes if w in ("small", "large", "huge")] == sorted(p.size for p in stated.things if p.size)
        said = {WORDS[word] for word in words if word in WORDS}
        assert said == {(n, getattr(stated, n)) for n in ("medium", "light", "focus") if getattr(stated, n)}
        assert [name for name in RELATIONS if name in caption.text] == ([stated.relation] if stated.relation else [])
        numbers = {"one": (1, 1), "two": (2, 2), "three": (3, 3), "several": (2, 3)}
        assert [numbers[word] for word in words if word in numbers] == ([stated.number] if stated.number else [])
        places = {"on the left": "left", "on the right": "right", "at the top": "top", "at the bottom": "bottom"}
        places["in the middle"] = "middle"
        assert [p for text, p in places.items() if text in caption.text] == [p.place for p in stated.things if p.place]


def special_captions():
    """Predicates that captions hardly ever state."""
    yield Predicate()
    for count in range(4):
        yield Predicate((Pattern("circle"),), number=(count, count))
    yield Predicate((Pattern(), Pattern(), Pattern()))
    yield Predicate((Pattern("circle"), Pattern("circle"), Pattern("circle")))
    for relation in RELATIONS:
        yield Predicate((Pattern(colour="red"), Pattern()), relation)
        yield Predicate((Pattern(size="large"), Pattern(place="left"), Pattern(size="small")), relation)
    yield Predicate((Pattern(place="middle"), Pattern()))
    yield Predicate((Pattern(place="left"), Pattern(place="right", size="large")), "above", light="dark")


def predicates(captions):
    return [caption.predicate for caption in itertools.chain(*captions)] + list(special_captions())


def matches(stated: Predicate, scene: Scene) -> bool:
    """True if the statement is true of the scene, object by object; independent of `match_matrix`."""
    if any(getattr(stated, name) not in (None, getattr(scene, name)) for name in CAMERA):
        return False
    if stated.number:
        low, high = stated.number
        return low <= sum(map(stated.things[0].fits, scene.things)) <= high
    holds = RELATIONS.get(stated.relation)
    return any(
        all(pattern.fits(thing) for pattern, thing in zip(stated.things, chosen))
        and (holds is None or holds(chosen[0].cell, chosen[1].cell))
        for chosen in itertools.permutations(scene.things, len(stated.things))
    )


def test_the_match_matrix_equals_matches(drawn):
    scenes, captions = drawn
    chosen = predicates(captions[:40])
    matrix = match_matrix(scenes[:150], chosen)
    assert matrix.dtype == bool
    expected = [[matches(stated, one) for stated in chosen] for one in scenes[:150]]
    np.testing.assert_array_equal(matrix, expected)


def test_ambiguity_is_the_share_of_scenes_that_fit(drawn):
    chosen = predicates(drawn[1][:25])
    total = 12_000
    found = match_matrix([scene("monte carlo", i) for i in range(total)], chosen).sum(axis=0)
    shares = np.array([ambiguity(stated) for stated in chosen])
    # Exact two-sided bounds for rare captions too: five standard deviations plus three scenes.
    bound = 5 * np.sqrt(total * shares * (1 - shares)) + 3
    assert (np.abs(found - total * shares) <= bound).all()
    assert ((shares >= 0) & (shares <= 1 + 1e-12)).all()
    assert (shares[: len(chosen) // 2] > 0).all()  # captions of scenes
    common = shares > 0.01
    assert common.sum() > 40
    assert np.abs(found / total - shares)[common].max() < 0.025


def test_the_sequence_of_scenes_stays_what_it_is():
    # Data that people have made must not change under them: Python guarantees random() for a text seed.
    things = (Thing("triangle", "yellow", "huge", 4),)
    assert scene("0 val", 7) == Scene(things, "photo", "dark", "sharp", seed=1726595376)
