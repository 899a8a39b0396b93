"""Results of the search page: match probabilities, sources, files for other programs; and several indexes."""

import csv
import io
import json
import re
import time
from pathlib import Path

import pytest
import torch

from probemb.reports.text import web_link
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
    serving,
)
from tests.world import run_folder  # noqa: F401 - a fixture
from tools.search.query import Searcher
from tools.search.wish import QueryImage, Wish


def test_a_match_is_the_models_probability_among_the_whole_gallery(searcher, gallery, monkeypatch):  # noqa: F811
    query = searcher.encoder.embed(["a red circle"], [])
    truth = searcher.encoder.loaded.model.match_probability(gallery.embedded, query, among="images")[:, 0]
    assert float(truth.sum()) == pytest.approx(1)
    for top, fits in ((N, None), (N, False), (3, None)):
        results = searcher.answer(Wish(["a red circle"], top=top, fits=fits))["results"]
        found = torch.tensor([one["match"] for one in results])
        torch.testing.assert_close(found, truth[[one["row"] for one in results]], atol=1e-4, rtol=1e-3)
    monkeypatch.setattr("tools.search.query.SAMPLE", 10)  # stands for the 37 that are not returned
    best = Searcher(searcher.index, searcher.encoder).answer(Wish(["a red circle"], top=3))["results"][0]
    assert best["match"] == pytest.approx(float(truth[best["row"]]), rel=0.5)
    for images in ([QueryImage("x", gallery.jpegs[3])], [searcher.stored_image(3)]):
        assert {one["match"] for one in searcher.answer(Wish(["a"], images))["results"]} == {None}


def test_match_probability_with_another_weight(gallery, searcher):  # noqa: F811
    fitting = Searcher(searcher.index, searcher.encoder, tolerance=-2.0)
    plain = {one["row"]: one["match"] for one in searcher.answer(Wish(["a red circle"], top=N))["results"]}
    for one in fitting.answer(Wish(["a red circle"], top=N, fits=True))["results"]:
        assert one["match"] == pytest.approx(plain[one["row"]], abs=1e-5)


@pytest.mark.parametrize(
    ("address", "fine"),
    [
        ("https://photos.example/a.jpg?b=1&c=2#d", True), ("HTTP://photos.example:8080/ä.jpg", True),
        ("javascript:alert(1)", False), ("data:text/html,x", False), ("//x.example/x", False), ("file:///etc", False),
        ("https://bank.example@evil.example/", False), ("https://bank.example\\@evil.example/", False),
        ("https://x.example/\u202egnp.exe", False), ("https://x.example/a b", False), ("https://", False), (7, False),
        ("https://x.example/\"><script>", False), ("https://[::1", False), ("https://x:99999/", False), (None, False),
        (" https://x.example/", False), ("https://x.example/" + "a" * 2_000, False), ("https://x.example/\n", False),
    ],
)  # fmt: skip
def test_addresses_that_may_become_links(address, fine):
    assert web_link(address) == (address if fine else None)


def test_sources_are_links_only_if_they_are_of_the_web(page, port):  # noqa: F811
    _, answer = post(port, [("text", "a red circle"), ("top", str(N))])
    urls = {one["row"]: one["url"] for one in answer["results"]}
    assert urls == {row: None if row < 4 else f"https://photos.example/{row}.jpg?a=1&b=2" for row in range(N)}
    search_for(page, "a red circle")
    page.click("#more button")
    page.wait(f"{CARDS}.length === {N}")
    links = page.run("[...document.querySelectorAll('.source')].map(a => [a.href, a.rel, a.target, a.textContent])")
    wanted = [
        [one["url"], "noopener noreferrer", "_blank", "photos.example"] for one in answer["results"] if one["url"]
    ]
    assert links == wanted
    source = "import('/static/results.js').then(m => m.sourceLink({}) === null)"
    for address in ("javascript:alert(1)", "https://a@evil.example", "no address", ""):  # whatever the server says
        assert page.run(source.format(json.dumps(address))), address


def saved(page, folder, button):  # noqa: F811
    """The content of the file that a button saves."""
    page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    page.click(button)
    path, end = folder / f"search.{button.removeprefix('#save-')}", time.monotonic() + 10
    while not path.exists() or list(folder.glob("*.crdownload")):
        assert time.monotonic() < end
        time.sleep(0.02)
    return path.read_text(encoding="utf-8-sig")


