"""Folders in open_clip's layout, written by tools.export: open_clip's reader and this project's give the same model."""

import json
import pickle

import open_clip
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from probemb.errors import UserError
from probemb.models import create_model, load_model, save_model
from probemb.models.formats import CONFIG, WEIGHTS, WITHOUT_BIAS, export_open_clip
from probemb.models.weights import tensors_sha256
from tools.export import main

NAME, STD = "ViT-Micro-32", [0.5, 0.4, 0.3]
PICTURE = Image.effect_mandelbrot((90, 70), (-2, -1.5, 1, 1.5), 50).convert("RGB")
TEXTS = ["a photo of a cat", "two dogs"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An exported model of random weights, with preprocessing of its own."""
    torch.manual_seed(0)
    save_model(create_model(NAME, n_unc_layers=1), tmp_path / "model")
    words = ["export", "--model", str(tmp_path / "model"), "--out", str(tmp_path / "x")]
    monkeypatch.setattr("sys.argv", words)
    assert main() == 0
    about = json.loads((tmp_path / "x" / CONFIG).read_text())
    assert about["tensors_sha256"] == tensors_sha256(load_file(tmp_path / "x" / WEIGHTS[0]))
    about["preprocess_cfg"]["std"] = STD
    (tmp_path / "x" / CONFIG).write_text(json.dumps(about))
    return tmp_path / "x"


@torch.no_grad()
def check(theirs, ours, pixels, tokens):
    for model in (theirs, ours):  # attention rounds otherwise where weights require a gradient
        model.eval().requires_grad_(False)
    assert torch.equal(theirs.encode_text(tokens, normalize=True), ours.encode_text(tokens).mean)
    assert torch.equal(theirs.encode_image(pixels, normalize=True), ours.encode_image(pixels).mean)


def test_both_readers_give_the_means_of_the_exported_model(folder):
    theirs, _, transform = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    tokens = open_clip.get_tokenizer(f"local-dir:{folder}")(TEXTS)
    pixels = transform(PICTURE)[None]
    check(theirs, load_model(folder.parent / "model").model, pixels, tokens)
    for source in (folder, folder / WEIGHTS[0]):
        ours, tokenizer, transforms = load_model(source)
        check(theirs, ours, pixels, tokens)
        assert not ours.probabilistic
        assert ours.config["preprocess"]["std"] == STD
        assert torch.equal(ours.normalized(transforms.evaluate(PICTURE)[None]), pixels)
        assert torch.equal(tokenizer(TEXTS), tokens)
        assert theirs.logit_scale.item() == pytest.approx(ours.logit_scale.item())


def test_its_file_loads_under_open_clip_s_own_name_as_clip_benchmark_does(tmp_path):
    torch.manual_seed(0)
    name, file = "ViT-B-32", str(tmp_path / "out" / WITHOUT_BIAS)
    ours = create_model(name, n_unc_layers=1, match="cosine")
    export_open_clip(ours, tmp_path / "out")
    theirs, _, transform = open_clip.create_model_and_transforms(name, pretrained=file, cache_dir=None)
    assert type(theirs) is open_clip.CLIP
    check(theirs, ours, transform(PICTURE)[None], open_clip.get_tokenizer(name)(TEXTS))
    also, _, _ = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'out'}", pretrained="", cache_dir=None)
    assert torch.equal(also.logit_scale, theirs.logit_scale)
    assert also.state_dict().keys() == theirs.state_dict().keys() | {"logit_bias"}


def test_weights_between_two_models(tmp_path, monkeypatch):
    """At the ends either model bit for bit, between them the mean of their weights; other branches are refused, and
    a point model has none."""
    for seed, name in enumerate(("a", "b", "other")):
        torch.manual_seed(seed)
        save_model(create_model(NAME, n_unc_layers=1 + (name == "other")), tmp_path / name)

    save_model(create_model(NAME, probabilistic=False), tmp_path / "point")

    def between(second, weight, first="a"):
        out = tmp_path / f"{first}-{second}-{weight}"
        words = ["export", "--interpolate", str(tmp_path / first), str(tmp_path / second), "--out", str(out)]
        monkeypatch.setattr("sys.argv", [*words, "--weight", str(weight)])
        assert main() == 0
        return load_model(out).model.state_dict()

    a, b = (load_model(tmp_path / name).model.state_dict() for name in "ab")
    for weight in (0.0, 0.25, 1.0):
        for name, tensor in between("b", weight).items():
            assert torch.equal(tensor, a[name] + weight * (b[name] - a[name]) if weight < 0.5 else b[name])
    point = load_model(tmp_path / "point").model.state_dict()
    for name, tensor in between("b", 0.0, "point").items():
        assert torch.equal(tensor, point.get(name, b[name]))
    with pytest.raises(UserError, match=r"not of one architecture \(n_unc_layers: 1 and 2\)"):
        between("other", 0.5)


def test_damaged_and_hostile_weights_are_refused(folder):
    state = load_file(folder / WEIGHTS[0])
    state["visual.proj"][0, 0] += 1
    torch.save(state, folder / WEIGHTS[1])
    (folder / WEIGHTS[0]).unlink()
    with pytest.raises(UserError, match="their SHA-256 differs"):
        load_model(folder)

    class Evil:
        def __reduce__(self):
            return exec, ("raise SystemExit('a pickle was loaded')",)

    (folder / WEIGHTS[1]).write_bytes(pickle.dumps({"x": Evil()}, protocol=2))
    for read in (load_model, lambda path: create_model(NAME, pretrained=str(path))):
        with pytest.raises(UserError, match="cannot be read as model weights"):
            read(folder)
    (folder / WEIGHTS[1]).unlink()
    with pytest.raises(UserError, match="Did you mean 'ViT-Micro-32'"):
        load_model("ViT-Micro32:weights.pt")
    with pytest.raises(UserError, match=f"There is no model at .*{CONFIG} with {WEIGHTS[0]} or {WEIGHTS[1]}"):
        load_model(folder)
