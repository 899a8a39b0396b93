"""Properties of every pair of towers: gradients and places of parameters, single items, files, precision."""

import pytest
import torch
from torch.testing import assert_close

from probemb.models import create_model, create_tokenizer, load_model, save_model
from tests.devices import elsewhere

WORDS = ["a", "red", "circle", "photo", "of", "dog"]
TEXTS = ["a photo of a red circle", "dog", "", "red red dog of a circle"]  # and an empty one
MODELS = {
    "transformers": ("ViT-Micro-32", {"n_unc_layers": 1}),
    "transformers, gpo": ("ViT-Micro-32", {"head": "gpo", "embed_dim": 24, "n_unc_layers": 2}),
    "uncertainty tokens": ("ViT-Micro-32", {"uncertainty": "token"}),
    "cnn and gru": ("scenes-cnn-gru", {"vocabulary": WORDS, "n_unc_layers": 1}),
    "resnet and words": ("resnet-words-small", {"vocabulary": WORDS, "n_unc_layers": (1, 0), "head": "mlp"}),
    "resnet and gru, pie": ("resnet-gru-small", {"vocabulary": WORDS, "head": "pie", "embed_dim": 12}),
    "regions (SCAN)": ("scan-scenes-gru", {"vocabulary": WORDS, "head": "average"}),
    "regions (VSRN)": ("vsrn-scenes-gru", {"vocabulary": WORDS, "n_unc_layers": 1}),
}


@pytest.fixture(scope="module", params=MODELS)
def made(request):
    """A model, and inputs of four items."""
    torch.manual_seed(0)
    name, options = MODELS[request.param]
    model = create_model(name, **options).eval()
    regions = "regions" in request.param
    images = torch.rand(4, 6, 437) if regions else torch.randn(4, 3, model.image_size, model.image_size)
    return model, images, create_tokenizer(model)(TEXTS)


def test_every_parameter_has_a_gradient_and_a_place(made):
    model, images, tokens = made
    out = elsewhere(model)(images, tokens)
    weight = torch.linspace(-1, 1, out.image.mean.shape[-1])
    sum(((g.mean + g.log_var) * weight).sum() for g in (out.image, out.text)).backward()
    idle = {"logit_scale", "scale", "shift"}
    assert {name for name, parameter in model.named_parameters() if parameter.grad is None} == idle
    places = {name: model.place(name) for name, _ in model.named_parameters() if name not in idle}
    assert {place.part for place in places.values()} <= {"trunk", "branch", "head"}
    for name in ("image", "text"):
        depths = {place.depth for place in places.values() if (place.tower, place.part) == (name, "trunk")}
        assert depths == set(range(min(depths, default=0), max(depths, default=-1) + 1))
    model.zero_grad()


@torch.no_grad()
def test_an_item_depends_neither_on_its_batch_nor_on_padding(made):
    model, images, tokens = made
    image, text = model.encode_image(images), model.encode_text(tokens)
    for i in range(len(tokens)):
        for whole, alone in (
            (image, model.encode_image(images[i : i + 1])),
            (text, model.encode_text(model.cut_padding(tokens[i : i + 1]))),
        ):
            assert_close(alone.mean[0], whole.mean[i], rtol=1e-4, atol=1e-5)
            assert_close(alone.log_var[0], whole.log_var[i], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_single_file_is_the_whole_model(made, tmp_path):
    model, images, tokens = made
    save_model(model, tmp_path / "run" / "model")
    alone = (tmp_path / "run" / "model" / "model.safetensors").rename(tmp_path / "alone.safetensors")
    loaded, tokenizer, _ = load_model(alone)
    assert torch.equal(tokenizer(TEXTS), tokens)
    assert loaded.config == model.config
    assert list(loaded.state_dict()) == list(model.state_dict())
    for ours, theirs in zip(model(images, tokens)[:2], loaded(images, tokens)[:2]):
        assert_close(ours.mean, theirs.mean, rtol=0, atol=1e-6)
        assert_close(ours.log_var, theirs.log_var, rtol=0, atol=1e-5)


@torch.no_grad()
def test_embeddings_are_float32_under_autocast(made):
    model, images, tokens = made
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = model(images, tokens)
    for half, whole in zip(inside[:2], model(images, tokens)[:2]):
        assert half.mean.dtype == half.log_var.dtype == torch.float32
        assert_close(half.mean, whole.mean, rtol=0, atol=0.1)
