"""Queries of the search page in Chromium: dropped and pasted pictures, results as queries, and the address."""

import json

import pytest

from tests.searching import N, gallery, searcher  # noqa: F401 - fixtures
from tests.searchpage import (  # noqa: F401 - fixtures
    CARDS,
    KEYS,
    SETTLED,
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

GIVEN = "document.querySelectorAll('.given').length"
NOTE = "!document.querySelector('#not-kept').hidden"


def keys(searcher, **wish):  # noqa: F811
    """Keys of the results of a wish."""
    return [one["key"] for one in searcher.answer(Wish(**{"top": 24, **wish}))["results"]]


def wait_for(page, wanted):  # noqa: F811
    page.wait(f"JSON.stringify({KEYS}) === {json.dumps(json.dumps(wanted, separators=(',', ':'), ensure_ascii=False))}")


def test_pictures_are_dropped(page, searcher, gallery, tmp_path):  # noqa: F811
    (tmp_path / "one.jpg").write_bytes(gallery.jpegs[5])
    (tmp_path / "note.txt").write_text("no picture")
    page.drop(tmp_path / "note.txt")
    page.wait(f"{STATUS}.textContent.startsWith('What was dropped is not an image.')")
    page.drop(tmp_path / "one.jpg", tmp_path / "note.txt")
    page.wait(f"{GIVEN} === 1 && {NOTE}")
    assert page.run("document.querySelector('#drop').hidden")
    assert page.run("location.pathname") == "/"  # the file has not taken the place of the page
    page.click("#go")
    wait_for(page, keys(searcher, images=[QueryImage("x", gallery.jpegs[5])]))


def test_pictures_are_pasted_and_texts_too(page, gallery, port):  # noqa: F811
    page.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    page.run("navigator.clipboard.writeText('a blue star')")
    page.click("#texts input")
    page.paste()
    page.wait("document.querySelector('#texts input').value === 'a blue star'")
    png = "const c = document.createElement('canvas'); c.width = 40; const b = await new Promise(r => c.toBlob(r));"
    page.run(f"(async () => {{ {png} await navigator.clipboard.write([new ClipboardItem({{'image/png': b}})]) }})()")
    for focused in ("#texts input", "#add-text"):
        page.run(f"document.querySelector('{focused}').focus()")
        page.paste()
    page.wait(f"{GIVEN} === 2 && {NOTE}")
    page.click("#go")
    page.wait(f"{SETTLED} && {CARDS}.length === 24")
    assert "its parts" in page.run(f"{STATUS}.textContent")
    assert page.run("location.hash") == "#text=a+blue+star&pictures=2"


def test_the_address_says_the_query(page, searcher, port):  # noqa: F811
    search_for(page, "a red circle")
    page.click("#add-text")
    page.type("50% & <b>more</b>")
    page.press("Enter")
    page.wait(SETTLED)
    two = keys(searcher, texts=["a red circle", "50% & <b>more</b>"], top=N)
    wait_for(page, two[:24])
    page.click("#more button")
    wait_for(page, two)
    address = page.run("location.href")
    assert address == f"http://127.0.0.1:{port}/#text=a+red+circle&text=50%25+%26+%3Cb%3Emore%3C%2Fb%3E&top={N}"
    reload(page)
    wait_for(page, two)
    page.run("history.back()")  # "More" is no entry of the history
    wait_for(page, keys(searcher, texts=["a red circle"]))
    page.run("history.back()")
    page.wait(f"{CARDS}.length === 0 && location.hash === '' && document.querySelector('#texts input').value === ''")
    page.open("about:blank")
    open_page(page, address)  # as another person
    wait_for(page, two)


def test_an_address_of_any_length(page):  # noqa: F811
    texts = [chr(0x4E00 + i) * 2_000 for i in range(8)]  # as long as a query may be, 144,000 characters in an address
    for place, text in enumerate(texts):
        if place:
            page.click("#add-text")
        page.type(text)
    page.press("Enter")
    page.wait(f"{SETTLED} && {CARDS}.length === 24")
    shown = page.run(KEYS)
    reload(page)
    wait_for(page, shown)
    assert page.run("[...document.querySelectorAll('#texts input[type=text]')].map(i => i.value)") == texts


def test_the_address_keeps_limits(page, searcher):  # noqa: F811
    search_for(page, "a red circle")
    page.run("document.querySelector('#item-limit').focus()")
    page.press("Home")
    for _ in range(25):
        page.press("ArrowRight")
    page.wait(f"{SETTLED} && location.hash.includes('max_item_uncertainty=')")
    shown, address = page.run(KEYS), page.run("location.hash")
    assert 0 < len(shown) < 24
    reload(page)
    wait_for(page, shown)
    assert page.run("location.hash") == address
    page.run("document.querySelector('#item-limit').focus()")
    page.press("End")
    wait_for(page, keys(searcher, texts=["a red circle"]))
    page.click("#query-limit")
    page.press("Home")
    page.wait(f"{STATUS}.className === 'refused'")
    reload(page)
    page.wait(f"{STATUS}.className === 'refused' && document.querySelector('#query-limit').value === '0'")


def test_an_address_asks_for_pictures_that_it_cannot_hold(page, searcher, gallery, tmp_path):  # noqa: F811
    (tmp_path / "one.jpg").write_bytes(gallery.jpegs[5])
    search_for(page, "a red circle")
    page.choose_files("#file", tmp_path / "one.jpg")
    page.click("#go")
    both = keys(searcher, texts=["a red circle"], images=[QueryImage("x", gallery.jpegs[5])])
    wait_for(page, both)
    page.run("history.back()")
    wait_for(page, keys(searcher, texts=["a red circle"]))
    page.run("history.forward()")  # while the page is open, its history has the picture
    wait_for(page, both)
    reload(page)
    page.wait(f"{STATUS}.textContent.startsWith('This query includes an uploaded picture')")
    assert page.run(f"{CARDS}.length") == 0  # not the results of another query
    page.choose_files("#file", tmp_path / "one.jpg")
    page.click("#go")
    wait_for(page, both)


def test_a_result_is_searched_with(page, searcher, gallery):  # noqa: F811
    search_for(page, "a red circle")
    first = searcher.answer(Wish(["a red circle"]))["results"][0]
    page.click(".card .last button")
    like = [searcher.stored_image(first["row"])]
    wait_for(page, keys(searcher, images=like))
    assert keys(searcher, images=like) == keys(searcher, images=[QueryImage("x", gallery.jpegs[first["row"]])])
    assert page.run("document.querySelector('#texts input').value") == ""
    assert not page.run(NOTE)
    assert "no match probability" in page.run("document.querySelector('#legend').textContent")
    page.wait("document.querySelector('.given img').naturalWidth === 32")
    reload(page)
    page.wait(f"{GIVEN} === 1")
    wait_for(page, keys(searcher, images=like))
    page.click("#texts input")
    page.type("a blue star")
    page.press("Enter")
    wait_for(page, keys(searcher, texts=["a blue star"], images=like))


@pytest.mark.parametrize("like", ["x", "0/0", "../0", "{here}/40", "{here}/-1", "{here}/" + "9" * 15, "{here}/1e3", ""])
def test_a_result_that_is_not_there(like, port, searcher):  # noqa: F811
    status, answer = post(port, [("like", like.format(here=searcher.identity))])
    assert status == 400
    assert answer["remedy"]


def test_hostile_addresses(page, port):  # noqa: F811
    for query in (
        "like=javascript:alert(1)//0", "like=..%2F..%2Fabout", "index=%3Cscript%3E", "top=-7&text=a", "top=1e99&text=a",
        "text=%00%ff&max_uncertainty=x", "pictures=99999", "fits=%22&text=a&max_item_uncertainty=NaN",
    ):  # fmt: skip
        page.open("about:blank")
        open_page(page, f"http://127.0.0.1:{port}/#{query}")
        page.wait("!document.querySelector('#go').disabled")
        assert page.run("[...document.querySelectorAll('img')].every(i => /\\/picture\\/|blob:|^$/.test(i.src))"), query
    assert page.run("document.title") == "Search"
