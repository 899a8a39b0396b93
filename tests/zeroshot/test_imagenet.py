"""`python -m zeroshot.imagenet`, from arguments to table, JSON and page."""

import io
import json

import pytest
from PIL import Image

from probemb.data.labelled import count_prompts, prompt_texts, read_templates
from probemb.errors import UserError
from tests.world import N_CLASSES, PER_CLASS, encode, save, write_samples
from zeroshot.imagenet import main


@pytest.fixture(scope="session")
def every(run, run_folder, shards):
    return run(main, run_folder, shards, "--filter", "every", "--select-on", "folds:2")


def test_the_json_holds_every_row_the_curve_and_each_class(every, names):
    results = every.json
    assert [row["note"] for row in results["rows"]] == [
        "zero-shot", "zero-shot", "oracle", "few-shot (folds:2)", "oracle", "oracle, upper bound", "few-shot (folds:2)",
        "zero-shot", "zero-shot", *["oracle", "few-shot (folds:2)"] * 4, "transductive", "unlabelled (folds:2)",
    ]  # fmt: skip
    assert results["images"] == N_CLASSES * PER_CLASS
    assert len(results["templates"]) == len(results["curve"]["top1"]) == 80
    assert [row["name"] for row in results["per_class"]] == names
    every_correct = sum(row["top1_all"] * row["images"] for row in results["per_class"]) / results["images"]
    assert every_correct == pytest.approx(results["rows"][1]["top1"])


def test_a_point_model_has_the_filters_that_read_no_uncertainty(run, point_model, shards):
    with pytest.raises(UserError, match=r"is a point model \(objective clip\), .* --filter weighted reads it"):
        run(main, point_model, shards, "--filter", "weighted")
    result = run(main, point_model, shards, "--filter", "every")
    assert [row["filter"] for row in result.json["rows"]] == ["single", "all"]
    assert set(result.json["uncertainty"].values()) == {None}
    assert {row["uncertainty"] for row in result.json["per_class"]} == {None}


def test_k_can_be_chosen_on_other_images_that_show_other_pictures(run, run_folder, shards, pictures, names, tmp_path):
    options = ("--filter", "best-topk", "--select-on", "train", "--classes", shards / "classes.txt")
    result = run(main, run_folder, shards / "00000.tar", *options, "--select-data", shards / "00001.tar")
    assert result.json["rows"][-1]["note"] == "few-shot (train)"
    half = resaved(tmp_path / "half", pictures[: len(pictures) // 2], names)
    with pytest.raises(UserError, match=r"16 of the 16 images in .*half \(100\.0%\) show the same pictures"):
        run(main, run_folder, shards / "00000.tar", *options, "--select-data", half)


def resaved(folder, pictures, names, form="WEBP"):
    """Class folders of the pictures in another format."""
    for i, (label, data) in enumerate(pictures):
        again = encode(Image.open(io.BytesIO(data)), form, quality=90)
        save(folder / names[label] / f"{i:02d}.{form.lower()}", again)
    return folder


def test_pictures_that_occur_twice_are_in_one_fold_and_told(run, run_folder, pictures, names, tmp_path):
    data = resaved(tmp_path / "data", pictures, names, "PNG")
    resaved(tmp_path / "data", pictures[:5], names, "WEBP")
    result = run(main, run_folder, data, "--filter", "topk", "--select-on", "folds:4")
    (notice,) = result.json["notices"]
    assert notice.startswith("5 of 37 images (13.5%) show the same picture as another one")
    assert notice in result.told
    assert notice in result.page.text


def test_own_templates_hostile_names_and_classes_without_images(run, run_folder, shards, tmp_path, names):
    (tmp_path / "t.txt").write_text("<b>{}</b>\nthe \u202e{}\n")
    (tmp_path / "c.json").write_text(json.dumps(["<script>alert(1)</script>", *names[1:], "zebra"]))
    templates, classes = ("--templates", tmp_path / "t.txt"), ("--classes", tmp_path / "c.json")
    result = run(main, run_folder, shards, "--filter", "topk", "--k", "1", *templates, *classes)
    assert "<b><" not in result.page.text
    assert "\u202e" not in result.page.text + result.told
    assert "&lt;script&gt;" in result.page.text
    (note,) = result.json["notes"]
    assert note == "1 of 9 classes have no images (zebra): they only compete with the others."
    assert note in result.told
    assert "topk keeps 1 of 2 prompts (zero-shot, K given)" in result.page.text


def test_templates_come_from_clip_a_file_or_are_those_of_each_class(tmp_path):
    assert len(read_templates(None)) == 80
    (tmp_path / "t.txt").write_text("the {}\n\n  a {}. \n")
    assert read_templates(tmp_path / "t.txt") == ["the {}", "a {}."]
    file, prompts = tmp_path / "p.json", {"dog": ["a dog", "an animal"], "cat": ["a cat", "a pet"], "more": []}
    file.write_text(json.dumps(prompts))
    templates = read_templates(file, ["cat", "dog"])
    assert prompt_texts(["cat", "dog"], templates) == ["a cat", "a pet", "a dog", "an animal"]
    assert count_prompts(templates) == 2
    file.write_text('{"cat": ["a cat"]}')
    with pytest.raises(UserError, match="there is no 'dog'"):
        read_templates(file, ["cat", "dog"])


# ------------------------------------------------------------------------------------------------ several data sets


@pytest.fixture(scope="session")
def sets(tmp_path_factory, shards, pictures, names):
    """Shards, class folders and a data set of CLIP_benchmark."""
    root = tmp_path_factory.mktemp("sets")
    for i, (label, data) in enumerate(pictures[:20]):
        save(root / "folders" / names[label] / f"{i}.jpg", data)
    samples = [{"cls": str(label), "jpg": data} for label, data in pictures[:16]]
    write_samples(root / "shapes" / "test" / "0.tar", samples)
    (root / "shapes" / "test" / "nshards.txt").write_text("1")
    (root / "shapes" / "classnames.txt").write_text("\n".join(names))
    (root / "shapes" / "zeroshot_classification_templates.txt").write_text("a photo of a {c}.\na drawing of a {c}.\n")
    return [str(shards), str(root / "folders"), str(root / "shapes")]


def test_each_data_set_has_a_row_and_a_page_and_the_mean_counts_each_once(sets, run, run_folder):
    result = run(main, run_folder, None, "--data", *sets, "--filter", "quantile", "--select-on", "folds:2")
    summary = result.json
    own = [json.loads((result.out / one["name"] / "results.json").read_text()) for one in summary["data"]]
    assert [one["images"] for one in summary["data"]] == [32, 20, 16]
    assert [one["classes"] for one in summary["data"]] == [8, 8, 8]
    assert own[2]["templates"] == ["a photo of a {}.", "a drawing of a {}."]
    for q, row in enumerate(summary["mean"]["rows"]):
        for key in ("top1", "top5", "mean_per_class_recall"):
            assert row[key] == pytest.approx(sum(one["rows"][q][key] for one in own) / 3)
    assert [row["filter"] for row in summary["mean"]["rows"]] == ["single", "all", "quantile", "quantile"]
    for one in summary["data"]:
        assert (result.out / one["name"] / "report.html").is_file()
        assert f"{100 * one['rows'][1]['top1']:.2f}" in result.page.text
