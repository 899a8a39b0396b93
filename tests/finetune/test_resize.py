"""`data.resize` of a run: kept, refused where it changes, and the floats of earlier runs to the last bit."""

import json

import pytest
import torch

from finetune.loading.rows import Rows
from probemb.errors import UserError
from probemb.runs.checkpoints import sha256_of
from tests.finetune.runs import checkpoint, metrics, run_here, saved

MIXED = {"mix.ratio": 0.5, "augment.cutout": 0.2, "swa-epochs": 0}


def forget(run, step):
    """Make a checkpoint that of a run from before there was a choice."""
    path = run / "checkpoints" / f"step-{step}" / "state.json"
    content = json.loads(path.read_text())
    assert content["state"]["config"]["data"].pop("resize") == "pil"
    content.pop("sha256")
    path.write_text(json.dumps({**content, "sha256": sha256_of(content)}))


def test_an_earlier_run_of_floats_resumes_exactly(scenes, tmp_path, monkeypatch):
    """It read PIL's pixels normalised in the loader; the rest of it reads uint8, in two workers."""
    options = {"data.path": scenes, "data.resize": "pil", **MIXED}
    whole = Rows.image

    def floats(rows, *place, **box):
        pixels = whole(rows, *place, **box)
        mean, std = ((torch.tensor(v)[:, None, None]) for v in CLIPS)
        return (pixels.float() / 255 - mean) / std

    with monkeypatch.context() as patch:
        patch.setattr(Rows, "image", floats)
        assert run_here({**options, "out": tmp_path / "floats"}) == 0
        assert run_here({**options, "out": tmp_path / "run", "stop-after-epochs": 1}) == 0
    forget(tmp_path / "run", 3)
    with pytest.raises(UserError, match=r"data\.resize: pil -> tensor"):
        run_here({**options, "data.resize": "tensor", "out": tmp_path / "run"}, "--resume")
    assert run_here({**options, "data.workers": 2, "out": tmp_path / "run"}, "--resume") == 0
    assert metrics(tmp_path / "run") == metrics(tmp_path / "floats")
    assert checkpoint(tmp_path / "run", 6) == checkpoint(tmp_path / "floats", 6)
    ours, theirs = saved(tmp_path / "run"), saved(tmp_path / "floats")
    assert all(torch.equal(ours[key], value) for key, value in theirs.items())


def test_torchs_pixels_train_another_model_and_nearly_the_same(scenes, tmp_path):
    """And validation reads them too: its figures are those of the uint8 that training sees."""
    options = {"data.path": scenes, **MIXED}
    for resize in ("pil", "tensor"):
        assert run_here({**options, "data.resize": resize, "out": tmp_path / resize}) == 0
    assert run_here({**options, "out": tmp_path / "default"}) == 0
    pil, tensor, default = (metrics(tmp_path / name) for name in ("pil", "tensor", "default"))
    assert default == tensor != pil
    for ours, theirs in zip(tensor, pil, strict=True):
        if "loss" in ours:
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.02)


CLIPS = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
