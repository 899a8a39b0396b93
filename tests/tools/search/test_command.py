"""python -m tools.search: its options, table, exit codes, calibration, and the served page's process."""

import json
import multiprocessing
import os
import shutil
import signal
import time
import urllib.request
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch

from probemb.cli.command import run_command
from probemb.distances import csd
from probemb.errors import UserError
from probemb.models import create_model, save_model
from tests.searching import EVIL, N, open_searcher
from tools.search.calibrate import load_calibration
from tools.search.command import main, open_searchers, parse
from tools.search.query import QueryImage, SearchRequest


@pytest.fixture
def index(gallery, tmp_path):
    """A copy of the index that may be changed."""
    return shutil.copytree(gallery.images, tmp_path / "index")


def test_weights_and_parts_to_leave_out(gallery, searcher, tmp_path, capsys):
    paths = [tmp_path / "x.jpg", tmp_path / "y.jpg"]
    for path, data in zip(paths, gallery.jpegs):
        path.write_bytes(data)
    argv = ["a red circle", "--without", "a blue square", "--image", paths[0], "--without-image", paths[1]]
    words = [*map(str, argv), "--weights", "1,0.3,2,0.2", "--index", str(gallery.images), "--json"]
    assert main(words) == 0
    answer = json.loads(capsys.readouterr().out)
    images = [QueryImage(path.name, path.read_bytes) for path in paths]
    truth = searcher.answer(SearchRequest(["a red circle", "a blue square"], images, [1, -0.3, 2, -0.2]))
    assert answer["query"] == truth["query"]
    assert answer["results"] == truth["results"]


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        ([], "The query is empty"),
        (["a", "--rerank", "20"], "already ranks by CSD"),
        (["a", "--rerank", "5"], "--rerank is 5, --top 10"),
        (["a", "--effort", "4"], "always searches everything"),
        (["a", "--effort", str(10**30)], "of 40 items"),
        (["a", "--serve"], "exclude each other"),
        (["--image", "nowhere.jpg"], "cannot be read"),
        (["a", "--model", "nowhere"], "does not exist"),
        (["--serve", "--port", "70000"], "--port is 70000"),
        (["--serve", "--top", "5"], "--top does not belong to --serve"),
        (["a", "--port", "80"], "--port does not belong to a query"),
        (["a", "--tolerance", "nan"], "--tolerance is nan"),
        (["a", "b", "--weights", "1"], "--weights is 1 for 2 parts"),
        (["a", "--weights=-1"], "--weights is -1"),
        (["a", "--max-uncertainty", "calibrated"], "has no calibration"),
    ],
)
def test_bad_input(gallery, argv, what):
    with pytest.raises(UserError, match=what):
        main([*argv, "--index", str(gallery.images)])


def test_no_index():
    with pytest.raises(UserError, match="--index is given 2 times"):
        main(["a dog", "--index", "a", "--index", "b"])
    with pytest.raises(UserError, match="Two indexes are called b"):
        main(["--serve", "--index", "a/b", "--index", "b"])
    with pytest.raises(UserError, match="There is no index in nowhere"):
        main(["a dog", "--index", "nowhere"])


def test_another_model_is_refused_with_both_names(gallery, index, tmp_path):
    torch.manual_seed(9)
    save_model(create_model("ViT-Micro-32"), tmp_path / "other" / "model")
    with pytest.raises(UserError) as error:
        main(["a dog", "--index", str(gallery.images), "--model", str(tmp_path / "other")])
    assert str(gallery.model) in str(error.value)
    assert str(tmp_path / "other") in str(error.value)
    about = json.loads((index / "index.json").read_text())
    (index / "index.json").write_text(json.dumps(about | {"model": str(tmp_path / "gone")}))
    with pytest.raises(UserError, match=r"gone.*was made with it; --model names it"):
        main(["a dog", "--index", str(index)])
    assert main(["a dog", "--index", str(index), "--model", str(gallery.model)]) == 0


def test_captions_cannot_speak_to_the_terminal(gallery, searcher, capsys):
    assert main(["anything", "--index", str(gallery.images), "--top", str(N), "--tolerance", "-1"]) == 0
    out = capsys.readouterr().out
    assert not any(mark in out for mark in ("\x1b", "\u202e"))
    assert all(text in out for text in ("[red]not", "markup[/red]", "variances of the items times -1"))
    answer = searcher.answer(SearchRequest(["anything"], top=N))
    assert any(EVIL in one["captions"] for one in answer["results"])


