"""Every method and distance through the whole command, and options that do not belong together."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from torch.nn import functional as F

from finetune.config import Config, with_method_file
from finetune.methods import METHODS, Batch
from probemb import Gaussian, load_model
from probemb.cli.configuration import parse_config
from probemb.cli.ranges import Distance
from probemb.data.captions.find import find_captions
from probemb.data.image_loader import Images
from probemb.errors import UserError
from probemb.losses import NCRLoss, clean_probability
from probemb.models import Encoded, create_model
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
    assert {*TERMS, "clip-zs"} == set(METHODS)


@pytest.mark.parametrize("method", TERMS)
def test_every_method_trains_validates_and_saves(method, scenes, tmp_path, capsys):
    """Two epochs: behind the warm-up of the losses that have one, and with the backbone frozen and thawed."""
    out, networks = tmp_path / "run", METHODS[method].networks
    assert run_here({"method": method, "data.path": scenes, "out": out}) == 0
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
        assert model.probabilistic == (method in ("pcmepp", "pcme"))
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


@pytest.mark.parametrize("distance", get_args(Distance))
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
    batch = Batch(Encoded(image), Encoded(text), match, torch.tensor([0, 0, 1, 2]), torch.arange(4), 0, 0, r)
    model = create_model("ViT-Micro-32", probabilistic=method == "pcmepp", init_scale=5, init_shift=5)

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


class TwoNetworks:
    """NCR for four epochs on one batch of twelve pairs; each network embeds two captions far from their images."""

    def __init__(self):
        config = parse_config(Config, "test", "", with_method_file(["--method=ncr", "--epochs=4"]))
        self.method, self.match = METHODS["ncr"](config, None, SimpleNamespace(n_captions=12)), torch.eye(12)
        self.embedded = [self.pairs(wrong=[0, 1], seed=0), self.pairs(wrong=[2, 3], seed=1)]

    @staticmethod
    def pairs(wrong: list[int], seed: int) -> tuple[Gaussian, Gaussian]:
        r = torch.Generator().manual_seed(seed)
        image = F.normalize(torch.randn(12, 32, generator=r), dim=1)
        text = F.normalize(image + 0.1 * torch.randn(12, 32, generator=r), dim=1)
        text[wrong] *= -1
        return Gaussian(image, torch.zeros(12, 32)), Gaussian(text, torch.zeros(12, 32))

    def step(self, epoch: int, network: int):
        rows, other = torch.arange(12), lambda: tuple(map(Encoded, self.embedded[1 - network]))
        batch = Batch(*map(Encoded, self.embedded[network]), self.match, rows, rows, epoch, 0, None, network, other)
        return self.method.loss(batch, None)

    def begin(self, epoch: int) -> None:
        for network in (0, 1):
            self.step(epoch - 1, network)
        self.method.begin_epoch(epoch)

    def say(self, network: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What a network's losses and predictions are: w and p of every pair."""
        image, text = self.embedded[network]
        losses = self.method.module.loss.pair_losses(image, text, self.match)
        return clean_probability(losses).float(), self.method.module.loss.predict(image, text, self.match)


@pytest.mark.parametrize(("network", "noisy"), [(0, [2, 3]), (1, [0, 1])])
def test_each_network_of_ncr_trains_the_pairs_that_the_others_losses_call_clean(network, noisy):
    two = TwoNetworks()
    two.begin(1)
    out = two.step(1, network)
    kept = [i for i in range(12) if i not in noisy]  # among them those that it would itself classify as noisy
    (w, _), (_, p) = two.say(1 - network), two.say(network)
    label = (w + (1 - w) * p)[kept]
    image, text = (g[kept] for g in two.embedded[network])
    torch.testing.assert_close(out.loss, NCRLoss()(image, text, torch.eye(10), label=label).loss)
    assert out.terms["clean"] == pytest.approx(10 / 12)


@pytest.mark.parametrize(("network", "noisy"), [(0, [2, 3]), (1, [0, 1])])
def test_pairs_that_ncr_classifies_as_noisy_get_the_mean_of_both_predictions(network, noisy):
    """In the second half of the epochs."""
    two = TwoNetworks()
    two.begin(2)
    out = two.step(2, network)
    (w, q), (_, p) = two.say(1 - network), two.say(network)
    label = w + (1 - w) * p
    label[noisy] = ((p + q) / 2)[noisy]
    assert (label - (w + (1 - w) * p)).abs().max() > 0.1
    torch.testing.assert_close(out.loss, NCRLoss()(*two.embedded[network], two.match, label=label).loss)


REFUSED = {
    "msda with triplet": ({"method": "vse", "mix.ratio": 0.25}, "vse cannot learn from mixed images", "pcmepp"),
    "smoothing with ncr": ({"method": "ncr", "mix.smoothing": 0.1}, "ncr cannot learn from label smoothing", "Set it"),
    "distance with vse": ({"method": "vse", "distance": "csd"}, "vse has no choice of distance", "pcmepp"),
    "distance with mu": ({"method": "pcmepp-mu", "distance": "kl"}, "pcmepp-mu has no choice of distance", "pcmepp"),
    "vib with infonce": ({"method": "infonce", "loss.vib": 1e-4}, "infonce does not use loss.vib", "pcmepp, pcme"),
    "vib with mu": ({"method": "pcmepp-mu", "loss.vib": 1e-4}, "pcmepp-mu does not use loss.vib", "Leave it out"),
    "margin with pcmepp": ({"loss.margin": 0.2}, "pcmepp does not use loss.margin", "vse"),
    "uncertainty of a point": ({"method": "vse", "model.n_unc_layers": 1}, "vse predicts no uncertainty", "Leave"),
    "no scale": ({"loss.scale": "null"}, "loss.scale is empty", "Set it to a number above 0"),
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
