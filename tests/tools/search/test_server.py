"""The search page's server: answers, refusals, requests that mean harm, and load that would hold up others."""

import contextlib
import http.client
import io
import json
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from PIL import Image

from probemb.data.remote import FetchPolicy
from tests.imagesite import bomb
from tests.orientation import stored, upright
from tests.searching import EVIL, MARKUP, N, open_searcher
from tests.searchpage import UPLOAD, post, request, serving
from tests.webserver import serve as serve_folder
from tests.world import encode
from tools.build_index import main as build
from tools.embed import main as embed
from tools.search.page import GAP, LARGE_FORM, PICTURES, form_turn, host_check, shrink
from tools.search.query import QUERIES, Busy, QueryImage, SearchRequest, decode_query


def test_an_answer_is_the_searchers(port, searcher, gallery):
    fields = [("text", "a red circle"), ("text", " "), ("like", f"{searcher.identity}/7"), ("top", "5")]
    fields += [("max_item_uncertainty", "1.03"), ("weight", "1"), ("weight", "0.5"), ("weight", "-0.2")]
    files = [("image", "x.jpg", gallery.jpegs[2]), ("image", "", b"")]
    status, answer = post(port, fields, files)
    images = [QueryImage("x.jpg", lambda: gallery.jpegs[2]), searcher.stored_image(7)]
    truth = searcher.answer(SearchRequest(["a red circle"], images, [1, 0.5, -0.2], 5, None, 1.03))
    assert status == 200
    assert answer["query"] == truth["query"]
    assert [(one["row"], one["distance"]) for one in answer["results"]] == [
        (one["row"], one["distance"]) for one in truth["results"]
    ]
    assert "shard" not in answer["results"][0]
    assert str(gallery.tar.parent) not in json.dumps(answer)


def test_texts_and_addresses_that_mean_harm(port):
    _, answer = post(port, [("text", "anything \u202e x"), ("top", str(N))])
    captions = [caption for one in answer["results"] for caption in one["captions"]]
    assert EVIL in captions
    assert MARKUP in captions
    assert not any(mark in json.dumps(answer, ensure_ascii=False) for mark in ("\u202e", "\u2066", "\x1b"))
    urls = {one["row"]: one["url"] for one in answer["results"]}
    assert urls == {row: None if row < 4 else f"https://photos.example/{row}.jpg?a=1&b=2" for row in range(N)}


@pytest.mark.parametrize("path", ["/", "/about", "/static/page.js", "/static/page.py", "/picture/x/0", "/nothing"])
def test_every_answer_is_hardened(port, path):
    status, headers, _ = request(port, path=path)
    assert (status == 200) == (path in ("/", "/about", "/static/page.js"))
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "Server" not in headers


@pytest.mark.parametrize(
    ("fields", "files", "code", "what"),
    [
        ([("text", "a"), ("max_uncertainty", "inf")], [], 400, "is inf"),
        ([("text", "a"), ("like", "../3")], [], 400, "not here, or was rebuilt"),
        ([], [("image", "<b>\u202e.jpg", b"nothing")], 400, "<b>\ufffd.jpg is not an image"),
        ([], [("image", "x.png", bomb())], 400, "more than 16,000,000 pixels"),
        ([], [("image", "x.jpg", b"")] * 9, 400, "more than 8 parts"),
        ([("text", "a" * (300 << 10))], [], 413, "a text has at most 2,000"),
        ([], [("image", "x.jpg", bytes(UPLOAD + 100))], 413, "the limit is 2 MiB"),
    ],
)
def test_what_is_refused(port, fields, files, code, what):
    status, answer = post(port, fields, files)
    assert status == code
    assert what in answer["error"]


