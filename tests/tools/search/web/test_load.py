"""The search page's server under uploads and connections that would hold up others."""

import contextlib
import http.client
import io
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from PIL import Image

from tests.searching import bomb, gallery, searcher  # noqa: F401 - fixtures
from tests.searchpage import port, post, serving  # noqa: F401 - a fixture
from tests.world import run_folder  # noqa: F401 - a fixture
from tools.search.decoding import QUERIES, Busy
from tools.search.web.pace import GAP, LARGE, Pace
from tools.search.wish import QueryImage, Wish


def test_an_upload_that_is_far_too_large_is_not_taken_at_all(port):  # noqa: F811
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        head = f"POST /search HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {1 << 40}\r\n\r\n"
        connection.sendall(head.encode())
        assert b" 413 " in connection.recv(4096).split(b"\r\n")[0]


def test_a_decompression_bomb(port):  # noqa: F811
    status, answer = post(port, [], [("image", "x.png", bomb())])
    assert status == 400
    assert "more than 16,000,000 pixels" in answer["error"]


def test_a_request_that_trickles_holds_up_nobody(port):  # noqa: F811
    slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(12)]
    try:
        for connection in slow:
            head = f"POST /search HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: 1000\r\n\r\nx"
            connection.sendall(head.encode())
        started = time.monotonic()
        assert post(port, [("text", "a red circle")])[0] == 200
        assert time.monotonic() - started < 5
    finally:
        for connection in slow:
            connection.close()


def plain_png(pixels):
    data = io.BytesIO()
    Image.new("RGB", (8_000, pixels // 8_000), (90, 60, 30)).save(data, "PNG")
    return data.getvalue()


def slowest(port, seconds):  # noqa: F811
    """The 99th percentile of the time of a text query, asked again and again."""
    end, took = time.monotonic() + seconds, []
    while time.monotonic() < end:
        started = time.monotonic()
        assert post(port, [("text", "a red circle")])[0] == 200
        took.append(time.monotonic() - started)
    return sorted(took)[int(0.99 * (len(took) - 1))]


@pytest.mark.parametrize(("pixels", "codes"), [(64_000_000, {400, 503}), (16_000_000, {200, 503})])
def test_uploads_do_not_hold_up_texts(port, pixels, codes):  # noqa: F811
    """Eight of them at once, again and again, and each small as a file."""
    picture, quiet, stop = plain_png(pixels), slowest(port, 0.5), threading.Event()

    def attack():
        found = set()
        while not stop.is_set():
            found.add(post(port, [], [("image", "x.png", picture)])[0])
        return found

    with ThreadPoolExecutor(10) as pool:
        attacks = [pool.submit(attack) for _ in range(10)]
        try:
            under = slowest(port, 2)
        finally:
            stop.set()
        found = set().union(*(one.result() for one in attacks))
    assert min(codes) in found
    assert found <= codes
    assert under < 3 * quiet + 0.5  # half a second for a machine with other work: it was seconds


def test_large_forms_are_taken_apart_one_after_the_other():
    pace, lock, seen = Pace(), threading.Lock(), []

    def take():
        with pace.turn(LARGE + 1):
            assert lock.acquire(blocking=False)  # nobody else has the turn
            seen.append(time.monotonic())
            lock.release()

    with ThreadPoolExecutor(QUERIES) as pool:
        for one in [pool.submit(take) for _ in range(QUERIES)]:
            one.result()
    assert min(later - earlier for earlier, later in pairwise(seen)) > 0.9 * GAP


def test_few_large_forms_wait_and_small_ones_pass():
    pace, many = Pace(), 3 * QUERIES

    def take():
        with pace.turn(LARGE + 1):
            pass

    with ThreadPoolExecutor(many) as pool:
        with pace.turn(None):
            asked = [pool.submit(take) for _ in range(many)]
            end = time.monotonic() + 10
            while sum(one.done() for one in asked) < many - QUERIES + 1 and time.monotonic() < end:
                time.sleep(0.01)
            with pace.turn(LARGE):
                pass
            refused = [one for one in asked if one.done()]
            assert len(refused) == many - QUERIES + 1  # this one has a place too
        assert all(isinstance(one.exception(), Busy) for one in refused)
        assert not any(one.exception() for one in asked if one not in refused)


def test_a_large_photograph_is_searched_with(port, searcher, gallery):  # noqa: F811
    large = io.BytesIO()
    Image.open(io.BytesIO(gallery.jpegs[5])).resize((5_000, 5_000), Image.BICUBIC).save(large, "JPEG", quality=95)
    status, answer = post(port, [("top", "3")], [("image", "x.jpg", large.getvalue())])
    assert status == 200
    small = searcher.answer(Wish([], [QueryImage("x", gallery.jpegs[5])], top=3))
    assert answer["results"][0]["row"] == small["results"][0]["row"]


def test_connections_that_trickle_do_not_shut_others_out(searcher, monkeypatch):  # noqa: F811
    monkeypatch.setattr("tools.search.web.server.HEADER_SECONDS", 1.5)
    monkeypatch.setattr("tools.search.web.server.BODY_SECONDS", 3.0)
    with serving(searcher) as server:
        port = int(server.effective_port)
        head = f"POST /search HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(230)]
        try:
            for number, connection in enumerate(slow):
                connection.sendall((head + ("Content-Length: 1000\r\n\r\n" if number % 2 else "")).encode())
            assert post(port, [("text", "a red circle")])[0] == 200  # at once, while they stay
            end = time.monotonic() + 12
            while server.active_channels and time.monotonic() < end:  # however steadily they send
                for connection in slow:
                    with contextlib.suppress(OSError):
                        connection.sendall(b"x")
                time.sleep(0.2)
            assert not server.active_channels
        finally:
            for connection in slow:
                connection.close()


def test_a_connection_is_answered_once_at_a_time(port):  # noqa: F811
    """A client that sends many requests at once and reads nothing would block the thread that writes to it."""
    request = f"GET /about HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(request * 50)
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


def test_answers_that_nobody_reads_do_not_stay(searcher, monkeypatch):  # noqa: F811
    monkeypatch.setattr("tools.search.web.server.UNREAD_SECONDS", 1.5)
    with serving(searcher) as server:
        server.adj.send_bytes = 1
        port = int(server.effective_port)
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", port))
            deadline = time.monotonic() + 20
            (channel,) = _channels(server, deadline)
            channel.write_soon(b"x" * (8 << 20))  # more than the system's buffers take
            assert channel.total_outbufs_len
            while channel.connected and time.monotonic() < deadline:
                time.sleep(0.1)
            assert not channel.connected
            assert not channel.total_outbufs_len
        assert post(port, [("text", "a red circle")])[0] == 200


def _channels(server, deadline: float) -> list:
    while not server.active_channels and time.monotonic() < deadline:
        time.sleep(0.05)
    return list(server.active_channels.values())
