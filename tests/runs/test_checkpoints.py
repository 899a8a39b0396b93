"""Checkpoints after damage and after kills; what a whole run does with them is in tests/pretrain/engine."""

import pytest

from pretrain.config import Config, Data
from probemb import UserError
from probemb.runs.checkpoints import WEIGHTS, complete_steps, find_checkpoint
from probemb.runs.folder import newest_checkpoint
from probemb.runs.output import RunOutput
from probemb.runs.starts import MAX_STARTS, refuse_idle_start
from tests.runs.test_best import save


def damage(run, step):
    path = run / "checkpoints" / f"step-{step}" / WEIGHTS
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_damaged_newer_checkpoints_do_not_push_out_new_ones(tmp_path):
    """Their sizes are right, so pruning would take them for the newest."""
    for step in (2, 4, 5):
        save(tmp_path, step)
    damage(tmp_path, 4)
    damage(tmp_path, 5)
    assert find_checkpoint(tmp_path, verify=True).name == "step-2"
    output = RunOutput(Config(data=Data(train="x"), out=str(tmp_path), keep_checkpoints=1), 2, 9)
    try:
        assert complete_steps(tmp_path) == [2]
        save(tmp_path, 3)
        output.prune()
    finally:
        output.close()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-3"]


def test_a_kill_between_the_renames_of_a_replacement_loses_nothing(tmp_path):
    save(tmp_path, 20)
    folder = tmp_path / "checkpoints"
    (folder / "step-20").rename(folder / ".step-20.old")
    (folder / ".step-20.partial").mkdir()
    assert newest_checkpoint(tmp_path, True, Config) == folder / "step-20"
    assert complete_steps(tmp_path) == [20]


def test_the_third_start_that_finishes_nothing_is_the_last(tmp_path):
    file = tmp_path / "starts"
    for _ in range(MAX_STARTS - 1):
        refuse_idle_start(file, 4, 4, "a shard", "Give it more time.")
    refuse_idle_start(file, 4, 5, "a shard", "Give it more time.")
    for _ in range(MAX_STARTS - 1):
        refuse_idle_start(file, 5, 5, "a shard", "Give it more time.")
    with pytest.raises(UserError, match="3 starts in a row were asked to stop before they had finished a shard"):
        refuse_idle_start(file, 5, 5, "a shard", "Give it more time.")
    refuse_idle_start(file, 5, 5, "a shard", "Give it more time.")  # counted anew
