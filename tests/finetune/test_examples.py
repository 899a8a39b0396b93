"""finetune/examples: each is a configuration that every method accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

import finetune
from finetune.config import Config, check, with_method_file
from finetune.methods import METHODS
from probemb.cli.configuration import parse_config

EXAMPLES = sorted((Path(finetune.__file__).parent / "examples").glob("*.yaml"))


def test_there_are_examples():
    assert {"scenes", "flickr8k"} <= {path.stem for path in EXAMPLES}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.parametrize("method", [name for name in METHODS if name != "clip-zs"])
def test_every_method_accepts_it(path, method):
    argv = with_method_file(["--method", method, "--config", str(path)])
    config = parse_config(Config, "finetune/run.py", "", argv)
    check(config)
    assert config.method == method
    if config.model.pretrained is None:  # from random heads: what is pretrained stays as it is
        assert config.model.lock_image
        assert config.data.cache_features
    else:
        assert config.model.pretrained.startswith("runs/")


def test_the_scenes_are_finetuned_with_the_losses_of_pretraining():
    path = next(path for path in EXAMPLES if path.stem == "scenes")
    config = parse_config(Config, "finetune/run.py", "", with_method_file(["--config", str(path)]))
    assert (config.method, config.loss.clip, config.loss.pseudo_positive) == ("pcmepp-clip", 1.0, 0.0)
    assert config.loss.scale is config.loss.shift is None  # of the pretraining, not PCME++'s 5
