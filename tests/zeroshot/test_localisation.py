"""`python -m zeroshot.localisation` on drawn scenes: its table, results and page, and what it refuses."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from probemb.data.boxes import find_phrases
from probemb.errors import UserError
from probemb.models import create_model, save_model
from tools.make_scenes import Plan, make
from tools.write_regions import main as write_regions
from zeroshot.localisation import main


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    out = tmp_path_factory.mktemp("boxed") / "scenes"
    make(Plan(train=0, val=8, classes_images=0, size=48, boxes=True), out, workers=1)
    return out


def command(run_folder, data, out, *options):
    grid = [] if "--proposals" in options else ["--grid.scales", "[0.4, 0.8]", "--grid.ratios", "[1.0]"]
    return main(["--model", str(run_folder), "--data", str(data), "--out", str(out), "--workers", "0", *grid, *options])


@pytest.fixture(scope="module")
def measured(run_folder, scenes, tmp_path_factory):
    out = tmp_path_factory.mktemp("measured")
    assert command(run_folder, scenes / "entities", out) == 0
    return out, json.loads((out / "results.json").read_text(), parse_constant=pytest.fail)


def test_the_results(measured, scenes):
    _, results = measured
    data = find_phrases(scenes / "entities", "test")
    assert results["config"]["split"] == "test"
    assert results["phrases"] == len(data.phrases) == sum(row["phrases"] for row in results["types"])
    assert results["images"] == 8
    titles = [row["title"] for row in results["rows"]]
    assert titles == ["CSD", "mean only", "guessing", "upper bound of the proposals"]
    for row in results["rows"]:
        assert 0 <= row["r@1"]["value"] <= row["r@5"]["value"] <= row["r@10"]["value"] <= 1
        assert row["r@10"]["value"] <= results["rows"][-1]["r@10"]["value"]
    bound = results["rows"][-1]
    assert bound["r@1"] == bound["r@10"]
    counts = [row["phrases"] for row in results["types"]]
    assert counts == sorted(counts, reverse=True)
    weighted = sum(row["phrases"] * row["r@5"]["value"] for row in results["types"]) / results["phrases"]
    assert weighted == pytest.approx(results["rows"][0]["r@5"]["value"])
    curve = results["thresholds"]
    assert curve["r@5"][curve["iou"].index(0.5)] == pytest.approx(results["rows"][0]["r@5"]["value"])
    assert {row["score"] for row in results["predictors"]} >= {"u", "distance", "margin"}
    assert results["uncertainty"]["counts"]


def test_the_page_shows_pictures_with_boxes(measured):
    out, results = measured
    page = (out / "report.html").read_text()
    pictures = page.count("<image href=")
    assert 0 < pictures <= 24
    assert page.count('class="meant"') >= pictures
    assert len(re.findall(r'<rect class="(?:right|wrong)"', page)) == pictures
    assert "upper bound of the proposals" in page
    assert 'src="http' not in page
    assert (out / "figures" / "iou.png").is_file()
    for row in results["types"]:
        assert row["type"] in page


def test_proposals_that_are_the_truth(run_folder, scenes, tmp_path):
    """With the objects' own boxes as proposals, every phrase of one object is among them, and ten are enough."""
    data = find_phrases(scenes / "entities", "test")
    boxes = {one: [] for one in data.image_ids}
    for phrase in data.phrases:
        boxes[data.image_ids[phrase.image]] += [list(box) for box in phrase.boxes]
    boxes = {one: [list(x) for x in dict.fromkeys(map(tuple, some))] for one, some in boxes.items()}
    (tmp_path / "boxes.json").write_text(json.dumps(boxes))
    proposals = ["--proposals", str(tmp_path / "boxes.json")]
    assert command(run_folder, scenes / "entities", tmp_path / "out", *proposals, "--several", "any") == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    for row in results["rows"]:
        assert row["r@10"]["value"] == 1
    guessing = results["rows"][-2]["r@1"]["value"]
    assert 1 / 3 <= guessing < 1
    assert results["proposals"]["source"] == str(tmp_path / "boxes.json")


