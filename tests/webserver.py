"""A real web server on the loopback that misbehaves as it is told to."""

import hashlib
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Site(ThreadingHTTPServer):
    """Serves a folder. `troubles` of a file name are used up one a request: an HTTP code, or a word.

    "cut" (half of it, then the connection ends), "stall" (half of it, then silence), "silence".
    """

    daemon_threads = True

    def __init__(self, folder: Path, ranges: bool = True):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.ranges = folder, ranges
        self.troubles: dict[str, list] = {}
        self.headers: dict[str, str] = {}  # of every answer
        self.requests: list[tuple[str, str | None]] = []  # name, Range header
        self.sent = 0
        self.ended = threading.Event()
        self.lock = threading.Lock()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_) -> None:
        pass

    def end_headers(self) -> None:
        for header in self.server.headers.items():
            self.send_header(*header)
        super().end_headers()

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        site, name, asked = self.server, self.path.rpartition("/")[2].partition("?")[0], self.headers.get("Range")
        with site.lock:
            site.requests.append((name, asked))
            queue = site.troubles.get(name, [])
            trouble = queue.pop(0) if queue else None
        if isinstance(trouble, int):
            self.send_response(trouble)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if trouble == "silence":
            site.ended.wait(30)
            return
        try:
            data = (site.folder / name).read_bytes()
        except OSError:
            self.send_error(404)
            return
        start, end, part = 0, len(data), asked and site.ranges
        if part:
            first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", asked).groups()
            start, end = int(first), min(end, int(last) + 1 if last else end)
        body = data[start:end]
        self.send_response(206 if part else 200)
        if part:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        if site.ranges:
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if trouble in ("cut", "stall"):
            body = body[: len(body) // 2]
        self._send(body)
        if trouble == "stall":
            site.ended.wait(30)

    def _send(self, data: bytes) -> None:
        with self.server.lock:  # before the client can have them all and look
            self.server.sent += len(data)
        try:
            self.wfile.write(data)
            self.wfile.flush()
        except OSError:  # the client has had enough
            self.server.ended.wait(0.01)


@contextmanager
def running(site):
    """The server, answering in a thread of its own; `site.ended` is set for what still waits, and it is closed."""
    thread = threading.Thread(target=site.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield site
    finally:
        site.ended.set()
        site.shutdown()
        site.server_close()
        thread.join()


def serve(folder: Path, ranges: bool = True):
    """A running Site."""
    return running(Site(folder, ranges))
