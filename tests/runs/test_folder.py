"""The folder of a run: its checkpoints, the best of them, its lock, and what is logged."""

import threading

import pytest
import torch

from pretrain.config import Config, Data
from probemb.errors import UserError
from probemb.runs import lock
from probemb.runs.checkpoints import (
    BEST,
    OPTIMIZER,
    RANDOM,
    WEIGHTS,
    Best,
    Snapshot,
    best_until,
    complete_steps,
    find_checkpoint,
    prune,
)
from probemb.runs.folder import RunOutput, newest_checkpoint
from probemb.runs.lock import MAX_STARTS, RunLock, count_start, new_folder, refuse_locked
from probemb.runs.log import Window, append_line


def save(run, step):
    tensors = {name: {"x": torch.full((3,), float(step))} for name in (WEIGHTS, OPTIMIZER, RANDOM)}
    return Snapshot(tensors, {"step": step, "state": {}}).write(run)


def test_the_best_is_the_first_of_the_largest_or_smallest():
    values = [float("nan"), 3.0, 1.0, 3.0, 5.0, float("nan"), 4.0]
    highest, lowest = Best("rsum"), Best("validation_loss")
    assert [highest.add(step, value) for step, value in enumerate(values)] == [0, 1, 0, 0, 1, 0, 0]
    assert [lowest.add(step, value) for step, value in enumerate(values)] == [0, 1, 1, 0, 0, 0, 0]
    assert (highest.step, lowest.step, Best("rsum").step) == (4, 2, None)


def test_a_resumed_run_knows_the_best_that_it_still_has(tmp_path):
    assert best_until(tmp_path, 9) is None
    save(tmp_path, 4)
    Best("rsum", 4, 2.0).write(tmp_path)
    assert best_until(tmp_path, 4) == best_until(tmp_path, 9) == Best("rsum", 4, 2.0)
    assert best_until(tmp_path, 3) is None
    (tmp_path / "checkpoints" / "step-4" / WEIGHTS).write_bytes(b"")
    assert best_until(tmp_path, 9) is None
    for damaged in ("", "{}", "[1]", '{"metric": "rsum", "step": "x"}'):
        (tmp_path / BEST).write_text(damaged)
        assert best_until(tmp_path, 9) is None


def test_pruning_leaves_the_best_beside_the_newest(tmp_path):
    for step in range(2, 12, 2):
        save(tmp_path, step)
    prune(tmp_path, keep=2, keep_every=0, also={4, 10})
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-10", "step-4", "step-8"]
    assert find_checkpoint(tmp_path).name == "step-10"


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
    assert find_checkpoint(tmp_path).name == "step-2"
    output = RunOutput(Config(data=Data(train="x"), out=str(tmp_path), keep_checkpoints=1), 2, 9)
    try:
        assert complete_steps(tmp_path) == [2]
        save(tmp_path, 3)
        output.prune()
    finally:
        output.close()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-3"]
    damage(tmp_path, 3)
    with pytest.raises(UserError, match=r"Every checkpoint in .* is damaged"):
        find_checkpoint(tmp_path)


def test_a_kill_between_the_renames_of_a_replacement_loses_nothing(tmp_path):
    save(tmp_path, 20)
    folder = tmp_path / "checkpoints"
    (folder / "step-20").rename(folder / ".step-20.old")
    (folder / ".step-20.partial").mkdir()
    assert newest_checkpoint(tmp_path, True) == folder / "step-20"
    assert complete_steps(tmp_path) == [20]


def test_the_third_start_that_finishes_nothing_is_the_last(tmp_path):
    file = tmp_path / "starts"
    ends = [(4, 4), (4, 4), (4, 5), (5, 5), (5, 5), (5, 5), (5, 5)]  # positions at the start and at the end
    assert [count_start(file, *positions) for positions in ends] == [1, 2, 0, 1, 2, MAX_STARTS, 1]


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(lock, "PATIENCE", 0.1)


def test_a_requeued_job_waits_until_its_earlier_start_has_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    held, told = RunLock(tmp_path), []
    end = threading.Timer(1.0, held.close)
    end.start()
    refuse_locked(tmp_path, minutes=1, tell=told.append)
    end.join()
    assert len(told) == 1
    assert "is in use: process" in told[0]
    assert "waiting up to 1 minutes (engine.timeout)" in told[0]


def test_a_first_start_is_refused_at_once(tmp_path, monkeypatch):
    """Another job writes the folder, and may do so for days."""
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    held, told = RunLock(tmp_path), []
    with pytest.raises(UserError, match="is in use"):
        refuse_locked(tmp_path, minutes=1, tell=told.append)
    assert not told
    held.close()


def test_a_folder_is_made_by_one_job_at_a_time(tmp_path):
    out = tmp_path / "out"
    with new_folder(out) as folder:
        (folder / "x").touch()
        with pytest.raises(UserError, match="is in use"), new_folder(out):
            pass
        assert (folder / "x").exists()
    assert [path.name for path in (*tmp_path.iterdir(), *out.iterdir())] == ["out", "x"]


def test_a_failed_login_at_wandb_leaves_no_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    config = Config(out=str(tmp_path / "run"), wandb="project")
    with pytest.raises(UserError, match="wandb login"):
        RunOutput(config, 0, 10)
    assert newest_checkpoint(config.out, False) is None


def test_every_file_that_cannot_be_written_is_told_once(tmp_path, capsys):
    for name in ("one", "one", "two"):
        append_line(tmp_path / name / "metrics.jsonl", {})
    told = capsys.readouterr().err.splitlines()
    assert [line.split("/")[-2] for line in told] == ["one", "two"]


def test_means_between_two_log_lines_leave_out_skipped_steps_which_count_for_the_speed():
    window = Window("pairs", lambda: 0.0)
    window.add({"loss": torch.tensor(1.0), "clean": 0.5})
    for value in (4.0, 4.0):
        window.add({"loss": torch.tensor(value)})
    window.add(None)
    values = window.read(batch_size=8, steps_left=3)
    window.restart()
    assert (values["loss"], values["clean"]) == (3.0, 0.5)
    assert values["pairs_per_second"] > 0
    assert 10 * 2**20 < values["memory"] < 2**40
    window.add(None)
    assert set(window.read(batch_size=8, steps_left=1)) == {"data_wait", "pairs_per_second", "eta", "memory"}
