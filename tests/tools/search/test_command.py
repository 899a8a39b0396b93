"""python -m tools.search: its options, table, exit codes, calibration, and the served page's process."""

import json
import shutil
import signal
import urllib.request

import pytest
import torch

from probemb.distances import csd
from probemb.errors import UserError
from probemb.models import create_model, save_model
from tests.jobs import Job
from tests.searching import EVIL, N, open_searcher
from tools.search.calibrate import load_calibration
from tools.search.command import main
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


def test_another_model_is_refused_with_both_names(gallery, tmp_path):
    torch.manual_seed(9)
    save_model(create_model("ViT-Micro-32"), tmp_path / "other" / "model")
    with pytest.raises(UserError) as error:
        main(["a dog", "--index", str(gallery.images), "--model", str(tmp_path / "other")])
    assert str(gallery.model) in str(error.value)
    assert str(tmp_path / "other") in str(error.value)


def test_captions_cannot_speak_to_the_terminal(gallery, searcher, capsys):
    assert main(["anything", "--index", str(gallery.images), "--top", str(N), "--tolerance", "-1"]) == 0
    out = capsys.readouterr().out
    assert not any(mark in out for mark in ("\x1b", "\u202e"))
    assert all(text in out for text in ("[red]not", "markup[/red]", "variances of the items times -1"))
    answer = searcher.answer(SearchRequest(["anything"], top=N))
    assert any(EVIL in one["captions"] for one in answer["results"])


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
    texts = searcher.encoder.embed([text for _, text in captions])
    ranks = csd(texts, gallery.embedded).argsort(1).argsort(1).gather(1, torch.tensor([[i] for i, _ in captions])) + 1
    found = load_calibration(index, open_searcher(index).index.weights)
    results = found["results"]
    shown = torch.tensor(results["90"])[torch.bucketize(texts.uncertainty(), torch.tensor(found["fifths"]))]
    assert 0.9 <= (ranks[:, 0] <= shown + 1).double().mean() < 1  # rounding may swap two that nearly tie
    assert main(["a red circle", "--coverage", "0.9", "--json", "--index", str(index)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["coverage"], len(answer["results"]) in results["90"]) == (90, True)
    with pytest.raises(UserError, match="is of queries of one text"):
        main(["a red circle", "a dog", "--coverage", "0.9", "--index", str(index)])
    u = open_searcher(index).answer(SearchRequest(["a red circle"]))["query"]["uncertainty"]
    assert main(["a red circle", "--max-uncertainty", "calibrated", "--index", str(index)]) == int(
        u > found["max_uncertainty"]
    )
    (index / "calibration.json").write_text(json.dumps(found | {"max_uncertainty": u - 1e-4}))
    assert main(["a red circle", "--max-uncertainty", "calibrated", "--index", str(index)]) == 1
    (index / "calibration.json").write_text(json.dumps(found | {"weights": "0"}))
    with pytest.raises(UserError, match="another model"):
        main(["a", "--index", str(index)])


def test_the_page_is_served_until_the_command_is_told_to_end(gallery, tmp_path):
    options = {"port": 0, "index": gallery.images}
    job = Job(main, options, "--serve", ranks=0, output=tmp_path / "log", errors=tmp_path / "errors")
    job.until("(end with Ctrl-C)\n", 30)
    with urllib.request.urlopen(f"{job.text().split()[1]}about", timeout=10) as response:
        assert [one["count"] for one in json.load(response)["indexes"]] == [N]
    job.signal(signal.SIGINT)
    assert job.wait(10) == [0]
