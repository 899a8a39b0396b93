"""Every architecture of open_clip and of the project: supported and built, or refused with a reason."""

import json

import open_clip
import pytest
import torch
from torch.testing import assert_close

from probemb.errors import UserError
from probemb.models import create_model, create_tokenizer
from probemb.models.architectures import OWN, obstacle, read_architecture, supported_names, tower_kind

HF = [name for name in open_clip.list_models() if tower_kind(read_architecture(name), "text_cfg") == "open_clip.hf"]
WITHOUT_HF = [name for name in open_clip.list_models() if name not in HF]
DISTINCT = {str(read_architecture(name)["vision_cfg"]): name for name in WITHOUT_HF}  # the last of each image tower
KINDS = ["RN50", "coca_ViT-B-32"]
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in DISTINCT.values() if name not in KINDS]


def test_at_least_120_of_open_clips_architectures_are_supported():
    names = set(supported_names())
    assert len(names - set(OWN)) >= 120
    assert set(WITHOUT_HF) <= names
    assert set(OWN) <= names


@pytest.mark.parametrize("name", KINDS + OTHERS)
def test_every_architecture_is_built_and_gives_every_parameter_a_gradient(name):
    with torch.device("meta"):  # shapes without numbers
        model = create_model(name)
    size, length = model.image_size, model.context_length
    image = model.encode_image(torch.empty(2, 3, size, size, device="meta"))
    text = model.encode_text(torch.ones(2, length, dtype=torch.long, device="meta"))
    assert image.mean.shape == text.mean.shape == image.log_var.shape == text.log_var.shape == (2, model.embed_dim)
    sum(x.sum() for x in (image.mean, image.log_var, text.mean, text.log_var)).backward()
    unused = {"logit_scale", "scale", "shift"}
    assert [key for key, parameter in model.named_parameters() if parameter.grad is None and key not in unused] == []
    assert all(
        tower.place(key).depth >= 0 for tower in (model.visual, model.text) for key, _ in tower.named_parameters()
    )


def test_the_towers_of_coca_equal_open_clips(tmp_path):
    config = read_architecture("coca_ViT-B-32")
    config["vision_cfg"] |= {"image_size": 32, "patch_size": 8, "width": 64, "layers": 2, "attn_pooler_heads": 2}
    config["text_cfg"] |= {"width": 64, "heads": 2, "layers": 2}
    config["multimodal_cfg"] |= {"width": 64, "heads": 2, "layers": 1, "attn_pooler_heads": 2}
    config["embed_dim"] = 64
    (tmp_path / "coca-micro.json").write_text(json.dumps(config))
    open_clip.add_model_config(tmp_path / "coca-micro.json")
    torch.manual_seed(0)
    stock = open_clip.create_model("coca-micro").eval()
    torch.save(stock.state_dict(), tmp_path / "stock.pt")
    model = create_model("coca-micro", pretrained=str(tmp_path / "stock.pt")).eval()
    images, tokens = torch.randn(2, 3, 32, 32), create_tokenizer(model)(["a photo of a cat", "two dogs"])
    with torch.no_grad():
        assert_close(model.encode_image(images).mean, stock.encode_image(images, normalize=True))
        assert_close(model.encode_text(tokens).mean, stock.encode_text(tokens, normalize=True))


def test_an_architecture_is_read_from_a_file_of_ones_own(tmp_path):
    own = tmp_path / "mine.json"
    own.write_text(OWN["ViT-Micro-32"].read_text())
    model, known = create_model(str(own)), create_model("ViT-Micro-32")
    assert model.config == {**known.config, "name": "mine"}
    for text in ("{", "[]", '{"embed_dim": 16, "vision_cfg": {"width": 1}}', '{"embed_dim": {}}'):
        own.write_text(text)
        with pytest.raises(UserError, match=r"mine.json is no architecture .* Write it as one of the project's"):
            create_model(str(own))


def test_kinds_that_are_no_pair_of_towers_have_a_reason():
    text = {"text_cfg": {"width": 8}}
    both = text | {"vision_cfg": {"timm_model_name": "naflexvit_base"}}
    for config in (text, text | {"audio_cfg": {}}, both | {"genlip_cfg": {}}):  # a text tower, CLAP, GenLIP
        assert "does not embed both images and texts" in obstacle(config)
    assert "NaFlex" in obstacle(both)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            {"name": "resnet152-gru", "image_weights": "tv_in1kk"},
            r"Did you mean 'tv_in1k'\? Give a file, or one of: timm, a1",
        ),
        ({"name": "RN50", "image_size": 100, "head": "gpo"}, "Set image_size to a multiple of 32"),
        ({"name": "ViT-Micro-32", "image_size": 50}, "Set it to 48 or 56"),
        ({"name": "ViT-Micro-32", "composer": "produkt"}, "no composer 'produkt'. Did you mean 'product'"),
    ],
)
def test_a_wrong_tag_size_or_composer_is_answered_with_right_ones(options, why):
    with pytest.raises(UserError, match=why):
        create_model(**options)
