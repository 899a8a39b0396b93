"""python -m tools.embed on shards that a real web server or a command hands out, and the pictures that search shows."""

import json
import os
import shutil
import signal
import tempfile
import time
from contextlib import suppress

import pytest

from probemb.data.remote.sources import Remote
from probemb.data.shards.index import Shard, read_index_file, write_index
from probemb.errors import UserError
from probemb.search.embeddings import open_embeddings
from tests.embedding import contents, corpus, items, options, start, whole  # noqa: F401 - fixtures
from tests.shards import iterate_samples
from tests.webserver import serve
from tests.world import run_folder  # noqa: F401 - a fixture
from tools.embed.command import main
from tools.embed.shards import partition_name
from tools.search.pictures import read_picture


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """Where fetched shards lie; nothing of them is left at the end."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert not list(folder.glob("probemb*"))


@pytest.fixture
def served(corpus, tmp_path):  # noqa: F811
    """A copy of the corpus that may be changed."""
    return shutil.copytree(corpus, tmp_path / "served")


def vectors(folder):
    return {name: content for name, content in contents(folder).items() if name.endswith(".npz")}


def fetched(site):
    """The names of whole files that were asked for since the last time."""
    names = sorted(name for name, part in site.requests if part is None)
    site.requests.clear()
    return names


@pytest.mark.parametrize(("workers", "ranges"), [(0, True), (2, False)])
def test_embeddings_are_those_of_the_files(workers, ranges, served, whole, run_folder, tmp_path, capfd):  # noqa: F811
    out = tmp_path / "out"
    with serve(served, ranges) as site:
        site.troubles = {"00001.tar": ["cut"], "00002.tar": [503]}
        source = f"{site.address}/corpus?key=secret".replace("//", "//me:hush@")
        argv = options(run_folder, source, out, "--workers", workers)
        assert main(argv) == 0
        assert vectors(out) == vectors(whole)
        assert items(out) == items(whole)
        asked = [(name, part) for name, part in site.requests if name == "00001.tar"]
        assert len(asked) == 2
        assert (asked[1][1] is not None) == ranges  # it went on where it had broken off
        said = [file.read_bytes() for file in out.rglob("*.*") if file.is_file()] + [str(capfd.readouterr()).encode()]
        assert not any(secret in text for text in said for secret in (b"secret", b"hush"))
        row = open_embeddings(out).read_items(open_embeddings(out).partitions("image")[3]).to_pylist()[4]
        assert row["shard"] == f"{site.address}/corpus/00003.tar"
        image = [sample.image for sample in iterate_samples(served / "00003.tar")][4]
        if ranges:
            assert read_picture(row["shard"], row["offset"], row["size"]) == image
        else:
            with pytest.raises(LookupError, match="does not serve parts of files"):
                read_picture(row["shard"], row["offset"], row["size"])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_signal_while_a_server_is_silent(workers, served, whole, run_folder, tmp_path):  # noqa: F811
    out = tmp_path / "out"
    with serve(served) as site:
        site.troubles = {"00002.tar": ["silence"]}
        argv = options(run_folder, f"{site.address}/corpus", out, "--workers", workers)
        process = start(argv)
        while ("00002.tar", None) not in site.requests:
            assert process.is_alive()
            time.sleep(0.01)
        time.sleep(1)  # for what lies before it
        os.kill(process.pid, signal.SIGTERM)
        process.join(20)  # before the silence of 30 seconds ends
        assert process.exitcode == 85
        assert not (out / "image" / "corpus-00002.done.json").exists()
        assert main(argv) == 0
        assert vectors(out) == vectors(whole)
        site.troubles, site.requests[:] = {"00001.tar": ["silence"]}, []
        process = start(argv)
        while "00001.tar" not in [name for name, _ in site.requests]:  # to see whether it has changed
            assert process.is_alive()
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGINT)
        process.join(20)
        assert process.exitcode == 130


@pytest.mark.parametrize(("workers", "number", "code"), [(0, signal.SIGTERM, 85), (2, signal.SIGINT, 130)])
def test_a_command_does_not_outlive_the_embedding(workers, number, code, corpus, run_folder, tmp_path):  # noqa: F811
    pid = tmp_path / "pid"
    hang = f"case $f in *2.t*) echo $$ > {pid}; echo > {pid}.whole; exec sleep 4242;; esac"
    command = f"pipe:f={corpus}/{{00000..00003}}.tar; {hang}; cat $f"
    process = start(options(run_folder, command, tmp_path / "out", "--workers", workers))
    while not (tmp_path / "pid.whole").exists():
        assert process.is_alive()
        time.sleep(0.01)
    time.sleep(1)  # for the other shards, as a fetch that ends while the temporary folder is removed may leave it there
    os.kill(process.pid, number)
    process.join(20)
    assert process.exitcode == code
    limit = time.monotonic() + 20
    with suppress(ProcessLookupError):
        while True:
            os.kill(int(pid.read_text()), 0)
            assert time.monotonic() < limit
            time.sleep(0.02)


def test_a_shard_that_has_changed_is_embedded_again(served, run_folder, tmp_path):  # noqa: F811
    out = tmp_path / "out"
    with serve(served) as site:
        argv = options(run_folder, f"{site.address}/corpus/{{00000..00002}}.tar", out)
        assert main(argv) == 0
        assert fetched(site) == ["00000.tar", "00001.tar", "00002.tar", "index.json"]
        before = contents(out)
        assert main(argv) == 0
        assert fetched(site) == ["index.json"]
        data = (served / "00001.tar").read_bytes().replace(b"caption 1 0 0", b"CAPTION 1 0 0")
        (served / "00001.tar").write_bytes(data)  # as large as before
        (served / "00002.tar").write_bytes((served / "00002.tar").read_bytes() + bytes(10_240))
        write_index(served, [shard_of(served / shard.name, shard.samples) for shard in read_index_file(served)])
        assert main(argv) == 0
        assert fetched(site) == ["00001.tar", "00002.tar", "index.json"]
        after = contents(out)
        changed = {name.rpartition("/")[2].partition(".")[0] for name in before if before[name] != after[name]}
        assert changed == {"corpus-00001", "corpus-00002"}
        site.ranges = False  # no version is stated any more: what has none is known by its size
        assert main(argv) == 0
        assert fetched(site) == ["00000.tar", "00001.tar", "00002.tar", "index.json"]
        assert main(argv) == 0
        assert fetched(site) == ["index.json"]
        site.ranges, site.troubles = True, {"00001.tar": [404]}
        with pytest.raises(UserError, match=r"has changed .* cannot be found out: http.*/00001\.tar: .*404"):
            main(argv)


def shard_of(path, samples):
    return Shard(path.name, path, samples, path.stat().st_size)


def test_what_cannot_be_fetched_is_named_and_tried_again(served, whole, run_folder, tmp_path):  # noqa: F811
    out = tmp_path / "out"
    with serve(served) as site:
        argv = options(run_folder, f"{site.address}/corpus", out)
        site.troubles = {"00001.tar": [404, 404], "00002.tar": ["garbage", "garbage"]}
        with pytest.raises(UserError, match=r"2 shards are not .*corpus/00001\.tar: .*HTTP 404.*holds 0 samples"):
            main(argv)
        assert len(list((out / "image").glob("*.done.json"))) == 2
        assert items(out) == {}
        assert main([*argv, "--skip-damaged"]) == 0
        assert items(out) == {"image": 12, "text": 24}
        site.requests.clear()
        assert main(argv) == 0
        assert "00001.tar" in fetched(site)
        assert items(out)["image"] == 18  # the other one is as damaged as its server says
        (out / "image" / "corpus-00002.done.json").unlink()
        (out / "text" / "corpus-00002.done.json").unlink()
        assert main(argv) == 0
        assert vectors(out) == vectors(whole)


def test_corpora_from_here_and_elsewhere_in_one_folder(corpus, served, whole, run_folder, tmp_path):  # noqa: F811
    out, here = tmp_path / "out", tmp_path / "here"
    here.mkdir()
    shutil.copy(served / "00000.tar", here)
    with serve(served) as site:
        assert main(options(run_folder, f"{site.address}/corpus", out, "--part", "1/2")) == 0
        assert items(out) == {}
        assert main(options(run_folder, f"{site.address}/corpus", out)) == 0
    assert main(options(run_folder, here, out)) == 0  # without asking there again
    counts = items(whole)
    assert items(out)["image"] == counts["image"] + 6
    with pytest.raises(UserError, match=r"has embeddings of http.* under the name corpus-00000"):
        main(options(run_folder, corpus, out))


def test_a_command_is_run_to_embed_and_never_for_a_picture(corpus, whole, run_folder, tmp_path):  # noqa: F811
    out = tmp_path / "out"
    command = f"pipe:echo >> {tmp_path}/runs; cat {corpus}/{{00000..00003}}.tar"
    assert main(options(run_folder, command, out)) == 0
    assert vectors(out) == vectors(whole)
    (part, *_) = open_embeddings(out).partitions("image")
    row = open_embeddings(out).read_items(part).to_pylist()[0]
    assert row["shard"] == command.replace("{00000..00003}", "00000")
    runs = (tmp_path / "runs").read_text()
    with pytest.raises(LookupError, match=r"not a file here and not on a web server \(pipe:\)"):
        read_picture(row["shard"], row["offset"], row["size"])
    assert main(options(run_folder, command, out)) == 0
    assert (tmp_path / "runs").read_text() == runs + "\n"  # for the index alone


def test_room_for_fetched_shards(served, whole, run_folder, tmp_path):  # noqa: F811
    sizes = sorted(shard.bytes / (1 << 30) for shard in read_index_file(served))
    with serve(served) as site:
        argv = options(run_folder, f"{site.address}/corpus", tmp_path / "out", "--cache-gib")
        with pytest.raises(UserError, match=r"\.tar has .* GiB, more than --cache-gib .* allows"):
            main([*argv, f"{0.9 * sizes[-1]:.12f}"])
        for workers in 0, 2:  # with workers, shards are asked for before earlier ones are given back
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
            site.requests.clear()
            assert main([*argv, f"{1.1 * sizes[-1]:.12f}", "--workers", str(workers)]) == 0  # one after the other
            assert vectors(tmp_path / "out") == vectors(whole)
            assert fetched(site) == ["00000.tar", "00001.tar", "00002.tar", "00003.tar", "index.json"]


@pytest.mark.parametrize("name", ["../../x.tar", "/etc/x.tar", "a\u202eb.tar", "n" * 300 + ".tar"])
def test_a_server_whose_index_means_harm(name, served, run_folder, tmp_path):  # noqa: F811
    rows = [{"name": name, "samples": 6, "bytes": 10240}]
    (served / "index.json").write_text(json.dumps({"shards": rows}))
    with serve(served) as site, pytest.raises(UserError, match=r"outside its own folder|name of .* is too long"):
        main(options(run_folder, f"{site.address}/corpus", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_names_of_partitions_lead_nowhere():
    for address, name, expected in (
        ("https://host/cc3m/00000.tar?key=a/b", "00000.tar", "cc3m-00000"),
        ("https://host:8000/00000.tar", "00000.tar", "host_8000-00000"),
        ("https://host/../00000.tar", "00000.tar", "..-00000"),
        ("https://host/a%2Fb/x%20y.tar", "x y.tar", "a_2Fb-x_y"),
        ("s3://bucket/00000.tar", "00000.tar", "bucket-00000"),
        ("pipe:ssh host cat 'data/cc 3m/00000.tar' | tee x", "00000.tar", "3m-00000"),
        ("pipe:rclone cat store:00000.tar", "00000.tar", "pipe-00000"),
    ):
        assert partition_name(Shard(name, Remote(address), 1, 1)) == expected
        assert os.path.basename(expected) == expected


def test_a_picture_that_is_not_at_hand(served):
    size = (served / "00000.tar").stat().st_size
    with serve(served) as site:
        shard = f"{site.address}/00000.tar"
        assert read_picture(shard, 512, 100) == (served / "00000.tar").read_bytes()[512:612]
        for trouble, place, message in (
            ([404], (0, 10), "HTTP 404"),
            ([500], (0, 10), "HTTP 500"),
            ([302], (0, 10), "HTTP 302 .*not allowed"),
            (["cut"], (0, 1000), "broke off"),
            ([], (size - 10, 100), "another range"),
            ([], (0, 1 << 40), "states 1,099,511,627,776 bytes"),
            ([], (-1, 10), "at -1"),
        ):
            site.troubles["00000.tar"] = trouble
            with pytest.raises(LookupError, match=message) as caught:
                read_picture(shard, *place)
            assert "127.0.0.1" not in str(caught.value)  # visitors of the page see it
    for elsewhere in ("s3://bucket/a.tar", "file:///etc/passwd", "pipe:cat /etc/passwd"):
        with pytest.raises(LookupError, match="not a file here and not on a web server"):
            read_picture(elsewhere, 0, 10)


def test_a_server_that_trickles_a_picture_is_left(served, monkeypatch):
    from probemb.data.remote.sources import FetchPolicy

    monkeypatch.setattr("tools.search.pictures.POLICY", FetchPolicy(attempts=1, timeout=0.3))
    with serve(served) as site:
        for trouble in "trickle", "silence", "stall":
            site.troubles["00000.tar"] = [trouble]
            with pytest.raises(LookupError, match=r"no answer in 0\.3 s|only \d+ bytes"):
                read_picture(f"{site.address}/00000.tar", 0, 4000)
