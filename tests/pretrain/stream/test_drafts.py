"""Large JPEGs that are decoded at a part of their size: the crop keeps the resolution of the result."""

from functools import partial

import numpy as np
import pytest
import torch

from pretrain.stream.stream import draft_size, find_crop
from probemb.data.images import decode_image
from probemb.models import Augmentation, create_transforms
from tests.world import encode, photograph

SIZE = 48


def transform(scale=(0.9, 1.0), size=SIZE):
    return create_transforms({"preprocess": {"size": size}}, Augmentation(scale=scale)).train


@pytest.mark.parametrize(
    ("scale", "size"), [((0.9, 1.0), (95, 300)), ((0.08, 1.0), (401, 399)), ((0.9, 1.0), (1024, 768))]
)
def test_the_crop_keeps_the_resolution_of_the_result(scale, size):
    crop = transform(scale)
    data, reduced, away = encode(photograph(*size)), 0, []
    first = find_crop(crop)
    for number in range(50):

        def seed(number=number):
            torch.manual_seed(number)

        image = decode_image(data, lambda width, height, seed=seed: draft_size(first, width, height, seed))
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


def test_images_that_are_not_reduced_stay_the_same_to_the_last_bit():
    crop = find_crop(transform())
    for seed in range(8):
        data = encode(photograph(60 + seed, 95 - seed, seed))
        draft = partial(draft_size, crop, seed=partial(torch.manual_seed, seed))
        assert decode_image(data, draft).tobytes() == decode_image(data).tobytes()
