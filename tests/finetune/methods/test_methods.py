"""Every method and distance through the whole command, and options that do not belong together."""

import math
from dataclasses import replace

import pytest
import torch

from finetune.methods import METHODS
from probemb import load_model
from probemb.data.captions.find import find_captions
from probemb.data.image_loader import Images
from probemb.errors import UserError
from tests.finetune.runs import ONE_EPOCH, metrics, run_here

TERMS = {
    "pcmepp": {"match", "pseudo_positive", "vib", "n_pseudo", "scale", "shift", "u_image", "u_text"},
    "pcmepp-clip": {"match", "clip", "vib", "scale", "shift", "u_image", "u_text"},
    "pcmepp-mu": {"match", "scale", "shift"},
    "prolip": {"ppcl", "vib", "inclusion", "scale", "shift", "u_image", "u_text"},
    "infonce": {"i2t", "t2i", "temperature"},
    "vse": set(),
    "pcme": {"match", "vib", "scale", "shift", "u_image"},
    "daa": {"triplet", "daa"},
    "p2rm": {"triplet", "rectangle"},
    "ncr": {"triplet", "clean"},
    "decl": {"evidential", "hinge", "clean"},
    "mse": {"mse", "image", "text"},
    "mmd-mse": {"mse", "mmd"},
    "jwae-mse": {"mse", "image_prior", "text_prior", "discriminator", "js", "code_square", "code_dimensions"},
    "jwae-mh": {"triplet", "image", "text", "image_prior", "discriminator"},
    "vae-mh": {"triplet", "image_prior", "text_prior", "u_image"},
    "prob-vsepp": {"u_image", "u_text"},
    "jwae-scan": {"triplet", "image", "text", "text_prior", "js"},
    "scan": {"triplet"},
    "vse0": {"triplet"},
    "vsepp": {"triplet"},
    "order": {"triplet"},
    "pvse": {"triplet", "diversity", "mmd"},
}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def test_every_method_is_tested():
    # test_composed.py has those that compose, test_vsrn.py and test_prob_vsrn.py those that reason over regions
    others = {name for name, method in METHODS.items() if method.composes or method.over_regions}
    assert {*TERMS, *others, "clip-zs"} == set(METHODS)
    assert not others & {*TERMS}


def decoders(method: str) -> dict:
    """Small decoders, for methods that have any: CLIP's vocabulary is large."""
    options = METHODS[method].Options
    return {"loss.hidden": 8, "loss.word_width": 8} if hasattr(options, "word_width") else {}


@pytest.mark.parametrize("method", TERMS)
def test_every_method_trains_validates_and_saves(method, scenes, tmp_path, capsys):
    """Two epochs: behind the warm-up of the losses that have one, and with the backbone frozen and thawed."""
    out, networks = tmp_path / "run", METHODS[method].networks
    assert run_here({"method": method, "data.path": scenes, "out": out, **decoders(method)}) == 0
    lines = metrics(out)
    trained, validated = [m for m in lines if "loss" in m], [m for m in lines if "rsum" in m]
    assert [m["step"] for m in trained] == list(range(1, 6 * networks + 1))
    assert [m["step"] for m in validated] == [3 * networks, 6 * networks]
    assert [m["network"] for m in trained if "network" in m] == ([1, 1, 1, 2, 2, 2] * 2 if networks == 2 else [])
    assert all(math.isfinite(m["loss"]) and m["gradient_norm"] > 0 for m in trained)
    assert TERMS[method] <= set(trained[-1])
    assert ("vib" in trained[-1]) == ("vib" in TERMS[method])
    assert {"swa_rsum", "swa_t2i_r1"} <= set(lines[-1])
    folders = ["model", "model-swa", *(["model-second", "model-swa-second"] if networks == 2 else [])]
    assert sorted(path.name for path in out.glob("model*")) == sorted(folders)
    for name in folders:
        model = load_model(out / name).model
        assert model.probabilistic == METHODS[method].probabilistic
        assert model.predicts_matches == ("scale" in TERMS[method] and model.probabilistic)
        assert (model.trained_temperature is None) == (method not in ("infonce", "pcmepp-clip", "prolip"))
        if method == "infonce" and name == "model":
            assert model.trained_temperature == pytest.approx(trained[-1]["temperature"], rel=1e-2)
        assert (model.match_form == "samples") == (method == "pcme")
    told = capsys.readouterr().out
    assert f"method  {method}" in told
    assert ("2 networks" in told) == (networks == 2)
    assert "validation RSUM" in told


