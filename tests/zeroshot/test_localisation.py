"""`python -m zeroshot.localisation` on drawn scenes: its table, results and page, and what it refuses."""

import pytest

from probemb.data.boxes import find_phrases
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


def test_a_model_that_reads_regions(run, boxed_scenes, tmp_path):
    attention = {"head": "average", "probabilistic": False, "ranking": "attention", "attention": {}}
    save_model(create_model("scan-scenes-gru", vocabulary=["a", "red", "circle"], **attention), tmp_path / "model")
    data = ["--data", str(boxed_scenes / "entities"), "--split", "test", "--out", str(tmp_path / "boxes")]
    assert write_regions([*data, "--proposals", "grid", "--model", "crops"]) == 0
    options = ("--workers", 0, "--sample", 3, "--regions", tmp_path / "boxes" / "test_ims.npy")
    result = run(main, tmp_path / "model", boxed_scenes / "entities", *options)
    assert [row["title"] for row in result.json["rows"]][:2] == ["cross attention", "mean only"]
    assert result.json["proposals"]["total"] == 302 * 3
    assert 0 < result.json["rows"][-1]["r@10"]["value"] <= 1
    assert result.page.count["img"]
