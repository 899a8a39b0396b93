"""The commands that draw embeddings as sets: what they write, of scenes and of classes, and what they refuse."""

import json

import pytest
import torch

from probemb.data.captions.find import find_captions
from probemb.errors import UserError
from probemb.models import create_model, load_model, save_model, weights_sha256
from tools.make_scenes import Plan, make
from zeroshot import ellipses, set_algebra, union


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    out = tmp_path_factory.mktemp("world") / "scenes"
    plan = Plan(train=0, val=10, classes_images=0, size=32, captions=3, class_captions=96)
    make(plan, out, workers=1)
    return out


def run(main, run_folder, data, out, **options):
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    return main([f"--model={run_folder}", f"--data={data}", f"--out={out}", "--device=cpu", *words])


def test_set_algebra(run_folder, world, tmp_path, capsys):
    assert run(set_algebra.main, run_folder, world / "val", tmp_path, inputs=8, examples=2, split="null") == 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["inputs"] == 8
    assert set(found["mixing"]) == {"cutmix", "mixup"}
    for rows in found["erasing"].values():
        assert [row["share"] for row in rows] == list(set_algebra.SHARES)
        assert all(0 <= row[key] <= 1 for row in rows for key in ("wider", "lies_in", "covers", "covered"))
    assert found["nested"]["pairs"] > 0
    assert len(found["examples"]) == 2
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 6
    assert {path.stem for path in (tmp_path / "figures").glob("*.pdf")} == {
        *("sigma-pixels", "sigma-words", "coverage-pixels", "coverage-words", "example-1", "example-2")
    }
    told = capsys.readouterr().out
    assert "pairs of nested captions" in told
    assert "own is closest" in told
    found = json.loads((tmp_path / "results.json").read_text())
    assert run(set_algebra.main, run_folder, world / "val", tmp_path, inputs=8, examples=2, split="null") == 0
    again = json.loads((tmp_path / "results.json").read_text())
    assert again | {"written": 0} == found | {"written": 0}  # the same again
    assert again["written"]["models"][str(run_folder)] == weights_sha256(load_model(run_folder).model)


def test_set_algebra_of_regions(tmp_path, capsys):
    make(Plan(train=0, val=10, classes_images=0, size=32, captions=3, boxes=True), tmp_path / "scenes", workers=1)
    data = tmp_path / "scenes" / "regions"
    words = find_captions(data, "val").captions
    model = create_model(
        "vsrn-scenes-gru", vocabulary=sorted({w for said in words for text in said for w in text.split()})
    )
    save_model(model, tmp_path / "model")
    assert run(set_algebra.main, tmp_path / "model", data, tmp_path / "out", inputs=8, split="val") == 0
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert set(found["mixing"]) == {"cutmix"}
    assert set(found["erasing"]) == {"regions", "words"}
    assert len({row["sigma"] for row in found["erasing"]["regions"]}) > 1
    assert "Images, regions left out" in (tmp_path / "out" / "report.html").read_text()
    assert "erased regions" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"reads .* regions of .* numbers of each image, and .* holds pixels"):
        run(set_algebra.main, tmp_path / "model", tmp_path / "scenes" / "val", tmp_path / "pixels", split="null")
    argv = [f"--model={tmp_path / 'model'}", f"--data={tmp_path / 'scenes' / 'visual_genome'}", "--device=cpu"]
    with pytest.raises(UserError, match=r"reads precomputed regions, and this command crops images"):
        union.main([*argv, f"--out={tmp_path / 'union'}"])


def test_every_other_region():
    one, two = torch.zeros(2, 5, 3), torch.ones(2, 5, 3)
    assert set_algebra.mix(one, two, "cutmix")[:, :, 0].tolist() == [[0, 1, 0, 1, 0]] * 2
    assert not one.any()


def test_halves_and_means():
    one, two = torch.zeros(2, 3, 4, 6), torch.ones(2, 3, 4, 6)
    assert set_algebra.mix(one, two, "cutmix").sum((0, 1, 2)).tolist() == [0, 0, 0, 24, 24, 24]
    assert (set_algebra.mix(one, two, "mixup") == 0.5).all()
    assert not one.any()


def test_ellipses_of_classes_with_a_generic_caption(run_folder, world, tmp_path, capsys):
    options = {"groups": 4, "per_group": 2, "generic": "a shape", "split": "train"}
    assert run(ellipses.main, run_folder, world / "by-class", tmp_path, **options) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert len(found["groups"]) == 4
    assert len(found["images"]["centre"]) == 8
    assert set(found["images"]["groups"]) == set(found["captions"]["groups"]) == set(found["groups"])
    assert len(found["captions"]["labels"]) == len(found["captions"]["angle"]) == 24
    assert 0 <= found["generic"]["captions_inside"] <= 1
    assert (tmp_path / "report.html").read_text().count("<svg") == 2
    assert "generic caption" in capsys.readouterr().out


def test_ellipses_of_single_images(run_folder, world, tmp_path):
    assert run(ellipses.main, run_folder, world / "val", tmp_path, groups=3, split="null") == 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert len(found["groups"]) == len(found["images"]["centre"]) == 3
    assert found["generic"] is None


@pytest.mark.parametrize("main", [set_algebra.main, ellipses.main])
def test_what_is_refused(main, run_folder, world, tmp_path):
    with pytest.raises(UserError, match="--model is missing"):
        main([])
    with pytest.raises(UserError, match="--data is missing"):
        main([f"--model={run_folder}"])
    save_model(create_model("ViT-Micro-32", probabilistic=False), tmp_path / "point")
    with pytest.raises(UserError, match="a model with no variances"):
        run(main, tmp_path / "point", world / "val", tmp_path / "out", split="null")
    assert not (tmp_path / "out").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "report.html").write_text("mine")
    with pytest.raises(UserError, match="was not written by this command"):
        run(main, run_folder, world / "val", tmp_path / "mine", split="null")
