"""`python -m zeroshot.imagenet`, from arguments to table, JSON and page."""

import io
import json

import pytest
from PIL import Image

from probemb.cli.named_paths import NamedPath, split_name
from probemb.data.labelled.prompts import count_prompts, prompt_texts
from probemb.errors import UserError
from probemb.models import create_model, save_model
from tests.data.labelled.test_cifar import TEN, write
from tests.orientation import stored
from tests.world import N_CLASSES, PER_CLASS, write_tar
from zeroshot.evaluations.filters import UPPER_BOUND
from zeroshot.evaluations.imagenet import folder_names, read_templates
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
    assert set(results["seconds"]) == {"text", "images", "filters"}
    chosen = {"oracle_k", "oracle_top1_best_topk", "oracle_top1_max_over_k"}  # on the images: called so everywhere
    assert set(results["per_class"][0]) == {"name", "key", "images", "uncertainty", "top1_all", *chosen}
    assert results["reweighted"]["reweighted, oracle"]["images_of_class"] == [PER_CLASS] * N_CLASSES
    assert any(notice.startswith("--shots 16 is more than there are images") for notice in results["notices"])


def test_the_page_has_the_table_figures_and_pictures(every):
    assert every.page.count["svg"] == 7  # two curves, the oracle K, classes and images by u, reliability, refusing
    assert every.page.count["img"] == N_CLASSES * PER_CLASS  # eight classes, shown with all their four images
    assert every.page.text.count("prompts kept (oracle)") == N_CLASSES
    for text in (UPPER_BOUND, "Oracle K of each class", *every.json["notices"]):
        assert text in every.page.text
    assert UPPER_BOUND in every.told
    for row in every.json["rows"]:
        assert f"{100 * row['top1']:.2f} ± {100 * row['top1_se']:.2f}" in every.page.text
        if row["filter"] != "all":
            assert f"{100 * row['gain']:+.2f} ± {100 * row['gain_se']:.2f}" in every.page.text


def test_turned_images_are_classified_as_upright_ones_if_asked(run, run_folder, pictures, names, tmp_path):
    for i, (label, data) in enumerate(pictures):
        image = Image.open(io.BytesIO(data))
        for kind, orientation in ("upright", 1), ("turned", 1 + i % 8):
            file = tmp_path / kind / names[label] / f"{i}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(stored(image, orientation, "PNG"))
    cases, found = (("upright",), ("turned",), ("turned", "--exif")), {}
    for kind, *more in cases:
        result = run(main, run_folder, tmp_path / kind, "--filter", "all", *more)
        found[(kind, *more)] = result.json["uncertainty"]["images"]["uncertainty"]
    assert found["turned", "--exif"] == found[("upright",)] != found[("turned",)]


def test_a_point_model_has_the_filters_that_read_no_uncertainty(run, point_model, shards):
    with pytest.raises(UserError, match=r"is a point model \(objective clip\), .* --filter weighted reads it"):
        run(main, point_model, shards, "--filter", "weighted")
    result = run(main, point_model, shards, "--filter", "every")
    assert "The model predicts no uncertainty" in result.told
    assert [row["filter"] for row in result.json["rows"]] == ["single", "all"]
    assert set(result.json["uncertainty"].values()) == {None}
    assert {row["uncertainty"] for row in result.json["per_class"]} == {None}
    assert result.json["calibration"]["source"] == "logit_scale"


def test_prompts_with_words_that_a_model_does_not_know_are_told(run, shards, tmp_path):
    model = create_model("scenes-cnn-gru", head="mlp", probabilistic=False, vocabulary=["a", "photo", "of"])
    save_model(model, tmp_path / "words")
    result = run(main, tmp_path / "words", shards, "--filter", "all")
    (notice,) = result.json["notices"]
    assert "words of the prompts are unknown to the model (such as bad, " in notice
    assert notice in result.told


