"""The best step of a run, and what is kept of it."""

import torch

from probemb.runs.best import NAME, Best, read_best
from probemb.runs.checkpoints import OPTIMIZER, RANDOM, WEIGHTS, Snapshot, find_checkpoint, prune


def save(run, step):
    tensors = {name: {"x": torch.full((3,), float(step))} for name in (WEIGHTS, OPTIMIZER, RANDOM)}
    return Snapshot(tensors, {"step": step, "state": {}}).write(run)


def test_the_best_is_the_first_of_the_largest_or_smallest():
    values = [float("nan"), 3.0, 1.0, 3.0, 5.0, float("nan"), 4.0]
    highest, lowest = Best("rsum"), Best("validation_loss", lower=True)
    assert [highest.add(step, value) for step, value in enumerate(values)] == [0, 1, 0, 0, 1, 0, 0]
    assert [lowest.add(step, value) for step, value in enumerate(values)] == [0, 1, 1, 0, 0, 0, 0]
    assert (highest.step, lowest.step, Best("rsum").step) == (4, 2, None)


def test_a_resumed_run_knows_the_best_that_it_still_has(tmp_path):
    assert read_best(tmp_path, 9) is None
    for step in (2, 4, 6):
        save(tmp_path, step)
    Best("rsum", values={2: 1.0, 3: 1.5, 4: 2.0, 6: 3.0}).write(tmp_path)
    assert read_best(tmp_path, 9) == Best("rsum", values={2: 1.0, 4: 2.0, 6: 3.0})  # 3 was never saved
    assert read_best(tmp_path, 5).step == 4
    (tmp_path / "checkpoints" / "step-4" / WEIGHTS).write_bytes(b"")
    assert read_best(tmp_path, 5).step == 2
    assert read_best(tmp_path, 1) is None
    for damaged in ("", "{}", "[1]", '{"metric": "rsum", "lower_is_better": false, "steps": [{"step": "x"}]}'):
        (tmp_path / NAME).write_text(damaged)
        assert read_best(tmp_path, 9) is None


def test_pruning_leaves_the_best_beside_the_newest(tmp_path):
    for step in range(2, 12, 2):
        save(tmp_path, step)
    prune(tmp_path, keep=2, keep_every=0, also={4, 10})
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-10", "step-4", "step-8"]
    assert find_checkpoint(tmp_path).name == "step-10"