def test_a_refused_query_and_an_empty_answer(gallery, capsys):
    argv = ["a red circle", "--index", str(gallery.images)]
    assert main([*argv, "--max-uncertainty", "0.1"]) == 1
    assert "refused: that is above 0.1" in capsys.readouterr().out
    assert main([*argv, "--max-item-uncertainty", "0"]) == 0
    assert "no certain enough result among the 40 closest" in capsys.readouterr().out


def start(out, errors, argv):
    """The command in a process forked from this one, so that nothing is imported again."""

    def work():
        told, said = open(out, "w", buffering=1), open(errors, "w")  # noqa: SIM115 - closing the first may fail
        with redirect_stdout(told), redirect_stderr(said):
            run_command(lambda: main([*map(str, argv)]))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_an_answer_that_finds_no_room_is_an_error(gallery, tmp_path):
    process = start("/dev/full", tmp_path / "errors", ["a dog", "--index", gallery.images, "--json"])
    process.join(60)
    assert process.exitcode == 2
    first, *more = (tmp_path / "errors").read_text().splitlines()
    assert first == "error: The output cannot be written (No space left on device)."
    assert len(more) == 1


def test_a_calibration(gallery, searcher, index, capsys):
    captions = [(i, text) for i, several in enumerate(gallery.captions) for text in several]
    closest = csd(searcher.encoder.embed([text for _, text in captions]), gallery.embedded).argsort(1)[:, :5]
    right = sum(i in row for (i, _), row in zip(captions, closest.tolist())) / len(captions)
    argv = ["--calibrate", str(gallery.tar), "--index", str(index), "--within", "5", "--min-precision"]
    with pytest.raises(UserError, match=r"no uncertainty promises a precision of 0\.99, but at most 0\.\d"):
        main([*argv, "0.99"])  # of a model that is not trained
    capsys.readouterr()
    assert main([*argv, "0.02"]) == 0
    last = capsys.readouterr().out.split("100.0%")[1]
    assert f"{right:.1%}" in last  # of all queries
    found = load_calibration(index, open_searcher(index).index.weights)
    u = open_searcher(index).answer(SearchRequest(["a red circle"]))["query"]["uncertainty"]
    assert main(["a red circle", "--max-uncertainty", "calibrated", "--index", str(index)]) == int(
        u > found["max_uncertainty"]
    )
    (index / "calibration.json").write_text(json.dumps(found | {"max_uncertainty": u - 1e-4}))
    assert main(["a red circle", "--max-uncertainty", "calibrated", "--index", str(index)]) == 1
    with pytest.raises(UserError, match="of queries of one text"):
        main(["a", "b", "--max-uncertainty", "calibrated", "--index", str(index)])
    for content, what in ((json.dumps(found | {"weights": "0"}), "another model"), ("{", "not a calibration")):
        (index / "calibration.json").write_text(content)
        with pytest.raises(UserError, match=what):
            main(["a", "--index", str(index)])


def test_indexes_of_a_model_share_it(gallery):
    folders = ["--index", str(gallery.images), "--index", str(gallery.texts)]
    two = open_searchers(parse(["--serve", *folders, "--device", "cpu"]))
    assert list(two) == ["image", "text"]
    assert two["image"].encoder is two["text"].encoder


def test_the_page_is_served_until_the_command_is_told_to_end(gallery, tmp_path):
    log = tmp_path / "log"
    process = start(log, tmp_path / "errors", ["--serve", "--port", "0", "--index", gallery.images])
    try:
        end = time.monotonic() + 30
        while not (log.exists() and log.read_text().endswith("(end with Ctrl-C)\n")):
            assert process.is_alive()
            assert time.monotonic() < end
            time.sleep(0.05)
        with urllib.request.urlopen(f"{log.read_text().split()[1]}about", timeout=10) as response:
            assert [one["count"] for one in json.load(response)["indexes"]] == [N]
        os.kill(process.pid, signal.SIGINT)
        process.join(10)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
