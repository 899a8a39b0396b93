"""The command, from arguments to table, JSON and page."""

import io
import json
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from probemb import create_model
from probemb.errors import UserError
from probemb.models import save_model
from tests.orientation import stored
from tests.world import N_CLASSES, PER_CLASS, write_tar
from zeroshot.imagenet import main


@pytest.fixture(scope="module")
def every(run_folder, shards, tmp_path_factory):
    out = tmp_path_factory.mktemp("every")
    arguments = ["--filter", "every", "--model", str(run_folder), "--data", str(shards), "--out", str(out)]
    assert main([*arguments, "--select-on", "folds:2", "--cache", str(out / "cache")]) == 0
    return out


def test_the_json_holds_every_row_the_curve_and_each_class(every, names):
    results = json.loads((every / "results.json").read_text(), parse_constant=pytest.fail)
    assert [row["note"] for row in results["rows"]] == [
        "zero-shot", "zero-shot", "oracle", "few-shot (folds:2)", "oracle", "oracle, upper bound", "few-shot (folds:2)",
        "zero-shot", "zero-shot", *["oracle", "few-shot (folds:2)"] * 4, "transductive", "unlabelled (folds:2)",
    ]  # fmt: skip
    assert all(0 < row["gain_se"] < 0.2 for row in results["rows"] if row["gain"])
    assert results["images"] == N_CLASSES * PER_CLASS
    assert len(results["templates"]) == len(results["curve"]["top1"]) == 80
    assert [row["name"] for row in results["per_class"]] == names
    assert sum(row["images"] for row in results["per_class"]) == results["images"]
    every_correct = sum(row["top1_all"] * row["images"] for row in results["per_class"]) / results["images"]
    assert every_correct == pytest.approx(results["rows"][1]["top1"])
    assert results["config"]["select_on"] == "folds:2"
    assert set(results["seconds"]) == {"text", "images", "filters"}
    oracle, few_shot = (row["shots"] for row in results["rows"] if row["filter"] == "reweighted")
    assert (oracle["asked"], oracle["mean"], few_shot["mean"]) == (16, PER_CLASS, PER_CLASS / 2)
    assert results["reweighted"]["reweighted, oracle"]["images_of_class"] == [PER_CLASS] * N_CLASSES
    assert any(notice.startswith("--shots 16 is more than there are images") for notice in results["notices"])


def test_turned_images_are_classified_as_upright_ones_if_asked(run_folder, pictures, names, tmp_path):
    for i, (label, data) in enumerate(pictures):
        image = Image.open(io.BytesIO(data))
        for kind, orientation in ("upright", 1), ("turned", 1 + i % 8):
            file = tmp_path / kind / names[label] / f"{i}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(stored(image, orientation, "PNG"))
    found = {}
    for kind, *more in ("upright",), ("turned",), ("turned", "--exif"):
        out = tmp_path / "out" / "-".join([kind, *more])
        words = ["--filter", "all", "--model", str(run_folder), "--data", str(tmp_path / kind), "--no-cache", *more]
        assert main([*words, "--out", str(out)]) == 0
        results = json.loads((out / "results.json").read_text())
        assert results["config"]["exif"] == bool(more)
        found[(kind, *more)] = results["uncertainty"]["images"]["uncertainty"]
    assert found["turned", "--exif"] == found[("upright",)] != found[("turned",)]


def test_torch_may_resize_instead_of_pil(run_folder, shards, tmp_path):
    found = {}
    for resize in ("pil", "tensor"):
        words = ["--filter", "all", "--model", str(run_folder), "--data", str(shards), "--no-cache", "--resize", resize]
        assert main([*words, "--out", str(tmp_path / resize)]) == 0
        found[resize] = json.loads((tmp_path / resize / "results.json").read_text())
        assert found[resize]["config"]["resize"] == resize
    uncertainty = [np.array(one["uncertainty"]["images"]["uncertainty"]) for one in found.values()]
    np.testing.assert_allclose(*uncertainty, rtol=0.01)
    assert abs(found["pil"]["rows"][1]["top1"] - found["tensor"]["rows"][1]["top1"]) <= 0.05


def test_a_point_model_has_the_filters_that_read_no_uncertainty(shards, tmp_path, capsys):
    save_model(create_model("ViT-Micro-32", probabilistic=False, objective="clip"), tmp_path / "points")
    words = ["--model", str(tmp_path / "points"), "--data", str(shards), "--no-cache", "--out", str(tmp_path / "out")]
    for name in ("best-topk", "weighted", "reweighted"):
        with pytest.raises(UserError, match=rf"is a point model \(objective clip\), .* --filter {name} reads it"):
            main([*words, "--filter", name])
    assert main([*words, "--filter", "every", "--select-on", "folds:2"]) == 0
    assert "The model predicts no uncertainty" in capsys.readouterr().out
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["filter"] for row in results["rows"]] == ["single", "all"]
    assert set(results["uncertainty"].values()) == {None}
    assert {row["uncertainty"] for row in results["per_class"]} == {None}
    assert results["calibration"]["source"] == "logit_scale"


