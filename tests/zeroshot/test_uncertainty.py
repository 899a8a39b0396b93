"""`python -m zeroshot.uncertainty`: every score on the same queries, sets, and the page."""

import pytest
import torch

from probemb.data.captions.find import find_captions
from probemb.errors import UserError
from probemb.models import load_model
from tests.world import jpeg, write_tar
from tools.make_scenes.world import scene
from zeroshot.uncertainty import main

sklearn = pytest.importorskip("sklearn.metrics")
FAST = ("--no-split", "--splits", 3, "--vilu", 4, "--levels", 3, "--alpha", 0.5)


@pytest.fixture(scope="module")
def judgements(captioned, tmp_path_factory):
    ids = find_captions(captioned).image_ids
    lines = [f"{i}\t{c}\t0\t{(n + k) % 3}\t1\n" for n, i in enumerate(ids) for k, c in enumerate(ids) if i != c]
    path = tmp_path_factory.mktemp("judged") / "judgements.tsv"
    path.write_text("image\tcaption_image\tcaption_index\tyes\tno\n" + "".join(lines))
    return path


def test_all_scores_are_measured_on_the_same_queries(run, run_folder, captioned, shards, scenes, judgements):
    options = ("--classes", shards, "--ood", scenes / "val", "--judgements", judgements, "--probes", 2)
    found = run(main, run_folder, captioned, *FAST, *options)
    rows = {of: {row["score"]: row for row in one["rows"]} for of, one in found.json["queries"].items()}
    model, tokenizer, transforms = load_model(run_folder)
    data = find_captions(captioned)
    with torch.no_grad():
        images = model.encode_image(torch.stack([transforms.evaluate(data.images.open(i)) for i in range(24)]))
        texts = model.encode_text(tokenizer(data.flat()))
    cosine = texts.mean @ images.mean.T
    right = cosine.argmax(1) == torch.tensor(data.owner())
    for name, confidence in (("u", -texts.uncertainty()), ("max cosine", cosine.amax(1))):
        auroc = sklearn.roc_auc_score(right.numpy(), confidence.numpy())
        assert rows["captions"][name]["auroc"]["value"] == pytest.approx(auroc, abs=0.02)
    assert {"ambiguity", "acceptance"} <= set(rows["captions"]["u"])
    u = rows["captions"]["u"]["aurc"]
    assert u["differences"].keys() >= {u["to"], "margin", "entropy", "logistic regression"}
    for name, apart in u["differences"].items():
        assert apart["value"] == pytest.approx(u["value"] - rows["captions"][name]["aurc"]["value"])
    assert {"r_auroc", "ood_auroc"} <= set(rows["classes"]["margin"])
    assert rows["classes"]["vilu"]["labels"] == rows["classes"]["logistic regression with u"]["labels"] == 16
    assert found.json["inputs"]["crop"]["images"] == 2
    assert {row["by"] for row in found.json["sets"]["classes"]} > {"means", "probit"}
    assert "captions → images" in found.told


def test_a_point_model_has_the_scores_that_need_no_variance(run, point_model, captioned, tmp_path):
    members = [(f"{name}/{i}.jpg", jpeg(scene(name, i)) if i else b"no") for name in ("a", "b") for i in range(6)]
    classes = write_tar(tmp_path / "classes.tar", members)
    found = run(main, point_model, captioned, *FAST, "--classes", classes, "--max-bad", 0.2)
    assert not any(row["own"] for one in found.json["queries"].values() for row in one["rows"])
    assert found.json["inputs"] is None
    assert "2 images left out" in found.told


def test_options_of_classes_are_refused_without_any(run, point_model, captioned):
    for option in (("--ood", captioned), ("--class-conditional",)):
        with pytest.raises(UserError, match=f"{option[0]} needs labelled images"):
            run(main, point_model, captioned, *option)
