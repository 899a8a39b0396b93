"""Exported models: open_clip loads them strictly, and embeds as the means did."""

import json
import sys

import open_clip
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from probemb.errors import UserError
from probemb.models import create_model, load_model, save_model
from probemb.models.digest import tensors_sha256
from probemb.models.formats.export import WITHOUT_BIAS, export_open_clip
from tools.export import main


def call(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["export", *map(str, words)])
    return main()


@pytest.mark.parametrize("name", ["ViT-Micro-32", "ViT-Tiny-64"])
def test_open_clip_loads_it_strictly_with_equal_outputs(tmp_path, monkeypatch, name):
    torch.manual_seed(0)
    save_model(create_model(name, n_unc_layers=1), tmp_path / "model")
    assert call(monkeypatch, "--model", tmp_path / "model", "--out", tmp_path / "out") == 0
    theirs, _, transform = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'out'}")
    ours, tokenizer, transforms = load_model(tmp_path / "model")
    image = Image.effect_mandelbrot((90, 70), (-2, -1.5, 1, 1.5), 50).convert("RGB")
    assert torch.equal(transform(image), ours.normalized(transforms.evaluate(image)[None])[0])
    tokens, images = tokenizer(["a photo of a cat", "two dogs"]), transform(image)[None]
    theirs.eval().requires_grad_(False)  # attention rounds otherwise where weights require a gradient
    with torch.no_grad():
        assert torch.equal(theirs.encode_text(tokens, normalize=True), ours.encode_text(tokens).mean)
        assert torch.equal(theirs.encode_image(images, normalize=True), ours.encode_image(images).mean)
    about = json.loads((tmp_path / "out" / "open_clip_config.json").read_text())
    assert about["tensors_sha256"] == tensors_sha256(load_file(tmp_path / "out" / "open_clip_model.safetensors"))
    assert theirs.logit_scale.item() == pytest.approx(ours.logit_scale.item())
    assert open_clip.get_tokenizer(f"local-dir:{tmp_path / 'out'}")(["two dogs"]).tolist() == tokens[1:].tolist()


@pytest.mark.parametrize(
    ("name", "match"), [("ViT-B-32", "cosine"), pytest.param("RN50", "distance", marks=pytest.mark.slow)]
)
def test_its_file_loads_under_open_clip_s_own_name_as_clip_benchmark_does(tmp_path, name, match):
    torch.manual_seed(0)
    ours = create_model(name, n_unc_layers=1, match=match).eval().requires_grad_(False)
    export_open_clip(ours, tmp_path / "out")
    file = "open_clip_model.safetensors" if match == "distance" else WITHOUT_BIAS
    assert (tmp_path / "out" / WITHOUT_BIAS).exists() == (match == "cosine")
    theirs, _, transform = open_clip.create_model_and_transforms(
        name, pretrained=str(tmp_path / "out" / file), cache_dir=None
    )
    assert type(theirs) is open_clip.CLIP
    theirs.eval().requires_grad_(False)
    tokens = open_clip.get_tokenizer(name)(["a photo of a cat"])
    pixels = transform(Image.effect_mandelbrot((90, 70), (-2, -1.5, 1, 1.5), 50).convert("RGB"))[None]
    with torch.no_grad():
        assert torch.equal(theirs.encode_text(tokens, normalize=True), ours.encode_text(tokens).mean)
        assert torch.equal(theirs.encode_image(pixels, normalize=True), ours.encode_image(pixels).mean)
    also, _, _ = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'out'}", pretrained="", cache_dir=None)
    assert torch.equal(also.logit_scale, theirs.logit_scale)
    assert also.state_dict().keys() == theirs.state_dict().keys() | ({"logit_bias"} if match == "cosine" else set())


def test_crop_pct_stays_for_probemb_and_the_command_says_that_open_clip_has_none(tmp_path, monkeypatch, capsys):
    save_model(create_model("ViT-Tiny-64", n_unc_layers=1, crop_pct=0.875), tmp_path / "model")
    assert call(monkeypatch, "--model", tmp_path / "model", "--out", tmp_path / "out") == 0
    assert "the centre 64 of 73" in capsys.readouterr().out
    image = Image.effect_mandelbrot((90, 70), (-2, -1.5, 1, 1.5), 50).convert("RGB")
    before, after = (load_model(tmp_path / name).transforms.evaluate(image) for name in ("model", "out"))
    assert torch.equal(before, after)
    open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'out'}")  # which ignores it


def test_what_cannot_be_exported_is_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="its head is 'gpo'"):
        export_open_clip(create_model("ViT-Micro-32", head="gpo", embed_dim=8), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="not an empty folder"):
        call(monkeypatch, "--model", "anything", "--out", tmp_path / "full")
