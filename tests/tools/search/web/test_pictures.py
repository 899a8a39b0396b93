"""Pictures of results: made anew, of one index, from shards here and on a web server."""

import io
import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from PIL import Image

from probemb.data.remote.sources import FetchPolicy
from tests.searching import N, gallery, searcher  # noqa: F401 - fixtures
from tests.searchpage import PICTURES_ARE_THERE, browser, open_page, port, post, request, search_for, serving  # noqa: F401 - fixtures
from tests.webserver import serve as serve_folder
from tests.world import run_folder  # noqa: F401 - a fixture
from tools.search.decoding import QUERIES
from tools.search.web.thumbnails import PICTURES


def test_pictures_are_made_anew(port, gallery, searcher):  # noqa: F811
    here = f"/picture/{searcher.identity}"
    status, headers, data = request(port, path=f"{here}/3")
    assert (status, headers["Content-Type"]) == (200, "image/jpeg")
    assert Image.open(io.BytesIO(data)).size == (32, 32)
    assert data != gallery.jpegs[3]
    for row in (N, "-1", "99999999999999999999", "x", "../3"):
        path = f"{here}/{row}"
        assert request(port, path=path)[0] == 404


def test_another_index_at_the_same_address_has_other_pictures(gallery, searcher, tmp_path):  # noqa: F811
    """A browser keeps pictures by their address; so a row of another index must have another one."""
    from tools.build_index import main as build
    from tools.search.command import open_searcher, parse

    index = tmp_path / "index"
    build(["--embeddings", str(gallery.images.parent / "embedded"), "--kind", "text", "--out", str(index)])
    other = open_searcher(parse(["x", "--index", str(index), "--device", "cpu"]))
    told = []
    for one in (searcher, other):
        with serving(one) as server:
            port = int(server.effective_port)
            _, answer = post(port, [("text", "a red circle"), ("top", str(N))])
            told.append({result["picture"] for result in answer["results"]})
            assert request(port, path=answer["results"][0]["picture"])[0] == 200
            if len(told) == 2:
                assert request(port, path=min(told[0]))[0] == 404
    assert not told[0] & told[1]
    assert open_searcher(parse(["x", "--index", str(index), "--device", "cpu"])).identity == other.identity


def test_large_pictures_become_small():
    from tools.search.web.thumbnails import shrink

    data = io.BytesIO()
    exif = Image.Exif()
    exif[0x010E] = "a secret place"
    Image.effect_noise((2_000, 1_000), 80).convert("RGB").save(data, "JPEG", exif=exif)
    small = shrink(data.getvalue(), 480)
    assert Image.open(io.BytesIO(small)).size == (480, 240)
    assert b"secret" in data.getvalue()
    assert b"secret" not in small
    with pytest.raises(LookupError, match="cannot be decoded"):
        shrink(data.getvalue()[:300], 480)


def test_pictures_that_are_gone(browser, gallery, searcher, tmp_path):  # noqa: F811
    with serving(searcher) as server:
        hidden = Path(f"{gallery.tar}.hidden")
        gallery.tar.rename(hidden)
        try:
            open_page(browser, f"http://127.0.0.1:{server.effective_port}/")
            search_for(browser, "a red circle")
            browser.wait("document.querySelector('.frame').textContent === 'The picture is missing.'")
        finally:
            hidden.rename(gallery.tar)


@pytest.fixture(scope="module")
def elsewhere(gallery, tmp_path_factory):  # noqa: F811
    """(the server that has the shards, a searcher of an index that was made from there)"""
    from tools.build_index import main as build
    from tools.embed.command import main as embed
    from tools.search.command import open_searcher, parse

    folder = tmp_path_factory.mktemp("elsewhere")
    with serve_folder(gallery.tar.parent) as site:
        embedded = str(folder / "embedded")
        embed(["--model", str(gallery.model), "--data", f"{site.address}/data", "--out", embedded, "--items", "image"])
        build(["--embeddings", embedded, "--out", str(folder / "index")])
        yield site, open_searcher(parse(["anything", "--index", str(folder / "index"), "--device", "cpu"]))


