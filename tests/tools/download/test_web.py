"""One address of a hostile server: its image, or a cause, within the time and bytes that were allowed."""

import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.imagesite import picture, serve_images
from tools.download.web import Limits, Refused, bounded

QUICK = Limits(seconds=1.0, patience=0.6, size=1 << 20, redirects=3, private=True)
PATIENT = Limits(seconds=30, patience=20, private=True)
ROOT = Path(__file__).resolve().parents[3]
AMPLE = 8  # seconds after which a request that should have ended counts as hanging, on a busy machine


@pytest.fixture(scope="module")
def site():
    with serve_images() as site:
        yield site


def ask(address: str, limits: Limits = QUICK) -> bytes:
    with bounded(limits), urllib.request.urlopen(address, timeout=99) as answer:
        return answer.read()


@pytest.mark.parametrize("word", ["ok", "moved", "chunked", "mislabelled"])
def test_images_come_as_they_are(site, word):
    assert ask(f"{site.address}/{word}/a", PATIENT) == picture("a")


@pytest.mark.parametrize(
    ("word", "cause"),
    [
        ("gone", "HTTP 404"),
        ("status/403", "HTTP 403"),
        ("status/500", "HTTP 500"),
        ("status/304", "redirects"),
        ("loop", "redirects"),
        ("chain/0", "redirects"),
        ("inward", "redirect to another scheme"),
        ("outward/ftp", "redirect to another scheme"),
        ("outward/data", "redirect to another scheme"),
        ("removed", "image removed"),
        ("announced", "too many bytes"),
        ("endless", "too many bytes"),
        ("silent", "no answer"),
        ("stalled", "no answer"),
        ("drip", "too slow"),
        ("dripheaders", "too slow"),
        ("dripchunks", "too slow"),
        ("cut", "cut off"),
        ("cutchunks", "cut off"),
        ("reset", "connection"),
        ("garbage", "not HTTP"),
    ],
)
def test_whatever_a_server_does_ends_with_a_cause(site, word, cause):
    started = time.monotonic()
    with pytest.raises(Refused) as refused:
        ask(f"{site.address}/{word}")
    assert time.monotonic() - started < AMPLE
    assert refused.value.cause == cause
    assert str(refused.value).startswith(f"{cause}|")


@pytest.mark.parametrize(
    ("rule", "leaves_out"),
    [
        ("none", True), ("NoAI", True), ("nofollow, noimageai", True), ("img2dataset: noai", True), ("*: noai", True),
        ("other: noindex, probemb: nofollow, noai", True), ("max-snippet: 5, noindex", True),
        ("all", False), ("other: noai, noindex", False), ("img2dataset: all", False),
        ("max-image-preview: none", False),
    ],
)  # fmt: skip
def test_opting_out(site, rule, leaves_out):
    address = f"{site.address}/robots/{quote(rule)}"
    assert ask(address) == picture(quote(rule))
    if leaves_out:
        with pytest.raises(Refused, match=r"opted out\|"):
            ask(address, replace(QUICK, agents=("img2dataset", "probemb")))
    else:
        assert ask(address, replace(QUICK, agents=("img2dataset", "probemb")))


def test_a_redirect_opts_out_too(site):
    assert ask(f"{site.address}/reserved/r") == picture("r")
    with pytest.raises(Refused, match=r"opted out\|noai"):
        ask(f"{site.address}/reserved/r", replace(QUICK, agents=("img2dataset",)))
    assert site.requests["/ok/r"] == 1


def test_a_host_that_asks_for_a_pause_gets_it(site):
    limits, day = replace(QUICK, seconds=5), 86_400
    with bounded(limits):
        started = time.monotonic()
        assert urllib.request.urlopen(f"{site.address}/busy/1").read() == picture("1")
        assert time.monotonic() - started > 0.9
        for word in (f"busy/{day}", "ok/later"):
            with pytest.raises(Refused, match="HTTP 429"):
                urllib.request.urlopen(f"{site.address}/{word}")
        assert not site.requests["/ok/later"]
    with bounded(limits), pytest.raises(Refused, match="HTTP 429"):
        urllib.request.urlopen(f"{site.address}/busy/{quote(formatdate(time.time() + day, usegmt=True))}")
    with bounded(limits), pytest.raises(Refused, match="HTTP 429"):
        urllib.request.urlopen(f"{site.address}/busy/soon")


def test_redirects_are_bounded(site):
    before = sum(site.requests.values())
    with pytest.raises(Refused):
        ask(f"{site.address}/chain/100")
    assert sum(site.requests.values()) - before == 1 + QUICK.redirects


