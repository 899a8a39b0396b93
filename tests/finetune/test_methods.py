"""Every method and distance through the whole command, and options that do not belong together."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from finetune.config import DISTANCES, Config, method_names, with_method_file
from finetune.methods import METHODS, Batch
from probemb import Gaussian, load_model
from probemb.command import parse_config
from probemb.data.captioned import find_captioned
from probemb.data.reading import Images
from probemb.errors import UserError
from probemb.models import create_model
from tests.finetune.runs import ONE_EPOCH, metrics, run_here

TERMS = {
    "pcmepp": {"match", "pseudo_positive", "vib", "n_pseudo", "scale", "shift", "u_image", "u_text"},
    "pcmepp-mu": {"match", "pseudo_positive", "scale", "shift"},
    "infonce": {"i2t", "t2i", "temperature"},
    "vse": set(),
    "pcme": {"match", "vib", "scale", "shift", "u_image"},
    "daa": {"triplet", "daa"},
    "p2rm": {"triplet", "rectangle"},
    "ncr": {"triplet", "clean"},
    "decl": {"evidential", "hinge", "clean"},
}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def test_every_method_is_tested():
    assert {*TERMS, "clip-zs"} == set(method_names())


@pytest.mark.parametrize("method", TERMS)
def test_every_method_trains_validates_and_saves(method, scenes, tmp_path, capsys):
    """Two epochs: behind the warm-up of the losses that have one, and with the backbone frozen and thawed."""
    out = tmp_path / "run"
    assert run_here({"method": method, "data.path": scenes, "out": out}) == 0
    lines = metrics(out)
    trained, validated = [m for m in lines if "loss" in m], [m for m in lines if "rsum" in m]
    assert [m["step"] for m in trained] == [1, 2, 3, 4, 5, 6]
    assert [m["step"] for m in validated] == [3, 6]
    assert all(math.isfinite(m["loss"]) and m["gradient_norm"] > 0 for m in trained)
    assert TERMS[method] <= set(trained[-1])
    assert ("vib" in trained[-1]) == ("vib" in TERMS[method])
    assert {"swa_rsum", "swa_t2i_r1"} <= set(lines[-1])
    for name in ("model", "model-swa"):
        model = load_model(out / name).model
        assert model.probabilistic == (method in ("pcmepp", "pcme"))
    told = capsys.readouterr().out
    assert f"method  {method}" in told
    assert "validation RSUM" in told


class Some:
    """The first images of a split, as a `Captioned`."""

    def __init__(self, n: int):
        self.n = n

    def __call__(self, *where, **options):
        whole = find_captioned(*where, **options)
        images = Images(places=whole.images.places[: self.n], source=whole.images.source)
        return replace(whole, captions=whole.captions[: self.n], image_ids=whole.image_ids[: self.n], located=images)


@pytest.mark.parametrize("method", [*TERMS, "clip-zs"])
def test_every_method_on_real_images_and_captions(method, shared_data, tmp_path, monkeypatch):
    """Flickr8k: three steps on images of its validation split, and retrieval among some of its test split."""
    import probemb.data.captioned

    monkeypatch.setattr(probemb.data.captioned, "find_captioned", Some(12))
    data = shared_data("flickr8k")
    options = {"data.path": data, "data.train": "val", "data.validation": "test", "out": tmp_path / "run"}
    if method == "clip-zs":
        options |= {"epochs": 0, "swa-epochs": 0, "model.embed_dim": "null"}
    else:
        options |= {"batch-size": 20, "model.embed_dim": 64, **ONE_EPOCH}
    if "warmup_epochs" in METHODS[method].options:
        options |= {"loss.warmup_epochs": 0}
    assert run_here({"method": method, **options}) == 0
    lines = metrics(tmp_path / "run")
    assert [m["step"] for m in lines if "loss" in m] == ([] if method == "clip-zs" else [1, 2, 3])
    assert all(math.isfinite(m["loss"]) and m["gradient_norm"] > 0 for m in lines if "loss" in m)
    (validated,) = (m for m in lines if "rsum" in m)
    assert 0 <= validated["rsum"] <= 600
    load_model(tmp_path / "run")


@pytest.mark.parametrize("method", ["pcmepp", "vse", "p2rm"])
def test_methods_on_clips_own_head(method, scenes, tmp_path):
    options = {"model.head": "clip", "model.embed_dim": "null", "size-augment": 0, "batch-size": 24, **ONE_EPOCH}
    assert run_here({"method": method, "data.path": scenes, "out": tmp_path / "run", **options}) == 0


@pytest.mark.parametrize("distance", DISTANCES)
def test_every_distance_trains_a_step(distance, scenes, tmp_path, capsys):
    options = {"distance": distance, "batch-size": 40, "out": tmp_path / "run", "data.path": scenes, **ONE_EPOCH}
    assert run_here(options, "--no-data.validation") == 0
    (line,) = metrics(tmp_path / "run")
    assert math.isfinite(line["loss"])
    assert line["gradient_norm"] > 0
    assert f"pcmepp ({distance})" in capsys.readouterr().out


def test_zero_shot_measures_and_saves_the_model_as_it_comes(scenes, tmp_path, capsys):
    out = tmp_path / "run"
    options = {"method": "clip-zs", "data.path": scenes, "out": out, "epochs": 0, "swa-epochs": 0}
    assert run_here({**options, "model.embed_dim": "null"}) == 0
    (line,) = metrics(out)
    assert 0 <= line["rsum"] <= 600
    assert not (out / "checkpoints").exists()
    first = load_model(out).model.state_dict()
    assert run_here({**options, "model.embed_dim": "null", "out": tmp_path / "again"}) == 0
    again = load_model(tmp_path / "again").model.state_dict()
    assert all(torch.equal(a, b) for a, b in zip(first.values(), again.values()))
    assert "as pretrained" in capsys.readouterr().out


@pytest.mark.parametrize("method", ["pcmepp", "pcmepp-mu"])
def test_the_clip_loss_beside_pcmepp(method):
    """Its weight, the model's own temperature, and labels with two captions of one image."""
    r = torch.Generator().manual_seed(0)
    image, text = (Gaussian(F.normalize(torch.randn(4, 8, generator=r), dim=1), torch.zeros(4, 8)) for _ in range(2))
    match = torch.eye(4)
    match[0, 1] = match[1, 0] = 1
    batch = Batch(image, text, match, torch.tensor([0, 0, 1, 2]), torch.arange(4), 0, 0, r)
    model = create_model("ViT-Micro-32", probabilistic=method == "pcmepp", init_scale=5, init_shift=5)

    def terms(weight: float):
        config = with_method_file(["--method", method, f"--loss.clip={weight}"])
        return METHODS[method](parse_config(Config, "test", "", config), model, None)(batch, model)

    logits = model.logit_scale.exp() * image.mean @ text.mean.T
    target = match / match.sum(1, keepdim=True)
    expected = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
    with_clip, without = terms(0.5), terms(0)
    torch.testing.assert_close(with_clip.loss, without.loss + 0.5 * expected)
    torch.testing.assert_close(with_clip.terms["clip"], expected)
    assert "clip" not in without.terms


