"""The command: from a published list to shards that training reads, interrupted, resumed, extended and retried."""

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from probemb.data.shards.index import read_index
from probemb.errors import UserError
from tests.imagesite import serve_images
from tests.shards import iterate_samples
from tools.download.command import main
from tools.shards import main as shards_command

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
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


QUICK = ("--private-hosts", "--seconds", "30", "--patience", "20", "--threads", "8", "--processes", "2")


def download(capsys, *words) -> dict:
    """The report."""
    assert main([*words, *QUICK, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(*words) -> str:
    first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    with pytest.raises(UserError) as error:
        main([*words[:first], *QUICK, *words[first:]])
    return str(error.value)


def adds_up(report) -> bool:
    return report["asked"] == report["got"] + sum(report["lost"].values()) + report["not_asked_yet"]


def test_the_whole_way(site, cc3m, tmp_path, capsys):
    """Shards, index, report; the same command again asks for nothing; --retry-failed for what may pass; more lists."""
    site.broken = {"moved"}
    words = [f"ok/{i}" for i in range(20)] + ["moved/a", "moved/b", "same/1", "gone", "html", "ok/3"] + ["same/2"] * 2
    words[-1] = "same/3"
    out = tmp_path / "out"
    report = download(capsys, "cc3m", cc3m(words), "--out", str(out), "--shard-size", "10")
    assert (report["corpus"], report["asked"], report["got"]) == ("CC3M", 28, 21)
    assert report["lost"] == {
        "duplicate image": 2, "HTTP 503": 2, "HTTP 404": 1, "HTML, no image": 1, "duplicate address": 1,
    }  # fmt: skip
    assert adds_up(report)
    assert sum(report["shorter_side"].values()) == sum(report["caption_words"].values()) == 21
    shards = read_index(out)
    assert sum(shard.samples for shard in shards) == 21
    assert all(shard.sha256 for shard in shards)
    assert shards_command(["verify", str(out), "--workers", "1"]) == 0
    capsys.readouterr()
    samples = list(iterate_samples(shards))
    assert len({sample.key for sample in samples}) == 21
    assert samples[0].captions[0].startswith("a picture called ok/")
    html = (out / "download" / "report.html").read_text()
    assert "HTTP 503" in html
    assert html.count("data:image/jpeg;base64") >= 12

    before, bytes_before = site.requests.copy(), [path.read_bytes() for path in sorted(out.glob("*.tar"))]
    assert download(capsys, "cc3m", "--out", str(out), "--shard-size", "10") == report
    assert site.requests == before
    assert [path.read_bytes() for path in sorted(out.glob("*.tar"))] == bytes_before

    again = download(capsys, "cc3m", "--out", str(out), "--shard-size", "10", "--retry-failed")  # in vain
    assert site.requests - before == {"/moved/a": 1, "/moved/b": 1}
    assert (again["lost"], again["got"], again["retried"]) == (report["lost"], 21, 2)

    site.broken, before = set(), site.requests.copy()
    report = download(capsys, "cc3m", "--out", str(out), "--shard-size", "10", "--retry-failed")
    assert site.requests - before == {"/moved/a": 1, "/moved/b": 1, "/ok/a": 1, "/ok/b": 1}
    assert (report["asked"], report["got"], report["retried"]) == (28, 23, 4)
    assert "HTTP 503" not in report["lost"]
    assert adds_up(report)

    more = cc3m(["ok/new", "same/4", "ok/3"], "more.tsv")
    report = download(capsys, "cc3m", more, "--out", str(out), "--shard-size", "10")
    assert (report["asked"], report["got"]) == (31, 24)
    assert report["lost"]["duplicate address"] == 2
    assert report["lost"]["duplicate image"] == 3
    assert adds_up(report)
    assert shards_command(["verify", str(out), "--workers", "1"]) == 0


def test_an_address_that_failed_once_is_asked_once_more(site, cc3m, tmp_path, capsys):
    """Also if the list is fetched, retried and retried again."""
    paths, out = [f"once/{i}" for i in range(3)], str(tmp_path / "out")
    report = download(capsys, "cc3m", cc3m([*paths, "ok/a"]), "--out", out, "--retry-failed")
    assert (report["got"], report["retried"], report["lost"]) == (4, 3, {})
    download(capsys, "cc3m", "--out", out, "--retry-failed")
    assert [site.requests[f"/{path}"] for path in paths] == [2, 2, 2]


def test_parts_of_a_job_array(site, cc3m, tmp_path, capsys):
    """Each task its own shards; a command without --part finishes."""
    words, out = [f"ok/part{i}" for i in range(12)], tmp_path / "out"
    argv = ["cc3m", cc3m(words), "--out", str(out), "--shard-size", "3"]
    assert main([*argv, *QUICK, "--part", "2/3"]) == 0
    assert sorted(path.name for path in out.glob("*.tar")) == ["00001.tar"]
    assert main([*argv, *QUICK, "--part", "1/3"]) == 0
    assert sorted(path.name for path in out.glob("*.tar")) == ["00000.tar", "00001.tar", "00003.tar"]
    assert not (out / "index.json").exists()
    assert "not asked yet" in capsys.readouterr().out
    before = sum(site.requests.values())
    assert download(capsys, *argv)["got"] == 12
    assert sum(site.requests.values()) - before == 3
    assert len(read_index(out)) == 4


def test_subreddits_fill_shards_together(tmp_path, capsys):
    folder, out = tmp_path / "annotations", tmp_path / "out"
    folder.mkdir()
    for name in ("cats_2017", "cats_2018", "dogs_2017"):
        rows = [{"url": f"https://i.redd.it/{name}{i}.jpg", "caption": f"{name} {i}"} for i in range(4)]
        (folder / f"{name}.json").write_text(json.dumps({"annotations": rows}))
    (folder / "empty_2017.json").write_text('{"annotations": []}')
    words = ["redcaps", str(folder), "--out", str(out), "--prepare", "--shard-size", "10"]
    assert main(words) == 0
    assert "12 rows, 12 to be requested, 2 shards" in capsys.readouterr().out
    (folder / "birds_2017.json").write_text(json.dumps({"annotations": [{"url": "http://a.b/c.jpg", "caption": "x"}]}))
    assert main(words) == 0
    assert "13 rows, 13 to be requested, 3 shards" in capsys.readouterr().out
    state = json.loads((out / "download" / "state.json").read_text())
    assert [one["name"] for one in state["lists"]][-1] == "birds_2017.json"
    keys = [
        key
        for number in range(3)
        for key in pq.read_table(out / "download" / "plan" / f"{number:05d}.parquet")["id"].to_pylist()
    ]
    assert keys == [f"{i:09d}" for i in range(13)]


@pytest.mark.parametrize("content", ["no", "[]", '{"annotations": [{"url": "http://a.b/c.jpg"}]}'])
def test_a_refused_json_leaves_no_folder(tmp_path, content):
    (tmp_path / "cats_2017.json").write_text(content)
    refused("redcaps", str(tmp_path / "cats_2017.json"), "--out", str(tmp_path / "deep" / "out"))
    assert not (tmp_path / "deep" / "out").exists()


def test_one_task_reads_the_lists_for_all(cc3m, tmp_path):
    out = tmp_path / "out"
    common = ["-m", "tools.download", "cc3m", cc3m([f"ok/{i}" for i in range(300)]), "--out", str(out), "--prepare"]
    tasks = [
        subprocess.Popen([sys.executable, *common, "--part", f"{i}/3"], cwd=ROOT, stderr=subprocess.PIPE)
        for i in (1, 2, 3)
    ]
    for task in tasks:
        _, told = task.communicate(timeout=60)
        assert task.returncode == 0, told.decode()
    assert len(json.loads((out / "download" / "state.json").read_text())["lists"]) == 1


def test_nothing_fetched_is_an_error_and_leaves_a_report(site, cc3m, tmp_path):
    out = tmp_path / "out"
    assert "No image was fetched: 2 of 2 for the cause 'HTTP 404'" in refused(
        "cc3m", cc3m(["gone/1", "gone/2"]), "--out", str(out)
    )
    assert json.loads((out / "download" / "report.json").read_text())["lost"] == {"HTTP 404": 2}
    assert not (out / "index.json").exists()


def test_how_to_ask_again_depends_on_the_cause(site, cc3m, tmp_path, capsys):
    quick = ["--seconds", "30", "--threads", "8", "--processes", "1"]

    def told(word, name, *more):
        with pytest.raises(UserError) as error:
            main(["cc3m", cc3m([word], f"{name}.tsv"), "--out", str(tmp_path / name), *quick, *more])
        return error.value.remedy

    assert "The same command with --retry-failed retries" in told("status/503", "passing", "--private-hosts")
    assert "rarely helps here; --retry-failed --retry-causes 'HTTP 404'" in told("gone/1", "lasting", "--private-hosts")
    assert "--private-hosts --retry-failed --retry-causes 'private address'" in told("ok/1", "private")
    again = ["--private-hosts", "--retry-failed", "--retry-causes", "private address", "--json"]
    capsys.readouterr()
    assert main(["cc3m", "--out", str(tmp_path / "private"), *quick, *again]) == 0
    assert json.loads(capsys.readouterr().out)["got"] == 1
    with pytest.raises(UserError, match="No image was fetched"):
        main(["cc3m", "--out", str(tmp_path / "lasting"), *quick, "--retry-failed", "--retry-causes", "gone"])
    assert "retrying 0 images; not for: HTTP 404" in capsys.readouterr().err


def test_a_folder_goes_on_with_its_own_settings(cc3m, tmp_path, capsys):
    out = tmp_path / "out"
    first = ["--image-size", "40", "--no-upscale", "--resize=center_crop", "--shard-size", "2"]
    assert main(["cc3m", cc3m(["large/1", "large/2", "large/3"]), "--out", str(out), *first, *QUICK, "--prepare"]) == 0
    capsys.readouterr()
    report = download(capsys, "cc3m", "--out", str(out))
    assert (report["got"], report["shards"]["tars"]) == (3, 2)
    assert {sample.meta["width"] for sample in iterate_samples(read_index(out))} == {40}
    for option, value in (("image-size", "41"), ("resize", "border"), ("shard-size", "10000")):
        assert f"started with --{option}" in refused("cc3m", "--out", str(out), f"--{option}", value)
    assert "started with --upscale False, not True" in refused("cc3m", "--out", str(out), "--upscale")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("caption,url\na dog,http://a.b/c.jpg\n", "not separated by tabs"),
        ("a dog\n", "1 of 2 columns"),
        ("a dog\thttp://a.b/c.jpg\tmore\n", "3 of 2 columns"),
        ("http://a.b/c.jpg\ta dog\n", "Start the command with cc12m"),
        ("a dog\tdog.jpg\n", "column 2 holds no http addresses"),
        ('{"annotations": []}', "it is JSON"),
        ("\0" * 3000, "1 of 2 columns"),
    ],
)
def test_lists_that_are_none(tmp_path, content, told):
    path = tmp_path / "list.tsv"
    path.write_text(content)
    assert told in refused("cc3m", str(path), "--out", str(tmp_path / "out"))
    assert not list((tmp_path / "out").glob("*.tar"))


