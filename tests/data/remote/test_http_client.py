"""Asking web servers that never come to an end of their answer, lead elsewhere, or want a user's name and password."""

import re
import socket
import threading
import time
from contextlib import contextmanager, suppress

import pytest

from probemb.data.failures import BadShard
from probemb.data.remote.sources import FetchPolicy, Remote, fetch, fetch_range
from tests.imagesite import self_signed, serve_images

SHORT = FetchPolicy(attempts=1, timeout=0.5)
AMPLE = FetchPolicy(attempts=1, timeout=20.0)
LATE = 8  # seconds after which a request that should have ended counts as hanging, on a busy machine
OK = b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: 4\r\n\r\nabcd'
SECRET = "pass%2Fw%40rd"


class Listener:
    """A server on the loopback; `answer(connection, head)` says what each request gets."""

    def __init__(self, answer):
        self.answer = answer
        self.heads: list[str] = []
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port = self.listening.getsockname()[1]
        self.ended = threading.Event()

    def work(self):
        with suppress(OSError):
            while True:
                connection = self.listening.accept()[0]
                threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection):
        with suppress(OSError), connection:
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                data = connection.recv(1 << 16)
                if not data:
                    return
                head += data
            self.heads.append(head.decode())
            self.answer(connection, head.decode())
            connection.close()

    def drip(self, connection, beginning: bytes, again: bytes, pause=0.05):
        """Something, and then a little of it for ever: never silent, never done."""
        connection.sendall(beginning)
        while not self.ended.wait(pause):
            connection.sendall(again)


@contextmanager
def listening(answer):
    server = Listener(lambda connection, head: answer(server, connection, head))
    thread = threading.Thread(target=server.work, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.ended.set()
        server.listening.shutdown(socket.SHUT_RDWR)
        server.listening.close()
        thread.join()


def fine(server, connection, head):
    connection.sendall(OK)


def got(address, tmp_path, policy=AMPLE) -> bytes:
    with open(tmp_path / "got", "w+b", buffering=0) as file:
        count = fetch(Remote(address), file, None, policy)
        file.seek(0)
        return file.read(count)


DRIPS = {
    "status line": (b"HTTP/1.1 200 ", b"O"),
    "chunk size": (b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-3/4\r\nTransfer-Encoding: chunked\r\n\r\n", b"0"),
}


@pytest.mark.parametrize("drip", DRIPS)
def test_an_answer_without_an_end(drip, tmp_path):
    with listening(lambda server, connection, head: server.drip(connection, *DRIPS[drip])) as server:
        address = f"http://127.0.0.1:{server.port}/a.tar"
        asking = [lambda: fetch_range(Remote(address), 0, 4, SHORT), lambda: got(address, tmp_path, SHORT)]
        for ask in asking:
            began = time.monotonic()
            with pytest.raises(BadShard, match=r"no answer in 0\.5 s"):
                ask()
            assert time.monotonic() - began < LATE
        assert len(server.heads) == len(asking)


def test_the_deadline_is_one_for_all_redirects(tmp_path):
    def lead_on(server, connection, head):
        time.sleep(0.15)
        number = int(re.search(r"/(\d+) ", head)[1])
        connection.sendall(f"HTTP/1.1 302 Found\r\nLocation: /{number + 1}\r\n\r\n".encode())

    with listening(lead_on) as server:
        with pytest.raises(BadShard, match=r"no answer in 0\.5 s"):
            got(f"http://127.0.0.1:{server.port}/0", tmp_path, SHORT)
        assert 2 <= len(server.heads) <= 4
    with listening(lead_on) as server:
        with pytest.raises(BadShard, match="more than 10 redirects"):
            got(f"http://127.0.0.1:{server.port}/0", tmp_path)
        assert len(server.heads) == 11


@pytest.mark.parametrize("location", ["file:///etc/hostname", "gopher://h/?secret"])
def test_redirects_to_what_is_not_the_web(location, tmp_path):
    def lead_away(server, connection, head):
        where = location.format(port=server.port)
        connection.sendall(f"HTTP/1.1 302 Found\r\nLocation: {where}\r\nContent-Length: 0\r\n\r\n".encode())

    with listening(lead_away) as server:
        address = f"http://127.0.0.1:{server.port}/a.tar"
        for ask in (
            lambda: got(address, tmp_path, FetchPolicy(attempts=3, timeout=20, backoff=0.01)),
            lambda: fetch_range(Remote(address), 0, 4, AMPLE),
        ):
            with pytest.raises(BadShard, match="no valid web address") as refused:
                ask()
            assert "secret" not in str(refused.value)
        assert len(server.heads) == 2  # another attempt would not help


@pytest.mark.parametrize("same", [True, False])
def test_a_password_stays_with_its_server(same, tmp_path):
    with listening(fine) as other:

        def lead_on(server, connection, head):
            where = f"http://127.0.0.1:{server.port if same else other.port}/b"
            moved = f"HTTP/1.1 301 Moved\r\nLocation: {where}\r\n\r\n"
            connection.sendall(moved.encode() if head.startswith("GET /a ") else OK)

        with listening(lead_on) as server:
            assert got(f"http://me:{SECRET}@127.0.0.1:{server.port}/a", tmp_path) == b"abcd"
            last = (server if same else other).heads[-1]
            assert last.startswith("GET /b ")
            assert ("Authorization" in last) == same
            assert "Authorization" in server.heads[0]


@pytest.mark.parametrize(
    "address",
    [
        "http://me:{secret}@127.0.0.1:1/a.tar?token=secret",
        "http://me:hush\N{CARE OF}secret@127.0.0.1:1/a.tar",
        "nosuch://me:hu/sh@host/a.tar",
    ],
)
def test_no_message_has_a_password(address, tmp_path):
    address = address.format(secret=SECRET)
    policy = FetchPolicy(attempts=2, timeout=20, backoff=0.01)
    with pytest.raises(BadShard) as refused:
        got(address, tmp_path, policy)
    for text in str(refused.value), str(Remote(address)):
        assert not any(word in text for word in ("hush", "hu/sh", "sh@", SECRET, "secret@", "token"))


def test_certificates_are_checked(tmp_path):
    with serve_images(self_signed(tmp_path)) as site, pytest.raises(BadShard, match="certificate verify failed"):
        got(f"{site.address}/ok/a.tar", tmp_path)
