"""Time of text queries to the search page while others upload pictures, against the time without them.

    python -m tools.bench.uploads --index indexes/scenes

The server, the uploads and the texts are processes of their own, on one machine. --uploads connections send a PNG,
small as a file and large once decoded, again as soon as the one before is answered: of 64 million pixels, which the
server refuses by its header, and of 16 million, the most that it decodes.
"""

from __future__ import annotations

import http.client
import io
import subprocess
import sys
import time
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

from probemb.cli.command import Parser, run_command
from probemb.errors import UserError

WIDTH = 8_000
MARK = "----uploads"


def main() -> None:
    parser = Parser(prog="python -m tools.bench.uploads", description=__doc__.splitlines()[0])
    parser.add_argument("--index", type=Path, required=True, help="index folder of tools.build_index")
    parser.add_argument("--uploads", type=int, default=8, help="connections that upload (%(default)s)")
    parser.add_argument("--seconds", type=float, default=20, help="of every measurement (%(default)s)")
    options = parser.parse_args()
    with serving(options.index) as port:
        measure(port, 3)  # warm
        quiet = measure(port, options.seconds)
        report("quiet", quiet)
        for pixels in (64_000_000, 16_000_000):
            with uploading(port, pixels, options.uploads) as answered:
                under = measure(port, options.seconds)
            report(f"{options.uploads} uploads of {pixels // 10**6} megapixels", under, quiet)
            answers = ", ".join(f"{code} x {count}" for code, count in sorted(answered.items()))
            print(f"    answers to the uploads: {answers}", flush=True)


@contextmanager
def serving(index: Path):
    """The search page's server in a process of its own; its port. Raises UserError: it does not start."""
    argv = [sys.executable, "-m", "tools.search", "--serve", "--index", str(index), "--port", "0"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
        try:
            line = next((line for line in server.stdout if "http://" in line), None)
            if line is None:
                raise UserError(f"The page of {index} is not served.", "Look at the message above.")
            yield int(line.split("http://")[1].split("/")[0].rsplit(":", 1)[1])
        finally:
            server.terminate()


def measure(port: int, seconds: float) -> list[float]:
    """Seconds of text queries, asked one after the other, sorted."""
    end, took = time.monotonic() + seconds, []
    while time.monotonic() < end:
        began = time.perf_counter()
        code = post(port, form('name="text"', b"a red circle"))
        took.append(time.perf_counter() - began)
        if code != 200:
            raise UserError(f"A text query is answered with {code}.", "Look at the server's output.")
    return sorted(took)


@contextmanager
def uploading(port: int, pixels: int, count: int):
    """So many processes upload; the answers' codes are counted when the context ends."""
    context, answered, body = get_context("fork"), {}, form('name="image"; filename="x.png"', plain_png(pixels))
    stop, codes = context.Event(), context.Queue()
    attackers = [context.Process(target=_upload, args=(port, body, stop, codes)) for _ in range(count)]
    for one in attackers:
        one.start()
    time.sleep(1)
    try:
        yield answered
    finally:
        stop.set()
        for _ in attackers:
            for code in codes.get():
                answered[code] = answered.get(code, 0) + 1
        for one in attackers:
            one.join()


def _upload(port: int, body: bytes, stop, codes) -> None:
    found = []
    while not stop.is_set():
        found.append(post(port, body))
    codes.put(found)


def plain_png(pixels: int) -> bytes:
    """A PNG of one colour: some 200 kB for 64 million pixels."""
    from PIL import Image

    data = io.BytesIO()
    Image.new("RGB", (WIDTH, pixels // WIDTH), (90, 60, 30)).save(data, "PNG")
    return data.getvalue()


def form(field: str, content: bytes) -> bytes:
    """A multipart body with one field."""
    head = f"--{MARK}\r\nContent-Disposition: form-data; {field}\r\n\r\n"
    return head.encode() + content + f"\r\n--{MARK}--\r\n".encode()


def post(port: int, body: bytes) -> int:
    """The status of the answer to a search."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/search", body, {"Content-Type": f"multipart/form-data; boundary={MARK}"})
    code = connection.getresponse().status
    connection.close()
    return code


def report(name: str, took: list[float], quiet: list[float] | None = None) -> None:
    """Print median and 99th percentile."""
    median, p99 = (1000 * quantile(took, q) for q in (0.5, 0.99))
    ratio = f", {p99 / 1000 / quantile(quiet, 0.99):.2f} x the quiet p99" if quiet else ""
    print(f"{name}: {len(took)} texts, median {median:.1f} ms, p99 {p99:.1f} ms{ratio}", flush=True)


def quantile(ordered: list[float], q: float) -> float:
    return ordered[int(q * (len(ordered) - 1))]


if __name__ == "__main__":
    run_command(main)
