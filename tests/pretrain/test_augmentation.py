"""Options of the augmentation: what reaches the crops and colours."""

import numpy as np
import pytest
import torch
from PIL import Image

from probemb.models import Augmentation, create_transforms

JITTER = (0.32, 0.32, 0.32, 0.08)


def transformed(options: Augmentation, resize: str) -> torch.Tensor:
    """Coordinates as colours: red is the column, green the row."""
    grid = np.indices((200, 200)).transpose(1, 2, 0)[..., ::-1]
    image = Image.fromarray(np.concatenate([grid, np.full((200, 200, 1), 90)], 2).astype(np.uint8))
    transform = create_transforms({"preprocess": {"size": 64}}, options, resize).train
    torch.manual_seed(3)
    return torch.stack([transform(image) for _ in range(40)]).float()


@pytest.mark.parametrize("resize", ["tensor", "pil"])
def test_crops_have_the_areas_and_ratios_that_are_asked_for(resize):
    options = Augmentation(scale=(0.2, 0.3), ratio=(0.5, 0.6))
    batch = transformed(options, resize)
    width, height = ((batch[:, i].amax((1, 2)) - batch[:, i].amin((1, 2)) + 1) for i in (0, 1))
    area = width * height / 200**2
    assert area.min() > 0.18
    assert area.max() < 0.32
    assert (width / height).min() > 0.47
    assert (width / height).max() < 0.63


@pytest.mark.parametrize("resize", ["tensor", "pil"])
def test_shares_of_images_lose_or_change_their_colours(resize):
    blue = transformed(Augmentation(), resize)[:, 2]
    assert ((blue - 90).abs() <= 1).all()
    jittered = transformed(Augmentation(color_jitter=JITTER, color_jitter_prob=0.5), resize)[:, 2]
    assert 8 < ((jittered - 90).abs() > 1).flatten(1).any(1).sum() < 32
    gray = transformed(Augmentation(gray_scale_prob=0.5), resize)
    assert 8 < (gray[:, 0] == gray[:, 2]).flatten(1).all(1).sum() < 32
