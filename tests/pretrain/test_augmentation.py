"""Options of the augmentation: what reaches the crops, colours and erased rectangles, and what is refused."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from pretrain.augmentation import Augmentation
from pretrain.config import Config, Data
from pretrain.contradictions import check
from pretrain.preparation import changes_since, pixels_identity
from probemb.cli.configuration import to_dict
from probemb.errors import UserError
from probemb.models import Augmentation as Applied
from probemb.models import create_transforms

JITTER = (0.32, 0.32, 0.32, 0.08)


def transformed(options: Augmentation, resize: str) -> torch.Tensor:
    """Coordinates as colours: red is the column, green the row."""
    grid = np.indices((200, 200)).transpose(1, 2, 0)[..., ::-1]
    image = Image.fromarray(np.concatenate([grid, np.full((200, 200, 1), 90)], 2).astype(np.uint8))
    transform = create_transforms({"preprocess": {"size": 64}}, Applied(**vars(options)), resize).train
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


@pytest.mark.parametrize("resize", ["tensor", "pil"])
def test_rectangles_of_a_share_of_images_are_erased(resize):
    """From the same crops: the draws for what is erased come behind the others."""
    whole = transformed(Augmentation(), resize)[0]
    erased = transformed(Augmentation(re_prob=0.5, re_count=2), resize)
    assert ((erased[0] - whole).abs() < 2).all() or ((erased[0] - whole).abs() < 2).float().mean() > 0.5
    share = ((erased[:, 2] - 90).abs() > 1).flatten(1).float().mean(1)
    assert 8 < (share > 0.01).sum() < 32
    assert share.max() < 0.5


def test_a_run_from_before_an_option_resumes_and_with_the_option_does_not():
    config = Config(data=Data(train="x"))
    identity = pixels_identity(config.data)
    older = {"config": to_dict(config), "data": {**identity, "augmentation": dict(identity["augmentation"])}}
    for augmentation in (older["config"]["data"]["augmentation"], older["data"]["augmentation"]):
        del augmentation["re_prob"], augmentation["re_count"]
    assert changes_since(config, copy.deepcopy(older), identity, Path("run")) == []
    erasing = Config(data=Data(train="x", augmentation=Augmentation(re_prob=0.25)))
    with pytest.raises(UserError, match=r"re_prob: 0\.0 -> 0\.25"):
        changes_since(erasing, copy.deepcopy(older), pixels_identity(erasing.data), Path("run"))


def test_the_identity_of_a_run_has_all_that_changes_pixels():
    data = Data(decode="device", augmentation=Augmentation(scale=(0.5, 1.0)))
    found = pixels_identity(data)
    assert (found["resize"], found["decode"]) == ("tensor", "device")
    assert found["augmentation"]["scale"] == [0.5, 1.0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"scale": (0.9, 0.5)}, "scale is 0.9 to 0.5"),
        ({"scale": (0.9, 1.5)}, "scale is 0.9 to 1.5"),
        ({"ratio": (2.0, 1.0)}, "ratio is 2 to 1"),
        ({"color_jitter": JITTER}, "one is set and the other is not"),
        ({"color_jitter_prob": 0.8}, "one is set and the other is not"),
        ({"color_jitter": (0.1, 0.1, 0.1, 0.7), "color_jitter_prob": 0.8}, "hue"),
    ],
)
def test_contradictions_are_refused(options, says):
    with pytest.raises(UserError, match=says):
        check(Config(data=Data(train="x", augmentation=Augmentation(**options))), world_size=1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"resize": "pil"}, "data.resize pil cannot be used with data.decode device"),
        ({"augmentation": Augmentation(gray_scale_prob=0.1)}, "Of data.augmentation only crops"),
        ({"augmentation": Augmentation(re_prob=0.1)}, "Of data.augmentation only crops"),
        ({"augmentation": Augmentation(color_jitter=JITTER, color_jitter_prob=0.8)}, "Of data.augmentation only crops"),
    ],
)
def test_what_only_workers_do_is_refused_where_the_device_decodes(options, says):
    with pytest.raises(UserError, match=says):
        check(Config(data=Data(train="x", decode="device", **options)), world_size=1)