def test_prompts_with_words_that_a_model_does_not_know_are_told(shards, tmp_path, capsys):
    model = create_model("scenes-cnn-gru", head="mlp", probabilistic=False, vocabulary=["a", "photo", "of"])
    save_model(model, tmp_path / "words")
    words = ["--model", str(tmp_path / "words"), "--data", str(shards), "--no-cache", "--out", str(tmp_path / "out")]
    assert main([*words, "--filter", "all"]) == 0
    assert "words of the prompts are unknown to the model (such as bad, " in capsys.readouterr().out
    (notice,) = json.loads((tmp_path / "out" / "results.json").read_text())["notices"]
    assert "which reads them all alike" in notice


@pytest.mark.parametrize("match", ["none", "distance"])
def test_confidence_has_the_scale_that_the_loss_trained(match, shards, tmp_path):
    """The configuration says what was trained, not the value: this logit_scale differs from its start."""
    options = {"probabilistic": False, "match": match, "temperature_trained": False, "init_logit_scale": 20}
    save_model(create_model("ViT-Micro-32", init_scale=3.0, **options), tmp_path / "vse")
    words = ["--model", str(tmp_path / "vse"), "--data", str(shards), "--no-cache", "--out", str(tmp_path / "out")]
    assert main([*words, "--filter", "all"]) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    if match == "none":
        assert results["calibration"] is None
        assert "refusing doubtful images" not in (tmp_path / "out" / "report.html").read_text()
    else:
        assert results["calibration"]["value"] == 6


class Page(HTMLParser):
    """Collects what a page loads from or links to elsewhere, and whether its elements are closed in order."""

    VOID = ("meta", "img")

    def __init__(self):
        super().__init__()
        self.open, self.elsewhere, self.images, self.charts = [], [], 0, 0

    def handle_starttag(self, tag, attributes):
        self.images += tag == "img"
        self.charts += tag == "svg"
        assert tag != "script"
        for name, value in attributes:
            assert not name.startswith("on")
            if name in ("src", "href") and not value.startswith(("data:image/jpeg;base64,", "#")):
                self.elsewhere.append(value)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing(every):
    page = Page()
    page.feed((every / "report.html").read_text())
    page.close()
    assert page.open == []
    assert len(page.elsewhere) == 2 * 7  # links to the figures as files
    assert {str(file.relative_to(every)) for file in (every / "figures").iterdir()} == set(page.elsewhere)
    assert page.charts == 7  # two curves, the histogram, classes and images by uncertainty, reliability, refusing
    assert page.images == N_CLASSES * PER_CLASS  # eight classes, shown with all their four images


def test_what_was_chosen_on_the_images_is_called_oracle(every, run_folder, shards, tmp_path):
    results, page = json.loads((every / "results.json").read_text()), (every / "report.html").read_text()
    chosen = {"oracle_k", "oracle_top1_best_topk", "oracle_top1_max_over_k"}
    for row in results["per_class"]:
        assert set(row) == {"name", "key", "images", "uncertainty", "top1_all", *chosen}
    assert page.count("with every class at its own oracle K") == N_CLASSES
    assert page.count("<h4>Kept (oracle): ") == N_CLASSES
    assert "Oracle K of each class" in page
    assert (every / "figures" / "oracle-k-of-classes.pdf").is_file()
    words = ["--filter", "topk", "--model", str(run_folder), "--data", str(shards), "--no-cache"]
    for more, mark in ([], True), (["--k", "3"], False):
        assert main([*words, *more, "--out", str(tmp_path)]) == 0
        assert ("<h4>Kept (oracle): " in (tmp_path / "report.html").read_text()) == mark


def test_accuracies_are_shown_with_their_standard_errors(every):
    results, page = json.loads((every / "results.json").read_text()), (every / "report.html").read_text()
    for row in results["rows"]:
        assert 0 < row["top1_se"] < 0.1
        assert f"<td>{100 * row['top1']:.2f} ± {100 * row['top1_se']:.2f}</td>" in page
        assert row["mean_per_class_recall"] == pytest.approx(row["top1"])  # as many images of every class
    bins = results["uncertainty"]["images"]
    for mean, se in zip(bins["accuracy"], bins["accuracy_se"], strict=True):
        assert f"{100 * mean:.2f} ± {100 * se:.2f} %" in page