def test_other_sites_are_refused(port):
    here = f"127.0.0.1:{port}"
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "", "10.0.0.1", "[::2]", "a:b:c"):
        assert request(port, path="/about", Host=host)[0] in (400, 421), host
    for host in (here, f"localhost:{port}", f"[::1]:{port}", "LOCALHOST"):
        assert request(port, path="/about", Host=host)[0] == 200, host
    for origin in ("http://evil.example", "http://[", "null", f"http://127.0.0.1:{port + 1}", "http://localhost"):
        status, answer = post(port, [("text", "a")], Origin=origin)
        assert (status, answer["error"]) == (403, "The request comes from another site."), origin
    for site in ("cross-site", "same-site"):
        assert post(port, [("text", "a")], Sec_Fetch_Site=site)[0] == 403
    assert post(port, [("text", "a")], Origin=f"http://{here}", Sec_Fetch_Site="same-origin")[0] == 200
    assert request(port, path="/search")[0] == 405
    known, alone = host_check("0.0.0.0", ["search.example.org"]), host_check("127.0.0.1", [])
    assert all(map(known, ("search.example.org", "Search.Example.ORG.:8000", "10.1.2.3:8000", "[fe80::1]:80")))
    assert not any(map(known, ("evil.example", "10.1.2.3.evil.example", "", "search.example.org.evil.example")))
    assert not any(map(alone, ("10.1.2.3", "search.example.org", "0.0.0.0")))


# ------------------------------------------------------------------------------------------------ pictures


def test_pictures_are_made_anew(port, gallery, searcher):
    status, headers, data = request(port, path=f"/picture/{searcher.identity}/3")
    assert (status, headers["Content-Type"]) == (200, "image/jpeg")
    assert Image.open(io.BytesIO(data)).size == (32, 32)
    assert data != gallery.jpegs[3]
    for row in (N, "-1", "99999999999999999999", "x", "../3"):
        assert request(port, path=f"/picture/{searcher.identity}/{row}")[0] == 404
    assert open_searcher(gallery.texts).identity != searcher.identity  # browsers keep pictures by their address


