"""Tensor resizing beside PIL's: the same boxes and sizes, and pixels that differ by rounding."""

import pytest
import torch

from probemb.models.inputs import create_transforms
from tests.world import photograph

SIZES = ((256, 256), (640, 480), (120, 90), (300, 1000), (1024, 700), (225, 225), (33, 500), (500, 33))


@pytest.mark.parametrize(
    ("mode", "interpolation", "size"),
    [("shortest", "bicubic", 96), ("longest", "bilinear", 96), ("squash", "bicubic", (64, 96))],
)
def test_pixels_differ_from_pils_by_rounding(mode, interpolation, size):
    config = {"preprocess": {"size": size, "resize_mode": mode, "interpolation": interpolation, "fill_color": 7}}
    tensor, pil = (create_transforms(config, resize=resize) for resize in ("tensor", "pil"))
    for seed, image_size in enumerate(SIZES):
        image = photograph(*image_size, seed)
        for kind in ("train", "evaluate"):
            torch.manual_seed(seed)
            ours = getattr(tensor, kind)(image)
            torch.manual_seed(seed)
            theirs = getattr(pil, kind)(image)
            assert ours.dtype == theirs.dtype == torch.uint8
            assert ours.shape == theirs.shape == (3, *(size if isinstance(size, tuple) else (size, size)))
            away = (ours.int() - theirs.int()).abs()
            assert away.max() <= 2, (image_size, kind)
            # PIL resizes the columns of tall images first, torch always the rows, and both round in between.
            tall = image_size[1] > image_size[0]
            assert away.float().mean() < (0.4 if tall else 0.1), (image_size, kind)