REFUSED = {
    "msda with triplet": ({"method": "vse", "mix.ratio": 0.25}, "vse cannot learn from mixed images", "pcmepp"),
    "smoothing with ncr": ({"method": "ncr", "mix.smoothing": 0.1}, "ncr cannot learn from label smoothing", "Set it"),
    "distance with vse": ({"method": "vse", "distance": "csd"}, "vse has no choice of distance", "pcmepp"),
    "distance with mu": ({"method": "pcmepp-mu", "distance": "kl"}, "pcmepp-mu has no choice of distance", "pcmepp"),
    "vib with infonce": ({"method": "infonce", "loss.vib": 1e-4}, "infonce does not use loss.vib", "pcmepp, pcme"),
    "vib with mu": ({"method": "pcmepp-mu", "loss.vib": 1e-4}, "pcmepp-mu does not use loss.vib", "Leave it out"),
    "margin with pcmepp": ({"loss.margin": 0.2}, "pcmepp does not use loss.margin", "vse"),
    "uncertainty of a point": ({"method": "vse", "model.n_unc_layers": 1}, "vse predicts no uncertainty", "Leave"),
    "no scale": ({"loss.scale": "null"}, "pcmepp needs loss.scale", "Give it a value"),
    "negative scale": ({"loss.scale": -1}, "loss.scale is -1", "above 0"),
    "nan vib": ({"loss.vib": ".nan"}, "loss.vib is nan", "from 0"),
    "no samples": ({"method": "pcme", "loss.samples": 0}, "loss.samples is 0", "from 1"),
    "soft margin": ({"method": "ncr", "loss.soft_margin": "cubic"}, "soft_margin is 'cubic'", "linear"),
    "size augment": ({"model.head": "clip", "model.embed_dim": "null"}, "SizeAugment drops tokens", "size_augment"),
    "no epochs": ({"epochs": 0}, "epochs is 0: nothing would be trained", "clip-zs"),
    "training zero-shot": ({"method": "clip-zs"}, "clip-zs trains nothing, and epochs is 2", "Leave epochs out"),
    "noisy zero-shot": (
        {"method": "clip-zs", "epochs": 0, "swa-epochs": 0, "noise-ratio": 0.2},
        "clip-zs trains nothing, and noise_ratio is 0.2",
        "Leave noise_ratio out",
    ),
    "head of zero-shot": (
        {"method": "clip-zs", "epochs": 0, "swa-epochs": 0, "model.head": "gpo"},
        "CLIP's own head",
        "model.head",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_options_that_a_method_does_not_use_are_refused(case, scenes, tmp_path):
    options, what, remedy = REFUSED[case]
    with pytest.raises(UserError) as caught:
        run_here({"data.path": scenes, "out": tmp_path / "run", **options})
    assert what in caught.value.what
    assert remedy in caught.value.remedy
    assert not (tmp_path / "run").exists()
