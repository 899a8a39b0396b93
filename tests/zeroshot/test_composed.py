"""`python -m zeroshot.composed` on drawn scenes: its sets and page, and refusals."""

import json
import shutil

import pytest
import torch

from probemb.models import create_model, save_model
from tests.data.compositions.test_fashion200k import write_fashion200k
from zeroshot.composed import main

QUERIES = 32  # of each set


@pytest.fixture(scope="session")
def drawn(composed_scenes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("composed") / "compositions"
    shutil.copytree(composed_scenes / "compositions", folder)
    seen, unseen = folder / "2_cat_combinations.json", folder / "2_cat_combinations_zero_shot.json"
    rows = json.loads(seen.read_text())  # all feasible pairs, in a world as small as this: 40 are not trained on
    seen.write_text(json.dumps(rows[40:]))
    unseen.write_text(json.dumps(rows[:40]))
    return folder


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A run of MPC, as far as the command reads it."""
    out = tmp_path_factory.mktemp("runs") / "mpc"
    torch.manual_seed(0)
    save_model(create_model("ViT-Micro-32", composer="product"), out / "model")
    (out / "config.yaml").write_text("compose: {parts: 2, setup: seen, seed: 0}")
    return out


@pytest.fixture(scope="session")
def measured(run, trained, drawn):
    return run(main, trained, drawn, "--k", "2,3", "--queries", QUERIES, "--rankings", "cosine,density")


def test_longer_queries_count_as_unseen_and_a_random_order_is_beside(measured):
    results = measured.json
    assert results["trained"] == {"k": 2, "setup": "seen", "seed": 0, "lists": None, "known": True}
    assert [(row["k"], row["combinations"]) for row in results["rows"][::2]] == [
        (2, "seen"), (2, "unseen"), (3, "unseen"),
    ]  # fmt: skip
    for row in results["rows"]:
        assert set(row["kinds"]) == {"all", "images", "mixed", "texts"}
        one = row["kinds"]["all"]
        assert one["guessing"]["r_precision"] == pytest.approx(one["targets"] / results["images"])
        assert one["guessing"]["r@5"] < one["guessing"]["r@10"] < 1


def test_a_composer_of_points(run, drawn, tmp_path):
    torch.manual_seed(0)
    save_model(create_model("ViT-Micro-32", composer="tirg"), tmp_path / "model")
    result = run(main, tmp_path / "model", drawn, "--k", "2", "--queries", QUERIES)
    assert {row["score"] for row in result.json["feasibility"]["rows"]} == {"rarity", "distance"}
    assert {row["ranking"] for row in result.json["rows"]} == {"cosine"}


def test_changes_of_an_attribute_leave_the_query_s_image_out(run, tmp_path):
    torch.manual_seed(0)
    save_model(create_model("ViT-Micro-32", composer="addition"), tmp_path / "model")
    (tmp_path / "data").mkdir()
    data = write_fashion200k(tmp_path / "data")
    result = run(main, tmp_path / "model", data)
    [row] = result.json["rows"]
    assert (row["combinations"], row["published"], row["metrics"][:3]) == ("changes", True, ["r@1", "r@10", "r@50"])
    assert set(row["kinds"]) == {"all", "mixed"}
    assert row["kinds"]["mixed"]["queries"] == 2
    assert row["kinds"]["mixed"]["r@10"]["value"] == 1  # of four images
    assert result.json["feasibility"] is None
    assert "own image is left out" in result.page.text
