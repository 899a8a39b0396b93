"""uint8 pixels: every image tower normalises them, wherever it computes."""

import copy
from itertools import islice

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

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
def test_half_precision_and_autocast(model):
    pixels = pixels_for(model)
    expected = model.encode_image(pixels).mean
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model.encode_image(pixels).mean, model.encode_image(as_floats(model, pixels)).mean)
    half = copy.deepcopy(model).bfloat16()
    assert torch.equal(half.encode_image(pixels).mean, half.encode_image(as_floats(model, pixels)).mean)
    assert_close(half.encode_image(pixels).mean.norm(dim=-1), expected.norm(dim=-1), rtol=0.02, atol=0.02)


def test_clips_resnet_normalises_too():
    """Its stem alone, as 38 million parameters take long."""
    with torch.device("meta"):
        model = create_model("RN50")
    pixels = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    found = model.visual.normalized(pixels, torch.float32)
    assert torch.equal(found, as_floats(model, pixels))


def test_gradients_and_compilation():
    torch.manual_seed(0)
    model = create_model("ViT-Micro-32")
    pixels = pixels_for(model)
    model.encode_image(pixels).mean.square()[:, 0].sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert "visual.conv1.weight" in grads
    model.zero_grad()
    model.encode_image(as_floats(model, pixels)).mean.square()[:, 0].sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is None or torch.equal(p.grad, grads[name])
    graph = torch.export.export(ImageSide(model.eval()), (pixels,)).module()  # captured whole, without a graph break
    with torch.no_grad():
        assert_close(graph(pixels), model.encode_image(pixels).mean)


class ImageSide(torch.nn.Module):
    """The mean's embedding."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, pixels):
        return self.model.encode_image(pixels).mean


@torch.no_grad()
def test_who_resizes_hardly_shifts_embeddings(model):
    numbers = np.random.default_rng(0)
    ways = [create_transforms(model, resize=resize).evaluate for resize in ("tensor", "pil")]
    for width, height in ((640, 480), (333, 500), (300, 300)):
        coarse = Image.fromarray(numbers.integers(0, 256, (24, 32, 3), dtype=np.uint8))
        image = coarse.resize((width, height), Image.Resampling.BICUBIC)
        ours, theirs = (model.encode_image(way(image)[None]) for way in ways)
        assert torch.cosine_similarity(ours.mean, theirs.mean).item() > 0.9999
        assert_close(ours.log_var, theirs.log_var, rtol=0.01, atol=0.01)


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