class Some:
    """The first images of a split, as a `CaptionDataset`."""

    def __init__(self, n: int):
        self.n = n

    def __call__(self, *where, **options):
        whole = find_captions(*where, **options)
        images = Images(places=whole.images.places[: self.n], source=whole.images.source)
        return replace(whole, captions=whole.captions[: self.n], image_ids=whole.image_ids[: self.n], located=images)


@pytest.mark.slow
@pytest.mark.parametrize("method", [*TERMS, "clip-zs"])
def test_every_method_on_real_images_and_captions(method, shared_data, tmp_path, monkeypatch):
    """Flickr8k: three steps on images of its validation split, and retrieval among some of its test split."""
    import probemb.data.captions.find

    monkeypatch.setattr(probemb.data.captions.find, "find_captions", Some(12))
    data = shared_data("flickr8k")
    options = {"data.path": data, "data.train": "val", "data.validation": "test", "out": tmp_path / "run"}
    if method == "clip-zs":
        options |= {"epochs": 0, "swa-epochs": 0, "model.embed_dim": "null"}
    else:
        options |= {"batch-size": 20, "model.embed_dim": 64, **ONE_EPOCH}
    if hasattr(METHODS[method].Options, "warmup_epochs"):
        options |= {"loss.warmup_epochs": 0}
    options |= decoders(method)
    assert run_here({"method": method, **options}) == 0
    lines = metrics(tmp_path / "run")
    steps = 0 if method == "clip-zs" else 3 * METHODS[method].networks
    assert [m["step"] for m in lines if "loss" in m] == list(range(1, steps + 1))
    assert all(math.isfinite(m["loss"]) and m["gradient_norm"] > 0 for m in lines if "loss" in m)
    (validated,) = (m for m in lines if "rsum" in m)
    assert 0 <= validated["rsum"] <= 600
    load_model(tmp_path / "run")


@pytest.mark.parametrize("method", ["pcmepp", "vse", "p2rm"])
def test_methods_on_clips_own_head(method, scenes, tmp_path):
    options = {"model.head": "clip", "model.embed_dim": "null", "size-augment": 0, "batch-size": 24, **ONE_EPOCH}
    assert run_here({"method": method, "data.path": scenes, "out": tmp_path / "run", **options}) == 0


def test_zero_shot_measures_and_saves_the_model_as_it_comes(scenes, tmp_path, capsys):
    out = tmp_path / "run"
    options = {"method": "clip-zs", "data.path": scenes, "out": out, "epochs": 0, "swa-epochs": 0}
    assert run_here({**options, "model.embed_dim": "null"}) == 0
    (line,) = metrics(out)
    assert 0 <= line["rsum"] <= 600
    assert not list(out.glob("checkpoints/*"))
    first = load_model(out).model.state_dict()
    assert run_here({**options, "model.embed_dim": "null", "out": tmp_path / "again"}) == 0
    again = load_model(tmp_path / "again").model.state_dict()
    assert all(torch.equal(a, b) for a, b in zip(first.values(), again.values()))
    assert "as pretrained" in capsys.readouterr().out
    assert run_here({**options, "model.embed_dim": "null", "resume": "true"}) == 0  # as a batch script asks for


