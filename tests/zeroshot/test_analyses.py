"""`python -m zeroshot.analyses NAME` and `zeroshot.hierarchy`: what they write, and what they refuse."""

import sys
from functools import partial

import pytest
import torch

from probemb.data.boxes.find import find_phrases
from probemb.data.boxes.visual_genome import crop_triplets
from probemb.data.captions.find import find_captions
from probemb.data.scenes import scene
from probemb.errors import UserError
from probemb.models import create_model, save_model
from tests.world import jpeg
from tools.make_scenes import Plan, make
from zeroshot import hierarchy
from zeroshot.analyses import main
from zeroshot.evaluations.analyses import SHARES, mix

CHAINS = ["shape => circle => red circle => a red circle on white", "thing => square => blue square => one <b>, left"]


def analysis(name, argv):
    return main([name, *argv])


union, algebra, ellipses, continuity = (
    partial(analysis, name) for name in ("union", "set-algebra", "ellipses", "continuity")
)


def test_names_and_help(capsys, monkeypatch):
    assert main(["--help"]) == 0
    assert "set-algebra" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"no analysis 'unoin'\. Did you mean 'union'"):
        main(["unoin"])
    with pytest.raises(UserError, match=r"--model is missing"):
        union([])
    monkeypatch.setattr(sys, "argv", ["x", "union", "--help"])
    with pytest.raises(SystemExit):
        main()
    assert "--areas" in capsys.readouterr().out


@pytest.fixture(scope="session")
def crops(run, run_folder, boxed_scenes):
    options = ("--workers", 0, "--areas", "[0.9, 0.4]", "--rankings", "csd,mean,kl")
    return run(union, run_folder, boxed_scenes / "visual_genome", *options)


def test_union(crops, boxed_scenes):
    data = find_phrases(boxed_scenes / "visual_genome")
    expected = {area: n for area in (0.4, 0.9) if (n := len(crop_triplets(data, area)))}
    assert {row["area"]: row["triplets"] for row in crops.json["areas"]} == expected
    for row in crops.json["areas"]:
        assert [one["ranking"] for one in row["selection"]] == ["csd", "mean", "kl"]
        for one in row["selection"]:
            tasks = [one[task]["value"] for task in ("crop A", "crop C", "caption A", "caption C")]
            assert one["mean"]["value"] == pytest.approx(sum(tasks) / 4)
        for side in ("images", "captions"):
            u = row["uncertainty"]["log-det"][side]
            assert u["difference"]["value"] == pytest.approx(u["C"]["value"] - u["A"]["value"])
    assert crops.page.count["svg"] == 2
    assert crops.page.count["img"] >= 3
    assert "binary selection" in crops.told
    assert " and a " in crops.page.text


def test_the_rankings_of_a_union_and_a_point_model(run, boxed_scenes, tmp_path):
    words = ["a", "and", "red", "circle", "square"]
    options = {"head": "average", "probabilistic": False, "ranking": "attention", "attention": {"direction": "t2i"}}
    save_model(create_model("resnet-gru-small", vocabulary=words, **options), tmp_path / "scan")
    save_model(create_model("ViT-Micro-32", ranking="min-kl", covariance="spherical"), tmp_path / "kl")
    for name, rankings in (("scan", ["mean"]), ("kl", ["min-kl", "mean"])):
        result = run(union, tmp_path / name, boxed_scenes / "visual_genome", "--workers", 0, "--sample", 4)
        assert [one["ranking"] for one in result.json["areas"][-1]["selection"]] == rankings
        assert ("log-det" in result.told) == result.json["probabilistic"] == (name == "kl")


def test_what_a_union_refuses(run, run_folder, boxed_scenes, tmp_path):
    save_model(create_model("scan-scenes-gru", vocabulary=["a", "red"], head="average"), tmp_path / "regions")
    for model, options, what in (
        (run_folder, ("--areas", "[]"), "--areas names none"),
        (run_folder, ("--rankings", "faiss-csd"), "faiss-csd scores no single pairs"),
        (run_folder, ("--rankings", "attention"), "attention compares tokens"),
        (tmp_path / "regions", (), "reads precomputed regions"),
    ):
        with pytest.raises(UserError, match=what):
            run(union, model, boxed_scenes / "visual_genome", "--workers", 0, *options)


def test_set_algebra(run, run_folder, boxed_scenes):
    options = ("--inputs", 8, "--examples", 2, "--no-split")
    result = run(algebra, run_folder, boxed_scenes / "val", *options)
    assert result.json["inputs"] == 8
    assert set(result.json["mixing"]) == {"cutmix", "mixup"}
    for rows in result.json["erasing"].values():
        assert [row["share"] for row in rows] == list(SHARES)
        assert all(0 <= row[key] <= 1 for row in rows for key in ("wider", "lies_in", "covers", "covered"))
    assert result.json["nested"]["pairs"] > 0
    assert result.page.count["svg"] == 6
    assert "pairs of nested captions" in result.told
    assert "own is closest" in result.told


def test_set_algebra_of_regions(run, boxed_scenes, tmp_path):
    data = boxed_scenes / "regions"
    words = sorted({w for said in find_captions(data, "val").captions for text in said for w in text.split()})
    save_model(create_model("vsrn-scenes-gru", vocabulary=words), tmp_path / "model")
    found = run(algebra, tmp_path / "model", data, "--inputs", 8, "--split", "val").json
    assert set(found["mixing"]) == {"cutmix"}
    assert set(found["erasing"]) == {"regions", "words"}
    assert len({row["sigma"] for row in found["erasing"]["regions"]}) > 1