def test_every_gain_is_shown_with_its_standard_error(every):
    html = (every / "report.html").read_text()
    for row in json.loads((every / "results.json").read_text())["rows"]:
        if row["filter"] != "all":
            assert f"{100 * row['gain']:+.2f} ± {100 * row['gain_se']:.2f}</span>" in html


def test_a_second_run_reads_the_cache_and_replaces_its_own_files(every, run_folder, shards, capsys):
    before = json.loads((every / "results.json").read_text())
    arguments = ["--filter", "every", "--model", str(run_folder), "--data", str(shards), "--out", str(every)]
    main([*arguments, "--select-on=folds:2", "--cache", str(every / "cache")])
    after = json.loads((every / "results.json").read_text())
    assert (before.pop("prompt_cache"), after.pop("prompt_cache")) == ("computed", "read")
    for one in (before, after):
        del one["seconds"], one["written"]
    assert after == before
    assert "best-topk, rivals at the same K" in capsys.readouterr().out


def test_each_filter_alone_compares_with_single_and_all(run_folder, shards, tmp_path):
    for name, expected in {"weighted": 1, "topk": 1, "best-topk": 2, "quantile": 1, "reweighted": 1}.items():
        main(
            ["--filter", name, "--model", str(run_folder), "--data", str(shards), "--out", str(tmp_path), "--no-cache"]
        )
        rows = json.loads((tmp_path / "results.json").read_text())["rows"]
        assert [row["filter"] for row in rows] == ["single", "all", *[name] * expected]


def test_k_can_be_chosen_on_other_images(run_folder, shards, tmp_path):
    main([
        "--filter", "best-topk", "--model", str(run_folder), "--data", str(shards / "00000.tar"), "--no-cache",
        "--select-on", "train", "--select-data", str(shards / "00001.tar"), "--out", str(tmp_path),
    ])  # fmt: skip
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert rows[-1]["note"] == "few-shot (train)"


def resaved(folder, pictures, names, form="WEBP"):
    """Class folders of the pictures in another format."""
    for i, (label, data) in enumerate(pictures):
        file = folder / names[label] / f"{i:02d}.{form.lower()}"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.open(io.BytesIO(data)).save(file, form, quality=90)
    return folder