def test_pictures_of_shards_on_a_web_server(browser, elsewhere, gallery):  # noqa: F811
    site, remote = elsewhere
    assert [remote.picture(row) for row in range(N)] == gallery.jpegs
    with serving(remote) as server:
        port = int(server.effective_port)
        open_page(browser, f"http://127.0.0.1:{port}/")
        search_for(browser, "a red circle")
        browser.wait(PICTURES_ARE_THERE)
        site.troubles["00000.tar"] = [404]
        status, _, data = request(port, path=f"/picture/{remote.identity}/3")
        assert status == 404
        assert "HTTP 404" in json.loads(data)["error"]
        assert site.address.encode() not in data


def test_pictures_that_are_waited_for_hold_up_no_search(elsewhere, monkeypatch):
    monkeypatch.setattr("tools.search.pictures.POLICY", FetchPolicy(attempts=1, timeout=6))
    site, remote = elsewhere
    with serving(remote) as server, ThreadPoolExecutor(48) as pool:
        port = int(server.effective_port)
        site.troubles["00000.tar"] = ["silence"] * 48
        started = time.monotonic()
        waiting = [pool.submit(request, port, "GET", f"/picture/{remote.identity}/{row % N}") for row in range(48)]
        while len(site.troubles["00000.tar"]) > 48 - PICTURES:
            assert time.monotonic() < started + 5
            time.sleep(0.01)
        assert post(port, [("text", "a red circle")])[0] == 200
        assert time.monotonic() < started + 5
        answers = [one.result()[:2] for one in waiting]
        assert Counter(status for status, _ in answers) == {503: 48 - PICTURES, 404: PICTURES}
        assert {headers.get("Retry-After") for status, headers in answers if status == 503} == {"1"}
        site.troubles["00000.tar"] = []
        assert request(port, path=f"/picture/{remote.identity}/3")[0] == 200


def test_results_that_are_searched_with_hold_up_no_texts(elsewhere, monkeypatch):
    """However long the server of their shards is silent."""
    monkeypatch.setattr("tools.search.pictures.POLICY", FetchPolicy(attempts=1, timeout=4))
    site, remote = elsewhere
    with serving(remote) as server, ThreadPoolExecutor(30) as pool:
        port = int(server.effective_port)
        site.troubles["00000.tar"] = ["silence"] * 30
        waiting = [pool.submit(post, port, [("like", f"{remote.identity}/{row}")]) for row in range(30)]
        while len(site.troubles["00000.tar"]) > 30 - QUERIES:
            time.sleep(0.01)
        assert post(port, [("text", "a red circle")])[0] == 200
        assert not all(one.done() for one in waiting)
        answers = [one.result() for one in waiting]
        assert Counter(status for status, _ in answers) == {503: 30 - QUERIES, 400: QUERIES}
        assert any("The picture to search with is not there" in answer["error"] for _, answer in answers)
        site.troubles["00000.tar"] = []
        assert post(port, [("like", f"{remote.identity}/3")])[0] == 200


def test_the_page_waits_its_turn_for_pictures(browser, elsewhere, monkeypatch):  # noqa: F811
    """Of a server that has too many to make, and then is silent: the next search is answered all the same."""
    monkeypatch.setattr("tools.search.pictures.POLICY", FetchPolicy(attempts=1, timeout=3))
    site, remote = elsewhere
    with serving(remote) as server, ThreadPoolExecutor(PICTURES) as pool:
        port = int(server.effective_port)
        open_page(browser, f"http://127.0.0.1:{port}/")
        site.troubles["00000.tar"] = ["silence"] * PICTURES
        waiting = [pool.submit(request, port, "GET", f"/picture/{remote.identity}/{row}") for row in range(PICTURES)]
        while site.troubles["00000.tar"]:
            time.sleep(0.01)
        browser.complaints.clear()
        search_for(browser, "a red circle")
        assert not all(one.done() for one in waiting)
        browser.wait(PICTURES_ARE_THERE)
        assert "503" in browser.complaints[0]  # Chromium's own line
        assert all(one.done() for one in waiting)

        monkeypatch.setattr("tools.search.pictures.POLICY", FetchPolicy(attempts=1, timeout=6))
        site.troubles["00000.tar"] = ["silence"] * 24
        browser.call("Network.clearBrowserCache")
        search_for(browser, "a blue star")
        time.sleep(0.5)  # for all that the page asks for at once, which has to be less than the browser's connections
        assert 18 < len(site.troubles["00000.tar"]) < 24
        site.troubles["00000.tar"] = []
        started = time.monotonic()
        search_for(browser, "a red circle")
        browser.wait(PICTURES_ARE_THERE)
        assert time.monotonic() < started + 4.5
