"""PCME++ with every distance, and the CLIP loss beside it."""

import math
from typing import get_args

import pytest
import torch
from torch.nn import functional as F

from finetune.config import Config, Mix, with_method_file
from finetune.methods import METHODS, Batch
from probemb import Gaussian, load_model
from probemb.cli.configuration import parse_config
from probemb.cli.ranges import Distance
from probemb.models import Encoded, create_model
from tests.finetune.runs import ONE_EPOCH, metrics, run_here


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize("distance", get_args(Distance))
def test_every_distance_trains_a_step(distance, scenes, tmp_path, capsys):
    options = {"distance": distance, "batch-size": 40, "out": tmp_path / "run", "data.path": scenes, **ONE_EPOCH}
    assert run_here(options, "--no-data.validation") == 0
    (line,) = metrics(tmp_path / "run")
    assert math.isfinite(line["loss"])
    assert line["gradient_norm"] > 0
    assert f"pcmepp ({distance})" in capsys.readouterr().out
    form = {"csd": "csd", "match-probability": "samples"}.get(distance, "none")
    assert load_model(tmp_path / "run").model.match_form == form  # a and b belong to the distance that trained them


@pytest.mark.parametrize("method", ["pcmepp", "pcmepp-clip", "pcmepp-mu"])
def test_the_clip_loss_beside_pcmepp(method):
    """Its weight, the model's own temperature, and labels with two captions of one image."""
    r = torch.Generator().manual_seed(0)
    image, text = (Gaussian(F.normalize(torch.randn(4, 8, generator=r), dim=1), torch.zeros(4, 8)) for _ in range(2))
    match = torch.eye(4)
    match[0, 1] = match[1, 0] = 1
    batch = Batch(Encoded(image), Encoded(text), match, torch.tensor([0, 0, 1, 2]), torch.arange(4), 0, 0, r)
    model = create_model("ViT-Micro-32", probabilistic=METHODS[method].probabilistic, init_scale=5, init_shift=5)

    def terms(weight: float):
        config = with_method_file(["--method", method, f"--loss.clip={weight}"])
        return METHODS[method](parse_config(Config, "test", "", config), model, None).loss(batch, model)

    logits = model.logit_scale.exp() * image.mean @ text.mean.T
    target = match / match.sum(1, keepdim=True)
    expected = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
    with_clip, without = terms(0.5), terms(0)
    torch.testing.assert_close(with_clip.loss, without.loss + 0.5 * expected)
    torch.testing.assert_close(with_clip.terms["clip"], expected)
    assert "clip" not in without.terms
    with torch.no_grad():
        model.logit_scale.fill_(math.log(100))  # CLIP's ceiling, at which published weights stand
    (slope,) = torch.autograd.grad(terms(0.5).loss, [model.logit_scale])
    assert slope > 0.1  # descent lowers it


def test_means_alone_are_the_match_loss_and_nothing_else():
    config = parse_config(Config, "test", "", with_method_file(["--method", "pcmepp-mu"]))
    assert (config.loss.pseudo_positive, config.loss.clip, config.mix) == (0, 0, Mix(ratio=0, smoothing=0))
