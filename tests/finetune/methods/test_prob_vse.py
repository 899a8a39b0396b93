"""Probabilistic VSE++ through the whole command: similarities, covariances, ranks, resuming, and what it refuses."""

import math
from dataclasses import replace

import pytest
import torch

from finetune.config import Config, with_method_file
from finetune.methods import METHODS, Batch
from probemb import Gaussian, UserError, load_model
from probemb.cli.configuration import parse_config
from probemb.losses import prob_triplet_loss
from probemb.models import Encoded
from tests.finetune.runs import Job, checkpoint, metrics, run_here, saved

SMALL = {
    "method": "prob-vsepp",
    "model.name": "scenes-cnn-gru",
    "model.embed_dim": 16,
    "batch-size": 24,
    "epochs": 1,
    "optimizer.decay-epochs": 0,
    "optimizer.freeze-epochs": 0,
    "swa-epochs": 0,
}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def options(**more):
    chosen = {**SMALL, **{key.replace("__", "."): value for key, value in more.items()}}
    return {key: value for key, value in chosen.items() if value is not None}


def parsed(*argv):
    return parse_config(Config, "test", "", with_method_file(["--method", "prob-vsepp", *argv]))


def test_the_papers_recipe():
    config = parsed()
    assert (config.loss.margin, config.batch_size, config.epochs, config.optimizer.lr) == (0.2, 128, 30, 2e-4)
    assert (config.optimizer.name, config.optimizer.decay_epochs, config.optimizer.clip_grad_norm) == ("adam", 15, 2)
    chosen = METHODS["prob-vsepp"].model_options(config)
    assert chosen["ranking"] == "wasserstein2"
    assert chosen["unit_features"]
    assert [math.exp(end) for end in chosen["log_var_range"]] == pytest.approx([0.1, 10])
    assert list(config.model.n_unc_layers) == [0, 1]


@pytest.mark.parametrize("similarity", ["wasserstein2", "min-kl", "kl"])
def test_the_loss_is_that_of_its_options(similarity):
    g = torch.Generator().manual_seed(0)
    image, text = (Gaussian(torch.randn(4, 8, generator=g), torch.randn(4, 8, generator=g)) for _ in range(2))
    match = torch.eye(4)
    match[0, 1] = match[1, 0] = 1
    batch = Batch(Encoded(image), Encoded(text), match, torch.tensor([0, 0, 1, 2]), torch.arange(4), 0, 0, g)
    config = parsed(f"--loss.similarity={similarity}", "--loss.margin=3", "--loss.negatives=semi-hard")
    out = METHODS["prob-vsepp"](config, None, None).loss(batch, None)
    assert torch.equal(out.loss, prob_triplet_loss(image, text, match, similarity, 3.0, "semi-hard").loss)
    config = parsed(f"--loss.similarity={similarity}", "--loss.margin=3", "--loss.warmup_epochs=1")
    method = METHODS["prob-vsepp"](config, None, None)
    for epoch, negatives in ((0, "all"), (1, "hardest")):
        out = method.loss(replace(batch, epoch=epoch), None)
        assert torch.equal(out.loss, prob_triplet_loss(image, text, match, similarity, 3.0, negatives).loss)


@pytest.mark.parametrize(
    ("similarity", "covariance"), [("wasserstein2", "ellipsoidal"), ("min-kl", "spherical-mean"), ("kl", "spherical")]
)
def test_trains_validates_and_saves(similarity, covariance, scenes, tmp_path):
    out = tmp_path / "run"
    more = {"loss__similarity": similarity, "loss__covariance": covariance, "data__path": scenes, "out": out}
    assert run_here(options(**more), "--no-model.image_weights") == 0
    lines = metrics(out)
    assert all(math.isfinite(m["loss"]) and m["gradient_norm"] > 0 for m in lines if "loss" in m)
    model = load_model(out).model
    assert (model.ranking, model.config["covariance"]) == (similarity, covariance)
    image = model.encode_image(torch.randn(2, 3, 64, 64))
    assert (image.var >= 0.1 - 1e-6).all()
    assert (image.var <= 10 + 1e-5).all()
    assert (image.log_var == image.log_var[:, :1]).all() == (covariance != "ellipsoidal")


def test_the_branch_is_the_last_learnable_block_again(scenes, tmp_path):
    """The image's linear map and the text's GRU, learned twice; nothing else is."""
    assert run_here(options(data__path=scenes, out=tmp_path / "run"), "--no-model.image_weights") == 0
    names = saved(tmp_path / "run")
    own = {name.split(".")[1] for name in names if name.startswith("visual.")}
    assert own == {"stem", "stages", "mean_head", "log_var_head"}
    layers = {name.removeprefix("text.layers.") for name in names if name.startswith("text.layers.")}
    assert layers == {name.removeprefix("text.branch.") for name in names if name.startswith("text.branch.")}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_equal_one_process(ranks, scenes, tmp_path):
    runs, lines = {}, {}
    for name, n in (("one", 1), ("several", ranks)):
        job = Job(options(data__path=scenes, out=tmp_path / name), "--no-model.image_weights", "--no-data.validation",
                  ranks=n, output=tmp_path / f"{name}.log")  # fmt: skip
        assert set(job.wait()) == {0}, job.text()
        runs[name], lines[name] = saved(tmp_path / name), metrics(tmp_path / name)
    for one, several in zip(lines["one"], lines["several"], strict=True):
        assert (several["loss"], several["gradient_norm"]) == pytest.approx(
            (one["loss"], one["gradient_norm"]), rel=1e-4
        )
    for key, value in runs["one"].items():  # Adam turns rounding of a gradient near zero into whole steps
        torch.testing.assert_close(runs["several"][key], value, rtol=1e-3, atol=1e-3)


def test_resumes_bit_for_bit(scenes, tmp_path):
    more = {"data__path": scenes, "epochs": 2}
    assert run_here(options(**more, out=tmp_path / "whole"), "--no-model.image_weights") == 0
    halves = options(**more, out=tmp_path / "halves")
    assert run_here({**halves, "stop-after-epochs": 1}, "--no-model.image_weights") == 0
    assert run_here(halves, "--no-model.image_weights", "--resume") == 0
    step = max(m["step"] for m in metrics(tmp_path / "whole"))
    assert checkpoint(tmp_path / "whole", step) == checkpoint(tmp_path / "halves", step)


REFUSED = {
    "mixing": ({"mix__ratio": 0.25}, "prob-vsepp cannot learn from mixed images"),
    "distance": ({"distance": "kl"}, "prob-vsepp has no choice of distance"),
    "similarity": ({"loss__similarity": "csd"}, "loss.similarity is 'csd'"),
    "bounds": ({"loss__smallest": 2, "loss__largest": 1}, "between loss.smallest 2 and loss.largest 1"),
    "vib": ({"loss__vib": 1}, "prob-vsepp does not use loss.vib"),
    "size augment": ({"size_augment": 0.2}, "SizeAugment drops tokens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case, scenes, tmp_path):
    more, what = REFUSED[case]
    with pytest.raises(UserError) as caught:
        run_here(options(**more, data__path=scenes, out=tmp_path / "run"), "--no-model.image_weights")
    assert what in caught.value.what
    assert not (tmp_path / "run").exists()
