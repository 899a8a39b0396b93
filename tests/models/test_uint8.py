"""uint8 pixels: every image tower normalises them, wherever it computes."""

from itertools import islice

import pytest
import torch

from probemb.data.images import decode_image
from probemb.data.pixels import normalize
from probemb.models import create_model, create_transforms
from tests.shards import iterate_samples

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


@torch.no_grad()
def test_who_resizes_hardly_shifts_embeddings_of_published_weights(shared_data):
    """Real photographs through EfficientNet-Lite0 with its published weights and preprocessing."""
    path = shared_data("pretrained") / "tf_efficientnet_lite0.safetensors"
    model = create_model("effnet-lite0-gru", vocabulary=["a"], image_weights=str(path), image_size=128).eval()
    ways = [create_transforms(model, resize=resize).evaluate for resize in ("tensor", "pil")]
    images = [decode_image(sample.image) for sample in islice(photographs(shared_data), 32)]
    ours, theirs = (model.visual.features(torch.stack([way(image) for image in images]))[0].pooled for way in ways)
    assert torch.cosine_similarity(ours, theirs).min() > 0.999
    others = torch.cosine_similarity(ours[1:], ours[:-1])
    assert others.max() < 0.9  # images do differ for this model


def photographs(shared_data):
    """The samples of ImageNet's that are here."""
    return iterate_samples(shared_data("imagenet_sample_1000") / "val-00000.tar")
