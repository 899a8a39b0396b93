"""The search page in a real headless Chromium: a dozen things that people do with it."""

import json
import time

from PIL import Image

from tests.searching import BACKWARDS, EVIL, MARKUP, N, open_searcher
from tests.searchpage import CARDS, KEYS, SETTLED, STATUS, UPLOAD, open_page, reload, search_for, serving
from tests.webserver import serve as serve_folder
from tools.search.query import QueryImage, SearchRequest

TEXT = "document.querySelector('[name=text]').value"


def keys_of(searcher, *args, **more):
    return [one["key"] for one in searcher.answer(SearchRequest(*args, top=24, **more))["results"]]


def wait_for_keys(page, keys):
    page.wait(f"{SETTLED} && JSON.stringify({KEYS}) === {json.dumps(json.dumps(keys, separators=(',', ':')))}")


def test_a_text_is_searched(page, searcher, tmp_path):
    search_for(page, "a red circle")
    answer = searcher.answer(SearchRequest(["a red circle"], top=24))
    assert page.run(KEYS) == [one["key"] for one in answer["results"]]
    first = answer["results"][0]
    match = f"1. match {100 * first['match']:.1f} %, {int(N * first['match'])}."
    assert page.run(f"{CARDS}[0].querySelector('.place').textContent").startswith(match)
    numbers = f"distance {first['distance']:#.4g}, uncertainty {first['uncertainty']:#.4g}"
    assert page.run(f"{CARDS}[0].querySelector('.numbers').textContent") == numbers
    assert f"{answer['query']['uncertainty']:#.4g}" in page.run(f"{STATUS}.textContent")
    page.wait("[...document.querySelectorAll('.frame img')].filter(i => i.naturalWidth === 32).length === 24")
    page.screenshot(tmp_path / "page.png")
    assert Image.open(tmp_path / "page.png").size[0] == 1280
    page.resize(360, 740)  # a phone
    assert page.run("document.documentElement.scrollWidth") <= 360
    page.click("#more button")
    page.wait(f"{CARDS}.length === {N}")
    assert page.run("document.querySelector('#more').hidden")


def test_hostile_texts_are_shown_as_text(page, searcher):
    for text in (EVIL, MARKUP, BACKWARDS):
        search_for(page, text[:100])
    page.click("#more button")
    page.wait(f"{CARDS}.length === {N}")
    told = page.run("[...document.querySelectorAll('.captions')].map(c => c.textContent)")
    assert EVIL in told
    assert MARKUP in told
    assert page.run("document.title") == "Search"
    assert page.run("document.querySelectorAll('#results script, #results b b').length") == 0
    links = page.run("[...document.querySelectorAll('.source')].map(a => [a.href, a.rel, a.target, a.textContent])")
    assert len(links) == N - 4  # the others are no addresses of the web
    assert [link[1:] for link in links] == [["noopener noreferrer", "_blank", "photos.example"]] * len(links)


def test_no_foreign_script_runs(browser, port):
    open_page(browser, f"http://127.0.0.1:{port}/")
    browser.complaints.clear()
    browser.run(
        "(() => { const s = document.createElement('script'); s.textContent = 'document.title = \"owned\"';"
        " document.body.append(s); const d = document.createElement('div');"
        " d.innerHTML = '<img src=/nothing onerror=\"document.title = 1\">'; document.body.append(d); })()"
    )
    time.sleep(0.3)
    assert browser.run("document.title") == "Search"
    assert any("Content Security Policy" in one for one in browser.complaints)


def test_a_form_of_another_site_is_refused(browser, port, tmp_path):
    target = f"http://127.0.0.1:{port}/search"
    (tmp_path / "evil.html").write_text(
        f'<!doctype html><form action="{target}" method="post" enctype="multipart/form-data">'
        '<input name="text" value="a red circle"></form><script>document.forms[0].submit()</script>'
    )
    with serve_folder(tmp_path) as site:
        browser.call("Page.navigate", url=f"{site.address}/evil.html")
        browser.wait(f"location.href === {json.dumps(target)}")
        assert "comes from another site" in browser.wait("document.body?.innerText")


def test_several_parts_with_weights(page, searcher, gallery, tmp_path):
    path = tmp_path / "<b>x&amp;.jpg"
    path.write_bytes(gallery.jpegs[5])
    image = QueryImage("x", lambda: gallery.jpegs[5])
    page.choose_files("#file", path)
    page.wait("document.querySelector('.file img').complete")
    assert page.run("document.querySelector('.file img').alt") == path.name
    page.click("[name=text]")
    page.type("a red circle")
    page.click("#add-text")
    page.type("a blue star")
    page.press("Enter")
    wait_for_keys(page, keys_of(searcher, ["a red circle", "a blue star"], [image]))
    page.run("document.querySelectorAll('.weight')[1].select()")  # the parts are in the order in which they were added
    page.run("document.querySelectorAll('.text .weight')[1].value = '-0.4'")
    page.click("#go")
    wait_for_keys(page, keys_of(searcher, ["a red circle", "a blue star"], [image], [1, -0.4, 1]))
    assert "weight=1&weight=-0.4&weight=1" in page.run("location.hash")
    reload(page)  # which has lost the picture
    page.wait(f"{STATUS}.textContent.startsWith('This query includes uploaded pictures')")
    page.click(".text:nth-child(2) .remove")
    page.run("document.querySelector('[name=text]').value = ''")
    page.click("#go")
    page.wait(f"{STATUS}.className === 'problem'")
    assert "The query is empty" in page.run(f"{STATUS}.textContent")


