"""uint8 pixels: every image tower normalises them, wherever it computes."""

import pytest
import torch

from probemb.data.pixels import normalize
from probemb.models import create_model

TOWERS = {
    "transformer": ("ViT-Micro-32", {}),
    "cnn": ("resnet-gru-small", {"vocabulary": ["a"]}),
    "timm": ("effnet-lite0-gru", {"vocabulary": ["a"], "head": "gpo", "image_size": 64}),
}


@pytest.fixture(scope="module", params=TOWERS)
def model(request):
    name, options = TOWERS[request.param]
    torch.manual_seed(0)
    return create_model(name, **options).eval()


def pixels_for(model, n=3) -> torch.Tensor:
    return torch.randint(0, 256, (n, 3, model.image_size, model.image_size), dtype=torch.uint8)


def as_floats(model, pixels) -> torch.Tensor:
    preprocess = model.config["preprocess"]
    return normalize(pixels, preprocess["mean"], preprocess["std"])


@torch.no_grad()
def test_embeddings_of_uint8_are_those_of_floats(model):
    pixels = pixels_for(model)
    expected = model.encode_image(as_floats(model, pixels))
    for held in (pixels, pixels.contiguous(memory_format=torch.channels_last)):
        found = model.encode_image(held)
        assert torch.equal(found.mean, expected.mean)
        assert torch.equal(found.log_var, expected.log_var)
    other = create_model_again(model, mean=[0.1, 0.2, 0.3])
    assert not torch.equal(other.encode_image(pixels).mean, expected.mean)
    assert torch.equal(other.encode_image(as_floats(model, pixels)).mean, expected.mean)


def create_model_again(model, **preprocess):
    """The same weights with another normalisation."""
    config = model.config
    config["preprocess"].update(preprocess)
    other = type(model)(config).eval()
    other.load_state_dict(model.state_dict())
    return other