def test_pictures_are_upright_and_those_shown_small_and_without_metadata():
    large = stored(upright((640, 416)), 6)
    assert decode_query("upload", large).getpixel((600, 40))[1] > 200
    small = Image.open(io.BytesIO(shrink(large, 320)))
    assert small.size == (320, 208)
    assert not small.getexif()
    corners = [small.getpixel(place) for place in ((40, 40), (240, 40), (40, 160))]
    assert [tuple(level // 200 for level in corner) for corner in corners] == [(1, 0, 0), (0, 1, 0), (0, 0, 1)]
    with pytest.raises(LookupError, match="cannot be decoded"):
        shrink(large[:300], 480)


@pytest.fixture(scope="module")
def elsewhere(gallery, tmp_path_factory):
    """(the server that has the shards, a searcher of an index that was made from there)"""
    folder = tmp_path_factory.mktemp("elsewhere")
    with serve_folder(gallery.tar.parent) as site:
        embedded = str(folder / "embedded")
        embed(["--model", str(gallery.model), "--data", f"{site.address}/data", "--out", embedded, "--items", "image"])
        build(["--embeddings", embedded, "--out", str(folder / "index")])
        yield site, open_searcher(folder / "index")


def test_pictures_of_shards_on_a_web_server(elsewhere, gallery, monkeypatch):
    monkeypatch.setattr("tools.search.query.POLICY", FetchPolicy(attempts=1, timeout=0.3))
    site, remote = elsewhere
    assert [remote.picture(row) for row in range(0, N, 8)] == gallery.jpegs[::8]
    for trouble, message in ((404, "HTTP 404"), (302, "HTTP 302"), ("cut", "broke off"), ("silence", "no answer")):
        site.troubles["00000.tar"] = [trouble]
        with pytest.raises(LookupError, match=message) as caught:
            remote.picture(3)
        assert site.address not in str(caught.value)  # visitors of the page see it


def test_pictures_that_are_waited_for_hold_up_no_search(elsewhere, monkeypatch):
    monkeypatch.setattr("tools.search.query.POLICY", FetchPolicy(attempts=1, timeout=3))
    site, remote = elsewhere
    many = 2 * (PICTURES + QUERIES)
    with serving(remote) as server, ThreadPoolExecutor(2 * many) as pool:
        port = int(server.effective_port)
        site.troubles["00000.tar"] = ["silence"] * 2 * many
        shown = [pool.submit(request, port, "GET", f"/picture/{remote.identity}/{i % N}") for i in range(many)]
        asked = [pool.submit(post, port, [("like", f"{remote.identity}/{i % N}")]) for i in range(many)]
        while len(site.troubles["00000.tar"]) > 2 * many - PICTURES - QUERIES:
            time.sleep(0.01)
        assert post(port, [("text", "a red circle")])[0] == 200
        assert not all(one.done() for one in shown + asked)
        answers = [one.result() for one in shown]
        assert Counter(status for status, *_ in answers) == {503: many - PICTURES, 404: PICTURES}
        assert {headers.get("Retry-After") for status, headers, _ in answers if status == 503} == {"1"}
        assert Counter(one.result()[0] for one in asked) == {503: many - QUERIES, 400: QUERIES}
        site.troubles["00000.tar"] = []
        assert post(port, [("like", f"{remote.identity}/3")])[0] == 200


# ------------------------------------------------------------------------------------------------ load


def test_an_upload_that_is_far_too_large_is_not_taken_at_all(port):
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        head = f"POST /search HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {1 << 40}\r\n\r\n"
        connection.sendall(head.encode())
        assert b" 413 " in connection.recv(4096).split(b"\r\n")[0]


def test_a_large_photograph_is_searched_with(port, searcher, gallery):
    large = encode(Image.open(io.BytesIO(gallery.jpegs[5])).resize((5_000, 5_000), Image.BICUBIC), quality=95)
    status, answer = post(port, [("top", "3")], [("image", "x.jpg", large)])
    assert status == 200
    small = searcher.answer(SearchRequest([], [QueryImage("x", lambda: gallery.jpegs[5])], top=3))
    assert answer["results"][0]["row"] == small["results"][0]["row"]


def test_large_forms_are_taken_apart_one_after_the_other_and_small_ones_pass():
    lock, seen = threading.Lock(), []

    def take():
        with form_turn(LARGE_FORM + 1):
            assert lock.acquire(blocking=False)  # nobody else has the turn
            seen.append(time.monotonic())
            lock.release()

    with ThreadPoolExecutor(3 * QUERIES) as pool:
        with form_turn(None):
            asked = [pool.submit(take) for _ in range(3 * QUERIES)]
            while sum(one.done() for one in asked) < 2 * QUERIES + 1:
                time.sleep(0.01)
            with form_turn(LARGE_FORM):
                pass
            refused = [one for one in asked if one.done()]
        assert all(isinstance(one.exception(), Busy) for one in refused)
        assert not any(one.exception() for one in asked if one not in refused)
    assert len(seen) == QUERIES - 1
    assert min(later - earlier for earlier, later in pairwise(seen)) > 0.9 * GAP


def test_a_connection_is_answered_once_at_a_time(port):
    """A client that sends many requests at once and reads nothing would block the thread that writes to it."""
    wanted = f"GET /about HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(wanted * 50)
        answers = b""
        while part := connection.recv(1 << 16):  # the server closes
            answers += part
    assert 1 <= answers.count(b"HTTP/1.1 200") <= 2  # the first may be answered before the others are seen
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        for _ in range(3):  # one after the other
            connection.request("GET", "/about")
            used = connection.sock
            assert connection.getresponse().read()
            assert connection.sock is used is not None


def test_requests_that_trickle_and_answers_that_nobody_reads_do_not_stay(searcher, monkeypatch):
    clock = [0.0]  # of the server alone
    monkeypatch.setattr(
        "tools.search.page.time", type("Clock", (), {"monotonic": lambda: clock[0], "sleep": time.sleep})
    )
    with serving(searcher) as server:
        server.adj.send_bytes = 1
        port = int(server.effective_port)
        head = f"POST /search HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
        slow[0].sendall(head.encode())
        slow[1].sendall(f"{head}Content-Length: 1000\r\n\r\n".encode())
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", port))
        try:
            wait_for(lambda: len(server.active_channels) == 3)
            assert post(port, [("text", "a red circle")])[0] == 200
            wait_for(lambda: len(server.active_channels) == 3)
            last = max(server.active_channels.values(), key=lambda one: one.creation_time)
            last.write_soon(b"x" * (8 << 20))  # more than the system's buffers take
            for seconds, left in ((9, 3), (11, 2), (31, 1), (61, 0)):
                clock[0] = seconds
                for connection in slow:
                    with contextlib.suppress(OSError):
                        connection.sendall(b"x")  # however steadily they send
                wait_for(lambda left=left: len(server.active_channels) == left)
        finally:
            for connection in (*slow, deaf):
                connection.close()


def wait_for(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
