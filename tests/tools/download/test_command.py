"""From a published list to shards that training reads: damaged, killed, resumed, extended, retried, in parts."""

import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from probemb.data.images import decode_image
from probemb.data.shards.index import read_index
from probemb.errors import UserError
from tests.imagesite import picture, serve_images
from tests.world import iterate_samples
from tools.download.command import main
from tools.shards import main as shards_command

ROOT = Path(__file__).resolve().parents[3]
QUICK = ("--private-hosts", "--seconds", "30", "--patience", "20", "--threads", "8", "--processes", "2")


@pytest.fixture
def site():
    with serve_images() as site:
        yield site


@pytest.fixture
def cc3m(site, tmp_path):
    """cc3m(words) -> a list of these paths of the site."""

    def make(words, name="list.tsv"):
        path = tmp_path / name
        path.write_text("".join(f"a picture called {word}\t{site.address}/{word}\n" for word in words))
        return str(path)

    return make


def download(*words) -> dict:
    """The report, whose numbers add up."""
    assert main([*words, *QUICK]) == 0
    out = Path(words[words.index("--out") + 1])
    report = json.loads((out / "download" / "report.json").read_text())
    assert report["asked"] == report["got"] + sum(report["lost"].values()) + report["not_asked_yet"]
    assert report["got"] == sum(shard.samples for shard in read_index(out))
    return report


def test_the_whole_way(site, cc3m, tmp_path):
    """Shards and report; the same command again asks for nothing; --retry-failed for what may pass; more lists."""
    site.broken = {"moved"}
    words = [f"ok/{i}" for i in range(14)] + ["large/1", "turned/6", "alpha/1", "webp/1", "noai", "bomb", "tiny"]
    words += ["moved/a", "moved/b", "same/1", "gone", "html", "same/2", "same/3", "noai/img2dataset:", "onward/1"]
    out = tmp_path / "out"
    report = download("cc3m", cc3m(words), "--out", str(out), "--shard-size", "10", "--image-size", "200")
    assert (report["corpus"], report["asked"], report["got"]) == ("CC3M", 30, 19)
    assert report["lost"] == {
        "duplicate image": 2, "HTTP 503": 2, "broken image": 2, "HTTP 404": 1, "too small": 1, "opted out": 3,
    }  # fmt: skip
    assert shards_command(["verify", str(out), "--workers", "1"]) == 0
    samples = {sample.meta["url"].partition("/")[2][1:].partition("/")[2]: sample for sample in iterate_samples(out)}
    sizes = {name: decode_image(sample.image).size for name, sample in samples.items()}
    assert (sizes["ok/1"], sizes["large/1"]) == ((96, 64), (300, 200))
    assert sizes["turned/6"] == (308, 200)  # upright
    pixels = [np.asarray(decode_image(data), int) for data in (samples["ok/1"].image, picture("1"))]
    assert np.abs(pixels[0] - pixels[1]).mean() < 3
    assert samples["ok/1"].captions == ["a picture called ok/1"]
    assert len({sample.key for sample in samples.values()}) == 19

    before, held = site.requests.copy(), {path: path.read_bytes() for path in out.glob("*.tar")}
    assert download("cc3m", "--out", str(out)) == report
    assert site.requests == before
    assert {path: path.read_bytes() for path in out.glob("*.tar")} == held
    assert download("cc3m", "--out", str(out), "--retry-failed") == report  # in vain
    assert site.requests - before == {"/moved/a": 1, "/moved/b": 1}
    site.broken = set()
    report = download("cc3m", "--out", str(out), "--retry-failed")
    assert (report["asked"], report["got"]) == (30, 21)
    assert "HTTP 503" not in report["lost"]
    report = download("cc3m", cc3m(["ok/new", "same/4"], "more.tsv"), "--out", str(out))
    assert (report["asked"], report["got"], report["lost"]["duplicate image"]) == (32, 22, 3)
    assert shards_command(["verify", str(out), "--workers", "1"]) == 0


def test_parts_of_a_job_array(site, cc3m, tmp_path, capsys):
    """Each task its own shards; a command without --part finishes."""
    out = tmp_path / "out"
    argv = ["cc3m", cc3m([f"ok/part{i}" for i in range(12)]), "--out", str(out), "--shard-size", "3"]
    assert main([*argv, *QUICK, "--part", "2/3"]) == 0
    assert sorted(path.name for path in out.glob("*.tar")) == ["00001.tar"]
    assert "not requested yet" in capsys.readouterr().out
    assert not (out / "index.json").exists()
    before = sum(site.requests.values())
    assert download(*argv)["got"] == 12
    assert sum(site.requests.values()) - before == 9
    assert len(read_index(out)) == 4


def test_private_hosts_are_refused_unless_asked_for(site, cc3m, tmp_path):
    words = ["cc3m", cc3m(["ok/1", "ok/2"]), "--out", str(tmp_path / "out"), "--processes", "1"]
    with pytest.raises(UserError, match="2 of 2 failed with 'private address'"):
        main(words)
    assert not site.requests
    assert not (tmp_path / "out" / "index.json").exists()
    again = ["--private-hosts", "--retry-failed", "--retry-causes", "private address"]
    assert main([*words, *again]) == 0
    assert len(list(iterate_samples(tmp_path / "out"))) == 2


def until(done) -> None:
    limit = time.monotonic() + 60
    while not done():
        assert time.monotonic() < limit
        time.sleep(0.02)


def running(session: int) -> bool:
    """Does a process of this session still run?"""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()  # from the state on, which proc(5) counts as 3
            if int(fields[3]) == session and fields[0] != "Z":
                return True
    return False


def test_a_killed_command_leaves_whole_tars_and_goes_on(site, cc3m, tmp_path):
    site.pause = 0.1
    out = tmp_path / "out"
    argv = ["cc3m", cc3m([f"ok/killed{i}" for i in range(40)]), "--out", str(out), "--shard-size", "5"]
    words = [*argv, "--private-hosts", "--threads", "1", "--processes", "1"]
    command = subprocess.Popen([sys.executable, "-m", "tools.download", *words], cwd=ROOT, start_new_session=True)
    until(lambda: list(out.glob("*.tar")))
    with pytest.raises(UserError, match="is writing it"):
        main([*argv, "--private-hosts"])
    command.kill()  # its processes end by themselves
    command.wait()
    until(lambda: not running(command.pid))
    done = {path: path.read_bytes() for path in out.glob("*.tar")}
    assert 1 <= len(done) < 8
    before, site.pause = site.requests.copy(), 0
    assert download(*argv)["got"] == 40
    assert all(path.read_bytes() == data for path, data in done.items())
    assert sum((site.requests - before).values()) <= 40 - 5 * len(done)
    assert not [path.name for path in out.iterdir() if path.name.startswith(".")]


def test_redcaps(site, tmp_path):
    row = {"url": f"{site.address}/ok/1", "caption": "cats", "author": "x", "score": 3, "image_id": "a"}
    (tmp_path / "cats_2017.json").write_text(json.dumps({"annotations": [row]}))
    download("redcaps", str(tmp_path / "cats_2017.json"), "--out", str(tmp_path / "out"))
    (sample,) = iterate_samples(tmp_path / "out")
    assert (sample.captions[0], sample.meta["score"], "author" in sample.meta) == ("cats", 3, False)