def test_results_are_saved(page, port, tmp_path):  # noqa: F811
    search_for(page, "a red circle")
    _, answer = post(port, [("text", "a red circle"), ("top", "24")])
    found = json.loads(saved(page, tmp_path, "#save-json"))
    assert (found["results"], found["query"]) == (answer["results"], answer["query"])
    rows = list(csv.DictReader(io.StringIO(saved(page, tmp_path, "#save-csv"))))
    for row, one in zip(rows, answer["results"], strict=True):
        assert [row["key"], row["captions"], row["url"]] == [one["key"], " | ".join(one["captions"]), one["url"] or ""]
        assert [float(row[name]) for name in ("rank", "match", "distance", "uncertainty", "row")] == [
            one[name] for name in ("rank", "match", "distance", "uncertainty", "row")
        ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('=HYPERLINK("http://evil.example")', "'=HYPERLINK(\"http://evil.example\")"), ("+1", "'+1"), ("-1", "'-1"),
        ("@SUM(A1)", "'@SUM(A1)"), ("  =1", "'  =1"), ("\t=1", "' =1"), ("\uff1d1", "'\uff1d1"), ("x;\n=1", "x;' =1"),
        ("x;=cmd|' /C calc'!A0", "x;'=cmd|' /C calc'!A0"),
        ("two-tone, a = b", "two-tone, a = b"), ('a "quoted", text', 'a "quoted", text'),
    ],
)  # fmt: skip
def test_a_table_has_no_formulas(page, text, told):  # noqa: F811
    result = {"rank": 1, "match": None, "distance": -1.5, "uncertainty": 1, "url": None, "row": 7}
    result |= {"key": text, "captions": ["x", text]}
    made = page.run(f"import('/static/save.js').then(m => m.toCsv([{json.dumps(result)}]))")
    (row,) = csv.DictReader(io.StringIO(made.removeprefix("\ufeff"), newline=""))
    assert (row["key"], row["distance"], row["match"], row["row"]) == (told, "-1.5", "", "7")
    for piece in re.split(r"[;\t\r\n]", made):  # for programs that separate cells by semicolons or tabs
        assert not piece.lstrip(' "').startswith(("=", "+", "-", "@"))


# ------------------------------------------------------------------------------------------------ several indexes


@pytest.fixture(scope="module")
def two(gallery):  # noqa: F811
    """Searchers of the images and of the captions, opened by one command."""
    from tools.search.command import open_searchers, parse

    folders = ["--index", str(gallery.images), "--index", str(gallery.texts)]
    return open_searchers(parse(["--serve", *folders, "--device", "cpu"]))


def test_names_of_indexes_tell_them_apart():
    from tools.search.command import index_names

    assert index_names([Path("a/x"), Path("/b/y")]) == ["x", "y"]
    assert index_names([Path("/runs/a/x"), Path("/runs/b/x"), Path("/y")]) == ["a/x", "b/x", "y"]


def test_indexes_of_a_model_share_it(two):
    assert list(two) == ["image", "text"]
    assert two["image"].encoder is two["text"].encoder


def test_an_index_is_chosen(browser, two):  # noqa: F811
    with serving(*two.values()) as server:
        port = int(server.effective_port)
        browser.resize(1280, 900)
        browser.open("about:blank")
        browser.complaints.clear()
        open_page(browser, f"http://127.0.0.1:{port}/")
        search_for(browser, "a red circle")
        assert browser.run(KEYS) == [
            one["key"] for one in two["image"].answer(Wish(["a red circle"], top=24))["results"]
        ]
        assert browser.run("document.querySelector('#facts').textContent").startswith("40 images embedded by run")
        browser.run("document.querySelector('#index').focus()")
        browser.press("ArrowDown")
        texts = two["text"].answer(Wish(["a red circle"], top=24))["results"]
        captions = f"{CARDS}.map(c => c.querySelector('.captions').textContent)"
        wanted = json.dumps(
            json.dumps([one["captions"][0] for one in texts], ensure_ascii=False, separators=(",", ":"))
        )
        browser.wait(f"JSON.stringify({captions}) === {wanted}")
        assert browser.run("document.querySelector('#facts').textContent").startswith("120 captions")
        assert browser.run("location.hash") == "#index=second&text=a+red+circle"
        reload(browser)
        browser.wait(f"JSON.stringify({captions}) === {wanted}")
        browser.click(".card:nth-child(2) .last button")  # its caption is the query
        browser.wait(f"location.hash.includes({json.dumps('index=second')}) && {SETTLED}")
        assert browser.run("document.querySelector('#texts input').value") == texts[1]["captions"][0]
        with two["image"].encoder._one_at_a_time:  # a result that is still there while the other index is asked
            browser.run("document.querySelector('#index').focus()")
            browser.press("ArrowUp")
            browser.wait(f"{STATUS}.textContent === 'Searching …' && location.hash.includes('index=first')")
            browser.click(".card:nth-child(3) .last button")
        caption = browser.run(f"{CARDS}[2].querySelector('.captions').textContent")
        assert browser.run("document.querySelector('#texts input').value") == caption
        browser.wait(SETTLED)
        assert browser.complaints == []
        for one in two.values():  # a result of either index as the query of the first
            _, answer = post(port, [("like", f"{one.identity}/3"), ("index", "first"), ("top", "5")])
            wanted = two["image"].answer(Wish(images=[QueryImage("x", one.picture(3))], top=5))["results"]
            assert [result["row"] for result in answer["results"]] == [result["row"] for result in wanted]
        assert "There is no index 'third' here" in post(port, [("text", "a"), ("index", "third")])[1]["error"]
        open_page(browser, f"http://127.0.0.1:{port}/#index=third&text=a")
        browser.wait(f"{STATUS}.textContent.startsWith(\"There is no index 'third' here.\")")
