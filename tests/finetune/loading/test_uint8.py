"""uint8 batches of finetuning: the pretraining reader's pixels, and what mixing and Cutout make of them."""

import pytest
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2

from finetune.config import Config, with_method_file
from finetune.loading.pair_loader import PairLoader
from finetune.methods.registry import METHODS
from finetune.pair_feed import PairFeed
from finetune.run import prepare_inputs
from pretrain.stream.settings import Settings
from pretrain.stream.stream import Stream
from probemb.cli.configuration import parse_config
from probemb.data.captions.find import find_captions
from probemb.data.shards.index import Shard
from probemb.models import Augmentation, create_model, create_tokenizer, create_transforms
from tests.world import captioned  # noqa: F401 - fixture

BATCH = 12


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return create_model("ViT-Micro-32", head="gpo", embed_dim=8, image_size=24)  # smaller than the images


def configured(*words):
    return parse_config(Config, "test", "", ["--method=pcmepp", "--data.path=x", f"--batch_size={BATCH}", *words])


def transforms_of(model, data, *words):
    """As a run makes them."""
    return prepare_inputs(configured(*words), [model], data, None, None)[2]


def open_clips(model):
    """The transform that gives normalised floats."""
    return image_transform_v2(PreprocessCfg(**model.config["preprocess"]), is_train=True)


def batches(model, data, transform, workers=0):
    with PairLoader(data, transform, create_tokenizer(model), BATCH, seed=3, workers=workers) as loader:
        return list(loader.epoch(1))


def test_pixels_are_those_of_open_clip_and_differ_by_rounding_from_torchs(model, captioned):  # noqa: F811
    data = find_captions(captioned, None)
    kinds = [transforms_of(model, data, f"--data.resize={resize}").train for resize in ("pil", "tensor")]
    assert repr(transforms_of(model, data).train) == repr(kinds[1])  # torch's by default, as in pretraining
    pil, tensor, floats = (batches(model, data, one) for one in (*kinds, open_clips(model)))
    assert len(pil) > 3
    for ours, other, expected in zip(pil, tensor, floats, strict=True):
        assert ours.images.dtype == other.images.dtype == torch.uint8
        assert torch.equal(model.normalized(ours.images), expected.images)
        assert 0 < (ours.images.int() - other.images.int()).abs().max() <= 8  # of drawn edges
        for one in (other, expected):
            assert torch.equal(ours.pair_index, one.pair_index)


@pytest.mark.parametrize("name", ["vsepp", "vse0", "prob-vsepp"])
def test_vsepps_recipes_crop_and_mirror_as_published(model, captioned, name):  # noqa: F811
    data = find_captions(captioned, None)
    config = parse_config(Config, "test", "", with_method_file([f"--method={name}", "--data.path=x"]))
    assert config.model.crop_pct == 224 / 256
    transform = prepare_inputs(config, [model], data, None, None)[2].train
    expected = create_transforms(model, Augmentation(scale=(0.08, 1.0), hflip=0.5), "tensor").train
    assert repr(transform) == repr(expected)


def test_workers_change_nothing_and_pixels_keep_the_decoders_order(model, captioned):  # noqa: F811
    data = find_captions(captioned, None)
    transform = transforms_of(model, data).train
    for alone, shared in zip(batches(model, data, transform), batches(model, data, transform, 2), strict=True):
        assert torch.equal(alone.images, shared.images)
        assert shared.images.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("resize", ["tensor", "pil"])
def test_an_image_is_that_of_the_pretraining_reader(model, captioned, resize):  # noqa: F811
    """Without a random crop, whose draws belong to the place in the data, both readers give the same uint8."""
    data = find_captions(captioned, None)
    transform = create_transforms(model, resize=resize).evaluate
    ours = {}
    for batch in batches(model, data, transforms_of(model, data, f"--data.resize={resize}").evaluate):
        ours |= {data.image_ids[i]: image for i, image in zip(batch.image_index.tolist(), batch.images)}
    shard = Shard(captioned.name, captioned, len(data), captioned.stat().st_size)
    with Stream([shard], Settings(batch_size=8, lanes=1), transform, create_tokenizer(model)) as stream:
        batch = next(stream)
    for key, image in zip(batch.keys, batch.images, strict=True):
        assert torch.equal(image, ours[key.rsplit("/", 1)[1]])


@pytest.mark.parametrize("words", [("--augment.cutout=0.3", "--mix.ratio=0"), ("--mix.ratio=1",), ("--mix.ratio=0",)])
def test_augmentation_is_that_of_normalised_floats(model, captioned, words):  # noqa: F811
    """Cutout's grey is 0 and mixing is not rounded: what the towers read is the same to the last bit."""
    data = find_captions(captioned, None)
    feed = PairFeed(configured(*words), torch.arange(len(data)), torch.device("cpu"), False)
    pixels, floats = (batches(model, data, t)[0] for t in (create_transforms(model).train, open_clips(model)))
    ((images, *_), mix), ((expected, *_), same) = (feed.inputs(batch, model, 5) for batch in (pixels, floats))
    assert torch.equal(model.normalized(images), expected)
    with torch.no_grad():
        found, wanted = model.encode_image(images), model.encode_image(expected)
    assert torch.equal(found.mean, wanted.mean)
    assert torch.equal(found.log_var, wanted.log_var)
    if "--mix.ratio=1" in words:
        assert torch.equal(mix.lam, same.lam)
        assert (mix.lam < 1).any()
    elif words[0].startswith("--augment"):
        assert ((images == 0).all(1).double().mean((1, 2)) - 0.3).abs().max() < 0.03
    else:
        assert images.dtype == torch.uint8  # nothing to change: as they came


def test_the_baseline_without_training_reads_pils_pixels():
    """Its figures stand beside those of open_clip and CLIP_benchmark."""
    resolved = {
        name: parse_config(Config, "test", "", with_method_file([f"--method={name}"])).data.resize for name in METHODS
    }
    assert resolved.pop("clip-zs") == "pil"
    assert set(resolved.values()) == {"tensor"}
