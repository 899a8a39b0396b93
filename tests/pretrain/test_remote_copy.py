"""A run with a remote copy, as the command is typed."""

import shutil

import torch

from probemb import load_model
from probemb.runs.copies.store import Store
from tests.pretrain.test_run import metrics, refused, scenes, start  # noqa: F401


def test_a_run_continues_from_its_copy_bit_for_bit(scenes, tmp_path):  # noqa: F811
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


def test_models_that_a_copy_does_not_hold_are_made_of_its_checkpoints(scenes, tmp_path):  # noqa: F811
    """model-best/ when a run resumes in an empty folder, and model/ too when nothing is left to do.

    Among two images all are found within ten, so the first evaluation is the best.
    """
    options = {"data.train": scenes / "train", "out": tmp_path / "run", "remote-copy": tmp_path / "copy"}
    options |= {"evaluate.pairs": scenes / "val", "evaluate.best": "i2t_r10", "evaluate.every_samples": 16}
    options |= {"evaluate.max_images": 2, "ema.half_life_samples": 32, "keep-checkpoints": 1, "samples": 48}

    def models_of(said, **more):
        done = start({**options, **more}, "--resume")
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
        assert (tmp_path / "copy" / "metrics.jsonl").read_bytes() == (tmp_path / "run" / "metrics.jsonl").read_bytes()
        found = [load_model(tmp_path / "run" / name).model.state_dict() for name in ("model", "model-best")]
        shutil.rmtree(tmp_path / "run")
        return found

    def same(a, b):
        return a.keys() == b.keys() and all(torch.equal(tensor, b[key]) for key, tensor in a.items())

    half = models_of("best    step 1", **{"stop-at-step": 2})
    assert not same(*half)
    whole = models_of("fetched step 2")
    assert same(whole[1], half[1])
    finished = models_of("is finished: 3 of 3 steps")
    assert all(map(same, finished, whole))