def test_mixes():
    one, two = torch.zeros(2, 5, 3), torch.ones(2, 5, 3)
    assert mix(one, two, "cutmix")[:, :, 0].tolist() == [[0, 1, 0, 1, 0]] * 2
    one, two = torch.zeros(2, 3, 4, 6), torch.ones(2, 3, 4, 6)
    assert mix(one, two, "cutmix").sum((0, 1, 2)).tolist() == [0, 0, 0, 24, 24, 24]
    assert (mix(one, two, "mixup") == 0.5).all()
    assert not one.any()


def test_ellipses_of_classes_with_a_generic_caption(run, run_folder, tmp_path):
    make(Plan(train=0, val=0, classes_images=0, size=32, captions=3, class_captions=64), tmp_path / "world", workers=1)
    options = ("--groups", 4, "--per-group", 2, "--generic", "a shape", "--split", "train")
    result = run(ellipses, run_folder, tmp_path / "world" / "by-class", *options)
    found = result.json
    assert len(found["groups"]) == 4
    assert set(found["images"]["groups"]) == set(found["captions"]["groups"]) == set(found["groups"])
    assert len(found["images"]["centre"]) <= 8
    assert len(found["captions"]["labels"]) == len(found["captions"]["angle"])
    assert 0 <= found["generic"]["captions_inside"] <= 1
    assert result.page.count["svg"] == 2
    assert "generic caption" in result.told


def test_ellipses_of_single_images_and_models_without_variances(run, run_folder, point_model, boxed_scenes):
    found = run(ellipses, run_folder, boxed_scenes / "val", "--groups", 3, "--no-split").json
    assert len(found["groups"]) == len(found["images"]["centre"]) == 3
    assert found["generic"] is None
    for one in (ellipses, algebra):
        with pytest.raises(UserError, match="a model with no variances"):
            run(one, point_model, boxed_scenes / "val", "--no-split")


def test_continuity(run, run_folder, captioned, tmp_path):
    result = run(continuity, run_folder, captioned, "--walks", 4, "--shown", 2, "--steps", 5, "--no-split")
    walks, near = result.json["walks"], result.json["neighbours"]
    assert (walks["walks"], len(walks["to_start"])) == (4, 5)
    assert walks["cosine"][0] == pytest.approx(1, abs=1e-4)
    assert 0 < near["likeness"] <= near["most"] <= 1
    assert result.page.count["img"] == 2 * 5 + 2 * 6
    options = {"head": "average", "probabilistic": False, "ranking": "attention", "attention": {"direction": "t2i"}}
    save_model(create_model("resnet-gru-small", vocabulary=["a", "red"], **options), tmp_path / "model")
    for model, words, what in (
        (tmp_path / "model", (), "has no one code an item"),
        (run_folder, ("--neighbours", 30), "has 24 images"),
    ):
        with pytest.raises(UserError, match=what):
            run(continuity, model, captioned, "--no-split", *words)


# -------------------------------------------------------------------------------------------------------- hierarchy


@pytest.fixture
def table(tmp_path):
    """HierarCaps' table with six images."""
    (tmp_path / "images").mkdir()
    rows = ["id,captions,image_url"]
    for i in range(6):
        (tmp_path / "images" / f"COCO_{i}.jpg").write_bytes(jpeg(scene("h", i)))
        rows.append(f'{i},"{CHAINS[i % 2]}",http://images.example/val2014/COCO_{i}.jpg')
    (tmp_path / "chains.csv").write_text("\n".join(rows))
    return tmp_path / "chains.csv"


def test_hierarchy_measures_each_walk(table, run, run_folder):
    data = find_captions(table)
    assert data.captions[1] == ["thing", "square", "blue square", "one <b>, left"]
    assert data.image_ids[5] == "COCO_5.jpg"
    result = run(hierarchy.main, run_folder, table)
    found = result.json
    assert (found["images"], found["captions"], found["distinct"]) == (6, 24, 8)
    assert [row["walk"] for row in found["rows"]] == ["walk", "walk-inclusion", "radius"]
    assert all(0 <= row[key] <= 1 for row in found["rows"] for key in ("precision", "recall", "any"))
    assert len(found["uncertainty"]) == 4
    assert "Kendall's tau with the level" in result.told


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("9,a => b,http://images.example/COCO_0.jpg", "2 to 4 captions"),
        ("9,a => b => c => d,http://images.example/..", "no name of an image, in row 7"),
        ("9,a => b => c => d,http://images.example/COCO_8.jpg", "1 of the 7"),
    ],
)
def test_wrong_tables(row, problem, table, run, run_folder):
    if "2 to 4" in problem:
        table.write_text(table.read_text().replace("COCO_0.jpg", "COCO_7.jpg"))
        (table.parent / "images" / "COCO_7.jpg").write_bytes((table.parent / "images" / "COCO_0.jpg").read_bytes())
    table.write_text(f"{table.read_text()}\n{row}")
    with pytest.raises(UserError, match=problem):
        run(hierarchy.main, run_folder, table)
