"""The search page by keyboard alone, in light and dark, and its progress, in Chromium."""

import pytest

from tests.searching import gallery, searcher  # noqa: F401 - fixtures
from tests.searchpage import (  # noqa: F401 - fixtures
    CARDS,
    SETTLED,
    STATUS,
    browser,
    page,
    port,
    search_for,
)
from tests.world import run_folder  # noqa: F401 - a fixture

FOCUS = "(e => e.id || e.name || e.className || e.tagName)(document.activeElement)"
CARD = f"{CARDS}.indexOf(document.activeElement.closest('.card'))"
OUTLINE = "parseFloat(getComputedStyle(document.activeElement).outlineWidth)"


def tab(page, times=1, **more):  # noqa: F811
    for _ in range(times):
        page.press("Tab", **more)


def test_every_control_is_reached_and_seen(page):  # noqa: F811
    assert page.run(FOCUS) == "text"  # where one begins to type
    page.type("a red circle")
    page.press("Enter")
    page.wait(f"{SETTLED} && {CARDS}.length === 24")
    order = []
    for _ in range(16):
        assert page.run(OUTLINE) >= 3
        tab(page)
        order.append(page.run(FOCUS))
    assert order == [
        "add-text", "add-image", "go", "more", "query-limit", "item-limit", "save-csv", "save-json", "card", "frame",
        "SUMMARY", "quiet", "quiet", "quiet", "source", "quiet",
    ]  # fmt: skip
    assert page.run("document.activeElement.textContent") == "More results"  # one card is a stop, not all 24
    tab(page, 7, modifiers=8)
    assert page.run(FOCUS) == "card"


def test_arrows_lead_through_the_results(page):  # noqa: F811
    search_for(page, "a red circle")
    columns = page.run(f"{CARDS}.filter(c => c.offsetTop === {CARDS}[0].offsetTop).length")
    assert columns == 4
    page.press("ArrowDown")
    for key, place in (
        ("ArrowRight", 1), ("ArrowDown", 5), ("ArrowLeft", 4), ("End", 23), ("ArrowRight", 23), ("ArrowUp", 19),
        ("Home", 0), ("ArrowLeft", 0),
    ):  # fmt: skip
        page.press(key)
        assert page.run(CARD) == place, key
        assert page.run("document.activeElement.className") == "card"
    page.press("ArrowUp")
    assert page.run(FOCUS) == "text"
    page.press("ArrowDown")
    page.press("ArrowRight")
    page.press("Escape")
    assert page.run(FOCUS) == "text"
    tab(page, 3)
    page.press("/")
    assert page.run(FOCUS) == "text"
    assert page.run("document.activeElement.value") == "a red circle"


def test_a_result_is_searched_with_by_keyboard(page):  # noqa: F811
    search_for(page, "a red circle")
    page.press("ArrowDown")
    page.press("ArrowRight")
    tab(page)
    while page.run("document.activeElement.tagName") != "BUTTON":
        tab(page)
    page.press("Enter")
    page.wait(f"{SETTLED} && location.hash.includes('like=')")
    page.wait(f"{CARD} === 0")
    tab(page, 2, modifiers=8)
    while page.run(FOCUS) != "remove":
        tab(page, modifiers=8)
    page.press("Enter")
    assert page.run("document.querySelectorAll('.given').length") == 0
    assert page.run(FOCUS) == "text"


def test_more_results_keep_the_place(page):  # noqa: F811
    search_for(page, "a red circle")
    page.run("document.querySelector('#more button').focus()")
    page.press("Enter")
    page.wait(f"{CARDS}.length === 40")
    page.wait(f"{CARD} === 24")


def test_a_search_shows_its_progress_and_is_stopped(page, searcher):  # noqa: F811
    state = (
        "(p => [p.className, p.hasAttribute('value') ? p.value / p.max : null])(document.querySelector('#progress'))"
    )
    assert page.run(state)[0] == "idle"
    with searcher.encoder._one_at_a_time:  # as if another query took long
        page.click("#texts input")
        page.type("a red circle")
        page.press("Enter")
        page.wait(f"{STATUS}.textContent === 'Searching …'")
        assert page.run(state) == ["", None]
        page.press("Escape")
        page.wait(f"{STATUS}.textContent === 'The search was stopped.'")
        assert page.run(state)[0] == "idle"
        assert not page.run("document.querySelector('#go').disabled")
    page.press("Enter")
    page.wait(f"{CARDS}.length === 24")
    page.wait("document.querySelector('#progress').className === 'idle'")
    assert page.run(state)[1] == 1


CONTRAST = """(selector => {
  const light = c => c.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const luminance = c => light(c).reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const behind = node => {
    const colour = parse(getComputedStyle(node).backgroundColor);
    return colour[3] === 0 ? behind(node.parentElement) : colour.slice(0, 3);
  };
  return Math.min(...[...document.querySelectorAll(selector)].map(node => {
    const own = parse(getComputedStyle(node).color).slice(0, 3);
    const both = [luminance(own), luminance(behind(node))].sort((a, b) => b - a);
    return (both[0] + 0.05) / (both[1] + 0.05);
  }));
})"""
TEXTS = (
    "h1, #facts, .fine, .grow, input[type=text], button:not([disabled]), label, #status, .ends, .place, .numbers span"
)
TEXTS += ", .captions, summary, .key, .source, legend"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(scheme, page, tmp_path):  # noqa: F811
    page.prefer(scheme)
    try:
        search_for(page, "a red circle")
        shade = page.run("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert (max(shade) < 60) == (scheme == "dark")
        assert page.run(f"{CONTRAST}({TEXTS!r})") >= 4.5  # WCAG AA
        for kind in ("problem", "refused"):
            page.run(f"{STATUS}.className = '{kind}'")
            assert page.run(f"{CONTRAST}('#status')") >= 4.5
        page.screenshot(tmp_path / f"{scheme}.png")
    finally:
        page.prefer("light")
