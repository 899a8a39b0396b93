"""Locks, patch dropout, masked copies, layer-wise rates, augmentation and a schedule in one run, as it is typed."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.pretrain.test_run import metrics, scenes, start  # noqa: F401

RECIPE = {
    "objective": "prolip",
    "loss.masked_inclusion": 0.001,
    "model.lock_image": "true",
    "model.unlocked_image_groups": 2,
    "model.patch_dropout": 0.5,
    "optimizer.layer_decay": 0.5,
    "optimizer.schedule": "wsd",
    "optimizer.cooldown_samples": 32,
    "data.augmentation.scale": "[0.4, 1.0]",
    "data.augmentation.color_jitter": "[0.32, 0.32, 0.32, 0.08]",
    "data.augmentation.color_jitter_prob": 0.8,
}


def weights(run: Path) -> dict:
    return load_file(run / "model" / "model.safetensors")


def test_a_run_with_all_of_it_resumes_bit_for_bit(scenes, tmp_path):  # noqa: F811
    options = {"data.train": scenes / "train"}
    first = start({**options, "objective": "prolip", "samples": 32, "out": tmp_path / "first"})
    assert first.returncode == 0, first.stderr
    options |= {**RECIPE, "model.pretrained": tmp_path / "first"}
    whole = start({**options, "out": tmp_path / "whole"})
    assert whole.returncode == 0, whole.stderr
    assert "M trained)" in whole.stdout
    parted = {**options, "out": tmp_path / "parted"}
    for more in ({"stop-at-step": 3}, {"resume": "true"}):
        assert start({**parted, **more}).returncode == 0
    before, once, twice = (weights(tmp_path / name) for name in ("first", "whole", "parted"))
    moved = {name for name, x in once.items() if not x.equal(before[name])}
    assert all(x.equal(twice[name]) for name, x in once.items())
    assert "visual.transformer.resblocks.0.ln_1.weight" not in moved
    assert {"visual.transformer.resblocks.1.ln_1.weight", "text.transformer.resblocks.0.ln_1.weight"} <= moved
    rates = {row["samples"]: row["lr"] for row in metrics(tmp_path / "whole") if "lr" in row}
    assert rates[32] == rates[64] == 5e-4
    assert rates[96] == pytest.approx(0)
    assert all("image_inclusion" in row for row in metrics(tmp_path / "whole") if "loss" in row)
