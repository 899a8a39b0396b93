"""Draft decoding: never fewer pixels than the crop needs, and nothing changed where nothing is reduced."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from pretrain.stream.jpeg_draft import CropDraft
from pretrain.stream.settings import Settings
from pretrain.stream.stream import Stream
from probemb.data.images import decode_image
from probemb.data.shards.index import Shard
from probemb.models.inputs import Augmentation, create_transforms
from tests.pretrain.stream.test_stream import tokenize
from tests.world import write_tar

SIZE = 48


def transform(scale=(0.9, 1.0), size=SIZE):
    return create_transforms({"preprocess": {"size": size}}, Augmentation(scale=scale)).train


def photograph(width, height, seed=0) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (height // 16 + 2, width // 16 + 2, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def jpeg(image, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=92, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    ("scale", "size"), [((0.9, 1.0), (95, 300)), ((0.08, 1.0), (401, 399)), ((0.9, 1.0), (1024, 768))]
)
def test_the_crop_keeps_the_resolution_of_the_result(scale, size):
    crop = transform(scale)
    draft, data, reduced, away = CropDraft(crop), jpeg(photograph(*size)), 0, []
    first = crop.transforms[0]
    for number in range(50):

        def seed(number=number):
            torch.manual_seed(number)

        image = decode_image(data, lambda width, height, seed=seed: draft.needed(width, height, seed))
        if image.size == size:
            continue
        reduced += 1
        factor = round(size[0] / image.size[0])
        assert image.size == tuple(-(-side // factor) for side in size)
        seed()
        small = first.get_params(image, first.scale, first.ratio)
        assert min(small[2:]) >= SIZE
        seed()
        full = first.get_params(photograph(*size), first.scale, first.ratio)
        away.append(np.abs(np.array(small[2:]) * factor - np.array(full[2:])).max() / factor)
    # A crop of the same size, but for the few draws that rounding makes fit into one of the two and not the other.
    assert reduced < 10 or np.median(away) <= 1
    if size == (1024, 768):
        assert reduced >= 25
    if min(size) < 2 * SIZE:
        assert reduced == 0


def shard(folder, images) -> Shard:
    folder.mkdir(exist_ok=True)
    files = [(f"{i}.{ext}", data) for i, image in enumerate(images) for ext, data in (("jpg", image), ("txt", b"a"))]
    path = write_tar(folder / "a.tar", files)
    return Shard(path.name, path, len(images), path.stat().st_size)


def batches(one, draft, **settings):
    crop = settings.pop("transform", None) or transform()
    with Stream([one], Settings(batch_size=8, draft=draft, **settings), crop, tokenize, steps=2) as stream:
        return torch.cat([batch.images for batch in stream]).float()


def test_images_that_are_not_reduced_stay_the_same_to_the_last_bit(tmp_path):
    one = shard(tmp_path / "small", [jpeg(photograph(60 + i, 95 - i, i)) for i in range(16)])
    assert torch.equal(batches(one, True), batches(one, False))
    one = shard(tmp_path / "large", [jpeg(photograph(300 + i, 400, i)) for i in range(16)])
    reduced = batches(one, True)
    assert not torch.equal(reduced, batches(one, False))
    assert torch.equal(reduced, batches(one, True, workers=2))
