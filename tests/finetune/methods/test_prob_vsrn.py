"""Probabilistic VSRN on the regions of the synthetic world: trains, resumes, and embeds within its bounds."""

import json
import math

import pytest
import torch

from probemb import load_model
from probemb.data.captions.find import find_captions
from tests.finetune.runs import checkpoint, metrics, run_here, saved
from tools.make_scenes import Plan, make
from zeroshot.retrieval import main as retrieval


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    out = tmp_path_factory.mktemp("scenes") / "world"
    make(Plan(train=16, val=8, classes_images=0, size=32, shard_size=16, captions=3, boxes=True), out, workers=1)
    return out


def options(scenes, out, **more):
    return {
        "method": "prob-vsrn", "data.path": scenes / "regions", "out": out, "model.name": "vsrn-scenes-gru",
        "model.embed_dim": "null", "batch-size": 20, "optimizer.freeze-epochs": 0, **more,
    }  # fmt: skip


def test_trains_resumes_and_keeps_its_bounds(scenes, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run_here(options(scenes, whole)) == 0
    assert run_here(options(scenes, parts, **{"stop-after-epochs": 1})) == 0
    assert run_here(options(scenes, parts), "--resume") == 0
    lines = [m for m in metrics(whole) if "loss" in m]
    assert all(math.isfinite(m["loss"]) and m["gradient_norm"] > 0 for m in lines)
    assert checkpoint(whole, lines[-1]["step"]) == checkpoint(parts, lines[-1]["step"])
    names = saved(whole)
    assert {"visual.branch.weight_hh_l0", "text.branch.0.forwards.weight_hh_l0"} <= set(names)
    model = load_model(whole).model
    assert model.ranking == "wasserstein2"
    regions = find_captions(scenes / "regions", "val").images.open(0)
    image = model.encode_image(torch.as_tensor(regions)[None])
    assert ((image.var > 0.1 - 1e-6) & (image.var < 10 + 1e-5)).all()
    out = tmp_path / "found"
    argv = ["--model", str(whole), "--data", str(scenes / "regions"), "--split", "val", "--out", str(out)]
    assert retrieval([*argv, "--erased", "4", "--rankings", "wasserstein2,mean", "--workers", "0"]) == 0
    erased = json.loads((out / "results.json").read_text())["uncertainty"]["erased"]
    assert set(erased) == {"regions", "words", "ends"}
    assert len(set(erased["regions"]["uncertainty"])) > 1
    page = (out / "report.html").read_text()
    assert "Images, regions left out" in page
    assert 'src=""' not in page  # regions have no picture
