"""From a published list to shards that training reads: damaged, killed, resumed, extended, retried, in parts."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from probemb.data.images import decode_image
from probemb.data.shards.index import read_index
from probemb.errors import UserError
from tests.imagesite import picture, serve_images
from tests.shards import iterate_samples
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


def refused(*words) -> str:
    first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    with pytest.raises(UserError) as error:
        main([*words[:first], *QUICK, *words[first:]])
    return str(error.value)


def test_the_whole_way(site, cc3m, tmp_path):
    """Shards and report; the same command again asks for nothing; --retry-failed for what may pass; more lists."""
    site.broken = {"moved"}
    words = [f"ok/{i}" for i in range(14)] + ["large/1", "turned/6", "alpha/1", "webp/1", "noai", "bomb", "tiny"]
    words += ["moved/a", "moved/b", "same/1", "gone", "html", "same/2", "same/3"]
    out = tmp_path / "out"
    report = download("cc3m", cc3m(words), "--out", str(out), "--shard-size", "10", "--image-size", "200")
    assert (report["corpus"], report["asked"], report["got"]) == ("CC3M", 28, 19)
    assert report["lost"] == {
        "duplicate image": 2, "HTTP 503": 2, "broken image": 2, "HTTP 404": 1, "too small": 1, "opted out": 1,
    }  # fmt: skip
    assert shards_command(["verify", str(out), "--workers", "1"]) == 0
    samples = {sample.meta["url"].partition("/")[2][1:].partition("/")[2]: sample for sample in
               iterate_samples(read_index(out))}  # fmt: skip
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
    assert (report["asked"], report["got"]) == (28, 21)
    assert "HTTP 503" not in report["lost"]
    report = download("cc3m", cc3m(["ok/new", "same/4"], "more.tsv"), "--out", str(out))
    assert (report["asked"], report["got"], report["lost"]["duplicate image"]) == (30, 22, 3)
    assert shards_command(["verify", str(out), "--workers", "1"]) == 0

    other = tmp_path / "other.tsv"
    other.write_text("http://a.b/c.jpg\ta dog\n")
    assert "holds cc3m, not cc12m" in refused("cc12m", str(other), "--out", str(out))
    assert "started with --image-size 200" in refused("cc3m", "--out", str(out), "--image-size", "300")
    (tmp_path / "list.tsv").write_text("changed\thttp://a.b/c.jpg\n")
    assert "it has changed" in refused("cc3m", str(tmp_path / "list.tsv"), "--out", str(out))


def test_parts_of_a_job_array(site, cc3m, tmp_path, capsys):
    """Each task its own shards; a command without --part finishes."""
    out = tmp_path / "out"
    argv = ["cc3m", cc3m([f"ok/part{i}" for i in range(12)]), "--out", str(out), "--shard-size", "3"]
    assert main([*argv, *QUICK, "--part", "2/3"]) == 0
    assert sorted(path.name for path in out.glob("*.tar")) == ["00001.tar"]
    assert "not asked yet" in capsys.readouterr().out
    assert not (out / "index.json").exists()
    before = sum(site.requests.values())
    assert download(*argv)["got"] == 12
    assert sum(site.requests.values()) - before == 9
    assert len(read_index(out)) == 4


def test_redcaps(site, tmp_path):
    folder, out = tmp_path / "annotations", tmp_path / "out"
    folder.mkdir()
    for name in ("cats_2017", "dogs_2017"):
        rows = [
            {
                "url": f"{site.address}/ok/{name}{i}",
                "caption": f"{name} {i}",
                "author": "x",
                "score": i,
                "image_id": "a",
            }
            for i in range(2)
        ]
        (folder / f"{name}.json").write_text(json.dumps({"annotations": rows}))
    download("redcaps", str(folder), "--out", str(out))
    samples = list(iterate_samples(read_index(out)))
    assert sorted((s.captions[0], s.meta["score"]) for s in samples) == [
        ("cats_2017 0", 0), ("cats_2017 1", 1), ("dogs_2017 0", 0), ("dogs_2017 1", 1),
    ]  # fmt: skip
    assert "author" not in samples[0].meta


def test_private_hosts_are_refused_unless_asked_for(site, cc3m, tmp_path):
    words = ["cc3m", cc3m(["ok/1", "ok/2"]), "--out", str(tmp_path / "out"), "--processes", "1"]
    with pytest.raises(UserError, match="2 of 2 for the cause 'private address'"):
        main(words)
    assert not site.requests
    assert not (tmp_path / "out" / "index.json").exists()
    again = ["--private-hosts", "--retry-failed", "--retry-causes", "private address"]
    assert main([*words, *again]) == 0
    assert len(list(iterate_samples(read_index(tmp_path / "out")))) == 2


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "is empty"),
        ("caption,url\na dog,http://a.b/c.jpg\n", "not separated by tabs"),
        ("a dog\thttp://a.b/c.jpg\tmore\n", "3 of 2 columns"),
        ("http://a.b/c.jpg\ta dog\n", "Start the command with cc12m"),
        ("a dog\tdog.jpg\n", "column 2 holds no http addresses"),
        ('{"annotations": []}', "it is JSON"),
        (gzip.compress(os.urandom(20).hex().encode() + b"\thttp://a.b/c.jpg\n" * 100)[:-9], "cannot be read"),
    ],
)
def test_lists_of_another_format_leave_nothing(tmp_path, content, told):
    path = tmp_path / "list.tsv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert told in refused("cc3m", str(path), "--out", str(tmp_path / "out"))
    assert not list((tmp_path / "out").glob("*.tar"))


def test_refusals(site, cc3m, tmp_path):
    path, out = cc3m(["ok/1"]), str(tmp_path / "out")
    assert "Did you mean 'cc3m'" in refused("cc3n", path, "--out", out)
    assert "No corpus was named" in refused("--out", out)
    assert "No list was named" in refused("cc3m", "--out", out)
    assert "--out is missing" in refused("cc3m", path)
    assert "--part is 3/2" in refused("cc3m", path, "--out", out, "--part", "3/2")
    assert "exclude each other" in refused("cc3m", path, "--out", out, "--part", "1/2", "--retry-failed")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("mine")
    assert "did not write" in refused("cc3m", path, "--out", str(foreign))
    assert [one.name for one in foreign.iterdir()] == ["thesis.tex"]


def start(site, cc3m, tmp_path, words, *options) -> tuple[subprocess.Popen, list[str], Path]:
    """The command in a session of its own, its first words, and its folder."""
    out = tmp_path / "out"
    argv = ["cc3m", cc3m(words), "--out", str(out), "--shard-size", "5", "--private-hosts"]
    words = [sys.executable, "-m", "tools.download", *argv, "--patience", "25", *options]
    return subprocess.Popen(words, cwd=ROOT, start_new_session=True, stderr=subprocess.PIPE), argv, out


def until(done) -> None:
    limit = time.monotonic() + 60
    while not done():
        assert time.monotonic() < limit
        time.sleep(0.02)


def session(leader: int) -> dict[int, int]:
    """When each process of a session that still runs was started, in clock ticks."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()  # from the state on, which proc(5) counts as 3
        except OSError:
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            found[int(path.parent.name)] = int(fields[19])
    return found


