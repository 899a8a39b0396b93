"""Saving, loading, and everything that can be wrong with a path, a file or a hub name."""

import json
import os

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from probemb.errors import UserError
from probemb.models import create_model, load_model, save_model
from probemb.models.formats import export_open_clip
from probemb.models.weights import load_strictly
from tests.webserver import serve

NAME = "ViT-Micro-32"


def model_with(seed=0, **options):
    torch.manual_seed(seed)
    model = create_model(NAME, **options)
    with torch.no_grad():
        model.scale.fill_(3.25)
    return model


def same_weights(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_a_failed_save_leaves_the_old_model(tmp_path, monkeypatch):
    model = model_with()
    save_model(model, tmp_path)

    def full_disk(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(UserError, match="No space left"):
        save_model(model_with(seed=1), tmp_path)
    assert same_weights(load_model(tmp_path).model, model)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]


def test_paths_without_a_model(tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"no model at runs/absent "):  # not looked for on the hub
        load_model("runs/absent")


@pytest.mark.parametrize(
    ("part", "wrong", "why"),
    [
        ("architecture", {"text_cfg": None}, "."),
        ("vision_cfg", {"unheard_of": 1}, "."),
        ("", {"embed_dim": 17}, "."),
        ("text_cfg", {"layers": 10**6}, "."),
        ("preprocess", {"std": [0.5, 0.5, float("nan")]}, "."),
        ("vision_cfg", {"image_size": 50_000, "patch_size": 1}, "numbers, far more than the weights"),
        ("", {"max_logit_scale": "high"}, "max_logit_scale is 'high'"),
        ("", {"n_embeddings": -1}, "n_embeddings is -1"),
        ("", {"log_var_start": float("nan")}, "log_var_start is nan"),
        ("", {"attention": "x"}, "attention is 'x'"),
    ],
)
def test_wrong_configurations(tmp_path, part, wrong, why):
    """None takes memory, however large a model it speaks of."""
    save_model(model_with(), tmp_path)
    save_file(load_file(tmp_path / "model.safetensors"), tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    {"": config, **config, **config["architecture"]}[part].update(wrong)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=why):
        load_model(tmp_path)


def test_weights_that_are_nan_or_infinite_are_refused_by_name(tmp_path):
    model = model_with()
    with torch.no_grad():
        model.text.ln_final.bias[3] = torch.nan
    save_model(model, tmp_path)
    with pytest.raises(UserError, match=rf"{tmp_path}.* holds weights that are NaN or Inf .*text\.ln_final\.bias"):
        load_model(tmp_path)
    whole = {**(model := model_with()).state_dict(), "text.ln_final.bias": torch.ones(32, dtype=torch.int64)}
    with pytest.raises(UserError, match=r"or no floats .*text\.ln_final\.bias"):
        load_strictly(model, whole, "a file")


def test_damaged_files(tmp_path):
    save_model(model_with(), tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        load_model(tmp_path)
    (tmp_path / "config.json").unlink()
    whole = (tmp_path / "model.safetensors").read_bytes()
    for damaged in (b"", whole[:1000], whole[:-10]):
        (tmp_path / "model.safetensors").write_bytes(damaged)
        with pytest.raises(UserError, match=r"model\.safetensors cannot be read"):
            load_model(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors", {"config": '{"a":' + "[" * 200_000})
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read"):
        load_model(tmp_path)


@pytest.mark.chaos
def test_a_flipped_bit_in_the_tensors_is_noticed(tmp_path):
    save_model(model_with(), tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for config in (True, False):  # with config.json, and with the configuration in the weights alone
        for at in (header, header + len(whole[header:]) // 2, len(whole) - 1):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(UserError, match=r"model\.safetensors is damaged: .* SHA-256 differs"):
                load_model(tmp_path)
        if config:
            (tmp_path / "config.json").unlink()
    file.write_bytes(whole)
    assert same_weights(load_model(tmp_path).model, model_with())


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The folder of a server on this machine that answers as the hub does."""
    (tmp_path / "hub").mkdir()
    with serve(tmp_path / "hub") as site:
        site.headers = {"X-Repo-Commit": "0" * 40, "X-Error-Code": "EntryNotFound"}
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "ENDPOINT", site.address)
        template = site.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield site.folder


@pytest.mark.parametrize("weights", ["open_clip_model.safetensors", "open_clip_pytorch_model.bin"])
def test_hub_name_of_a_repository_of_open_clips(tmp_path, hub, weights):
    ours = model_with(n_unc_layers=1)
    export_open_clip(ours, tmp_path / "x")
    if weights.endswith(".bin"):
        torch.save(load_file(tmp_path / "x" / "open_clip_model.safetensors"), tmp_path / "x" / weights)
        # the same weights for another library
        (hub / "config.json").write_text('{"model_type": "clip", "transformers_version": "4.30"}')
        (hub / "model.safetensors").write_text("another layout")
    for name in ("open_clip_config.json", weights):
        (tmp_path / "x" / name).rename(hub / name)
    images, tokens = torch.randn(3, 3, 32, 32), torch.randint(1, 49408, (3, 16))
    found = load_model("hf-hub:someone/CLIP").model
    started = create_model(NAME, pretrained="someone/CLIP", image_size=48)
    assert len(started.visual.positional_embedding) == 6 * 6 + 1
    for model in (found, started, ours):
        model.eval().requires_grad_(False)
    expected = ours.encode_text(tokens).mean
    assert torch.equal(found.encode_image(images).mean, ours.encode_image(images).mean)
    assert torch.equal(found.encode_text(tokens).mean, expected)
    assert torch.equal(started.encode_text(tokens).mean, expected)
