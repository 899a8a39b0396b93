"""The sliders of the search page, and its choice between the closest one and all that fits, in Chromium."""

import dataclasses
import json
from pathlib import Path

from probemb.metrics import PrecisionCurve
from tests.searching import N, gallery, searcher  # noqa: F401 - fixtures
from tests.searchpage import (  # noqa: F401 - fixtures
    CARDS,
    SETTLED,
    STATUS,
    browser,
    open_page,
    page,
    port,
    search_for,
    serving,
)
from tests.world import run_folder  # noqa: F401 - a fixture
from tools.search.wish import Wish


def test_the_sliders(page):  # noqa: F811
    search_for(page, "a red circle")
    assert page.run(f"{CARDS}.length") == 24
    page.click("#query-limit")
    page.press("Home")
    page.wait(f"{STATUS}.className === 'refused'")
    assert page.run(f"{CARDS}.length") == 0
    assert "Not answered" in page.run(f"{STATUS}.textContent")
    page.press("End")
    page.wait(f"{CARDS}.length === 24")
    assert page.run("document.querySelector('#query-limit-value').textContent") == "any"
    page.click("#item-limit")  # in the middle
    page.wait(f"{SETTLED} && document.querySelector('#item-limit-value').textContent !== 'any'")
    limit = float(page.run("document.querySelector('#item-limit-value').textContent").removeprefix("up to "))
    shown = page.run(f"{CARDS}.map(c => Number(c.querySelector('.uncertainty').textContent.split(' ')[1]))")
    assert shown
    assert max(shown) <= limit + 1e-3
    page.press("Home")
    page.wait(f"{CARDS}.length <= 1")


def test_a_calibrated_page_says_what_a_setting_promises(browser, gallery, searcher):  # noqa: F811
    from tools.search.calibrating import calibrate
    from tools.search.query import Searcher

    calibration = dataclasses.replace(calibrate(searcher, str(gallery.tar), within=5), tests=None)  # as of format 1
    with serving(Searcher(searcher.index, searcher.encoder, calibration)) as server:
        open_page(browser, f"http://127.0.0.1:{server.effective_port}/")
        note = "document.querySelector('#query-limit-note').textContent"
        assert "This answers 100 % of the validation set's queries" in browser.run(note)
        assert "among the first 5 of 40 images" in browser.run(note)
        browser.click("#query-limit")
        alone = browser.run(note)
        assert "This answers" in alone
        assert "100 %" not in alone
        browser.click("#texts input")
        browser.type("a red circle")
        browser.click("#add-text")
        browser.type("a circle")
        assert "This answers" in browser.run(note)  # of queries of two texts
        assert browser.run(note) != alone
        browser.choose_files("#file", Path(__file__))
        browser.wait(f"{note} === 'A query above it is not answered.'")


def test_a_page_limits_by_the_calibrated_score_or_says_why_not(browser, gallery, searcher):  # noqa: F811
    from tools.search.calibration import BETTER, CHANCE
    from tools.search.calibration import Calibration as Made
    from tools.search.query import Searcher

    value = float(searcher.scores(searcher.encoder.embed(["a red circle"], []))["entropy"])
    curve = PrecisionCurve([value - 0.5, value - 0.1], [0.5, 1.0], [0.9, 0.8], [0.7, 0.6], 100)
    tests = {1: {"entropy": {"gain": 0.3, "se": 0.02, "verdict": BETTER}},
             2: {"entropy": {"gain": 0.1, "se": 0.2, "verdict": CHANCE}}}  # fmt: skip
    calibration = Made("text", {1: curve, 2: curve}, "", "data", N, "validation", 1, "entropy", tests)
    with serving(Searcher(searcher.index, searcher.encoder, calibration)) as server:
        open_page(browser, f"http://127.0.0.1:{server.effective_port}/")
        note = "document.querySelector('#query-limit-note').textContent"
        assert "at least 60 % of those find the right one" in browser.run(note)
        assert "how evenly" in browser.run(note)
        assert browser.run("document.querySelector('#query-limit-name').textContent") == (
            "Tolerated evenness of the matches"
        )
        search_for(browser, "a red circle")
        assert f"Evenness of the matches: {value:#.4g}" in browser.run(f"{STATUS}.textContent")
        browser.click("#query-limit")  # the middle of the range, below this query's
        browser.click("#go")
        browser.wait(f"{STATUS}.textContent.startsWith('Not answered: its evenness of the matches of')")
        browser.click("#add-text")
        browser.type("a circle")
        assert "promised" in browser.run(note)
        assert browser.run("document.querySelector('#query-limit-name').textContent") == (
            "Tolerated uncertainty of the query"
        )


def test_all_that_fits_is_chosen_by_the_keyboard(browser, gallery, tmp_path):  # noqa: F811
    from tools.search.command import open_searcher, parse

    options = ["--serve", "--index", str(gallery.images), "--device", "cpu", "--tolerance", "-2"]
    fitting = open_searcher(parse(options))
    with serving(fitting) as server:
        browser.open("about:blank")
        browser.complaints.clear()
        open_page(browser, f"http://127.0.0.1:{server.effective_port}/")
        search_for(browser, "a red circle")
        shown = f"{CARDS}.map(c => c.querySelector('.key').textContent)"
        for fits, key in ((False, None), (True, "ArrowRight"), (False, "ArrowLeft")):
            if key:
                browser.run("document.querySelector('#fits input:checked').focus()")
                browser.press(key)
            want = [r["key"] for r in fitting.answer(Wish(["a red circle"], top=24, fits=fits))["results"]]
            browser.wait(f"JSON.stringify({shown}) === {json.dumps(json.dumps(want, separators=(',', ':')))}")
        browser.screenshot(tmp_path / "fits.png")
        assert browser.complaints == []
