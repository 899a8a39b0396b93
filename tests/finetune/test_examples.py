"""finetune/examples: each is a configuration that every method accepts; finetune/recipes: a paper's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import finetune
from finetune.config import Config, check, with_method_file
from finetune.methods import METHODS
from finetune.recipe import make_schedule
from probemb.cli.configuration import parse_config
from probemb.models.architectures import architecture

EXAMPLES = sorted((Path(finetune.__file__).parent / "examples").glob("*.yaml"))


RECIPES = sorted((Path(finetune.__file__).parent / "recipes").glob("*.yaml"))


def test_there_are_examples():
    assert {"scenes", "flickr8k"} <= {path.stem for path in EXAMPLES}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.parametrize("method", [name for name in METHODS if name != "clip-zs" and not METHODS[name].composes])
def test_every_method_accepts_it(path, method):
    own = {"attention": "average", "multi-instance": "pie"}.get(METHODS[method].ranking)  # the only head it works with
    argv = with_method_file(["--method", method, "--config", str(path), *(["--model.head", own] if own else [])])
    config = parse_config(Config, "finetune/run.py", "", argv)
    check(config)
    assert config.method == method
    if config.model.pretrained is None:  # from random heads: what is pretrained stays as it is
        assert config.model.lock_image
        assert config.data.cache_features
    else:  # all of a run, whatever the method's own recipe trains and starts from
        assert config.model.pretrained.startswith("runs/")
        assert config.model.image_weights is None
        assert not config.model.lock_image


def test_the_scenes_are_finetuned_with_the_losses_of_pretraining():
    path = next(path for path in EXAMPLES if path.stem == "scenes")
    config = parse_config(Config, "finetune/run.py", "", with_method_file(["--config", str(path)]))
    assert (config.method, config.loss.clip, config.loss.pseudo_positive) == ("pcmepp-clip", 1.0, 0.0)
    assert config.loss.scale is config.loss.shift is None  # of the pretraining, not PCME++'s 5


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_complete_and_accepted(path):
    config = parse_config(Config, "", "", with_method_file(["--config", str(path), "--data.path=x"]))
    check(config)
    of_method = METHODS[config.method].model_options(config)
    with torch.device("meta"):  # its sizes fit each other's
        model = replace(config.model, image_weights=None).create([], config.loss, ["word"], **of_method)
    text = architecture(config.model.name)["text_cfg"]
    if path.stem.endswith("-double"):
        twice = 2 * architecture(config.model.name)["embed_dim"]
        assert model.config["embed_dim"] == twice
        assert text.get("projection", True) or model.text.shape.hidden == twice == 2 * text["hidden"]


def test_fine_tuned_models_train_the_image_tower_in_the_last_15_epochs_at_a_tenth():
    for words in (["--method=vsepp"], [f"--config={RECIPES[0].with_name('prob-vsepp-ft.yaml')}"]):
        config = parse_config(Config, "", "", with_method_file(words))
        schedule = make_schedule(config, 1, 10)
        samples = [epoch * schedule.epoch_samples + 1 for epoch in range(45)]
        rates = [schedule.factor(at, image_backbone=True) for at in samples]
        assert rates == pytest.approx([0] * 30 + [0.1] * 15)
        assert [schedule.factor(at) for at in samples] == pytest.approx([1] * 15 + [0.1] * 30)
        assert not any(map(schedule.frozen, samples[30:]))


def test_pcmes_recipes_are_the_papers():
    """D, networks, erasing ratios, two phases and the optimizer are in §4.1 and §4.2; there are two data sets."""
    found = {path.stem: parse_config(Config, "", "", ["--config", str(path)]) for path in RECIPES}
    for name, network, embed_dim, positives in (
        ("pcme-cub", "resnet50", 512, "class"), ("pcme-coco", "resnet152", 1024, "image"),
    ):  # fmt: skip
        config = found[name]
        assert architecture(config.model.name)["vision_cfg"]["timm_model_name"] == network
        assert (config.method, config.model.embed_dim, config.data.positives) == ("pcme", embed_dim, positives)
        assert (config.augment.cutout, config.augment.word_dropping) == (0.2, 0.1)
        o = config.optimizer
        assert (o.name, o.schedule, o.freeze_text, o.freeze_epochs > 0) == ("adamp", "cosine", True, True)