@pytest.mark.parametrize("match", ["none", "distance"])
def test_confidence_has_the_scale_that_the_loss_trained(match, run, shards, tmp_path):
    """The configuration says what was trained, not the value: this logit_scale differs from its start."""
    options = {"probabilistic": False, "match": match, "temperature_trained": False, "init_logit_scale": 20}
    save_model(create_model("ViT-Micro-32", init_scale=3.0, **options), tmp_path / "vse")
    result = run(main, tmp_path / "vse", shards, "--filter", "all")
    if match == "none":
        assert result.json["calibration"] is None
        assert "refusing uncertain images" not in result.page.text
    else:
        assert result.json["calibration"]["value"] == 6


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
        file = folder / names[label] / f"{i:02d}.{form.lower()}"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.open(io.BytesIO(data)).save(file, form, quality=90)
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
    assert "prompts kept (oracle)" not in result.page.text


def test_templates_come_from_clip_a_file_or_are_those_of_each_class(tmp_path):
    assert len(read_templates(None)) == 80
    (tmp_path / "t.txt").write_text("the {}\n\n  a {}. \n")
    assert read_templates(tmp_path / "t.txt") == ["the {}", "a {}."]
    file, prompts = tmp_path / "p.json", {"dog": ["a dog", "an animal"], "cat": ["a cat", "a pet"], "more": []}
    file.write_text(json.dumps(prompts))
    templates = read_templates(file, ["cat", "dog"])
    assert prompt_texts(["cat", "dog"], templates) == ["a cat", "a pet", "a dog", "an animal"]
    assert count_prompts(templates) == 2
    for name, content, message in (
        ("t.txt", "", "is empty"),
        ("t.txt", "a {}\n{} and {}\n", "exactly once"),
        ("t.txt", "a {}\na {}\n", "occurs twice"),
        ("p.json", "[]", "no JSON object"),
        ("p.json", '{"cat": ["a cat"]}', "no prompts for the class 'dog'"),
        ("p.json", '{"cat": ["a cat"], "dog": ["a dog", "it"]}', "one length"),
        ("p.json", '{"cat": [], "dog": []}', "one length"),
        ("p.json", '{"cat": "a cat", "dog": "a dog"}', "one length"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match=message):
            read_templates(tmp_path / name, ["cat", "dog"])


REFUSED = {
    "Did you mean 'best-topk'": {"--filter": "best-topkk"},
    "only 2 class names": {"--classes": "two.txt"},
    "There is no ImageNet in": {"--data": ""},
    "needs the images to choose on": {"--select-on": "train"},
    "of the images in .* are also evaluated": {"--select-on": "train", "--select-data": "00001.tar"},
    "but nothing is chosen on it": {"--select-data": "00001.tar"},
    "chooses nothing": {"--filter": "all", "--select-on": "folds:5"},
    "--k has no effect": {"--filter": "best-topk", "--k": "3"},
    "--shots has no effect with --filter topk.*Say --filter reweighted": {"--filter": "topk", "--shots": "4"},
    "--temperature has no effect": {"--filter": "best-topk", "--temperature": "0.1"},
    "--quantile is 1.5": {"--quantile": "1.5"},
    "--k 81 is more than the 80": {"--filter": "topk", "--k": "81"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_options_are_refused_before_anything_is_written(message, run, shards, run_folder, tmp_path):
    (tmp_path / "two.txt").write_text("cat\ndog\n")
    given = {"--data": str(shards), **REFUSED[message]}
    places = {"two.txt": str(tmp_path / "two.txt"), "00001.tar": str(shards / "00001.tar")}
    options = [word for pair in given.items() for word in (pair[0], places.get(pair[1], pair[1])) if pair[1]]
    with pytest.raises(UserError, match=message):
        run(main, run_folder, None, *options)


def test_too_many_corrupt_images_write_nothing_and_files_of_others_are_kept(run, run_folder, shards, names, tmp_path):
    members = [(f"{i}.{ext}", data) for i in range(10) for ext, data in (("jpg", b"no"), ("cls", b"0"))]
    write_tar(tmp_path / "bad.tar", members)
    (tmp_path / "classes.txt").write_text("\n".join(names))
    with pytest.raises(UserError, match="of 10 images"):
        run(main, run_folder, tmp_path / "bad.tar")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "results.json").write_text('{"mine": 1}')
    with pytest.raises(UserError, match="was not written by this command"):
        run(main, run_folder, shards, "--out", tmp_path / "theirs")


def test_the_small_imagenet_sample_has_no_folds(shared_data, run, run_folder):
    with pytest.raises(UserError, match="no class has more than one image"):
        run(main, run_folder, shared_data("imagenet_sample_1000"), "--select-on", "folds:5")


# ------------------------------------------------------------------------------------------------ several data sets


@pytest.fixture(scope="session")
def sets(tmp_path_factory, shards, pictures, names):
    """Shards, CIFAR-10 and a data set of CLIP_benchmark."""
    root = tmp_path_factory.mktemp("sets")
    write(root / "cifar-10-batches-bin" / "test_batch.bin", [i % 10 for i in range(20)])
    (root / "cifar-10-batches-bin" / "batches.meta.txt").write_text("\n".join(TEN))
    members = []
    for i, (label, data) in enumerate(pictures[:16]):
        members += [(f"s{i:04d}.cls", str(label).encode()), (f"s{i:04d}.jpg", data)]
    write_tar(root / "shapes" / "test" / "0.tar", members)
    (root / "shapes" / "test" / "nshards.txt").write_text("1")
    (root / "shapes" / "classnames.txt").write_text("\n".join(names))
    (root / "shapes" / "zeroshot_classification_templates.txt").write_text("a photo of a {c}.\na drawing of a {c}.\n")
    return [str(shards), str(root), str(root / "shapes")]


def test_each_data_set_has_a_row_and_a_page_and_the_mean_counts_each_once(sets, run, run_folder):
    result = run(main, run_folder, None, "--data", *sets, "--filter", "quantile", "--select-on", "folds:2")
    summary = result.json
    own = [json.loads((result.out / one["name"] / "results.json").read_text()) for one in summary["data"]]
    assert [one["images"] for one in summary["data"]] == [32, 20, 16]
    assert [one["classes"] for one in summary["data"]] == [8, 10, 8]
    assert own[2]["templates"] == ["a photo of a {}.", "a drawing of a {}."]
    for q, row in enumerate(summary["mean"]["rows"]):
        for key in ("top1", "top5", "mean_per_class_recall"):
            assert row[key] == pytest.approx(sum(one["rows"][q][key] for one in own) / 3)
    assert [row["filter"] for row in summary["mean"]["rows"]] == ["single", "all", "quantile", "quantile"]
    assert summary["mean"]["ece"] == pytest.approx(sum(one["calibration"]["ece"] for one in own) / 3)
    for one in summary["data"]:
        assert (result.out / one["name"] / "report.html").is_file()
        low, high = one["rows"][1]["intervals"]["top1"]
        assert f"{100 * low:.1f}–{100 * high:.1f}" in result.page.text


def test_options_and_names_of_several_data_sets(sets, run, run_folder):
    for more, message in (
        (["--labels", "x.txt"], "--labels belongs to one data set"),
        (["--select-on", "train", "--select-data", "a"], "--select-data has 1 paths, and --data 3"),
        (["--data", sets[0], sets[0]], "same path twice"),
        (["--data", f"x={sets[0]}", f"x={sets[2]}"], "named 'x'"),
    ):
        with pytest.raises(UserError, match=message):
            run(main, run_folder, None, "--filter", "topk", "--data", *sets, *more)
    given = ["/d/imagenet/val", "/d/places/val", "/d/x.tar", "/e/x", "/e/a b!", "y=/e/x", "val=/d/x", "..=/d/y"]
    assert folder_names([split_name(one) for one in given]) == [
        "imagenet-val", "places-val", "x", "x-2", "a-b", "y", "val", "data"
    ]  # fmt: skip
    assert folder_names([NamedPath("", "/d/figures")]) == ["figures-2"]