def test_a_killed_command_leaves_whole_tars_and_goes_on(site, cc3m, tmp_path):
    site.pause = 0.1
    words = [f"ok/killed{i}" for i in range(40)]
    command, argv, out = start(site, cc3m, tmp_path, words, "--threads", "1", "--processes", "1")
    until(lambda: list(out.glob("*.tar")))
    with pytest.raises(UserError, match="is writing it"):
        main(argv)
    command.kill()  # its processes end by themselves
    command.wait()
    command.stderr.close()
    until(lambda: not session(command.pid))
    done = {path: path.read_bytes() for path in out.glob("*.tar")}
    assert 1 <= len(done) < 8
    before, site.pause = site.requests.copy(), 0
    assert download(*argv)["got"] == 40
    assert all(path.read_bytes() == data for path, data in done.items())
    assert sum((site.requests - before).values()) <= 40 - 5 * len(done)
    assert not [path.name for path in out.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_the_command_does_not_outlive_its_processes_nor_they_it(site, cc3m, tmp_path, killed):
    command, _, out = start(site, cc3m, tmp_path, [f"silent/{i}" for i in range(4)], "--processes", "1")
    until(lambda: any(path.startswith("/silent") for path in site.requests))
    processes = session(command.pid)
    assert len(processes) > 1
    if killed:
        os.kill(max(processes, key=processes.get), signal.SIGKILL)
    else:
        command.terminate()
    _, told = command.communicate(timeout=15)
    assert command.returncode == (2 if killed else 130)
    assert ("A process was killed" if killed else "interrupted") in told.decode()
    until(lambda: not session(command.pid))
    assert not list(out.glob("*.tar"))
