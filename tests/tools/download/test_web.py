"""One address of a hostile server: its image, or a cause, within the time and bytes that were allowed."""

import socket
import time
import urllib.request

import pytest

from tests.imagesite import picture, self_signed, serve_images
from tools.download.web import BoundedOpener, Limits, Refused

QUICK = Limits(seconds=1.0, patience=0.6, size=1 << 20, private=True)
PATIENT = Limits(seconds=30, patience=20, private=True)
PUBLIC = Limits(seconds=1, patience=0.6)
AMPLE = 8  # seconds after which a request that should have ended counts as hanging, on a busy machine


@pytest.fixture(scope="module")
def site():
    with serve_images() as site:
        yield site


def ask(address: str, limits: Limits = QUICK) -> bytes:
    with BoundedOpener(limits).open(urllib.request.Request(address)) as answer:
        return answer.read()


def cause_of(address: str, limits: Limits = QUICK) -> str:
    began = time.monotonic()
    with pytest.raises(Refused) as refused:
        ask(address, limits)
    assert time.monotonic() - began < AMPLE
    return str(refused.value).partition("|")[0]


@pytest.mark.parametrize("word", ["ok", "moved", "chunked", "busy"])
def test_images_come_as_they_are(site, word):
    assert ask(f"{site.address}/{word}/a", PATIENT) == picture("a")


@pytest.mark.parametrize(
    ("word", "cause"),
    [
        ("gone", "HTTP 404"),
        ("status/500", "HTTP 500"),
        ("status/304", "redirects"),
        ("inward", "redirect to another scheme"),
        ("announced", "too many bytes"),
        ("endless", "too many bytes"),
        ("silent", "no answer"),
        ("stalled", "no answer"),
        ("drip", "too slow"),
        ("dripheaders", "too slow"),
        ("dripchunks", "too slow"),
        ("cutchunks", "cut off"),
        ("cut", "cut off"),
        ("reset", "connection"),
        ("garbage", "not HTTP"),
    ],
)
def test_whatever_a_server_does_ends_with_a_cause(site, word, cause):
    assert cause_of(f"{site.address}/{word}") == cause


def test_redirects_are_bounded(site):
    before = sum(site.requests.values())
    assert cause_of(f"{site.address}/chain/100") == "redirects"
    assert sum(site.requests.values()) - before == 6


def test_private_addresses_are_not_asked(site):
    before = sum(site.requests.values())
    for host in ("127.0.0.1", "localhost", "[::1]", "169.254.169.254", "10.0.0.1", "0.0.0.0", "[::ffff:127.0.0.1]"):
        assert cause_of(f"http://{host}:{site.server_port}/ok/a", PUBLIC) == "private address"
    assert sum(site.requests.values()) == before


@pytest.mark.parametrize(
    "environment",
    [{"no_proxy": "localhost"}, {"http_proxy": "http://10.0.0.1:3128", "no_proxy": "127.0.0.1"}],
    ids=" ".join,
)
def test_a_proxy_opens_no_private_network(site, monkeypatch, environment):
    before = sum(site.requests.values())
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cause_of(f"http://127.0.0.1:{site.server_port}/ok/a", PUBLIC) == "private address"
    assert sum(site.requests.values()) == before


@pytest.mark.parametrize("address", ["file:///etc/hostname", "ftp://127.0.0.1/a", "data:,hello"])
def test_only_the_web_is_asked(address):
    assert cause_of(address) == "not a web address"


def test_tls(tmp_path, monkeypatch):
    pem = self_signed(tmp_path)
    with serve_images(pem) as site:
        assert cause_of(f"{site.address}/ok/a") == "TLS"  # nobody vouches for it
        monkeypatch.setenv("SSL_CERT_FILE", pem)
        assert ask(f"{site.address}/ok/a", PATIENT) == picture("a")
        assert cause_of(f"{site.address}/drip/a") == "too slow"
    with socket.create_server(("127.0.0.1", 0)) as server:  # a handshake that never ends
        assert cause_of(f"https://127.0.0.1:{server.getsockname()[1]}/a") == "no answer"
