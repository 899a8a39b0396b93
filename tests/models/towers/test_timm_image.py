"""timm's backbones as image towers: tokens, weights of timm's, what does not fit."""

import pytest
import timm
import torch
from torch.testing import assert_close

from probemb.errors import UserError
from probemb.models import DualEncoder, create_model, load_model, save_model

WORDS = ["a", "cat", "dog"]


def config_of(name, size, head="gpo", n_unc_layers=(1, 1), **kwargs):
    config = create_model("ViT-Micro-32", head=head, embed_dim=16).config
    vision = {"tower": "timm", "timm_model_name": name, "timm_model_kwargs": kwargs, "image_size": size}
    config["architecture"]["vision_cfg"] = vision
    return {**config, "n_unc_layers": list(n_unc_layers)}


SWIN = {"embed_dim": 8, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 1, 1)}


@pytest.mark.parametrize(
    ("name", "n_tokens", "width", "kwargs", "head"),
    [
        ("test_efficientnet", 4, None, {}, "clip"),
        ("test_vit", 17, 64, {"img_size": 64}, "gpo"),
        ("swin_tiny_patch4_window7_224", 4, 64, SWIN, "gpo"),
    ],
)
def test_feature_maps_are_tokens(name, n_tokens, width, kwargs, head):
    torch.manual_seed(0)
    model = DualEncoder(config_of(name, 64, head, **kwargs))
    tower = model.visual
    images = torch.randn(2, 3, 64, 64)
    features, unc = tower.features(images)
    assert features.tokens.shape[:2] == unc.tokens.shape[:2] == (2, n_tokens)
    assert tower.n_tokens == n_tokens
    assert width is None or features.tokens.shape[2] == width
    out = tower(images).gaussian
    ((out.mean + out.log_var) * torch.linspace(-1, 1, 16)).sum().backward()
    assert [key for key, parameter in tower.named_parameters() if parameter.grad is None] == []
    assert max(tower.place(key).depth for key, _ in tower.named_parameters()) > 1


def test_weights_of_a_file(tmp_path):
    torch.manual_seed(1)
    stock = timm.create_model("test_resnet").eval()  # with its classifier
    path = tmp_path / "weights.pth"
    torch.save(stock.state_dict(), path)
    model = create_model("resnet-gru-small", vocabulary=WORDS, image_weights=str(path)).eval()
    images = torch.randn(2, 3, 64, 64)
    own = model.visual.features(images)[0].tokens
    assert torch.equal(own, stock.forward_features(images).flatten(2).transpose(1, 2))
    wanted = timm.data.resolve_model_data_config(stock)
    for key in ("mean", "std"):
        assert model.config["preprocess"][key] == list(wanted[key])
    save_model(model, tmp_path / "model")
    assert_close(load_model(tmp_path / "model").model.visual.features(images)[0].tokens, own)
    # From a run, the trunk comes along.
    again = create_model("resnet-gru-small", head="gpo", pretrained=str(tmp_path / "model"))
    assert torch.equal(again.visual.trunk.layer4[0].conv1.weight, model.visual.trunk.layer4[0].conv1.weight)


@pytest.mark.parametrize("option", ["checkpoint_path", "pretrained_cfg"])
def test_a_configuration_names_no_files(option):
    with pytest.raises(UserError, match=f"timm_model_kwargs has {option}"):
        DualEncoder(config_of("resnet18", 64, **{option: "/etc/hostname"}))
