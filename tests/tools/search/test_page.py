"""The search page in a real headless Chromium: what people do with it."""

import json

from tests.searching import BACKWARDS, EVIL, MARKUP, N
from tests.searchpage import CARDS, KEYS, SETTLED, STATUS, open_page, reload, search_for
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
    page.press_enter()
    wait_for_keys(page, keys_of(searcher, ["a red circle", "a blue star"], [image]))
    page.run("document.querySelectorAll('.weight')[1].select()")  # the parts are in the order in which they were added
    page.run("document.querySelectorAll('.text .weight')[1].value = '-0.4'")
    page.click("#go")
    wait_for_keys(page, keys_of(searcher, ["a red circle", "a blue star"], [image], [1, -0.4, 1]))
    assert "weight=1&weight=-0.4&weight=1" in page.run("location.hash")
    reload(page)  # which has lost the picture
    page.wait(f"{STATUS}.textContent.startsWith('This query includes uploaded pictures')")


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
