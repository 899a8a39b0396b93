"""The search page in a real headless Chromium: queries, results, and what it says."""

import json
import time

import pytest
from PIL import Image

from tests.searching import BACKWARDS, EVIL, MARKUP, N, gallery, searcher  # noqa: F401 - fixtures
from tests.searchpage import (  # noqa: F401 - fixtures
    CARDS,
    PICTURES_ARE_THERE,
    SETTLED,
    STATE,
    STATUS,
    UPLOAD,
    browser,
    open_page,
    page,
    port,
    search_for,
    serving,
)
from tests.webserver import serve as serve_folder
from tests.world import run_folder  # noqa: F401 - a fixture
from tools.search.wish import QueryImage, Wish


def test_a_text_is_searched(page, searcher, tmp_path):  # noqa: F811
    search_for(page, "a red circle")
    answer = searcher.answer(Wish(["a red circle"], top=24))
    assert page.run(f"{CARDS}.map(c => c.querySelector('.key').textContent)") == [r["key"] for r in answer["results"]]
    first = answer["results"][0]
    match = f"1.match {100 * first['match']:.1f} %, {int(N * first['match'])}."
    assert page.run(f"{CARDS}[0].querySelector('.place').textContent").startswith(match)
    numbers = f"distance {first['distance']:#.4g}uncertainty {first['uncertainty']:#.4g}"
    assert page.run(f"{CARDS}[0].querySelector('.numbers').textContent") == numbers
    assert f"{answer['query']['uncertainty']:#.4g}" in page.run(f"{STATUS}.textContent")
    page.wait(PICTURES_ARE_THERE)
    page.screenshot(tmp_path / "page.png")
    assert Image.open(tmp_path / "page.png").size[0] == 1280


def test_more_results(page):  # noqa: F811
    search_for(page, "a red circle")
    first = page.run(f"{CARDS}.map(c => c.querySelector('.key').textContent)")
    page.click("#more button")
    page.wait(f"{CARDS}.length === {N}")
    assert page.run(f"{CARDS}.map(c => c.querySelector('.key').textContent)")[:24] == first
    assert page.run("document.querySelector('#more').hidden")


def test_hostile_captions_are_shown_as_text(page):  # noqa: F811
    for caption in (EVIL, MARKUP, BACKWARDS):
        search_for(page, caption[:100])
    told = []
    for text in ("anything", "a shape", "red", "blue star", "three objects", "a small ring"):
        search_for(page, text)
        told += page.run("[...document.querySelectorAll('.captions')].map(c => c.textContent)")
    assert EVIL in told
    assert MARKUP in told
    assert page.run("document.title") == "Search"
    assert page.run("document.querySelectorAll('#results script, #results b b').length") == 0


def test_no_foreign_script_runs(browser, port):  # noqa: F811
    browser.open(f"http://127.0.0.1:{port}/")
    browser.complaints.clear()
    browser.run(
        "(() => { const s = document.createElement('script'); s.textContent = 'document.title = \"owned\"';"
        " document.body.append(s); const d = document.createElement('div');"
        " d.innerHTML = '<img src=/nothing onerror=\"document.title = 1\">'; document.body.append(d); })()"
    )
    time.sleep(0.3)
    assert browser.run("document.title") == "Search"
    assert any("Content Security Policy" in one for one in browser.complaints)


def test_images_and_several_texts(page, searcher, gallery, tmp_path):  # noqa: F811
    path = tmp_path / "<b>x&amp;.jpg"
    path.write_bytes(gallery.jpegs[5])
    page.choose_files("#file", path)
    page.wait("document.querySelector('.given img').complete")
    assert page.run("document.querySelector('.given img').alt") == path.name
    page.click("#add-text")
    page.type("a blue star")
    page.click("#go")
    page.wait(f"{SETTLED} && {STATUS}.textContent.includes('its parts')")
    answer = searcher.answer(Wish(["a blue star"], [QueryImage("x", gallery.jpegs[5])], top=24))
    assert page.run(f"{CARDS}.map(c => c.querySelector('.key').textContent)") == [r["key"] for r in answer["results"]]
    page.click(".given .remove")
    page.click("#texts .remove")
    assert page.run("document.querySelectorAll('.given, #texts .remove').length") == 0
    page.click("#go")
    page.wait(f"{STATUS}.className === 'problem'")
    assert "The query is empty" in page.run(f"{STATUS}.textContent")


def test_what_the_page_says_of_a_bad_upload(page, tmp_path):  # noqa: F811
    (tmp_path / "note.txt").write_text("no image")
    page.choose_files("#file", tmp_path / "note.txt")
    page.click("#go")
    page.wait(f"{STATUS}.className === 'problem'")
    assert "note.txt is not an image" in page.run(f"{STATUS}.textContent")
    (tmp_path / "large.jpg").write_bytes(bytes(UPLOAD))
    page.choose_files("#file", tmp_path / "large.jpg")
    page.wait(f"{STATUS}.textContent.includes('too large')")
    assert page.run("document.querySelectorAll('.given').length") == 1
    assert "Choose a smaller image" in page.run(f"{STATUS}.textContent")
    page.complaints.clear()  # Chromium's own line about the 400


@pytest.mark.parametrize("size", [UPLOAD + 100, UPLOAD + (3 << 20), 40 << 20])
def test_an_upload_that_only_the_server_knows_to_be_too_large(page, tmp_path, size):  # noqa: F811
    """As after it was started anew with a smaller --max-upload: Flask, waitress, or a broken connection refuse it."""
    with open(tmp_path / "large.jpg", "wb") as file:
        file.truncate(size)
    page.run(f"{STATE}.then(s => {{ s.about.max_upload = {1 << 30} }})")
    page.choose_files("#file", tmp_path / "large.jpg")
    page.wait("document.querySelectorAll('.given').length === 1")
    page.click("#go")
    page.wait(f"{STATUS}.className === 'problem'")
    said = "The upload is too large: the limit is 2 MiB. Choose a smaller image, or fewer parts."
    assert page.run(f"{STATUS}.textContent") == said
    page.click(".given .remove")
    search_for(page, "a red circle")
    assert page.run(f"{CARDS}.length") == 24
    page.complaints.clear()  # Chromium's own lines about the 413 or the connection


def test_a_server_that_has_gone(browser, searcher):  # noqa: F811
    with serving(searcher) as server:
        open_page(browser, f"http://127.0.0.1:{server.effective_port}/")
    browser.click("#texts input")
    browser.type("a red circle")
    browser.press("Enter")
    browser.wait(f"{STATUS}.textContent.startsWith('The server does not answer.')")


def test_the_page_fits_a_phone(page):  # noqa: F811
    page.resize(360, 740)
    search_for(page, "a red circle")
    assert page.run("document.documentElement.scrollWidth") <= 360


def test_a_form_of_another_site_is_refused_in_the_browser(browser, port, tmp_path):  # noqa: F811
    target = f"http://127.0.0.1:{port}/search"
    (tmp_path / "evil.html").write_text(
        f'<!doctype html><form action="{target}" method="post" enctype="multipart/form-data">'
        '<input name="text" value="a red circle"></form><script>document.forms[0].submit()</script>'
    )
    with serve_folder(tmp_path) as site:
        browser.call("Page.navigate", url=f"{site.address}/evil.html")
        browser.wait(f"location.href === {json.dumps(target)}")
        assert "comes from another site" in browser.wait("document.body?.innerText")
