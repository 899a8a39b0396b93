"""The search page's server: answers, refusals, and requests that mean harm."""

import json

import pytest

from probemb.errors import UserError
from tests.searching import BACKWARDS, EVIL, MARKUP, N, gallery, searcher  # noqa: F401 - fixtures
from tests.searchpage import UPLOAD, port, post, request  # noqa: F401 - a fixture
from tests.world import run_folder  # noqa: F401 - a fixture
from tools.search.web.guard import host_check
from tools.search.web.page import make_app
from tools.search.web.server import addresses, make_server
from tools.search.wish import QueryImage, Wish


def test_an_answer_is_the_searchers(port, searcher, gallery):  # noqa: F811
    fields = [("text", "a red circle"), ("text", "  "), ("top", "5"), ("max_item_uncertainty", "1.03")]
    status, answer = post(port, fields, [("image", "x.jpg", gallery.jpegs[2]), ("image", "", b"")])
    truth = searcher.answer(
        Wish(["a red circle"], [QueryImage("x.jpg", gallery.jpegs[2])], top=5, max_item_uncertainty=1.03)
    )
    assert status == 200
    assert [(one["row"], one["distance"]) for one in answer["results"]] == [
        (one["row"], pytest.approx(one["distance"])) for one in truth["results"]
    ]
    assert answer["query"] == truth["query"]
    assert "shard" not in answer["results"][0]
    assert str(gallery.tar.parent) not in json.dumps(answer)


def test_texts_that_mean_harm_are_text(port):  # noqa: F811
    _, answer = post(port, [("text", "anything \u202e x"), ("top", str(N))])
    captions = [caption for one in answer["results"] for caption in one["captions"]]
    assert EVIL in captions
    assert MARKUP in captions
    assert not any(mark in json.dumps(answer, ensure_ascii=False) for mark in ("\u202e", "\u2066", "\x1b"))


@pytest.mark.parametrize("path", ["/", "/about", "/static/page.js", "/picture/x/0", "/picture/x/1/large", "/nothing"])
def test_every_answer_is_hardened(port, path):  # noqa: F811
    _, headers, _ = request(port, path=path)
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "Server" not in headers


@pytest.mark.parametrize(
    ("fields", "files", "code", "what"),
    [
        ([], [], 400, "The query is empty"),
        ([("text", " \t")], [("image", "", b"")], 400, "The query is empty"),
        ([("text", "a"), ("top", "many")], [], 400, "no number"),
        ([("text", "a"), ("top", "100000")], [], 400, "100000 results"),
        ([("text", "a"), ("max_uncertainty", "-1")], [], 400, "is -1"),
        ([("text", "a"), ("max_uncertainty", "inf")], [], 400, "is inf"),
        ([("text", "a"), ("min_precision", "0.5")], [], 400, "no calibration"),
        ([("text", "a" * 2_001)], [], 400, "2,001 characters"),
        ([("text", "a")] * 9, [], 400, "9 parts"),
        ([], [("image", "x.jpg", b"<svg onload=alert(1)>")], 400, "x.jpg is not an image"),
        ([], [("image", "<b>\u202e.jpg", b"nothing")], 400, "<b>\ufffd.jpg is not an image"),
        ([], [("image", "x.jpg", b"")] * 9, 400, "more than 8 parts"),
        ([("text", "a")] * 400, [], 413, "too long"),
        ([("text", "a" * (300 << 10))], [], 413, "The query is too long: a text has at most 2,000"),
        ([], [("image", "x.jpg", bytes(UPLOAD + 100))], 413, "the limit is 2 MiB"),
    ],
)
def test_what_is_refused(port, fields, files, code, what):  # noqa: F811
    status, answer = post(port, fields, files)
    assert status == code
    assert what in answer["error"]
    assert answer["remedy"]


def test_other_sites_are_refused(port):  # noqa: F811
    here = f"127.0.0.1:{port}"
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "", "10.0.0.1", "[::2]", "a:b:c"):
        assert request(port, path="/about", Host=host)[0] in (400, 421), host
    for host in (here, f"localhost:{port}", f"[::1]:{port}", "LOCALHOST"):
        assert request(port, path="/about", Host=host)[0] == 200, host
    for origin in ("http://evil.example", "http://[", "null", f"http://127.0.0.1:{port + 1}", "http://localhost"):
        status, answer = post(port, [("text", "a")], Origin=origin)
        assert (status, answer["error"]) == (403, "The request comes from another site."), origin
    assert post(port, [("text", "a")], Sec_Fetch_Site="cross-site")[0] == 403
    assert post(port, [("text", "a")], Sec_Fetch_Site="same-site")[0] == 403
    assert post(port, [("text", "a")], Origin=f"http://{here}", Sec_Fetch_Site="same-origin")[0] == 200
    assert post(port, [("text", "a")])[0] == 200  # no browser
    assert request(port, path="/search")[0] == 405


def test_names_of_a_server_for_others():
    known = host_check("0.0.0.0", ["search.example.org"])
    assert all(
        map(known, ("search.example.org", "Search.Example.ORG.:8000", "10.1.2.3:8000", "[fe80::1]:80", "localhost"))
    )
    assert not any(map(known, ("evil.example", "10.1.2.3.evil.example", "", "search.example.org.evil.example")))
    alone = host_check("127.0.0.1", [])
    assert not any(map(alone, ("10.1.2.3", "search.example.org", "0.0.0.0")))


def test_an_address_that_is_taken(port, searcher):  # noqa: F811
    with pytest.raises(UserError, match="cannot be served"):
        make_server(make_app({"x": searcher}), "127.0.0.1", port, UPLOAD)
    with pytest.raises(UserError, match="cannot be served"):
        make_server(make_app({"x": searcher}), "no.such.host.invalid", 0, UPLOAD)


def test_addresses():
    class Two:
        effective_listen = (("127.0.0.1", 1), ("::1", 2))

    assert addresses(Two) == ["http://127.0.0.1:1/", "http://[::1]:2/"]
