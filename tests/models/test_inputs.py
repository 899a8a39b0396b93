"""Preprocessing and tokens that belong to a model."""

import random
import time

import open_clip
import pytest
import torch
from PIL import Image
from torchvision.transforms import CenterCrop, InterpolationMode, RandomResizedCrop, Resize

from probemb.data.images import as_pixels
from probemb.models import create_model, create_tokenizer, create_transforms, load_model, save_model
from probemb.models.inputs import RandomCrop


@pytest.fixture(scope="module")
def model():
    return create_model("ViT-Micro-32")


def test_evaluation_transform_is_open_clips(model):
    image = Image.effect_noise((70, 50), 80).convert("RGB")
    cfg = open_clip.transform.PreprocessCfg(size=32)
    expected = open_clip.transform.image_transform_v2(cfg, is_train=False)(image)
    pixels = create_transforms(model).evaluate(image)
    assert pixels.dtype == torch.uint8
    assert pixels.shape == (3, 32, 32)
    assert torch.equal(model.normalized(pixels[None])[0], expected)
    assert torch.equal(create_transforms(model.config).evaluate(image), pixels)
    assert model.normalized(expected) is expected


@pytest.mark.parametrize("resize", ["pil", "tensor"])
def test_a_model_keeps_the_share_that_its_centre_crop_has(resize, tmp_path):
    model = create_model("ViT-Micro-32", crop_pct=0.8)
    save_model(model, tmp_path / "model")
    image = Image.effect_noise((90, 60), 80).convert("RGB")
    expected = as_pixels(CenterCrop(32)(Resize(40, InterpolationMode.BICUBIC)(image)))
    started = create_model("ViT-Micro-32", pretrained=tmp_path / "model")
    for one in (model, load_model(tmp_path / "model").model, started):
        found = create_transforms(one, resize=resize).evaluate(image)
        assert (found.int() - expected.int()).abs().max() <= (0 if resize == "pil" else 2)


@pytest.mark.parametrize("sides", [(250, 330), (900, 20), (20, 900), (1, 1)], ids=str)  # in the middle no crop fits
@pytest.mark.parametrize("scale", [(0.9, 1.0), (0.08, 1.0)], ids=str)
def test_crops_are_torchvisions_and_leave_the_same_random_state(sides, scale):
    for seed in range(50):
        found = []
        for crop in (RandomCrop, RandomResizedCrop):
            torch.manual_seed(seed)
            found.append([*crop.get_params(Image.new("1", sides), scale, (3 / 4, 4 / 3)), *torch.get_rng_state()])
        assert found[0] == found[1]


def test_tokens_are_open_clips(model):
    texts = ["a photo of a cat", "", "Ünïcödé — 你好 🐈", "it's 1,234.5 DON'T!!! (really)", "word " * 200]
    texts += ["&lt;b&gt; html &amp; entities", "<end_of_text> inside"]
    for context_length in (16, 77):
        config = model.config
        config["architecture"]["text_cfg"]["context_length"] = context_length
        ours, theirs = create_tokenizer(config), open_clip.SimpleTokenizer(context_length=context_length)
        assert ours(texts).dtype == torch.int64
        assert torch.equal(ours(texts), theirs(texts))
        assert ours(["\x00\ud800 control"]).shape == (1, context_length)
    assert torch.equal(create_tokenizer(model)("one text"), create_tokenizer(model)(["one text"]))


def test_tokens_of_plain_ascii_are_open_clips(model):
    """Plain ASCII takes a shorter way, which every punctuation and every run of spaces must survive."""
    config = model.config
    config["architecture"]["text_cfg"]["context_length"] = 77
    ours, theirs, letters = create_tokenizer(config), open_clip.SimpleTokenizer(), [chr(c) for c in range(32, 127)]
    numbers = random.Random(0)
    texts = ["".join(numbers.choices(letters, k=numbers.randrange(60))) for _ in range(300)]
    texts += ["".join(numbers.choices("ab '`\"<>&#;:-_/\\()[]~^", k=20)) for _ in range(300)]
    for _ in range(2):  # then from the cache
        assert torch.equal(ours(texts), theirs(texts))


def test_tokenizer_is_not_held_up_by_hostile_text(model):
    tokenizer = create_tokenizer(model)
    start = time.perf_counter()
    tokens = tokenizer(["x" * 1_000_000, "ab" * 500_000, "a b " * 500_000])
    assert time.perf_counter() - start < 5
    assert tokens.shape == (3, 16)
    assert (tokens[:, -1] == 49407).sum() >= 1