def test_visual_genome(run_folder, scenes, tmp_path, capsys):
    assert command(run_folder, scenes / "visual_genome", tmp_path / "out", "--sample", "4", "--rankings", "mean") == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["images"] == 4
    assert [row["type"] for row in results["types"]] == ["all"]
    assert "4 images" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--rankings", "faiss-csd"], "not for proposals"),
        (["--rankings", "cosine"], "no ranking 'cosine'"),
        (["--rankings", "multi-instance"], "does not fit"),
        (["--top", "5"], "--top is given without"),
        (["--split", "tset"], "no split 'tset'"),
        (["--several", "union"], "Choose merged or any"),
        (["--grid.step", "0"], "grid.step"),
        (["--grid.scales", "[0.01]"], "more than 10,000"),
        (["--images", "nowhere"], "does not exist"),
        (["--sample", "0"], "from 1"),
    ],
)
def test_options_that_are_refused(run_folder, scenes, tmp_path, options, what):
    with pytest.raises(UserError, match=what):
        command(run_folder, scenes / "entities", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def region_runs(scenes, tmp_path_factory):
    """Saved SCAN and VSRN models, and the features of a grid's proposals."""
    torch.manual_seed(0)
    out = tmp_path_factory.mktemp("region-runs")
    words = ["a", "red", "circle", "square"]
    attention = {"ranking": "attention", "attention": {}}
    scan = create_model("scan-scenes-gru", head="average", probabilistic=False, vocabulary=words, **attention)
    save_model(scan, out / "scan" / "model")
    save_model(create_model("vsrn-scenes-gru", vocabulary=words), out / "vsrn" / "model")
    data = ["--data", str(scenes / "entities"), "--split", "test", "--out", str(out / "boxes")]
    assert write_regions([*data, "--proposals", "grid", "--model", "crops"]) == 0
    return out


@pytest.mark.parametrize(
    ("name", "titles"), [("scan", ["cross attention", "mean only"]), ("vsrn", ["CSD", "mean only"])]
)
def test_models_that_read_regions(region_runs, scenes, tmp_path, name, titles):
    argv = ["--model", str(region_runs / name), "--data", str(scenes / "entities"), "--workers", "0", "--sample", "3"]
    regions = ["--regions", str(region_runs / "boxes" / "test_ims.npy")]
    assert main([*argv, *regions, "--out", str(tmp_path / "out")]) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text(), parse_constant=pytest.fail)
    assert [row["title"] for row in results["rows"]][:2] == titles
    assert results["proposals"]["total"] == 302 * 3
    assert 0 < results["rows"][-1]["r@10"]["value"] <= 1
    assert "<image href=" in (tmp_path / "out" / "report.html").read_text()


def test_regions_and_models_that_do_not_fit(run_folder, region_runs, scenes, tmp_path):
    regions = ["--regions", str(region_runs / "boxes" / "test_ims.npy")]
    narrow = tmp_path / "test_ims.npy"
    for name in ("test_boxes.npy", "test_ids.txt"):
        (tmp_path / name).write_bytes((region_runs / "boxes" / name).read_bytes())
    np.save(narrow, np.load(region_runs / "boxes" / "test_ims.npy")[..., :9])
    cases = [
        (run_folder, regions, "The model reads pixels", "Leave --regions out"),
        (region_runs / "vsrn", [], "reads regions of 437 numbers, and crops", "--regions"),
        (region_runs / "scan", ["--regions", str(narrow)], "has regions of 9", "tools.write_regions"),
        (run_folder, [*regions, "--proposals", "x.json"], "has proposals of its own", "--proposals"),
        (run_folder, [*regions, "--grid.step", "0.4"], "--grid has no effect", "Leave"),
        (run_folder, ["--rankings", "attention"], "this one was not", "Leave --rankings out"),
    ]
    for model, options, what, remedy in cases:
        argv = ["--model", str(model), "--data", str(scenes / "entities"), "--out", str(tmp_path / "out"), *options]
        with pytest.raises(UserError, match=what) as error:
            main(argv)
        assert remedy in error.value.remedy


def test_what_is_missing(run_folder, scenes, tmp_path):
    with pytest.raises(UserError, match="--model is missing"):
        main(["--data", str(scenes / "entities")])
    with pytest.raises(UserError, match="--data is missing"):
        main(["--model", str(run_folder)])
    with pytest.raises(UserError, match="Flickr30k Entities and Visual Genome"):
        command(run_folder, scenes, tmp_path / "out")
    (tmp_path / "boxes.json").write_text("{}")
    with pytest.raises(UserError, match="no proposals for"):
        command(run_folder, scenes / "entities", tmp_path / "out", "--proposals", str(tmp_path / "boxes.json"))
    proposals = ["--proposals", str(tmp_path / "boxes.json"), "--grid.step", "0.4"]
    with pytest.raises(UserError, match="--grid has no effect"):
        command(run_folder, scenes / "entities", tmp_path / "out", *proposals)


def test_help_comes_without_torch():
    code = "import sys; from zeroshot.localisation import main; main(['--help'])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0
    assert "--proposals" in ended.stdout
