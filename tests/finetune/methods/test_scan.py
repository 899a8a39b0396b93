"""SCAN on files of regions: ranks, resume, refusals, and retrieval by attention with the saved model."""

import json

import pytest
import torch

from finetune.methods import METHODS
from probemb import load_model
from probemb.cross_attention import CrossAttention
from probemb.errors import UserError
from tests.finetune.region_files import write_regions
from tests.finetune.runs import ONE_EPOCH, Job, metrics, run_here, saved
from zeroshot.retrieval import main as retrieval


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def regions(tmp_path_factory):
    return write_regions(tmp_path_factory.mktemp("regions"))


def options(regions, out, **more):
    return {
        "method": "scan", "data.path": regions, "out": out, "model.name": "scan-scenes-gru", "model.embed_dim": 8,
        "batch-size": 12, **more,
    }  # fmt: skip


def test_trains_resumes_and_is_ranked_by_attention(regions, tmp_path, capsys):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run_here(options(regions, whole)) == 0
    assert run_here(options(regions, parts, **{"stop-after-epochs": 1})) == 0
    assert run_here(options(regions, parts), "--resume") == 0
    a, b = saved(whole), saved(parts)
    assert all(torch.equal(a[name], b[name]) for name in a)
    model = load_model(whole).model
    assert (model.ranking, model.attention) == ("attention", CrossAttention())
    assert not model.probabilistic
    argv = ["--model", str(whole), "--data", str(regions), "--split", "val", "--out", str(tmp_path / "found")]
    assert retrieval([*argv, "--erased", "0"]) == 0
    rows = json.loads((tmp_path / "found" / "results.json").read_text())["rows"]
    assert {row["ranking"] for row in rows} >= {"attention", "mean"}
    best = max(line["rsum"] for line in metrics(whole) if "rsum" in line)
    assert rows[0]["ranking"] == "attention"
    assert rows[0]["rsum"] == pytest.approx(best)


@pytest.mark.parametrize("ranks", [2, 3])
def test_several_processes_equal_one(regions, tmp_path, ranks):
    settings = {**ONE_EPOCH, "data.validation": "null", "loss.direction": "i2t"}
    assert run_here(options(regions, tmp_path / "one", **settings)) == 0
    job = Job(options(regions, tmp_path / "many", **settings), ranks=ranks, output=tmp_path / "log")
    assert job.wait() == [0] * ranks, job.text()
    one, many = ([line["loss"] for line in metrics(tmp_path / name) if "loss" in line] for name in ("one", "many"))
    assert many == pytest.approx(one, rel=1e-4)
    for name, tensor in saved(tmp_path / "one").items():
        torch.testing.assert_close(saved(tmp_path / "many")[name], tensor, rtol=1e-3, atol=1e-4)


REFUSED = {
    "head clip": ({"model.head": "clip"}, "compares tokens, and head clip pools them", "average"),
    "head gpo": ({"model.head": "gpo"}, "compares tokens, and head gpo pools them", "average"),
    "pixels": ({"model.name": "ViT-Micro-32"}, "reads pixels, and .* holds 6 regions of 437", "scan-scenes-gru"),
    "cache": ({"model.lock_image": "true", "data.cache_features": "x"}, "need no cache", "data.cache_features"),
    "size augment": ({"size-augment": 0.2}, "and SizeAugment has others", "Set size_augment to 0"),
    "mixed": ({"mix.ratio": 0.25}, "cannot learn from mixed images", "Set it to 0"),
    "cutout": ({"augment.cutout": 0.2}, "A region has no pixels that augment.cutout could change", "leave it out"),
    "mixed regions": ({"method": "infonce", "mix.ratio": 0.25}, "A region has no pixels that mix.ratio", "to 0"),
    "norm": ({"method": "vsrn", "loss.norm": "l2norm"}, "vsrn does not use loss.norm", "scan"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(regions, tmp_path, case):
    settings, what, remedy = REFUSED[case]
    with pytest.raises(UserError, match=what) as error:
        run_here(options(regions, tmp_path / "run", **settings))
    assert remedy in str(error.value)
    assert not (tmp_path / "run").exists()


def test_regions_model_on_pixels_is_refused(regions, scenes, tmp_path):
    settings = options(scenes, tmp_path / "run", **{"model.vocabulary": regions / "vocabulary.txt"})
    with pytest.raises(UserError, match=r"reads 6 regions of 437 numbers of each image, and .* holds pixels"):
        run_here(settings)


def test_lambdas_are_the_directions_own_unless_given():
    from finetune.methods.scan import cross_attention

    make = METHODS["scan"].Options
    assert cross_attention(make()) == CrossAttention("t2i", lambda_softmax=9.0, lambda_lse=6.0)
    assert cross_attention(make(direction="i2t")) == CrossAttention("i2t", lambda_softmax=4.0, lambda_lse=5.0)
    assert cross_attention(make(direction="i2t", lambda_softmax=7.0)).lambda_softmax == 7.0