def test_a_list_of_another_format_leaves_nothing(tmp_path):
    path, out = tmp_path / "list.tsv", tmp_path / "out"
    path.write_text("a dog;http://a.b/c.jpg\n")
    assert "not separated by tabs" in refused("cc3m", str(path), "--out", str(out))
    assert not out.exists()


def test_a_cut_gzip(tmp_path):
    path = tmp_path / "list.tsv.gz"
    path.write_bytes(gzip.compress(os.urandom(20).hex().encode() + b"\thttp://a.b/c.jpg\n" * 100)[:-9])
    assert "cannot be read" in refused("cc3m", str(path), "--out", str(tmp_path / "out"))


def test_refusals(site, cc3m, tmp_path):
    path, out = cc3m(["ok/1"]), str(tmp_path / "out")
    assert "no corpus cc3" in refused("cc3", path, "--out", out)
    assert "Did you mean 'cc3m'" in refused("cc3n", path, "--out", out)
    assert "No corpus was named" in refused("--out", out)
    assert "No list was named" in refused("cc3m", "--out", out)
    assert "--out is missing" in refused("cc3m", path)
    assert "does not exist" in refused("cc3m", str(tmp_path / "none.tsv"), "--out", out)
    assert "--resize is 'keepratio'. Did you mean 'keep_ratio'" in refused(
        "cc3m", path, "--out", out, "--resize=keepratio"
    )
    for option, value in (("threads", 0), ("quality", 101), ("shard-size", -1), ("seconds", 0), ("redirects", -1)):
        assert f"--{option} is" in refused("cc3m", path, "--out", out, f"--{option}={value}")
    assert "--part is 3/2" in refused("cc3m", path, "--out", out, "--part", "3/2")
    assert "exclude each other" in refused("cc3m", path, "--out", out, "--part", "1/2", "--retry-failed")
    assert "no option --threds" in refused("cc3m", path, "--out", out, "--threds", "2")
    for package in ("pyspark", "ray"):
        told = f"needs the package {package}"
        assert told in refused("cc3m", path, "--out", out, "--distributor", package) or _installed(package)
    assert not list(Path(out).glob("*.tar"))