def test_pictures_are_dropped(page, searcher, gallery, tmp_path):
    (tmp_path / "x.jpg").write_bytes(gallery.jpegs[5])
    (tmp_path / "note.txt").write_text("no image")
    page.drop(tmp_path / "note.txt")
    page.wait(f"{STATUS}.textContent.startsWith('What was dropped is not an image')")
    page.drop(tmp_path / "x.jpg")
    page.wait("document.querySelectorAll('.file').length === 1")
    page.click("#go")
    wait_for_keys(page, keys_of(searcher, [], [QueryImage("x", lambda: gallery.jpegs[5])]))


def test_bad_uploads(page, tmp_path):
    (tmp_path / "note.txt").write_text("no image")
    page.choose_files("#file", tmp_path / "note.txt")
    page.click("#go")
    page.wait(f"{STATUS}.className === 'problem'")
    assert "note.txt is not an image" in page.run(f"{STATUS}.textContent")
    (tmp_path / "large.jpg").write_bytes(bytes(UPLOAD))
    page.choose_files("#file", tmp_path / "large.jpg")
    page.wait(f"{STATUS}.textContent.includes('too large')")
    assert page.run("document.querySelectorAll('.file').length") == 1
    page.complaints.clear()  # Chromium's own line about the 400


def test_limits(page, searcher):
    search_for(page, "a red circle")
    u = page.run(f"{CARDS}.map(c => Number(c.querySelector('.numbers').textContent.split(' ').at(-1)))")
    limit = sorted(u)[12]
    page.click("#max_item_uncertainty")
    page.type(str(limit))
    page.press("Enter")
    wait_for_keys(page, keys_of(searcher, ["a red circle"], max_item_uncertainty=limit))
    page.click("#max_uncertainty")
    page.type("0.1")
    page.press("Enter")
    page.wait(f"{STATUS}.className === 'refused'")
    assert "is above 0.1000" in page.run(f"{STATUS}.textContent")
    assert page.run(f"{CARDS}.length") == 0


def test_an_address_holds_the_query(page, port, searcher):
    search_for(page, "a red circle")
    search_for(page, "a blue star")
    page.run("history.back()")
    wait_for_keys(page, keys_of(searcher, ["a red circle"]))
    assert page.run(TEXT) == "a red circle"
    address = f"http://127.0.0.1:{port}/#text=a&text=b&like={searcher.identity}/7&weight=1&weight=-0.1&weight=2"
    page.open("about:blank")
    open_page(page, address)
    wait_for_keys(page, keys_of(searcher, ["a", "b"], [searcher.stored_image(7)], [1, -0.1, 2]))
    page.open("about:blank")
    open_page(page, f"http://127.0.0.1:{port}/#text=a&text=b&weight=1&weight=-9")
    page.wait(f"{STATUS}.className === 'problem'")
    assert "Taking away part 2 of the query leaves no density" in page.run(f"{STATUS}.textContent")
    page.complaints.clear()  # Chromium's own line about the 400


def test_more_like_this(page, searcher):
    search_for(page, "a red circle")
    row = searcher.answer(SearchRequest(["a red circle"], top=24))["results"][1]["row"]
    page.click(".card:nth-child(2) .like")
    wait_for_keys(page, keys_of(searcher, [], [searcher.stored_image(row)]))
    assert page.run(TEXT) == ""


def test_keys(page, searcher):
    with searcher.encoder._one_at_a_time:
        page.click("[name=text]")
        page.type("a red circle")
        page.press("Enter")
        page.wait(f"{STATUS}.textContent === 'Searching …'")
        page.press("Escape")
        page.wait(f"{STATUS}.textContent === 'The search was stopped.'")
    page.click("h1")
    page.press("/")
    assert page.run("document.activeElement.name") == "text"


def test_an_index_is_chosen(browser, gallery, searcher):
    texts = open_searcher(gallery.texts)
    texts.encoder = searcher.encoder  # as the command shares it
    with serving(searcher, texts) as server:
        address = f"http://127.0.0.1:{server.effective_port}/"
        open_page(browser, address)
        search_for(browser, "a red circle")
        assert browser.run(KEYS) == keys_of(searcher, ["a red circle"])
        browser.run("document.querySelector('#index').focus()")
        browser.press("ArrowDown")
        wait_for_keys(browser, keys_of(texts, ["a red circle"]))
        assert browser.run("document.querySelector('#facts').textContent").startswith("120 captions embedded by run")
        assert "no match probability" in browser.run("document.querySelector('#legend').textContent")
        reload(browser)
        wait_for_keys(browser, keys_of(texts, ["a red circle"]))
        open_page(browser, f"{address}#index=third&text=a")
        browser.wait(f"{STATUS}.textContent.startsWith('That index is not here.')")
    browser.click("#go")
    browser.wait(f"{STATUS}.textContent.startsWith('The server does not answer')")
