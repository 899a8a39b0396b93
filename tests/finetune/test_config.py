"""The configuration: precedence, recipes shortened and complete, and settings that cannot work or have no effect."""

from dataclasses import replace

import pytest
import torch

from finetune.config import CONFIGS, Config, check, with_method_file
from finetune.config import shortened as shorten
from finetune.methods import METHODS
from probemb.cli.configuration import parse_config
from probemb.errors import UserError
from probemb.models.architectures import architecture

ROOT = CONFIGS.parents[1]
EXAMPLES = sorted((CONFIGS.parent / "examples").glob("*.yaml"))
RECIPES = sorted((CONFIGS.parent / "recipes").glob("*.yaml"))


def resolved(*words: str) -> Config:
    return parse_config(Config, "finetune/run.py", "", with_method_file(["--data.path=x", *words]))


def test_the_methods_file_then_config_files_then_options_decide(tmp_path):
    assert resolved().method == "pcmepp"
    assert resolved("--method", "vse").loss.margin == 0.2
    mine = tmp_path / "mine.yaml"
    mine.write_text("method: ncr\nepochs: 7\nloss: {margin: 0.3}\n")
    config = resolved("--config", str(mine))
    assert (config.method, config.epochs, config.loss.margin, config.loss.warmup_epochs) == ("ncr", 7, 0.3, 1)
    config = resolved("--loss.margin=0.4", "--method=vse", f"--config={mine}")  # options win wherever they stand
    assert (config.method, config.epochs, config.loss) == ("vse", 7, METHODS["vse"].Options(margin=0.4))


@pytest.mark.parametrize("method", METHODS)
def test_every_methods_own_recipe_is_accepted(method):
    check(resolved("--method", method))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.parametrize("method", [name for name in METHODS if not METHODS[name].composes])
def test_every_method_of_pairs_accepts_the_examples(path, method):
    more = [f"--model.head={head}" for head in METHODS[method].heads]
    more += ["--model.dropout=0"] * bool(more) + ["--model.lock_text=false"] * METHODS[method].wants_words
    check(resolved("--method", method, "--config", str(path), *more))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_complete_and_accepted(path):
    config = resolved("--config", str(path))
    check(config)
    of_method = METHODS[config.method].model_options(config.loss)
    with torch.device("meta"):  # its sizes fit each other's
        model = replace(config.model, image_weights=None).create([], config.loss, ["word"], **of_method)
    text = architecture(config.model.name)["text_cfg"]
    if path.stem.endswith("-double"):
        twice = 2 * architecture(config.model.name)["embed_dim"]
        assert model.config["embed_dim"] == twice
        assert text.get("projection", True) or model.text.shape.hidden == twice == 2 * text["hidden"]


@pytest.mark.parametrize(
    ("words", "freeze", "warmup", "decay"),
    [
        (("--epochs=1",), 0, 0.04, 0),
        (("--epochs=10",), 1, 0.4, 4),
        (("--epochs=11",), 2, 1, 10),  # all of them fit
        (("--epochs=10", "--optimizer.decay-epochs=3"), 2, 1, 3),
        (("--method=vsrn", "--epochs=3", "--optimizer.decay-epochs=[20, 10]"), 0, 0, (20, 10)),  # named: refused
        (("--config=finetune/recipes/pcme-coco.yaml", "--epochs=6"), 3, 0, 10),
        (("--method=vsepp", "--epochs=3"), 2, 0, 2),
    ],
)
def test_a_recipe_is_shortened_to_fewer_epochs(words, freeze, warmup, decay, monkeypatch):
    monkeypatch.chdir(ROOT)
    argv = with_method_file([*words, "--data.path=x"])
    whole = parse_config(Config, "test", "", argv)
    config, told = shorten(whole, argv)
    o = config.optimizer
    assert (o.freeze_epochs, o.warmup_epochs, o.decay_epochs) == (freeze, warmup, decay)
    assert bool(told) == (o != whole.optimizer)
    if decay == (20, 10):
        with pytest.raises(UserError, match="decay_epochs is 20 of 3 epochs"):
            check(config)
    else:
        check(config)


REFUSED = {  # words -> what is said of them
    "--optimizer.freeze_epochs=25": "freeze_epochs is 25 of 25 epochs: .* less than 25",
    "--optimizer.warmup_epochs=24": "warm-up ends after 26 of 25 epochs",
    "--mix.mixup=0 --mix.cutmix=0": "are both 0",
    "--data.cache_features=x": "keeps what a frozen tower computes",
    "--method=scan --model.head=gpo": "scan works with head average alone. Set model.head to average",
    "--method=vse --mix.ratio=0.25": "mix.ratio is 0.25 and would have no effect: vse needs pairs that match or do not",
    "--method=infonce --compose.parts=3": "compose.parts is 3 .* infonce trains on pairs",
    "--method=mpc --size_augment=0.2": "size_augment is 0.2 .* Set size_augment to 0.0",
    "--model.head=clip": "size_augment is 0.2 .* head clip reads pooled features. Set size_augment to 0.0",
    "--model.lock_image --data.cache_features=x": "mix.ratio is 0.25 .* no pixels to change",
}


@pytest.mark.parametrize("words", REFUSED)
def test_settings_that_cannot_work_or_have_no_effect_are_refused(words):
    with pytest.raises(UserError, match=REFUSED[words]):
        check(resolved(*words.split()))


def test_a_batch_that_ranks_cannot_share_is_refused():
    with pytest.raises(UserError, match=r"batch_size is 16, which 3 processes cannot share evenly. Set it to .* 18"):
        check(resolved("--batch-size=16"), 3)
