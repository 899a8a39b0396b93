"""Folders in open_clip's layout: as models, as starting points, and everything that can be wrong with them."""

import json
import pickle

import open_clip
import pytest
import torch
from safetensors.torch import load_file

from probemb.errors import UserError
from probemb.models import create_model, load_model
from probemb.models.formats import CONFIG, WEIGHTS, export_open_clip

NAME = "ViT-Micro-32"
STD = [0.5, 0.4, 0.3]


@pytest.fixture
def folder(tmp_path):
    """An exported model of random weights, with preprocessing of its own."""
    torch.manual_seed(0)
    export_open_clip(create_model(NAME, n_unc_layers=1), tmp_path / "x")
    change(tmp_path / "x", lambda about: about["preprocess_cfg"].update(std=STD))
    return tmp_path / "x"


def change(folder, edit):
    about = json.loads((folder / CONFIG).read_text())
    edit(about)
    (folder / CONFIG).write_text(json.dumps(about))


def pickled(folder):
    torch.save(load_file(folder / WEIGHTS[0]), folder / WEIGHTS[1])
    (folder / WEIGHTS[0]).unlink()


def inputs(size=32):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, 3, size, size, generator=generator), torch.randint(1, 49408, (3, 16), generator=generator)


def means(model):
    images, tokens = inputs()
    model.eval().requires_grad_(False)
    return torch.cat([model.encode_image(images).mean, model.encode_text(tokens).mean])


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_a_folder_is_a_point_model_with_open_clips_outputs(folder, form):
    theirs = open_clip.create_model(f"local-dir:{folder}").eval().requires_grad_(False)
    if form == "bin":
        pickled(folder)
    weights = next(name for name in WEIGHTS if name.endswith(form))
    images, tokens = inputs()
    expected = torch.cat([theirs.encode_image(images, normalize=True), theirs.encode_text(tokens, normalize=True)])
    for source in (folder, folder / weights):
        loaded = load_model(source)
        assert torch.equal(means(loaded.model), expected)
        assert not loaded.model.probabilistic
        assert loaded.model.config["preprocess"]["std"] == STD
        assert loaded.model.logit_scale.item() == pytest.approx(theirs.logit_scale.item())


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
    with pytest.raises(UserError, match=f"There is no model at .*{CONFIG} with {WEIGHTS[0]} or {WEIGHTS[1]}"):
        load_model(folder)