def test_the_evaluated_images_in_another_format_are_refused_to_choose_k_on(
    run_folder, shards, pictures, names, tmp_path
):
    words = ["--filter", "topk", "--model", str(run_folder), "--data", str(shards / "00000.tar"), "--no-cache"]
    words += ["--select-on", "train", "--classes", str(shards / "classes.txt"), "--out", str(tmp_path / "out")]
    half = resaved(tmp_path / "half", pictures[: len(pictures) // 2], names)
    with pytest.raises(
        UserError, match=r"16 of the 16 images in .*half \(100\.0%\) show the same pictures as evaluated"
    ):
        main([*words, "--select-data", str(half)])
    assert not (tmp_path / "out").exists()


def test_pictures_that_occur_twice_are_in_one_fold_and_told(run_folder, pictures, names, tmp_path, capsys):
    data = resaved(tmp_path / "data", pictures, names, "PNG")
    resaved(tmp_path / "data", pictures[:5], names, "WEBP")
    words = ["--filter", "topk", "--model", str(run_folder), "--data", str(data), "--no-cache"]
    assert main([*words, "--select-on", "folds:4", "--out", str(tmp_path / "out")]) == 0
    told = "5 of 37 images (13.5%) show the same picture as another one"
    assert told in capsys.readouterr().out
    assert told in (tmp_path / "out" / "report.html").read_text()
    (notice,) = json.loads((tmp_path / "out" / "results.json").read_text())["notices"]
    assert notice.endswith("and are in its fold")
    assert told in notice


def test_own_templates_and_hostile_names_are_shown_as_text(run_folder, shards, tmp_path, names):
    (tmp_path / "t.txt").write_text("<b>{}</b>\nthe \u202e{}\n")
    evil = ["<script>alert(1)</script>", *names[1:]]
    (tmp_path / "c.json").write_text(json.dumps(evil))
    main([
        "--filter", "every", "--model", str(run_folder), "--data", str(shards), "--no-cache",
        "--templates", str(tmp_path / "t.txt"), "--classes", str(tmp_path / "c.json"), "--out", str(tmp_path / "out"),
    ])  # fmt: skip
    text = (tmp_path / "out" / "report.html").read_text()
    Page().feed(text)
    assert "<script" not in text
    assert "<b><" not in text
    assert "\u202e" not in text


def test_classes_without_images_are_told(run_folder, shards, tmp_path, names, capsys):
    (tmp_path / "c.txt").write_text("\n".join([*names, "zebra"]))
    main([
        "--filter", "single", "--model", str(run_folder), "--data", str(shards), "--no-cache",
        "--classes", str(tmp_path / "c.txt"), "--out", str(tmp_path / "out"),
    ])  # fmt: skip
    note = "1 of 9 classes have no images (zebra): they only compete with the others."
    assert note in capsys.readouterr().out.splitlines()
    assert json.loads((tmp_path / "out" / "results.json").read_text())["notes"] == [note]


def bad_inputs(shards, run_folder, tmp):
    good = {"--model": str(run_folder), "--data": str(shards)}
    (tmp / "two.txt").write_text("cat\ndog\n")
    (tmp / "theirs").mkdir()
    (tmp / "theirs" / "results.json").write_text('{"mine": 1}')
    (tmp / "file").write_text("")
    return {
        "Did you mean 'best-topk'": {**good, "--filter": "best-topkk"},
        "Did you mean 'filter'|Did you mean 'filters'|no option --filtr": {**good, "--filtr": "all"},
        "only 2 class names": {**good, "--classes": str(tmp / "two.txt")},
        "does not exist": {**good, "--data": str(tmp / "nothing")},
        "There is no ImageNet in": {"--model": str(run_folder)},
        "not a way to choose K": {**good, "--select-on": "test"},
        "needs the images to choose on": {**good, "--select-on": "train"},
        "of the images in .* are also evaluated": {
            **good,
            "--select-on": "train",
            "--select-data": str(shards / "00001.tar"),
        },
        "but nothing is chosen on it": {**good, "--select-data": str(shards)},
        "chooses nothing": {**good, "--filter": "all", "--select-on": "folds:5"},
        "--k has no effect": {**good, "--filter": "best-topk", "--k": "3"},
        "--quantile has no effect": {**good, "--filter": "threshold", "--quantile": "0.5"},
        "--shots has no effect with --filter topk.*Say --filter reweighted": {
            **good,
            "--filter": "topk",
            "--shots": "4",
        },
        "--temperature has no effect": {**good, "--filter": "best-topk", "--temperature": "0.1"},
        "--quantile is 1.5": {**good, "--quantile": "1.5"},
        "--k 81 is more than the 80": {**good, "--filter": "topk", "--k": "81"},
        "--k is 0": {**good, "--filter": "topk", "--k": "0"},
        "--batch-size is 0": {**good, "--batch-size": "0"},
        "--temperature is -1": {**good, "--temperature": "-1"},
        "--max-bad is 2": {**good, "--max-bad": "2"},
        "There is no device": {**good, "--device": "gpu"},
        "--precision is 'fp8'": {**good, "--precision": "fp8"},
        "was not written by this command": {**good, "--out": str(tmp / "theirs")},
        "is a file": {**good, "--out": str(tmp / "file")},
        "There is no model at": {**good, "--model": str(tmp / "no-run")},
    }


@pytest.mark.parametrize("case", range(25))
def test_bad_input_is_refused_before_anything_is_written(case, shards, run_folder, tmp_path):
    message, options = list(bad_inputs(shards, run_folder, tmp_path).items())[case]
    out = tmp_path / "out"
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=message):
        main([word for pair in {"--out": str(out), "--no-cache": "", **options}.items() for word in pair if word])
    assert sorted(tmp_path.rglob("*")) == before


def test_too_many_corrupt_images_write_nothing(run_folder, pictures, names, tmp_path):
    members = [(f"{i}.{ext}", data) for i in range(10) for ext, data in (("jpg", b"no"), ("cls", b"0"))]
    write_tar(tmp_path / "bad.tar", members)
    (tmp_path / "classes.txt").write_text("\n".join(names))
    with pytest.raises(UserError, match="of 10 images"):
        main(
            [
                "--model",
                str(run_folder),
                "--data",
                str(tmp_path / "bad.tar"),
                "--out",
                str(tmp_path / "o"),
                "--no-cache",
            ]
        )
    assert not (tmp_path / "o").exists()


def test_the_command_ends_in_two_lines_and_code_2(tmp_path):
    command = [sys.executable, "-m", "zeroshot.imagenet", "--filter", "bst-topk", "--data", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0] == "error: There is no filter 'bst-topk'. Did you mean 'best-topk'?"
    assert len(lines) == 2
    assert list(tmp_path.iterdir()) == []


def test_help_loads_nothing_heavy():
    program = (
        "import sys, zeroshot.imagenet, zeroshot.retrieval\n"
        "for main in (zeroshot.imagenet.main, zeroshot.retrieval.main):\n"
        "    try: main(['--help'])\n"
        "    except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'open_clip', 'matplotlib'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "--select_on" in done.stdout


def test_the_small_imagenet_sample_has_no_folds(shared_data, run_folder, tmp_path):
    data = shared_data("imagenet_sample_1000")
    with pytest.raises(UserError, match="no class has more than one image"):
        main(["--model", str(run_folder), "--data", str(data), "--out", str(tmp_path), "--select-on", "folds:5"])
