"""Weights of a query's parts and parts to leave out, in requests to the page's server and in Chromium."""

import json

import pytest

from tests.searching import gallery, searcher  # noqa: F401 - fixtures
from tests.searchpage import (  # noqa: F401 - fixtures
    CARDS,
    KEYS,
    SETTLED,
    STATE,
    STATUS,
    browser,
    open_page,
    page,
    port,
    post,
    reload,
    search_for,
)
from tests.world import run_folder  # noqa: F401 - a fixture
from tools.search.wish import QueryImage, Wish

SHOWN = "[...document.querySelectorAll('.weighing')].filter(w => w.offsetParent).length"
FEASIBLE = "document.querySelector('#feasible')"


def test_a_form_has_weights(port, searcher, gallery):  # noqa: F811
    fields = [("text", "a red circle"), ("text", " "), ("text", "a blue square"), ("like", f"{searcher.identity}/7")]
    weights = [1.0, -0.5, 2.0, 0.5]
    files = [("image", "x.jpg", gallery.jpegs[2])]
    status, answer = post(port, [*fields, *(("weight", str(one)) for one in weights)], files)
    images = [QueryImage("x.jpg", gallery.jpegs[2]), searcher.stored_image(7)]
    truth = searcher.answer(Wish(["a red circle", "a blue square"], images, top=24, weights=weights))
    assert status == 200
    assert answer["query"] == truth["query"]
    assert answer["feasibility"] == truth["feasibility"]
    assert [one["row"] for one in answer["results"]] == [one["row"] for one in truth["results"]]


@pytest.mark.parametrize(
    ("weights", "code", "what"),
    [
        (["x", "1"], 400, "no number"),
        (["", "1"], 400, "no number"),
        (["1"], 400, "2 parts and 1 weights"),
        (["1"] * 9, 400, "2 parts and 9 weights"),
        (["nan", "1"], 400, "is nan"),
        (["1e300", "1"], 400, "is 1e+300"),
        (["-1", "-1"], 400, "only what to leave out"),
        (["1", "-9"], 400, "Taking away part 2"),
        (["1"] * 100, 413, "too long"),
    ],
)
def test_weights_that_are_refused(port, weights, code, what):  # noqa: F811
    status, answer = post(port, [("text", "a"), ("text", "b"), *(("weight", one) for one in weights)])
    assert status == code
    assert what in answer["error"]
    assert answer["remedy"]


def test_parts_are_weighed_by_keyboard(page, searcher):  # noqa: F811
    search_for(page, "a red circle")
    assert page.run(SHOWN) == 0
    assert page.run(f"{FEASIBLE}.hidden")
    page.click("#add-text")
    page.type("a blue square")
    assert page.run(SHOWN) == 2
    page.press("Enter")
    page.wait(f"{SETTLED} && !{FEASIBLE}.hidden")
    plain = searcher.answer(Wish(["a red circle", "a blue square"], top=24))
    assert page.run(f"{FEASIBLE}.textContent") == plain["feasibility"]["says"]
    page.press("Tab")
    page.press("Tab")
    page.press(" ")
    assert page.run("document.activeElement.checked")
    page.press("Tab", modifiers=8)
    assert page.run("document.activeElement.value") == "0.5"  # a whole one often leaves no density
    page.press("ArrowDown")
    page.press("Enter")
    truth = searcher.answer(Wish(["a red circle", "a blue square"], top=24, weights=[1, -0.4]))
    keys = json.dumps([one["key"] for one in truth["results"]], separators=(",", ":"))
    assert truth["results"] != plain["results"]
    page.wait(f"JSON.stringify({KEYS}) === {json.dumps(keys)}")
    assert page.run(f"{FEASIBLE}.hidden")  # one part alone is wanted
    assert page.run("location.hash") == "#text=a+red+circle&text=a+blue+square&weight=1&weight=-0.4"
    reload(page)
    page.wait(f"JSON.stringify({KEYS}) === {json.dumps(keys)}")
    assert page.run("[...document.querySelectorAll('.without')].map(b => b.checked)") == [False, True]
    page.click("#texts .remove")  # what is left is searched for, whatever was said of its weight
    assert page.run(SHOWN) == 0


def test_screen_readers_hear_what_the_controls_are(page):  # noqa: F811
    page.click("#add-text")
    page.call("Accessibility.enable")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    told = [(node["role"]["value"], node["name"]["value"]) for node in nodes if "name" in node and "role" in node]
    assert told.count(("spinbutton", "Weight of this text")) == 2
    assert told.count(("checkbox", "without this text")) == 2
    page.resize(360, 740)
    assert page.run("document.documentElement.scrollWidth") <= 360


def test_pictures_have_weights_too(page, searcher, gallery, tmp_path):  # noqa: F811
    (tmp_path / "x.jpg").write_bytes(gallery.jpegs[5])
    like = f"like={searcher.identity}/7"
    page.run(f"location.hash = '#text=a+red+circle&{like}&pictures=1&weight=2&weight=-0.4&weight=0.7'")
    page.wait(f"{STATUS}.textContent.startsWith('This query includes an uploaded picture')")
    page.choose_files("#file", tmp_path / "x.jpg")
    page.wait(f"{SHOWN} === 3")
    page.click("#go")
    images = [QueryImage("x.jpg", gallery.jpegs[5]), searcher.stored_image(7)]
    truth = searcher.answer(Wish(["a red circle"], images, top=24, weights=[2, -0.4, 0.7]))
    keys = json.dumps([one["key"] for one in truth["results"]], separators=(",", ":"))
    page.wait(f"JSON.stringify({KEYS}) === {json.dumps(keys)}")
    assert page.run(f"{FEASIBLE}.textContent") == truth["feasibility"]["says"]
    assert page.run("document.querySelectorAll('.given.left-out').length") == 1


def test_what_cannot_be_taken_away_is_said(page):  # noqa: F811
    page.run("location.hash = '#text=a&text=b&weight=1&weight=-9'")
    page.wait(f"{STATUS}.className === 'problem'")
    assert "Taking away part 2 of the query leaves no density" in page.run(f"{STATUS}.textContent")
    page.complaints.clear()  # Chromium's own line about the 400
    for hostile in ("weight=%3Cb%3E&weight=NaN", "weight=1e999&weight=0", "weight=&weight="):
        page.run(f"location.hash = '#text=a&text=b&{hostile}'")
        page.wait(f"{SETTLED} && {CARDS}.length === 24")
        assert page.run("[...document.querySelectorAll('.size')].map(s => s.value)") == ["1", "1"]


def test_a_composer_without_weights_shows_none(page):  # noqa: F811
    page.run(f"{STATE}.then(s => {{ s.index.weighs = false }})")
    page.click("#add-text")
    page.type("a blue square")
    assert page.run(SHOWN) == 0
