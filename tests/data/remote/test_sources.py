"""Fetching from real servers and commands that fail, stall, cut off and lie."""

import json
import time
from pathlib import Path

import pytest

from probemb.data.failures import BadShard
from probemb.data.remote import FetchPolicy, Remote, fetch, fetch_range
from probemb.data.shards.index import read_index
from probemb.errors import UserError
from tests.imagesite import serve_images
from tests.webserver import serve
from tests.world import picture, write_tar

QUICK = FetchPolicy(attempts=4, timeout=2, backoff=0.01)  # long enough for a busy machine to answer in
DATA = bytes(range(256)) * 2000
SIZE = len(DATA)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "a.tar").write_bytes(DATA)
    return folder


def got(remote, tmp_path, size=SIZE, policy=QUICK) -> bytes:
    with open(tmp_path / "got", "w+b", buffering=0) as file:
        count = fetch(remote, file, size, policy)
        file.seek(0)
        return file.read(count)


@pytest.mark.parametrize(
    ("trouble", "ranges"), [([503, 500], True), (["cut", "cut"], True), (["cut", "cut"], False), (["stall"], True)]
)
def test_troubles_that_pass(folder, tmp_path, trouble, ranges):
    with serve(folder, ranges) as site:
        site.troubles["a.tar"] = list(trouble)
        assert got(Remote(f"{site.address}/a.tar"), tmp_path) == DATA
        assert len(site.requests) == len(trouble) + 1
        if trouble == ["cut", "cut"] and ranges:  # it went on where it had stopped
            starts = [int(asked[6:-1]) for _, asked in site.requests[1:]]
            assert 190_000 < starts[0] <= 256_000 < 290_000 < starts[1] <= 384_000
            assert site.sent < len(DATA) + 140_000


def test_commands(folder, tmp_path):
    assert got(Remote(f"pipe:cat {folder}/a.tar"), tmp_path) == DATA
    assert got(Remote(f"pipe:head -c 1000 {folder}/a.tar; tail -c +1001 {folder}/a.tar"), tmp_path) == DATA
    count = tmp_path / "count"
    flaky = f"echo >> {count}; [ $(wc -l < {count}) -gt 2 ] || {{ echo no luck >&2; exit 3; }}; cat {folder}/a.tar"
    assert got(Remote(f"pipe:{flaky}"), tmp_path) == DATA
    assert len(count.read_text()) == 3
    with pytest.raises(BadShard, match=r"\(exit code 5: not today; attempt 4\)"):
        got(Remote("pipe:echo not today >&2; exit 5"), tmp_path)


def test_a_command_that_hangs_is_ended_with_its_children(folder, tmp_path):
    began = time.monotonic()
    brief = FetchPolicy(attempts=2, timeout=1, backoff=0.01)
    with pytest.raises(BadShard, match=r"no answer in 1 s"):
        got(Remote(f"pipe:sleep 1234.5 & echo $! >> {tmp_path}/pids; cat {folder}/a.tar; wait"), tmp_path, policy=brief)
    limit = began + 20  # not the 1234.5 s
    assert time.monotonic() < limit
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2
    while left := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < limit, left  # they end when they next get a processor
        time.sleep(0.05)


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_fsspec_reads_every_other_scheme(folder, tmp_path):
    patient = FetchPolicy(attempts=2, timeout=30, backoff=0.01)
    assert got(Remote(f"file://{folder}/a.tar"), tmp_path, policy=patient) == DATA
    with pytest.raises(BadShard, match=r"file://.*none\.tar: cannot be fetched \(FileNotFoundError.*attempt 2"):
        got(Remote(f"file://{folder}/none.tar"), tmp_path, policy=patient)


@pytest.fixture
def corpus(folder):
    """Three indexed shards in the served folder."""
    from tools.shards import main

    (folder / "a.tar").unlink()
    for number in range(3):
        write_tar(folder / f"{number:05d}.tar", [("0.jpg", picture("red", format="JPEG")), ("0.txt", b"a dog")])
    main(["index", str(folder), "--workers", "1"])
    return folder


def test_indexes_on_a_server(corpus):
    with serve(corpus) as site:
        site.troubles["index.json"] = [503, "cut"]
        for form in "", "/", "/index.json", "/{00000..00002}.tar", "/*.tar":
            shards = read_index(f"{site.address}/cc3m{form}", QUICK)
            assert [str(shard.path) for shard in shards] == [f"{site.address}/cc3m/{i:05d}.tar" for i in range(3)]
            assert [shard.samples for shard in shards] == [1, 1, 1]
        [one] = read_index(f"{site.address}/cc3m/00001.tar?key=1", QUICK)
        assert one.path.address == f"{site.address}/cc3m/00001.tar?key=1"
    assert len(read_index(f"file://{corpus}/*.tar", FetchPolicy(attempts=1))) == 3


@pytest.mark.parametrize("name", ["pipe:touch run.tar", "../b.tar", "a::b.tar", "x.tar;touch run"])
def test_an_index_names_nothing_outside_its_folder_and_no_command(corpus, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (corpus / "index.json").write_text(json.dumps({"shards": [{"name": name, "samples": 1, "bytes": 10240}]}))
    with serve(corpus) as site:
        if name == "pipe:touch run.tar" or ";" in name:  # a strange name, but one of a file in the folder
            [shard] = read_index(f"{site.address}/c", QUICK)
            assert shard.path.address.startswith(f"{site.address}/c/")
            with pytest.raises(BadShard):
                got(shard.path, tmp_path)
        else:
            with pytest.raises(UserError, match="outside its own folder"):
                read_index(f"{site.address}/c", QUICK)
    with pytest.raises(UserError):
        read_index(f"pipe:cat {corpus}/00000.tar", QUICK)
    assert not Path("run").exists()
    assert not Path("run.tar").exists()


SHORT = FetchPolicy(attempts=1, timeout=0.5)
LATE = 16  # seconds after which two requests that should have ended count as hanging, on a busy machine
SECRET = "pass%2Fw%40rd"


@pytest.mark.parametrize(
    ("word", "why"),
    [("dripheaders", "no answer in 0.5 s"), ("dripsize", "no answer in 0.5 s"), ("inward", "InvalidSchema")],
)
def test_an_answer_without_an_end_and_a_redirect_to_what_is_not_the_web(word, why, tmp_path):
    """Never silent, never done."""
    with serve_images() as site:
        remote, began = Remote(f"{site.address}/{word}"), time.monotonic()
        for ask in (lambda: fetch_range(remote, 0, 4, SHORT), lambda: got(remote, tmp_path, None, SHORT)):
            with pytest.raises(BadShard, match=why):
                ask()
        assert time.monotonic() - began < LATE


@pytest.mark.parametrize(
    "address",
    [
        f"http://me:{SECRET}@127.0.0.1:1/a.tar?token=secret",
        "http://me:hush\N{CARE OF}secret@127.0.0.1:1/a.tar",
        "nosuch://me:hu/sh@host/a.tar",
        "http://me:hush*@h/x{",
        "http://me:hush*@127.0.0.1:9",
    ],
)
def test_no_message_has_a_password(address, tmp_path):
    policy = FetchPolicy(attempts=2, timeout=20, backoff=0.01)
    with pytest.raises(BadShard) as refused:
        got(Remote(address), tmp_path, None, policy)
    with pytest.raises(UserError) as index:
        read_index(address, policy)
    for text in str(refused.value), str(index.value), str(Remote(address)):
        assert not any(word in text for word in ("hush", "hu/sh", "sh@", SECRET, "secret@", "token"))
