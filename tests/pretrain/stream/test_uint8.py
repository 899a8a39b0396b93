"""uint8 batches: the same for every number of workers, the same crops as PIL's, a quarter of the memory."""

import io

import pytest
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2

from pretrain.stream.workers import shared_tensors
from probemb.data.pixels import normalize
from probemb.data.shards.index import Shard
from probemb.models.inputs import create_transforms
from tests.pretrain.stream.test_jpeg_draft import jpeg, photograph, shard
from tests.pretrain.stream.test_stream import LANES, assert_same, corpus, make, read  # noqa: F401
from tests.world import write_tar

CONFIG = {"preprocess": {"size": 32}}


def open_clips():
    """open_clip's transform, which gives normalised floats."""
    return image_transform_v2(PreprocessCfg(**CONFIG["preprocess"]), is_train=True)


@pytest.fixture(scope="module")
def transforms():
    return {resize: create_transforms(CONFIG, resize=resize).train for resize in ("tensor", "pil")}


@pytest.mark.parametrize("resize", ["tensor", "pil"])
def test_batches_do_not_depend_on_workers_ranks_or_restarts(corpus, transforms, resize):  # noqa: F811
    expected = read(corpus, steps=7, transform=transforms[resize])
    assert expected[0].images.dtype == torch.uint8
    assert expected[0].images.shape == (8, 3, 32, 32)
    assert expected[0].images.float().std() > 10
    assert_same(read(corpus, steps=7, transform=transforms[resize], workers=3), expected)
    later = read(corpus, steps=3, transform=transforms[resize], workers=2, start_samples=expected[3].samples_seen)
    assert_same(later, expected[4:])
    parts = [read(corpus, steps=7, transform=transforms[resize], rank=rank, world_size=2) for rank in range(2)]
    for whole, *mine in zip(expected, *parts, strict=True):
        assert torch.equal(torch.cat([one.images for one in mine]), whole.images)


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


def test_large_jpegs_are_decoded_smaller_either_way(tmp_path, transforms):
    large = [shard(tmp_path, [jpeg(photograph(400, 300, seed)) for seed in range(4)])]
    settings = {"batch_size": 4, "lanes": 1, "steps": 1}
    found = {
        (resize, draft): read(large, transform=transforms[resize], draft=draft, **settings)[0].images.int()
        for resize in transforms
        for draft in (False, True)
    }
    for resize in transforms:
        assert not torch.equal(found[resize, True], found[resize, False])
    for draft in (False, True):
        assert (found["tensor", draft] - found["pil", draft]).abs().max() <= 2


def test_every_format_comes_the_same_way(tmp_path, transforms):
    """Grey, CMYK, palettes and transparency, as JPEG, PNG and WebP."""
    files, image = [], photograph(60, 50)
    for i, (form, mode) in enumerate(
        [("JPEG", "L"), ("JPEG", "CMYK"), ("PNG", "P"), ("PNG", "RGBA"), ("PNG", "L"), ("WEBP", "RGB")]
    ):
        file = io.BytesIO()
        image.convert(mode).save(file, form)
        files += [(f"{i}.{'jpg' if form == 'JPEG' else form.lower()}", file.getvalue()), (f"{i}.txt", b"a")]
    path = write_tar(tmp_path / "forms.tar", files)
    one = [Shard(path.name, path, 6, path.stat().st_size)]
    settings = {"batch_size": 6, "lanes": 1, "steps": 1}
    tensor, pil = (read(one, transform=transforms[resize], **settings)[0] for resize in ("tensor", "pil"))
    assert not tensor.replaced.any()
    assert (tensor.images.int() - pil.images.int()).abs().max() <= 2


def test_shared_memory_holds_a_byte_a_value(corpus, transforms, monkeypatch):  # noqa: F811
    taken = []

    def measured(*kinds):
        taken.append(sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in kinds[:1]))
        return shared_tensors(*kinds)

    monkeypatch.setattr("pretrain.stream.batches.shared_tensors", measured)
    for transform in (transforms["tensor"], open_clips()):
        with make(corpus, transform=transform, workers=1) as stream:
            next(stream)
    assert taken == [8 * 3 * 32 * 32] * 2 + [4 * 8 * 3 * 32 * 32] * 2