def _installed(package: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(package) is not None


def test_folders_of_others(site, cc3m, tmp_path):
    path, out = cc3m(["ok/1"]), tmp_path / "out"
    assert main(["cc3m", path, "--out", str(out), "--prepare", *QUICK]) == 0
    other = tmp_path / "other.tsv"
    other.write_text("http://a.b/c.jpg\ta dog\n")
    assert "holds cc3m, not cc12m" in refused("cc12m", str(other), "--out", str(out))
    assert "holds cc3m, not coco" in refused("coco", str(other), "--out", str(out))
    told = refused("cc3m", path, "--out", str(out), "--image-size", "300")
    assert "started with --image-size 256, not 300" in told
    Path(path).write_text("changed\thttp://a.b/c.jpg\n")
    assert "it has changed" in refused("cc3m", path, "--out", str(out))
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("mine")
    assert "did not write" in refused("cc3m", path, "--out", str(foreign))
    assert "is a file" in refused("cc3m", path, "--out", path)
    assert [one.name for one in foreign.iterdir()] == ["thesis.tex"]


def test_preparing_asks_nobody(site, cc3m, tmp_path, capsys):
    before = sum(site.requests.values())
    assert main(["cc3m", cc3m(["ok/1", "ok/2", "ok/1"]), "--out", str(tmp_path / "out"), "--prepare", *QUICK]) == 0
    assert "3 rows, 2 to be requested, 1 shards" in capsys.readouterr().out
    assert sum(site.requests.values()) == before


def test_help_is_quick():
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "tools.download", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert "--retry_causes" in done.stdout
    assert time.monotonic() - started < 10
