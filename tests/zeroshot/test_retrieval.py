"""`python -m zeroshot.retrieval`: the numbers, weights of the tolerance, human judgements, and the page."""

import open_clip
import pytest
import torch

from probemb.data.captions.find import find_captions
from probemb.distances import csd
from probemb.errors import UserError
from probemb.evaluation.embedding import exact_match
from probemb.metrics.retrieval import Positives, mean_metrics, score_metrics
from probemb.models import load_model
from tests.world import jpeg, write_samples, write_tar
from tools.make_scenes.world import scene
from zeroshot.evaluations import runner
from zeroshot.retrieval import RetrievalConfig, main

sklearn = pytest.importorskip("sklearn.metrics")
FAST = ("--no-split", "--erased", "0", "--rankings")


@pytest.fixture(scope="session")
def judged_pairs(captioned, tmp_path_factory):
    """Every second pair of the scenes, judged by the truth, and one of an image that is not there."""
    data = find_captions(captioned)
    truth, lines = exact_match(data), []
    for i, image in enumerate(data.image_ids):
        for c in range(i % 2, data.n_captions, 2):
            yes = 2 + int(torch.randint(2, (), generator=torch.Generator().manual_seed(c))) if truth[i, c] else c % 2
            lines.append(f"{image}\t{data.image_ids[c // 3]}\t{c % 3}\t{yes}\t{3 - yes}\n")
    path = tmp_path_factory.mktemp("judgements") / "judgements.tsv"
    path.write_text("image\tcaption_image\tcaption_index\tyes\tno\n" + "".join(lines) + "zzz\t000\t0\t1\t2\n")
    return path


@pytest.fixture(scope="session")
def measured(run, run_folder, captioned, judged_pairs):
    """One whole evaluation of the synthetic data."""
    options = ("--no-split", "--erased", 4, "--samples", 2, "--candidates", 12, "--judgements", judged_pairs)
    return run(main, run_folder, captioned, *options)


def encoded(run_folder, captioned):
    model, tokenizer, transforms = load_model(run_folder)
    data = find_captions(captioned)
    with torch.no_grad():
        pixels = torch.stack([transforms.evaluate(data.images.open(i)) for i in range(24)])
        return data, model.encode_image(pixels), model.encode_text(tokenizer(data.flat()))


def test_the_numbers_are_those_of_the_whole_matrix(measured, run_folder, captioned):
    data, images, texts = encoded(run_folder, captioned)
    rows = {(row["positives"], row["ranking"]): row for row in measured.json["rows"]}
    assert len(rows) == 2 * 8
    assert rows["own captions", "match-probability"]["how"] == "sampled, 2 x 2 samples a pair"
    own = torch.tensor(data.owner()) == torch.arange(24)[:, None]
    for positives, match in (("own captions", own), ("all true captions", exact_match(data))):
        for ranking, scores in (("csd", -csd(images, texts)), ("mean", images.mean @ texts.mean.T)):
            for way, s, m in (("i2t", scores, match), ("t2i", scores.T, match.T)):
                expected = mean_metrics(score_metrics(lambda rows, s=s: s[rows], Positives.from_matrix(m)))
                assert rows[positives, ranking][way] == pytest.approx(expected, abs=0.03)
                searched = rows[positives, {"csd": "faiss-csd", "mean": "faiss-mean"}[ranking]][way]
                assert searched == pytest.approx(expected, abs=0.03)  # float32 may swap two that nearly tie


def test_weights_chosen_on_other_images_are_called_so(run, run_folder, captioned, tmp_path):
    samples = [{"jpg": jpeg(scene("other", i)), "txt": f"one {i}\ntwo {i}"} for i in range(12)]
    other = write_samples(tmp_path / "other" / "val" / "a.tar", samples).parent.parent
    result = run(main, run_folder, captioned, *FAST, "csd,tolerance", "--select-data", other)
    found = result.json["tolerance"]["chosen"]
    assert (found["chosen"], found["metric"], found["positives"]) == ("chosen on val", "recall", "own captions")
    assert "tolerance, chosen on val: u of captions times" in result.told
    with pytest.raises(UserError, match=r"24 of the 24 images in .* show the same pictures as evaluated images"):
        run(main, run_folder, captioned, "--no-split", "--select-data", captioned, "--no-select-split")


def test_judgements_are_scikit_learns(measured, run_folder, captioned, judged_pairs):
    found = measured.json["judgements"]
    _, images, texts = encoded(run_folder, captioned)
    scores, label, score = images.mean @ texts.mean.T, [], []
    for line in judged_pairs.read_text().splitlines()[1:-1]:
        image, other, index, yes, no = line.split("\t")
        if image != other:
            label.append(int(yes) > int(no))
            score.append(float(scores[int(image), 3 * int(other) + int(index)]))
    assert (found["pairs"], found["accepted"], found["not_in_the_data"]) == (len(label), sum(label), 1)
    rows = {row["ranking"]: row for row in found["rows"]}
    assert rows["tolerance"]["title"] == "tolerance, oracle"  # its weights were chosen on the evaluated images
    assert rows["tolerance-cross-fitted"]["title"] == "tolerance, cross-fitted"
    precision = rows["mean"]["average_precision"]
    assert precision["value"] == pytest.approx(sklearn.average_precision_score(label, score), abs=1e-3)
    assert rows["mean"]["roc_auc"]["value"] == pytest.approx(sklearn.roc_auc_score(label, score), abs=1e-3)
    assert -1 < found["acceptance"]["spearman"]["value"] < 1
    assert -1 < measured.json["uncertainty"]["sign"]["captions"]["r@1"]["value"] < 1


def test_results_that_will_be_replaced_are_named(measured, capsys):
    runner.claim(RetrievalConfig(model="x", data="y", out=str(measured.out)), "retrieval")
    assert f"replaces what {measured.out} holds, of {measured.json['written']['date']}: " in capsys.readouterr().out


def test_a_point_model_has_no_uncertainty(run, point_model, captioned, judged_pairs):
    result = run(main, point_model, captioned, *FAST, "csd,mean", "--judgements", judged_pairs)
    assert (result.json["uncertainty"], result.json["judgements"]["calibration"]) == ({}, None)


def test_open_clips_weights_under_the_name_of_their_architecture(run, captioned, tmp_path):
    torch.save(open_clip.create_model("ViT-Micro-32").state_dict(), file := tmp_path / "epoch_1.pt")
    found = run(main, "ViT-Micro-32", captioned, "--pretrained", file, "--rankings", "mean", "--erased", 0)
    assert found.json["models"] == [f"ViT-Micro-32:{file}"]


def test_markup_in_captions_and_unreadable_images(run, run_folder, tmp_path):
    members = []
    for i in range(10):
        data = b"no" if i == 4 else jpeg(scene("bad", i))
        members += [(f"<i>{i}.jpg", data), (f"<i>{i}.txt", f"<script>alert({i})</script>\nother {i}".encode())]
    tar = write_tar(tmp_path / "a.tar", members)
    with pytest.raises(UserError, match="1 of 10 images"):
        run(main, run_folder, tar, *FAST, "mean")
    result = run(main, run_folder, tar, *FAST, "mean,csd", "--max-bad", "0.1")
    assert "&lt;script&gt;alert(3)" in result.page.text
    assert "<i>3" not in result.page.text
    assert (result.json["images"], result.json["captions"]) == (9, 18)
    assert [row["name"] for row in result.json["images_left_out"]] == ["<i>4"]
    assert "1 image left out" in result.told
