"""A real web server here that serves images and misbehaves by path: the first word of a path says how."""

import shutil
import socket
import ssl
import struct
import subprocess
import threading
import time
import zlib
from collections import Counter
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.orientation import stored, upright
from tests.webserver import running
from tests.world import encode

DRIP = 0.05  # seconds between two bytes


def picture(name: object, size: tuple[int, int] = (96, 64), form: str = "JPEG", mode: str = "RGB") -> bytes:
    """An encoded image that depends on its name alone."""
    colours = np.random.default_rng(zlib.crc32(str(name).encode())).integers(0, 256, (4, 4, 3), np.uint8)
    return encode(Image.fromarray(colours).resize(size, Image.Resampling.BILINEAR).convert(mode), form)


def bomb(width: int = 40_000, height: int = 40_000) -> bytes:
    """A PNG of a few bytes whose header states this size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


class ImageSite(ThreadingHTTPServer):
    """`requests` counts paths; `broken` is a set of first words that are answered with 503 while they are in it."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: Counter[str] = Counter()
        self.broken: set[str] = set()
        self.pause = 0.0  # seconds before an image
        self.ended = threading.Event()
        self.scheme = "http"

    @property
    def address(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address) -> None:
        pass  # clients that have had enough


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        site = self.server
        site.requests[self.path] += 1
        word, _, rest = self.path.lstrip("/").partition("/")
        if word in site.broken:
            self.answer(code=503)
        elif word in IMAGES:
            time.sleep(site.pause)
            self.answer(IMAGES[word](rest))
        else:
            with suppress(OSError):
                getattr(self, f"do_{word}", self.do_gone)(rest)
        self.close_connection = True

    def begin(self, code: int = 200, **headers: object) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()

    def answer(self, body: bytes = b"", code: int = 200, **headers: object) -> None:
        self.begin(code, Content_Type="image/jpeg", Content_Length=len(body), Connection="close", **headers)
        self.wfile.write(body)

    def do_gone(self, rest: str) -> None:
        self.answer(b"gone", 404)

    def do_status(self, rest: str) -> None:
        self.answer(b"no", int(rest))

    def do_noai(self, rest: str) -> None:
        self.answer(picture(rest), X_Robots_Tag=f"{rest}noindex, noai")

    def do_busy(self, rest: str) -> None:
        again = self.server.requests[self.path] > 1
        self.answer(picture(rest), 200 if again else 429, Retry_After=1)

    def do_onward(self, rest: str) -> None:
        self.answer(code=302, Location=f"/ok/{rest}", X_Robots_Tag="noai")

    def do_moved(self, rest: str) -> None:
        self.answer(code=301, Location=f"/ok/{rest}")

    def do_chain(self, rest: str) -> None:  # never twice the same
        self.answer(code=302, Location=f"/chain/{int(rest) + 1}")

    def do_inward(self, rest: str) -> None:
        self.answer(code=302, Location="file:///etc/hostname")

    # --------------------------------------------------------------------------------------------- what does not end
    def do_announced(self, rest: str) -> None:
        self.do_endless(rest, Content_Length=1 << 40)

    def do_endless(self, rest: str, **headers: object) -> None:
        self.begin(**headers)
        while not self.server.ended.is_set():
            self.wfile.write(bytes(1 << 16))

    def do_silent(self, rest: str) -> None:
        self.server.ended.wait(30)

    def do_stalled(self, rest: str) -> None:
        self.do_cut(rest)
        self.server.ended.wait(30)

    def do_drip(self, rest: str) -> None:
        self.begin(Content_Length=len(picture(rest)))
        self.dripping(picture(rest))

    def do_dripheaders(self, rest: str) -> None:
        self.dripping(b"HTTP/1.1 200 OK\r\n" + b"X-Wait: a little longer\r\n" * 1000)

    def do_dripchunks(self, rest: str) -> None:
        self.begin(Transfer_Encoding="chunked")
        self.dripping(b"1\r\nx\r\n" * 1000)

    def do_dripsize(self, rest: str) -> None:  # of a chunk
        self.begin(Transfer_Encoding="chunked")
        self.dripping(b"0" * 1000)

    def dripping(self, data: bytes) -> None:
        for byte in data:
            if self.server.ended.wait(DRIP):
                break
            self.wfile.write(bytes([byte]))
            self.wfile.flush()

    # ------------------------------------------------------------------------------------------ what ends too early
    def do_cut(self, rest: str) -> None:
        self.begin(Content_Length=len(picture(rest)))
        self.wfile.write(picture(rest)[:100])

    def do_chunked(self, rest: str) -> None:  # this one is whole
        self.do_cutchunks(rest)
        self.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(picture(rest)) - 100, picture(rest)[100:]))

    def do_cutchunks(self, rest: str) -> None:
        self.begin(Transfer_Encoding="chunked")
        self.wfile.write(b"64\r\n%b\r\n" % picture(rest)[:100])

    def do_reset(self, rest: str) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def do_garbage(self, rest: str) -> None:
        self.wfile.write(b"\x00\xff\xfe not a protocol\r\n\r\n")


IMAGES = {  # answered as image/jpeg, whatever they are
    "ok": picture,
    "same": lambda rest: picture("the same"),
    "large": lambda rest: picture(rest, (900, 600)),
    "turned": lambda rest: stored(upright((640, 416)), int(rest)),  # with the orientation that the path names
    "alpha": lambda rest: picture(rest, form="PNG", mode="RGBA"),
    "webp": lambda rest: picture(rest, form="WEBP"),
    "html": lambda rest: b"<!DOCTYPE html><html><body>Log in</body></html>",
    "bomb": lambda rest: bomb(),
    "tiny": lambda rest: picture(rest, (8, 8)),
}


def serve_images(certificate: str | None = None):
    """A running ImageSite; with a PEM file of key and certificate, over TLS."""
    site = ImageSite()
    if certificate:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate)
        site.socket = tls.wrap_socket(site.socket, server_side=True, do_handshake_on_connect=False)
        site.scheme = "https"
    return running(site)


def self_signed(folder: Path) -> str:
    """A PEM file with a key and a certificate for 127.0.0.1 for which nobody vouches; skips without openssl."""
    if not shutil.which("openssl"):
        pytest.skip("openssl makes the certificate")
    pem = str(folder / "self-signed.pem")
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=127.0.0.1"
    words = [*words.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", pem, "-out", pem]
    subprocess.run(words, check=True, capture_output=True)
    return pem