REFUSED = {
    "msda with triplet": ({"method": "vse", "mix.ratio": 0.25}, "vse cannot learn from mixed images", "pcmepp"),
    "part of a batch": ({"mix.mode": "batch"}, "mixes all images of a batch, or none", "mix.prob"),
    "smoothing with ncr": ({"method": "ncr", "mix.smoothing": 0.1}, "ncr cannot learn from label smoothing", "Set it"),
    "distance with vse": ({"method": "vse", "distance": "csd"}, "vse has no choice of distance", "pcmepp"),
    "distance with mu": ({"method": "pcmepp-mu", "distance": "kl"}, "pcmepp-mu has no choice of distance", "pcmepp"),
    "vib with infonce": ({"method": "infonce", "loss.vib": 1e-4}, "infonce does not use loss.vib", "pcmepp, pcme"),
    "vib with mu": ({"method": "pcmepp-mu", "loss.vib": 1e-4}, "pcmepp-mu does not use loss.vib", "Leave it out"),
    "margin with pcmepp": ({"loss.margin": 0.2}, "pcmepp does not use loss.margin", "vse"),
    "uncertainty of a point": ({"method": "vse", "model.n_unc_layers": 1}, "vse predicts no uncertainty", "Leave"),
    "no scale": ({"method": "pcme", "loss.scale": "null"}, "loss.scale is empty", "Set it to a number above 0"),
    "negative scale": ({"loss.scale": -1}, "loss.scale is -1", "above 0"),
    "nan vib": ({"loss.vib": ".nan"}, "loss.vib is nan", "from 0"),
    "no samples": ({"method": "pcme", "loss.samples": 0}, "loss.samples is 0", "from 1"),
    "soft margin": ({"method": "ncr", "loss.soft_margin": "cubic"}, "soft_margin is 'cubic'", "linear"),
    "size augment": ({"model.head": "clip", "model.embed_dim": "null"}, "SizeAugment drops tokens", "size_augment"),
    "size augment of captions": (
        {"method": "jwae-mh", "size-augment": 0.2, "model.head": "gpo"},
        "jwae-mh reconstructs whole captions",
        "size_augment",
    ),
    "size augment of pooled features": ({"method": "mse", "size-augment": 0.2}, "head mlp pools a single one", "gpo"),
    "margin of mse": ({"method": "jwae-mse", "loss.margin": 0.2}, "jwae-mse does not use loss.margin", "jwae-mh"),
    "prior of mse": ({"method": "mse", "loss.image_prior": 0.2}, "mse does not use loss.image_prior", "jwae-mse"),
    "no kernel": ({"method": "mmd-mse", "loss.kernel": "cubic"}, "loss.kernel is 'cubic'", "imq"),
    "discriminator of vae": ({"method": "vae-mh", "loss.discriminator_lr": 1e-4}, "vae-mh does not use", "jwae-mh"),
    **{
        f"{option} of mean word vectors": (
            {"method": "jwae-mse", "model.name": "resnet-words-small", "size-augment": 0, f"loss.{option}": value},
            f"jwae-mse does not use loss.{option}, which is {value}: resnet-words-small has mean word vectors",
            f"Leave loss.{option} out, or choose a model that reads words one by one",
        )
        for option, value in (("word_dropout", 0.1), ("word_width", 8), ("hidden", 8))
    },
    "branch of jwae": ({"method": "jwae-mh", "model.n_unc_layers": 1}, "jwae-mh predicts no uncertainty", "Leave"),
    "no epochs": ({"epochs": 0}, "epochs is 0: nothing would be trained", "clip-zs"),
    "training zero-shot": ({"method": "clip-zs"}, "clip-zs trains nothing, and epochs is 2", "Leave epochs out"),
    "noisy zero-shot": (
        {"method": "clip-zs", "epochs": 0, "swa-epochs": 0, "noise-ratio": 0.2},
        "clip-zs trains nothing, and noise_ratio is 0.2",
        "Leave noise_ratio out",
    ),
    "head of pvse": ({"method": "pvse", "model.head": "gpo"}, "pvse trains PIE-Net's several embeddings", "head pie"),
    "uncertainty of pvse": ({"method": "pvse", "model.n_unc_layers": 1}, "pvse predicts no uncertainty", "Leave"),
    "no embeddings": ({"method": "pvse", "loss.embeddings": 0}, "loss.embeddings is 0", "from 1"),
    **{
        f"{option} of one embedding": (
            {"method": "pvse", "loss.embeddings": 1, f"loss.{option}": value},
            f"pvse does not use loss.{option}, which is {value}: with one embedding",
            f"Leave loss.{option} out, or set loss.embeddings to 2",
        )
        for option, value in (("diversity", 0.2), ("mmd", 0.5), ("gamma", 2.0), ("kernel", "unsquared"))
    },
    **{
        f"{option} of {method} without {' and '.join(off)}": (
            {"method": method, "size-augment": 0, **dict.fromkeys(off, 0), f"loss.{option}": value},
            f"{method} does not use loss.{option}, which is {value}: {off[0]}",
            f"Leave loss.{option} out, or set",
        )
        for method, off, option, value in (
            ("pvse", ["loss.mmd"], "gamma", 2.0),
            ("pcme", ["loss.vib"], "vib_form", "sum"),
            ("prob-vsrn", ["loss.caption_weight"], "hidden", 8),
            ("vsrn", ["loss.caption_weight"], "word_width", 8),
            ("jwae-mh", ["loss.text_weight"], "hidden", 8),
            ("vae-mh", ["loss.image_weight"], "image_norm", "l1"),
            ("mse", ["loss.image_weight", "loss.text_weight"], "reduce", "mean"),
            ("mmd-mse", ["loss.mmd_weight"], "kernel", "imq"),
            ("jwae-mse", ["loss.image_prior", "loss.text_prior"], "discriminator_lr", 0.1),
            ("jwae-scan", ["loss.image_prior", "loss.text_prior"], "discriminator_hidden", 8),
            ("prolip", ["loss.inclusion"], "inclusion_scale", 5.0),
            ("prolip", ["loss.inclusion", "loss.vib"], "form", "code"),
        )
    },
    "warm-up of all negatives": (
        {"method": "prob-vsepp", "loss.negatives": "all", "loss.warmup_epochs": 1},
        "prob-vsepp does not use loss.warmup_epochs, which is 1: loss.negatives is all",
        "set loss.negatives to hardest or semi-hard",
    ),
    **{
        f"warm-up of all negatives of {method}": (
            {"method": method, "loss.hardest": False, "loss.warmup_epochs": 1},
            f"{method} does not use loss.warmup_epochs, which is 1: loss.hardest is false",
            "set loss.hardest to true",
        )
        for method in ("pvse", "scan", "jwae-scan")
    },
    "lambda of a sum": (
        {"method": "scan", "loss.aggregation": "sum", "loss.lambda_lse": 3.0},
        "scan does not use loss.lambda_lse, which is 3.0: loss.aggregation is sum",
        "Leave loss.lambda_lse out, or set loss.aggregation to lse",
    ),
    "diversity with order": ({"method": "order", "loss.diversity": 0.1}, "order does not use loss.diversity", "pvse"),
    "msda with order": ({"method": "order", "mix.ratio": 0.25}, "order cannot learn from mixed images", "pcmepp"),
    "warm-up of vse0": ({"method": "vse0", "loss.warmup_epochs": 1}, "vse0 does not use loss.warmup_epochs", "vse"),
    "distance with vse0": ({"method": "vse0", "distance": "csd"}, "vse0 has no choice of distance", "pcmepp"),
    "ranking of points": ({"method": "scan", "ranking": "csd"}, "scan has no variances to rank by", "--ranking out"),
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
    assert remedy in str(caught.value)  # among others, where several settings cannot work
    assert not (tmp_path / "run").exists()