def test_redirects_share_the_time_of_their_address(site):
    """A chain of slow answers, each within the patience, is not longer than one address may take."""
    slow = Limits(seconds=0.8, patience=0.6, redirects=50, private=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answer():
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.recv(4096)
                        time.sleep(0.3)
                        place = f"Location: http://127.0.0.1:{port}/{time.monotonic_ns()}\r\n"
                        connection.sendall(f"HTTP/1.0 302 Found\r\n{place}Content-Length: 0\r\n\r\n".encode())

        thread = threading.Thread(target=answer)
        thread.start()
        started = time.monotonic()
        with pytest.raises(Refused) as refused:
            ask(f"http://127.0.0.1:{port}/", slow)
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert refused.value.cause == "too slow"
    assert time.monotonic() - started < AMPLE


def test_private_addresses_are_not_asked(site):
    before = sum(site.requests.values())
    public = Limits(seconds=1, patience=0.6)
    for host in ("127.0.0.1", "localhost", "[::1]", "169.254.169.254", "10.0.0.1", "0.0.0.0", "[::ffff:127.0.0.1]"):
        with pytest.raises(Refused, match="private address"):
            ask(f"http://{host}:{site.server_port}/ok/a", public)
    assert sum(site.requests.values()) == before


@pytest.mark.parametrize(
    "environment",
    [
        {"no_proxy": "localhost"},
        {"https_proxy": "http://10.0.0.1:3128"},
        {"http_proxy": "http://10.0.0.1:3128", "no_proxy": "127.0.0.1"},
    ],
    ids=" ".join,
)
def test_a_proxy_opens_no_private_network(site, monkeypatch, environment):
    before = sum(site.requests.values())
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Refused, match="private address"):
        ask(f"http://127.0.0.1:{site.server_port}/ok/a", Limits(seconds=1, patience=0.6))
    assert sum(site.requests.values()) == before


def test_a_proxy_in_a_private_network_is_asked(site, monkeypatch):
    monkeypatch.setenv("http_proxy", f"127.0.0.1:{site.server_port}")
    monkeypatch.delenv("no_proxy", raising=False)
    with pytest.raises(Refused, match="HTTP 404"):  # the site does not forward
        ask("http://somewhere.example/a", Limits(seconds=5, patience=5))
    assert site.requests["http://somewhere.example/a"] == 1


@pytest.mark.parametrize("address", ["file:///etc/hostname", "ftp://127.0.0.1/a", "data:,hello"])
def test_only_the_web_is_asked(address):
    with pytest.raises(Refused) as refused:
        ask(address)
    assert refused.value.cause == "not a web address"


def test_hosts_that_are_not_there():
    with pytest.raises(Refused) as refused:
        ask("http://no-such-host.invalid/a.jpg")
    assert refused.value.cause == "host not found"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(Refused) as refused:
        ask(f"http://127.0.0.1:{port}/a.jpg")
    assert refused.value.cause == "connection"


SILENT_NAME_SERVER = """
import fcntl, socket, struct, subprocess, sys, threading, time, urllib.request
from tools.download.web import Limits, Refused, bounded

subprocess.run(["mount", "--bind", sys.argv[1], "/etc/resolv.conf"], check=True)
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:  # the loopback, up
    fcntl.ioctl(one, 0x8914, struct.pack("16sh14x", b"lo", 0x49))
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
for limits in (Limits(seconds=30, patience=0.5), Limits(seconds=0.5, patience=30)):
    begun = time.monotonic()
    with bounded(limits):
        try:
            urllib.request.urlopen("http://a.slow.example/a.jpg")
        except Refused as error:
            print(error, flush=True)
    assert time.monotonic() - begun < 8
assert b"slow" in server.recv(512)  # it was asked
"""


def test_a_name_server_that_never_answers(tmp_path):
    """In namespaces of its own, where the only name server is silent for the resolver's 30 seconds."""
    if subprocess.run(["unshare", "-rmn", "mount", "--bind", "/etc/resolv.conf", "/etc/resolv.conf"]).returncode:
        pytest.skip("needs Linux namespaces")
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:30 attempts:1\n")
    command = ["unshare", "-rmn", sys.executable, "-c", SILENT_NAME_SERVER, str(tmp_path / "resolv.conf")]
    proxies = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=proxies, timeout=60)
    assert done.stdout.splitlines() == ["no answer|no answer from the name server", "too slow|"], done.stderr


def test_the_opener_of_before_is_back_afterwards():
    before = urllib.request._opener
    with bounded(QUICK):
        assert urllib.request._opener is not before
    assert urllib.request._opener is before


def test_nothing_is_asked_after_a_stop(site):
    before = sum(site.requests.values())
    with bounded(QUICK) as opener:
        opener.stopped = True
        with pytest.raises(Refused) as refused:
            urllib.request.urlopen(f"{site.address}/ok/a")
    assert refused.value.cause == "stopped"
    assert sum(site.requests.values()) == before


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if not shutil.which("openssl"):
        pytest.skip("openssl makes the certificate")
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=127.0.0.1"
    subprocess.run(
        [*make.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert],
        check=True,
        capture_output=True,
    )
    both = folder / "both.pem"
    both.write_text(key.read_text() + cert.read_text())
    return both, cert


def test_tls(certificate, monkeypatch):
    both, cert = certificate
    with serve_images(str(both)) as site:
        with pytest.raises(Refused) as refused:  # nobody vouches for it
            ask(f"{site.address}/ok/a")
        assert refused.value.cause == "TLS"
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        assert ssl.create_default_context().cert_store_stats()["x509"] >= 1
        assert ask(f"{site.address}/ok/a", PATIENT) == picture("a")
        for word, cause in (("drip", "too slow"), ("silent", "no answer"), ("dripheaders", "too slow")):
            started = time.monotonic()
            with pytest.raises(Refused) as refused:
                ask(f"{site.address}/{word}/a")
            assert refused.value.cause == cause
            assert time.monotonic() - started < AMPLE


def test_a_handshake_that_never_ends():
    with socket.create_server(("127.0.0.1", 0)) as server:
        started = time.monotonic()
        with pytest.raises(Refused) as refused:
            ask(f"https://127.0.0.1:{server.getsockname()[1]}/a")
        assert refused.value.cause == "no answer"
        assert time.monotonic() - started < AMPLE
