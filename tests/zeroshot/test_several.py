"""Several data sets in one run: a table with a row each, and layouts that bring their own names and templates."""

import json

import pytest

from probemb.cli.named_paths import NamedPath, split_name
from probemb.errors import UserError
from tests.data.labelled.test_cifar import TEN, write
from tests.world import write_tar
from zeroshot.imagenet import main
from zeroshot.several import folder_names


@pytest.fixture(scope="module")
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


def test_each_data_set_has_a_row_and_a_page_and_the_mean_counts_each_once(sets, run_folder, tmp_path, capsys):
    words = ["--model", str(run_folder), "--filter", "quantile", "--select-on", "folds:2", "--no-cache"]
    assert main([*words, "--data", *sets, "--out", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "results.json").read_text())
    own = [json.loads((tmp_path / one["name"] / "results.json").read_text()) for one in summary["data"]]
    assert [one["images"] for one in summary["data"]] == [32, 20, 16]
    assert [one["classes"] for one in summary["data"]] == [8, 10, 8]
    assert [len(one["templates"]) for one in own] == [80, 80, 2]
    assert own[2]["templates"] == ["a photo of a {}.", "a drawing of a {}."]
    for q, row in enumerate(summary["mean"]["rows"]):
        for key in ("top1", "top5", "mean_per_class_recall"):
            assert row[key] == pytest.approx(sum(one["rows"][q][key] for one in own) / 3)
    assert [row["filter"] for row in summary["mean"]["rows"]] == ["single", "all", "quantile", "quantile"]
    assert summary["mean"]["ece"] == pytest.approx(sum(one["calibration"]["ece"] for one in own) / 3)
    page = (tmp_path / "report.html").read_text()
    for one in summary["data"]:
        assert f'href="{one["name"]}/report.html"' in page
        assert (tmp_path / one["name"] / "report.html").is_file()
        low, high = one["rows"][1]["intervals"]["top1"]
        assert low <= one["rows"][1]["top1"] <= high
        assert f"<td>{100 * low:.1f}–{100 * high:.1f}</td>" in page
    printed = capsys.readouterr().out
    assert "mean" in printed.split("top-1 in %")[1]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--labels", "x.txt"], "--labels belongs to one data set"),
        (["--select-on", "train", "--select-data", "a"], "--select-data has 1 paths, and --data 3"),
    ],
)
def test_options_of_a_single_data_set_are_refused(more, message, sets, run_folder, tmp_path):
    with pytest.raises(UserError, match=message):
        main(["--model", str(run_folder), "--filter", "topk", "--data", *sets, "--out", str(tmp_path / "o"), *more])
    assert not (tmp_path / "o").exists()


def test_a_data_set_named_twice_is_refused(sets, run_folder):
    with pytest.raises(UserError, match="same path twice"):
        main(["--model", str(run_folder), "--data", sets[0], sets[0]])


def test_names_of_folders_are_distinct_and_harmless():
    given = ["/d/imagenet/val", "/d/places/val", "/d/x.tar", "/e/x", "/e/a b!", "y=/e/x", "val=/d/x", "..=/d/y"]
    assert folder_names([split_name(one) for one in given]) == [
        "imagenet-val", "places-val", "x", "x-2", "a-b", "y", "val", "data"
    ]  # fmt: skip
    assert folder_names([NamedPath("", "/d/figures")]) == ["figures-2"]


def test_names_are_those_that_were_given_and_two_are_not_the_same(sets, run_folder, tmp_path):
    words = ["--model", str(run_folder), "--filter", "single", "--no-cache", "--out", str(tmp_path)]
    with pytest.raises(UserError, match="named 'x'"):
        main([*words, "--data", f"x={sets[0]}", f"x={sets[2]}"])
    assert main([*words, "--data", f"x={sets[0]}", sets[2]]) == 0
    summary = json.loads((tmp_path / "results.json").read_text())
    assert [(one["name"], one["data"]) for one in summary["data"]] == [("x", sets[0]), ("shapes", sets[2])]
    assert main([*words, "--data", f"x={sets[0]}"]) == 0
    assert json.loads((tmp_path / "results.json").read_text())["config"]["data"] == sets[0]
