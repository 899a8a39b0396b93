"""uint8 batches: the same for every number of workers, the same crops as PIL's, a quarter of the memory."""

import pytest
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2

from probemb.data.pixels import normalize
from probemb.models.inputs import create_transforms
from tests.pretrain.stream.test_stream import LANES, assert_same, corpus, make, read  # noqa: F401

CONFIG = {"preprocess": {"size": 32}}


def open_clips():
    """open_clip's transform, which gives normalised floats."""
    return image_transform_v2(PreprocessCfg(**CONFIG["preprocess"]), is_train=True)


@pytest.fixture(scope="module")
def transforms():
    return {resize: create_transforms(CONFIG, resize=resize).train for resize in ("tensor", "pil")}


def test_both_ways_show_the_same_crops(corpus, transforms):  # noqa: F811
    """PIL's uint8, normalised by the model, are the floats of open_clip's transform to the last bit."""
    tensor, pil = (read(corpus, steps=6, transform=transforms[resize]) for resize in ("tensor", "pil"))
    floats = read(corpus, steps=6, transform=open_clips())
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    for one, other, float32 in zip(tensor, pil, floats, strict=True):
        assert one.keys == other.keys == float32.keys
        assert torch.equal(one.tokens, other.tokens)
        assert (one.images.int() - other.images.int()).abs().max() <= 2
        assert torch.equal(normalize(other.images, mean, std), float32.images)
