"""The small convolutional tower."""

import pytest
import torch

from probemb.models.heads import HeadConfig
from probemb.models.towers.small_cnn import SmallCNN


def tower(n_unc_layers=1, kind="clip", **options) -> SmallCNN:
    torch.manual_seed(0)
    settings = {"image_size": 20, "widths": (8, 8, 16), "groups": 4, **options}
    return SmallCNN(n_unc_layers, HeadConfig(kind, 3), **settings)


@pytest.mark.parametrize("kind", ["clip", "gpo"])
def test_an_image_does_not_depend_on_its_batch(kind):
    model, pixels = tower(kind=kind).train(), torch.randn(3, 3, 20, 20)
    together, alone = model(pixels), model(pixels[1:2])
    for whole, one in zip(together, alone):
        torch.testing.assert_close(whole[1:2], one)


def test_every_parameter_has_a_place_and_a_gradient():
    model = tower()
    mean, log_var = model(torch.randn(2, 3, 20, 20))
    (mean[:, 0] + log_var[:, 0]).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    places = {name: model.place(name) for name, _ in model.named_parameters()}
    assert places["stem.0.weight"] == ("trunk", 0)
    assert places["stages.0.0.weight"] == ("trunk", 2)
    assert places["stages.1.1.bias"] == ("trunk", 1)
    assert places["branch.0.0.weight"] == ("branch", 1)
    assert places["mean_head.weight"] == ("head", 0)
