"""`python -m zeroshot.retrieval --judgements`: results, page, scores beside them, and comparisons."""

import json

import pytest
import torch

from probemb.data.captions.find import find_captions
from probemb.errors import UserError
from probemb.evaluation.embed_pairs import exact_match
from probemb.models import create_model, load_model, save_model
from zeroshot.judgements import SCORES, load_scores
from zeroshot.retrieval import main

sklearn = pytest.importorskip("sklearn.metrics")
FAST = (
    "--erased",
    "0",
    "--rankings",
    "csd,mean,match-probability,tolerance,faiss-mean",
    "--samples",
    "2",
    "--no-split",
)


def command(model, data, out, *options):
    return main(["--model", str(model), "--data", str(data), "--out", str(out), *FAST, *options])


@pytest.fixture(scope="module")
def file(captioned, tmp_path_factory):
    """Every second pair of the scenes, judged by the truth, and one of an image that is not there."""
    data = find_captions(captioned)
    truth, lines = exact_match(data, list(range(len(data)))), []
    for i, image in enumerate(data.image_ids):
        for c in range(i % 2, data.n_captions, 2):
            yes = 2 + int(torch.randint(2, (), generator=torch.Generator().manual_seed(c))) if truth[i, c] else c % 2
            lines.append(f"{image}\t{data.image_ids[c // 3]}\t{c % 3}\t{yes}\t{3 - yes}\n")
    path = tmp_path_factory.mktemp("judgements") / "judgements.tsv"
    path.write_text("image\tcaption_image\tcaption_index\tyes\tno\n" + "".join(lines) + "zzz\t000\t0\t1\t2\n")
    return path


@pytest.fixture(scope="module")
def measured(run_folder, captioned, file, tmp_path_factory):
    out = tmp_path_factory.mktemp("measured")
    assert command(run_folder, captioned, out, "--judgements", str(file)) == 0
    return out


def test_results_are_scikit_learns(measured, run_folder, captioned, file):
    results = json.loads((measured / "results.json").read_text())
    found = results["judgements"]
    model, tokenizer, transforms = load_model(run_folder)
    data = find_captions(captioned)
    with torch.no_grad():
        images = model.encode_image(torch.stack([transforms.evaluate(data.images.open(i)) for i in range(24)])).mean
        scores = images @ model.encode_text(tokenizer(data.flat())).mean.T
    label, score = [], []
    for line in file.read_text().splitlines()[1:-1]:
        image, other, index, yes, no = line.split("\t")
        if image != other:
            label.append(int(yes) > int(no))
            score.append(float(scores[int(image), 3 * int(other) + int(index)]))
    assert (found["pairs"], found["accepted"], found["not_in_the_data"]) == (len(label), sum(label), 1)
    rows = {row["ranking"]: row for row in found["rows"]}
    assert list(rows) == ["csd", "mean", "match-probability", "tolerance", "tolerance-cross-fitted"]
    assert rows["tolerance"]["title"] == "tolerance, oracle"  # its weights were chosen on the evaluated images
    assert rows["tolerance-cross-fitted"]["title"] == "tolerance, cross-fitted"
    precision = rows["mean"]["average_precision"]
    assert precision["value"] == pytest.approx(sklearn.average_precision_score(label, score), abs=1e-3)
    assert rows["mean"]["roc_auc"]["value"] == pytest.approx(sklearn.roc_auc_score(label, score), abs=1e-3)
    assert precision["low"] < precision["value"] < precision["high"]
    assert set(found["calibration"]) == {"closed form", "sampled", "constant"}
    assert found["acceptance"]["captions"] > 50
    u = results["predictors"]["captions"][0]
    assert u["accepted_share"]["value"] == pytest.approx(found["acceptance"]["spearman"]["value"])
    assert found["compared"] is None


def test_the_page_shows_them(measured):
    html = (measured / "report.html").read_text()
    for words in (
        "People's judgements",
        "AP, mean of halves",
        "Match probability, closed form",
        "tolerance, cross-fitted",
        "1 judged pairs are not",
    ):
        assert words in html, words
    assert (measured / "figures" / "reliability-sampled.pdf").is_file()


def test_another_model_is_compared(measured, captioned, file, tmp_path, capsys):
    torch.manual_seed(5)
    save_model(create_model("ViT-Micro-32", probabilistic=False), tmp_path / "point")
    of_points = ("--rankings", "csd,mean")
    options = (*of_points, "--judgements", str(file), "--compare")
    assert command(tmp_path / "point", captioned, tmp_path / "out", *options, str(measured)) == 0
    told = capsys.readouterr().out
    assert "people's judgements" in told
    assert "difference from" in told
    found = json.loads((tmp_path / "out" / "results.json").read_text())["judgements"]
    assert found["calibration"] is None
    before = {row["ranking"]: row for row in json.loads((measured / "results.json").read_text())["judgements"]["rows"]}
    after = {row["ranking"]: row for row in found["rows"]}
    for mine, row in found["compared"]["differences"].items():
        assert set(row) == set(before)
        for theirs, one in row.items():
            fitted = "tolerance-cross-fitted" in (mine, theirs)
            assert ("roc_auc" in one) != fitted
            metric = "roc_auc_halves" if fitted else "roc_auc"
            expected = after[mine][metric]["value"] - before[theirs][metric]["value"]
            assert one[metric]["value"] == pytest.approx(expected, abs=1e-6)
    assert command(tmp_path / "point", captioned, tmp_path / "out", *options, str(tmp_path / "out")) == 0
    same = json.loads((tmp_path / "out" / "results.json").read_text())["judgements"]["compared"]["differences"]
    assert same["mean"]["mean"]["average_precision"] == {"value": 0, "low": 0, "high": 0}
    assert command(tmp_path / "point", captioned, tmp_path / "out", *of_points) == 0  # without, no old scores are left
    assert not (tmp_path / "out" / SCORES).exists()


def test_wrong_input(measured, run_folder, captioned, file, tmp_path):
    (tmp_path / "few.tsv").write_text("".join(file.read_text().splitlines(keepends=True)[:400]))
    (tmp_path / "none.tsv").write_text(file.read_text().splitlines()[0] + "\nx\t000\t0\t1\t2\n")
    (tmp_path / "agreed.tsv").write_text(file.read_text().splitlines()[0] + "\n001\t000\t0\t1\t2\n")
    (tmp_path / SCORES).write_bytes((measured / SCORES).read_bytes()[:-8])
    for options, message in (
        (("--judgements", "nowhere.tsv"), "nowhere.tsv does not exist"),
        (("--judgements", str(tmp_path / "none.tsv")), "None of the 1 judged pairs"),
        (("--judgements", str(tmp_path / "agreed.tsv")), "people accept none"),
        (("--compare", str(measured)), "--compare is given without --judgements"),
        (("--judgements", str(file), "--compare", "nowhere"), "nowhere holds no scores of judged pairs"),
        (("--judgements", str(file), "--compare", str(tmp_path)), "holds no scores of judged pairs: "),
        (("--judgements", str(tmp_path / "few.tsv"), "--compare", str(measured)), "scores other judged pairs"),
    ):
        with pytest.raises(UserError, match=message):
            command(run_folder, captioned, tmp_path / "out", *options)
        assert not (tmp_path / "out").exists()


def test_scores_are_kept(measured, run_folder):
    scores, _, models, _ = load_scores(measured)
    assert set(scores) == {"csd", "mean", "match-probability", "tolerance", "tolerance-cross-fitted"}
    assert models == [str(run_folder)]
