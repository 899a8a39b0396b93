"""`python -m zeroshot.union` on drawn scenes: its tables, results and page, and what it refuses."""

import json
import subprocess
import sys

import pytest

from probemb.data.boxes.find import find_phrases
from probemb.data.boxes.visual_genome import crop_triplets
from probemb.errors import UserError
from probemb.models import create_model, save_model
from tools.make_scenes import Plan, make
from zeroshot.union import main


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    out = tmp_path_factory.mktemp("boxed") / "scenes"
    make(Plan(train=0, val=8, classes_images=0, size=48, boxes=True), out, workers=1)
    return out / "visual_genome"


def command(run_folder, data, out, *options):
    return main(["--model", str(run_folder), "--data", str(data), "--out", str(out), "--workers", "0", *options])


@pytest.fixture(scope="module")
def measured(run_folder, scenes, tmp_path_factory):
    out = tmp_path_factory.mktemp("measured")
    assert command(run_folder, scenes, out, "--areas", "[0.9, 0.4]", "--rankings", "csd,mean,kl") == 0
    return out, json.loads((out / "results.json").read_text(), parse_constant=pytest.fail)


def test_the_results(measured, scenes):
    _, results = measured
    data = find_phrases(scenes)
    expected = {area: len(crop_triplets(data, area)) for area in (0.4, 0.9)}
    assert {row["area"]: row["triplets"] for row in results["areas"]} == {a: n for a, n in expected.items() if n}
    for row in results["areas"]:
        assert [one["ranking"] for one in row["selection"]] == ["csd", "mean", "kl"]
        for one in row["selection"]:
            assert 0 <= one["mean"]["value"] <= 1
            tasks = [one[task]["value"] for task in ("crop A", "crop C", "caption A", "caption C")]
            assert one["mean"]["value"] == pytest.approx(sum(tasks) / 4)
        for side in ("images", "captions"):
            u = row["uncertainty"]["log-det"][side]
            assert u["difference"]["value"] == pytest.approx(u["C"]["value"] - u["A"]["value"])


def test_the_page(measured):
    out, _ = measured
    page = (out / "report.html").read_text()
    assert page.count("<svg") >= 2
    assert " and a " in page
    assert 'src="http' not in page
    assert page.count('src="data:image/jpeg') >= 3
    for side in ("images", "captions"):
        assert (out / "figures" / f"{side}.pdf").is_file()


def test_the_ranking_that_a_model_was_trained_for(scenes, tmp_path, capsys):
    save_model(create_model("ViT-Micro-32", ranking="min-kl", covariance="spherical"), tmp_path / "model")
    assert command(tmp_path / "model", scenes, tmp_path / "out", "--sample", "4") == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [one["ranking"] for one in results["areas"][-1]["selection"]] == ["min-kl", "mean"]
    told = capsys.readouterr().out
    assert "log-determinant" in told
    assert "binary selection" in told


def test_a_model_that_ranks_by_attention_is_compared_by_its_means(scenes, tmp_path):
    words = ["a", "and", "red", "circle", "square"]
    options = {"head": "average", "probabilistic": False, "ranking": "attention", "attention": {"direction": "t2i"}}
    save_model(create_model("resnet-gru-small", vocabulary=words, **options), tmp_path / "model")
    assert command(tmp_path / "model", scenes, tmp_path / "out", "--sample", "4") == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [one["ranking"] for one in results["areas"][-1]["selection"]] == ["mean"]


def test_a_model_of_regions_cannot_read_crops(scenes, tmp_path):
    save_model(create_model("scan-scenes-gru", vocabulary=["a", "red"], head="average"), tmp_path / "model")
    with pytest.raises(UserError, match=r"reads precomputed regions.* Name a model that reads pixels"):
        command(tmp_path / "model", scenes, tmp_path / "out")


def test_a_point_model_has_no_uncertainty(scenes, tmp_path, capsys):
    save_model(create_model("ViT-Micro-32", probabilistic=False), tmp_path / "model")
    assert command(tmp_path / "model", scenes, tmp_path / "out") == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert not results["probabilistic"]
    assert all(row["uncertainty"] is None for row in results["areas"])
    assert "log-determinant" not in capsys.readouterr().out
    assert "Uncertainty" not in (tmp_path / "out" / "report.html").read_text()


REFUSED = {
    "no data": (["--model", "x"], "--data is missing"),
    "no model": (["--data", "x"], "--model is missing"),
    "no areas": (["--model", "x", "--data", "y", "--areas", "[]"], "--areas names none"),
    "area above 1": (["--model", "x", "--data", "y", "--areas", "[1.5]"], "areas"),
    "search": (["--model", "x", "--data", "y", "--rankings", "faiss-csd"], "faiss-csd scores no single pairs"),
    "tokens": (["--model", "x", "--data", "y", "--rankings", "attention"], "attention compares tokens"),
    "unknown ranking": (["--model", "x", "--data", "y", "--rankings", "kll"], "no ranking 'kll'"),
    "nothing there": (["--model", "x", "--data", "/nowhere"], "does not exist"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    options, what = REFUSED[case]
    with pytest.raises(UserError, match=what):
        main(options)


def test_files_of_others_are_kept(run_folder, scenes, tmp_path):
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(UserError, match="was not written by this command"):
        command(run_folder, scenes, tmp_path)


def test_help_is_quick_and_names_the_options():
    told = subprocess.run(
        [sys.executable, "-m", "zeroshot.union", "--help"], capture_output=True, text=True, check=True
    )
    assert "--areas" in told.stdout
