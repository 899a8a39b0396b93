"""Exported models: open_clip loads them strictly, and embeds as the means did."""

import json
import sys

import open_clip
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from probemb.models import create_model, load_model, save_model
from probemb.models.formats import WITHOUT_BIAS, export_open_clip
from probemb.models.weights import tensors_sha256
from tools.export import main


def call(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["export", *map(str, words)])
    return main()


def test_open_clip_loads_it_strictly_with_equal_outputs(tmp_path, monkeypatch):
    torch.manual_seed(0)
    save_model(create_model("ViT-Micro-32", n_unc_layers=1), tmp_path / "model")
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


def test_its_file_loads_under_open_clip_s_own_name_as_clip_benchmark_does(tmp_path):
    torch.manual_seed(0)
    name, file = "ViT-B-32", str(tmp_path / "out" / WITHOUT_BIAS)
    ours = create_model(name, n_unc_layers=1, match="cosine").eval().requires_grad_(False)
    export_open_clip(ours, tmp_path / "out")
    theirs, _, transform = open_clip.create_model_and_transforms(name, pretrained=file, cache_dir=None)
    assert type(theirs) is open_clip.CLIP
    theirs.eval().requires_grad_(False)
    tokens = open_clip.get_tokenizer(name)(["a photo of a cat"])
    pixels = transform(Image.effect_mandelbrot((90, 70), (-2, -1.5, 1, 1.5), 50).convert("RGB"))[None]
    with torch.no_grad():
        assert torch.equal(theirs.encode_text(tokens, normalize=True), ours.encode_text(tokens).mean)
        assert torch.equal(theirs.encode_image(pixels, normalize=True), ours.encode_image(pixels).mean)
    also, _, _ = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'out'}", pretrained="", cache_dir=None)
    assert torch.equal(also.logit_scale, theirs.logit_scale)
    assert also.state_dict().keys() == theirs.state_dict().keys() | {"logit_bias"}
