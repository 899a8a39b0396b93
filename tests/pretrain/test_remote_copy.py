"""A run with a remote copy, as the command is typed."""

import shutil

import pytest
import torch

from probemb import load_model
from probemb.runs.copies.store import Store
from tests.pretrain.test_run import metrics, refused, start


@pytest.mark.slow
def test_a_run_continues_from_its_copy_bit_for_bit(scenes, tmp_path):
    """Two ranks; the run folder is lost in between."""
    address = f"file://{tmp_path}/copy"
    options = {"data.train": scenes / "train", "remote-copy": address, "keep-checkpoints": 1}
    whole = start({"data.train": scenes / "train", "out": tmp_path / "whole"}, ranks=2)
    assert whole.returncode == 0, whole.stderr
    half = start({**options, "out": tmp_path / "half", "stop-at-step": 4}, ranks=2)
    assert half.returncode == 0, half.stderr
    assert f"remote copy {address}: step 4 is complete" in half.stdout
    assert Store(address).steps() == [4]
    again = start({**options, "out": tmp_path / "new"})
    refused(again.returncode, again.stderr, "already holds a run", "--resume")
    shutil.rmtree(tmp_path / "half")
    rest = start({**options, "out": tmp_path / "half"}, "--resume", ranks=2)
    assert rest.returncode == 0, rest.stderr
    assert rest.stdout.count(f"resume  fetched step 4 from {address}") == 1
    assert "resumed at step 4" in rest.stdout
    assert Store(address).steps() == [6]
    model, resumed = load_model(tmp_path / "whole").model, load_model(tmp_path / "half").model
    for (name, a), b in zip(model.state_dict().items(), resumed.state_dict().values()):
        assert torch.equal(a, b), name
    shutil.rmtree(tmp_path / "copy")
    again = start({**options, "out": tmp_path / "half"}, "--resume")
    assert "is finished: 6 of 6 steps" in again.stdout
    assert Store(address).steps() == [6]
    steps = [line["step"] for line in metrics(tmp_path / "half") if "loss" in line and "first_step" not in line]
    assert steps == [2, 4, 6]
