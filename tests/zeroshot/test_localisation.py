"""`python -m zeroshot.localisation` on drawn scenes: its table, results and page, and what it refuses."""

import json

import numpy as np
import pytest
import torch

from probemb.data.boxes import find_phrases
from probemb.errors import UserError
from probemb.models import create_model, save_model
from tools.write_regions import main as write_regions
from zeroshot.localisation import main

GRID = ("--workers", 0, "--grid.scales", "[0.4, 0.8]", "--grid.ratios", "[1.0]")


@pytest.fixture(scope="session")
def measured(run, run_folder, boxed_scenes):
    return run(main, run_folder, boxed_scenes / "entities", *GRID)


def test_the_results(measured, boxed_scenes):
    results, data = measured.json, find_phrases(boxed_scenes / "entities", "test")
    assert results["config"]["split"] == "test"
    assert results["phrases"] == len(data.phrases) == sum(row["phrases"] for row in results["types"])
    titles = [row["title"] for row in results["rows"]]
    assert titles == ["CSD", "mean only", "guessing", "upper bound of the proposals"]
    bound = results["rows"][-1]
    assert bound["r@1"] == bound["r@10"]
    for row in results["rows"]:
        assert 0 <= row["r@1"]["value"] <= row["r@5"]["value"] <= row["r@10"]["value"] <= bound["r@10"]["value"]
    counts = [row["phrases"] for row in results["types"]]
    assert counts == sorted(counts, reverse=True)
    weighted = sum(row["phrases"] * row["r@5"]["value"] for row in results["types"]) / results["phrases"]
    assert weighted == pytest.approx(results["rows"][0]["r@5"]["value"])
    curve = results["thresholds"]
    assert curve["r@5"][curve["iou"].index(0.5)] == pytest.approx(results["rows"][0]["r@5"]["value"])
    assert {row["score"] for row in results["predictors"]} >= {"u", "distance", "margin"}


def test_the_page_shows_pictures(measured):
    assert 0 < measured.page.count["img"] <= 24
    assert measured.page.text.count('class="card"') == measured.page.count["img"]
    assert "figures/iou.png" in measured.page.elsewhere
    for text in ("upper bound of the proposals", *(row["type"] for row in measured.json["types"])):
        assert text in measured.page.text
        assert text in measured.told


def test_proposals_that_are_the_truth(run, run_folder, boxed_scenes, tmp_path):
    """With the objects' own boxes as proposals, every phrase of one object is among them, and ten are enough."""
    data = find_phrases(boxed_scenes / "entities", "test")
    boxes = {one: [] for one in data.image_ids}
    for phrase in data.phrases:
        boxes[data.image_ids[phrase.image]] += [list(box) for box in phrase.boxes]
    boxes = {one: [list(x) for x in dict.fromkeys(map(tuple, some))] for one, some in boxes.items()}
    (tmp_path / "boxes.json").write_text(json.dumps(boxes))
    options = ("--workers", 0, "--proposals", tmp_path / "boxes.json", "--several", "any")
    results = run(main, run_folder, boxed_scenes / "entities", *options).json
    assert all(row["r@10"]["value"] == 1 for row in results["rows"])
    assert 1 / 3 <= results["rows"][-2]["r@1"]["value"] < 1
    assert results["proposals"]["source"] == str(tmp_path / "boxes.json")


@pytest.fixture(scope="session")
def region_runs(boxed_scenes, tmp_path_factory):
    """Saved SCAN and VSRN models, and the features of a grid's proposals."""
    torch.manual_seed(0)
    out = tmp_path_factory.mktemp("region-runs")
    words = ["a", "red", "circle", "square"]
    attention = {"ranking": "attention", "attention": {}}
    scan = create_model("scan-scenes-gru", head="average", probabilistic=False, vocabulary=words, **attention)
    save_model(scan, out / "scan" / "model")
    save_model(create_model("vsrn-scenes-gru", vocabulary=words), out / "vsrn" / "model")
    data = ["--data", str(boxed_scenes / "entities"), "--split", "test", "--out", str(out / "boxes")]
    assert write_regions([*data, "--proposals", "grid", "--model", "crops"]) == 0
    return out


@pytest.mark.parametrize(
    ("name", "titles"), [("scan", ["cross attention", "mean only"]), ("vsrn", ["CSD", "mean only"])]
)
def test_models_that_read_regions(region_runs, run, boxed_scenes, name, titles):
    options = ("--workers", 0, "--sample", 3, "--regions", region_runs / "boxes" / "test_ims.npy")
    result = run(main, region_runs / name, boxed_scenes / "entities", *options)
    assert [row["title"] for row in result.json["rows"]][:2] == titles
    assert result.json["proposals"]["total"] == 302 * 3
    assert 0 < result.json["rows"][-1]["r@10"]["value"] <= 1
    assert result.page.count["img"]


def test_regions_and_models_that_do_not_fit(run, run_folder, region_runs, boxed_scenes, tmp_path):
    regions = ("--regions", region_runs / "boxes" / "test_ims.npy")
    narrow = tmp_path / "test_ims.npy"
    for name in ("test_boxes.npy", "test_ids.txt"):
        (tmp_path / name).write_bytes((region_runs / "boxes" / name).read_bytes())
    np.save(narrow, np.load(region_runs / "boxes" / "test_ims.npy")[..., :9])
    for model, options, what in (
        (run_folder, regions, "The model reads pixels"),
        (region_runs / "vsrn", (), "reads regions of 437 numbers, and crops"),
        (region_runs / "scan", ("--regions", narrow), "has regions of 9"),
        (run_folder, (*regions, "--proposals", "x.json"), "has proposals of its own"),
        (run_folder, (*regions, "--grid.step", "0.4"), "--grid has no effect"),
        (run_folder, ("--rankings", "attention"), "this one was not"),
        (run_folder, ("--rankings", "faiss-csd"), "scores no single pairs"),
        (run_folder, ("--top", "5"), "--top is given without"),
        (run_folder, ("--split", "tset"), "no split 'tset'"),
        (run_folder, ("--grid.scales", "[0.01]"), "more than 10,000"),
    ):
        with pytest.raises(UserError, match=what):
            run(main, model, boxed_scenes / "entities", *options)
