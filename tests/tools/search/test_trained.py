"""A model that was trained with MPC on composed scenes, embedded, indexed and searched by the project's commands."""

import json

import pytest
import torch
from torch.nn import functional as F

from probemb.data.compositions.find import find_compositions
from probemb.models import load_model
from tests.finetune.runs import ONE_EPOCH, run_here
from tools.build_index import main as build
from tools.embed.command import main as embed
from tools.make_scenes import Plan, make
from tools.search.calibrating import calibrate
from tools.search.command import main, open_searcher, parse
from tools.search.web.about import describe
from tools.search.wish import Wish


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The run and the index of the test images, by the cosine of the means."""
    folder = tmp_path_factory.mktemp("composed")
    make(Plan(train=0, val=0, classes_images=0, size=32, compositions=900, shard_size=500), folder / "s", workers=1)
    data, run = folder / "s" / "compositions", folder / "run"
    options = {
        "method": "mpc", "data.path": data, "out": run, "model.name": "scenes-cnn-gru", "model.head": "clip",
        "model.embed_dim": "null", "batch-size": 64, "compose.queries": 40, "loss.temperature": 20, **ONE_EPOCH,
    }  # fmt: skip
    assert run_here(options) == 0
    assert embed(["--model", str(run), "--data", str(data / "test"), "--out", str(folder / "embedded")]) == 0
    index = folder / "index"
    assert build(["--embeddings", str(folder / "embedded"), "--tolerance", "0", "--out", str(index)]) == 0
    return run, data, index


def test_its_composer_composes(world, capsys):
    run, data, index = world
    pair = [find_compositions(data, "test").concepts[one] for one in find_compositions(data, "test").tuples[0]]
    capsys.readouterr()
    assert main([*pair, "--without", "dark picture", "--weights", "1,2,0.5", "--index", str(index), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    model, tokenizer, _ = load_model(run)
    searcher = open_searcher(parse(["x", "--index", str(index), "--device", "cpu"]))
    with torch.inference_mode():
        parts = model.encode_text(tokenizer([*pair, "dark picture"]))
        composed = model.composer(parts[None], [1, 2, -0.5])
    assert searcher.composer.trained
    assert answer["query"]["composer"] == "product"
    assert answer["query"]["log_normaliser"] == pytest.approx(float(composed.log_normaliser), rel=1e-4)
    assert 0 <= answer["feasibility"]["share"] <= 1
    assert {one["match"] for one in answer["results"]} == {None}
    pictures = searcher.feasibility.pool("image").parts  # every sampled picture under the trained ranking
    rows = list(searcher.feasibility.pool("image").place)
    cosine = F.cosine_similarity(composed.gaussian.mean, pictures.mean)
    every = searcher.answer(Wish([*pair, "dark picture"], top=len(searcher.index), weights=[1, 2, -0.5]))["results"]
    place = {one["row"]: one["rank"] for one in every}
    found = cosine[sorted(range(len(rows)), key=lambda i: place[rows[i]])]
    torch.testing.assert_close(found, cosine.sort(descending=True).values, rtol=0, atol=2e-4)  # the index has float16


def test_what_the_page_knows_of_it(world):
    about = describe(open_searcher(parse(["x", "--index", str(world[2]), "--device", "cpu"])))
    assert about["weighs"]
    assert not about["matches"]  # it learned no probability of pairs
    assert about["fits"] is None  # the means alone rank


def test_its_calibration_composes_as_its_queries_do(world):
    _, data, index = world
    searcher = open_searcher(parse(["x", "--index", str(index), "--device", "cpu"]))
    calibration = calibrate(searcher, str(data / "val"), within=10)
    assert set(calibration.curves) == {1, 2, 3}
