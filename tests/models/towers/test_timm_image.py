"""timm's backbones as image towers: tokens, weights of timm's, what does not fit."""

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from torch.testing import assert_close

from probemb.errors import UserError
from probemb.models import DualEncoder, create_model, create_transforms, load_model, save_model
from probemb.models.features import Features
from probemb.models.heads import HeadConfig
from probemb.models.towers.timm_image import timm_tower

WORDS = ["a", "cat", "dog"]


def config_of(name, size, head="gpo", n_unc_layers=(1, 1), **kwargs):
    config = create_model("ViT-Micro-32", head=head, embed_dim=16).config
    vision = {"tower": "timm", "timm_model_name": name, "timm_model_kwargs": kwargs, "image_size": size}
    config["architecture"]["vision_cfg"] = vision
    return {**config, "n_unc_layers": list(n_unc_layers)}


@pytest.mark.parametrize("head", ["clip", "gpo", "pie"])
@pytest.mark.parametrize(
    ("name", "size", "n_tokens", "width", "kwargs"),
    [
        ("test_resnet", 64, 4, None, {}),
        ("test_efficientnet", 64, 4, None, {}),
        ("test_vit", 64, 17, 64, {"img_size": 64}),
        ("test_convnext", 64, 4, None, {}),
        (
            "swin_tiny_patch4_window7_224",
            64,
            4,
            64,
            {"embed_dim": 8, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 1, 1)},
        ),
    ],
)
def test_feature_maps_are_tokens(name, size, n_tokens, width, kwargs, head):
    torch.manual_seed(0)
    model = DualEncoder(config_of(name, size, head, **kwargs))
    tower = model.visual
    images = torch.randn(2, 3, size, size)
    features, unc = tower.features(images)
    assert features.tokens.shape[:2] == unc.tokens.shape[:2] == (2, n_tokens)
    assert tower.n_tokens == n_tokens
    assert width is None or features.tokens.shape[2] == width
    out = tower.encode(images).gaussian
    ((out.mean + out.log_var) * torch.linspace(-1, 1, 16)).sum().backward()
    assert [key for key, parameter in tower.named_parameters() if parameter.grad is None] == []
    assert max(tower.place(key).depth for key, _ in tower.named_parameters()) > 1


def test_a_feature_map_is_timms():
    torch.manual_seed(0)
    model = DualEncoder(config_of("test_resnet", 64)).eval()
    stock = timm.create_model("test_resnet", num_classes=0, global_pool="").eval()
    stock.load_state_dict(model.visual.trunk.state_dict(), strict=False)
    images = torch.randn(2, 3, 64, 64)
    feature_map = stock(images)  # (B, C, H, W)
    assert torch.equal(model.visual.features(images)[0].tokens, feature_map.flatten(2).transpose(1, 2))


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_weights_of_a_file(tmp_path, suffix):
    torch.manual_seed(1)
    stock = timm.create_model("test_resnet").eval()  # with its classifier
    path = tmp_path / f"weights{suffix}"
    (save_file if suffix == ".safetensors" else torch.save)(stock.state_dict(), path)
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


def test_weights_that_do_not_fit(tmp_path):
    save_file(timm.create_model("test_vit").state_dict(), tmp_path / "other.safetensors")
    for source, what in {
        str(tmp_path / "other.safetensors"): "another model",
        "no_such_tag": "neither a file nor a weight tag of timm's test_resnet",
    }.items():
        with pytest.raises(UserError, match=what):
            create_model("resnet-gru-small", vocabulary=WORDS, image_weights=source)
    with pytest.raises(UserError, match="image tower from timm"):
        create_model("ViT-Micro-32", image_weights="timm")


def test_names_that_timm_does_not_have():
    with pytest.raises(UserError, match="timm has no model 'resnet51'"):
        DualEncoder(config_of("resnet51", 64))


@pytest.mark.parametrize("option", ["checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"])
def test_a_configuration_names_no_files(option):
    with pytest.raises(UserError, match=f"timm_model_kwargs has {option}"):
        DualEncoder(config_of("resnet18", 64, **{option: "/etc/hostname"}))


def test_real_weights(shared_data):
    path = shared_data("pretrained") / "tf_efficientnet_lite0.safetensors"
    config = config_of("tf_efficientnet_lite0", 128, n_unc_layers=(0, 1))
    from probemb.models.architectures import build_stock
    from probemb.models.towers.timm_image import pretrained_trunk

    stock = build_stock(config["architecture"])
    stock.visual, preprocess = pretrained_trunk(config["architecture"]["vision_cfg"], str(path))
    assert preprocess["mean"] == preprocess["std"] == (0.5, 0.5, 0.5)
    config["preprocess"].update(preprocess, size=128)
    model = DualEncoder(config, stock).eval()
    pixels = create_transforms(model).evaluate(Image.new("RGB", (200, 150), (255, 0, 0)))[None]
    assert_close(model.normalized(pixels)[0, :, 64, 64], torch.tensor([1.0, -1.0, -1.0]))
    features = model.visual.features(pixels)[0]
    assert features.tokens.shape == (1, 16, 1280)
    plain = timm.create_model("tf_efficientnet_lite0", checkpoint_path=str(path)).eval()
    assert torch.equal(features.tokens, plain.forward_features(model.normalized(pixels)).flatten(2).transpose(1, 2))


def test_resnet_and_gru_train_together():
    torch.manual_seed(0)
    model = create_model("resnet-gru-small", vocabulary=WORDS, head="pie", embed_dim=16, n_embeddings=2)
    out = model(torch.randn(2, 3, 64, 64), torch.tensor([[2, 3, 0], [2, 4, 3]]))
    assert out.image.mean.shape == out.text.mean.shape == (2, 2, 16)
    weight = torch.linspace(-1, 1, 16)
    sum(((g.mean + g.log_var) * weight).sum() for g in (out.image, out.text)).backward()
    for tower in (model.visual, model.text):
        assert [name for name, parameter in tower.named_parameters() if parameter.grad is None] == []


def test_a_backbone_without_a_feature_map_is_refused():
    name = "crossvit_9_240"  # two class tokens, no map
    with pytest.raises(UserError, match="CrossVit gives no feature map") as error:
        timm_tower(lambda: None, timm.create_model(name, num_classes=0), name, 240, 0, HeadConfig("pie", 8, False))
    assert "another backbone" in error.value.remedy


@pytest.mark.parametrize("head", ["clip", "gpo"])
def test_without_blocks_of_its_own_the_log_variance_reads_the_features_of_the_mean(head):
    torch.manual_seed(0)
    tower = DualEncoder(config_of("test_efficientnet", 64, head, n_unc_layers=(0, 0))).visual.eval()
    mean, unc = tower.features(torch.randn(2, 3, 64, 64))
    assert torch.equal(unc.tokens, mean.tokens)
    assert torch.equal(unc.pooled, mean.pooled)


def test_the_length_of_features_does_not_scale_the_variance():
    torch.manual_seed(0)
    config = config_of("test_efficientnet", 64, "clip", n_unc_layers=(0, 0))
    head = DualEncoder({**config, "unit_features": True}).visual.log_var_head
    features = Features(torch.empty(0), 30 * torch.randn(4, head.in_features))
    expected = torch.nn.functional.linear(
        features.pooled / features.pooled.norm(dim=1, keepdim=True), head.weight, head.bias
    )
    assert_close(head(features), expected)
    assert_close(head(features._replace(pooled=features.pooled / 30)), expected)
    assert not DualEncoder(config).visual.log_var_head.unit_length  # PCME++'s published weights
