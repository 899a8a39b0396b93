"""The ranking by which a validation of composed queries chooses the epoch."""

import pytest
import torch
from accelerate import Accelerator

from finetune.config import Config, with_method_file
from finetune.methods.registry import METHODS
from finetune.run import add_new_settings
from finetune.selection import ComposedValidator
from probemb.cli.configuration import parse_config, to_dict
from probemb.data.compositions.find import find_compositions
from probemb.evaluation.composed import embed_queries, measure_composed
from probemb.evaluation.embedding import Embedder
from probemb.models import create_model, create_tokenizer, create_transforms
from tools.make_scenes import Plan, make


def configured(method, *words):
    words = [f"--method={method}", "--data.path=x", "--model.head=clip", "--compose.queries=80", *words]
    return parse_config(Config, "test", "", with_method_file(words))


@pytest.fixture(scope="module")
def validation(tmp_path_factory):
    out = tmp_path_factory.mktemp("composed") / "scenes"
    make(Plan(train=0, val=0, classes_images=0, size=32, compositions=900, shard_size=900), out, workers=1)
    return find_compositions(out / "compositions", "val")


@pytest.mark.parametrize(
    ("method", "asked", "by"),
    [
        ("mpc", None, "density"),
        ("mpc-mlp", None, "density"),
        ("mpc-cosine", None, "cosine"),
        ("pcme-addition", None, "cosine"),
        ("tirg", None, "cosine"),
        ("mpc", "cosine", "cosine"),
        ("mpc-cosine", "density", "density"),
    ],
)
def test_composed_queries_are_ranked_as_the_method_learns_or_as_asked(validation, method, asked, by):
    torch.manual_seed(0)
    config = configured(method, "--data.workers=0", *([f"--compose.ranking={asked}"] if asked else []))
    model = create_model("ViT-Micro-32", **METHODS[method].model_options(config)).eval()
    with torch.no_grad():  # a new model's embeddings are all alike
        for one in model.parameters():
            one += 0.2 * torch.randn_like(one)
    tokenizer, transforms = create_tokenizer(model), create_transforms(model)
    validator = ComposedValidator(validation, tokenizer, transforms, config, Accelerator(cpu=True))
    embedder = Embedder(model, tokenizer, transforms.evaluate)
    gallery, queries = embedder.images(validation.images), embed_queries(embedder, validation, validator.queries)
    told = validator.measure(model)["r_precision"]
    assert told == pytest.approx(100 * measure_composed(gallery, validation, queries, by)["all"]["r_precision"])
    if method != "tirg":
        other = "cosine" if by == "density" else "density"
        refused = measure_composed(gallery, validation, queries, other)["all"]["r_precision"]
        assert told != pytest.approx(100 * refused)


@pytest.mark.parametrize(("method", "before"), [("mpc", "cosine"), ("mpc-cosine", None), ("infonce", None)])
def test_a_run_from_before_the_choice_was_validated_by_the_cosine(method, before):
    saved = to_dict(configured(method) if METHODS[method].composes else Config(method=method))
    del saved["compose"]["ranking"]
    add_new_settings(saved)
    assert saved["compose"]["ranking"] == before


def test_a_run_from_before_composed_queries_has_none():
    saved = to_dict(Config(method="infonce"))
    del saved["compose"]
    add_new_settings(saved)
    assert saved["compose"] == to_dict(Config())["compose"]
