"""Copies of a run's checkpoints in a folder, through the processes that also write to object stores."""

import json
import shutil
import time

import pytest

from probemb import UserError
from probemb.runs.best import Best
from probemb.runs.checkpoints import WEIGHTS, complete_steps, find_checkpoint
from probemb.runs.copies.copier import Copier
from probemb.runs.copies.start import fetch_newest, lacks_fetch
from probemb.runs.copies.store import CopyFailed, Store
from tests.runs.test_folder import save


def copier(run, store, step=0, keep=2, keep_every=0, best=()):
    return Copier(run, store, step, keep, keep_every, lambda: frozenset(best), pauses=(0.1,))


def brought(run, store, **options):
    one = copier(run, store, **options)
    one.wake()
    one.close(60)
    return store.steps()


@pytest.fixture
def run(tmp_path):
    for step in (2, 4, 6, 8):
        save(tmp_path / "run", step)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 8}\n')
    Best("rsum", values={2: 1.0, 4: 2.0}).write(tmp_path / "run")
    return tmp_path / "run"


def test_a_copy_has_what_a_resumption_needs_and_an_empty_folder_gets_it(run, tmp_path):
    store, told = Store(f"file://{tmp_path}/copy"), []
    assert store.steps() == []
    assert brought(run, store, best={4}) == [8, 4]
    for name in ("checkpoints/step-8", "checkpoints/step-4"):
        for file in (run / name).iterdir():
            assert (tmp_path / "copy" / name / file.name).read_bytes() == file.read_bytes()
    other = tmp_path / "elsewhere" / "run"
    fetch_newest(store, other, told.append)
    assert told == [f"fetched step 8 from {store}"]
    assert complete_steps(other) == [8, 4]
    assert find_checkpoint(other, verify=True).name == "step-8"
    assert sorted(path.name for path in other.iterdir()) == ["best.json", "checkpoints", "metrics.jsonl"]
    assert sorted(path.name for path in (other / "checkpoints").iterdir()) == [".fetching", "step-4", "step-8"]
    fetch_newest(store, other, told.append)
    assert len(told) == 1


def test_a_copy_keeps_as_many_as_the_run_folder(run, tmp_path):
    store = Store(str(tmp_path / "copy"))
    assert brought(run, store, keep_every=4) == [8, 4]
    save(run, 10)
    assert brought(run, store, step=8, keep_every=4) == [10, 8, 4]
    save(run, 14)
    save(run, 18)
    assert brought(run, store, step=10, keep=1, best={10}) == [18, 10]


def test_an_interrupted_copy_is_not_complete_and_is_made_again(run, tmp_path):
    store = Store(str(tmp_path / "copy"))
    assert brought(run, store) == [8]
    state = tmp_path / "copy" / "checkpoints" / "step-8" / "state.json"
    state.unlink()
    assert store.steps() == []
    told = []
    fetch_newest(store, tmp_path / "other", told.append)
    assert (told, (tmp_path / "other").exists()) == ([], False)
    assert brought(run, store, step=8) == [8]
    assert json.loads(state.read_text())["step"] == 8


@pytest.mark.slow
def test_damage_in_a_copy_is_noticed(run, tmp_path):
    store, told, other = Store(str(tmp_path / "copy")), [], tmp_path / "other"
    for step in (6, 8):
        store.put(run / "checkpoints" / f"step-{step}")
    for step in (8, 6):
        weights = tmp_path / "copy" / "checkpoints" / f"step-{step}" / WEIGHTS
        weights.write_bytes(weights.read_bytes()[:-1] + b"x")
        if step == 8:
            fetch_newest(store, other, told.append)
            assert complete_steps(other) == [6]
            assert "the contents of weights.safetensors are not what was written" in told[0]
            shutil.rmtree(other)
    with pytest.raises(UserError, match=r"^Every checkpoint in .*copy is damaged"):
        fetch_newest(store, other, told.append)
    assert not other.exists()


@pytest.mark.slow
def test_a_failure_is_told_and_tried_again(run, tmp_path, capfd):
    (tmp_path / "copy").write_text("a file where the folder should be")
    store = Store(str(tmp_path / "copy"))
    one = copier(run, store)
    one.wake()
    said, until = "", time.monotonic() + 60
    while said.count("tried again in 0.1 s") < 2 and time.monotonic() < until:
        time.sleep(0.1)
        said += capfd.readouterr().out
    assert "failed (exit code 1: NotADirectoryError" in said or "failed (exit code 1: FileExistsError" in said
    (tmp_path / "copy").unlink()
    one.close(60)
    assert store.steps() == [8]
    assert "step 8 is complete" in capfd.readouterr().out


def test_a_fetch_that_failed_is_completed_by_the_next(run, tmp_path, monkeypatch):
    store, other = Store(str(tmp_path / "copy")), tmp_path / "other"
    assert brought(run, store, best={4}) == [8, 4]

    def broken(*_):
        raise CopyFailed("503")

    get = Store.get
    with monkeypatch.context() as patch:
        patch.setattr(Store, "get", lambda self, step, *more: broken() if step == 4 else get(self, step, *more))
        with pytest.raises(UserError, match=r"cannot be fetched \(503\)"):
            fetch_newest(store, other, lambda line: None)
    assert lacks_fetch(other)
    fetch_newest(store, other, lambda line: None)
    assert not lacks_fetch(other)
    assert complete_steps(other) == [8, 4]
    assert (other / "metrics.jsonl").read_text() == '{"step": 8}\n'
