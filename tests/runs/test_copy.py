"""Copies of a run's checkpoints in a folder, through the file systems that also write to object stores."""

import json
import shutil
import threading
import time

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from probemb import UserError
from probemb.runs.checkpoints import WEIGHTS, Best, complete_steps, find_checkpoint
from probemb.runs.copy import Copier, Copy, check_copy, fetch_newest
from tests.runs.test_folder import save


@pytest.fixture
def run(tmp_path):
    for step in (2, 4, 6, 8):
        save(tmp_path / "run", step)
    (tmp_path / "run" / "config.yaml").write_text("out: x\n")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 8}\n')
    Best("rsum", 4, 2.0).write(tmp_path / "run")
    return tmp_path / "run"


def copied(run, place, keep=2, keep_every=0, best=()):
    copier = Copier(run, place, keep, keep_every, lambda: frozenset(best))
    copier.wake()
    copier.close(60)
    return place.steps()


def test_a_copy_has_what_a_resumption_needs_and_an_empty_folder_gets_it(run, tmp_path):
    place, told = Copy(f"file://{tmp_path}/copy"), []
    check_copy(place, run, None, told.append)
    assert copied(run, place, best={4}) == [8, 4]
    for name in ("checkpoints/step-8", "checkpoints/step-4"):
        for file in (run / name).iterdir():
            assert (tmp_path / "copy" / name / file.name).read_bytes() == file.read_bytes()
    other = tmp_path / "elsewhere" / "run"
    fetch_newest(place, other, told.append)
    fetch_newest(place, other, told.append)
    assert told == [f"fetched step 8 from {place}"]
    assert complete_steps(other) == [8, 4]
    assert find_checkpoint(other).name == "step-8"
    assert sorted(path.name for path in other.iterdir()) == ["best.json", "checkpoints", "config.yaml", "metrics.jsonl"]


def test_a_copy_of_another_run_is_refused(run, tmp_path):
    place = Copy(str(tmp_path / "copy"))
    assert copied(run, place) == [8]
    for step, message in ((None, "already holds a run"), (6, "has step 8, and the run would resume from step 6")):
        with pytest.raises(UserError, match=message):
            check_copy(place, run, step, print)
    with pytest.raises(UserError, match="is the run folder"):
        check_copy(Copy(f"file://{run}"), run, None, print)
    with pytest.raises(UserError, match="cannot be reached or written"):
        check_copy(Copy("s3x://user:secret@bucket"), run, None, print)


def test_a_copy_keeps_as_many_as_the_run_folder(run, tmp_path):
    place = Copy(str(tmp_path / "copy"))
    assert copied(run, place, keep_every=4) == [8, 4]
    save(run, 10)
    assert copied(run, place, keep_every=4) == [10, 8, 4]
    save(run, 14)
    save(run, 18)
    assert copied(run, place, keep=1, best={10}) == [18, 10]


def test_an_interrupted_copy_is_not_complete_and_is_made_again(run, tmp_path):
    place = Copy(str(tmp_path / "copy"))
    assert copied(run, place) == [8]
    state = tmp_path / "copy" / "checkpoints" / "step-8" / "state.json"
    state.unlink()
    assert place.steps() == []
    fetch_newest(place, tmp_path / "other", print)
    assert not (tmp_path / "other").exists()
    assert copied(run, place) == [8]
    assert json.loads(state.read_text())["step"] == 8


def test_damage_in_a_copy_is_found_on_the_way_back(run, tmp_path):
    place, told, other = Copy(str(tmp_path / "copy")), [], tmp_path / "other"
    for step in (6, 8):
        place.put_step(step, run)
    for step in (8, 6):
        weights = tmp_path / "copy" / "checkpoints" / f"step-{step}" / WEIGHTS
        weights.write_bytes(weights.read_bytes()[:-1] + b"x")
        if step == 8:
            fetch_newest(place, other, told.append)
            assert complete_steps(other) == [6]
            assert "the contents of weights.safetensors are not what was written" in told[0]
            shutil.rmtree(other)
    with pytest.raises(UserError, match=r"^Every checkpoint in .*copy is damaged"):
        fetch_newest(place, other, told.append)
    assert complete_steps(other) == []


def test_a_failure_is_told_and_tried_again(run, tmp_path, capfd):
    (tmp_path / "copy").write_text("a file where the folder should be")
    place = Copy(str(tmp_path / "copy"))
    copier = Copier(run, place, 2, 0, frozenset)
    copier.close(60)
    said = capfd.readouterr().out
    assert "failed (NotADirectoryError" in said or "failed (FileExistsError" in said
    assert "the next checkpoint, or --resume, tries again" in said
    (tmp_path / "copy").unlink()
    copier.close(60)
    assert place.steps() == [8]


class Hanging(LocalFileSystem):
    """A server that does not answer until `answers` is set."""

    protocol, answers = "hanging", threading.Event()

    def find(self, *args, **more):
        self.answers.wait(1.0)
        return super().find(*args, **more)

    def put_file(self, *args, **more):
        self.answers.wait()
        super().put_file(*args, **more)


def test_a_server_that_hangs_holds_nobody_up(run, tmp_path, capfd, monkeypatch):
    fsspec.register_implementation("hanging", Hanging, clobber=True)
    place, began = Copy(f"hanging://{tmp_path}/copy"), time.monotonic()
    copier = Copier(run, place, 2, 0, frozenset)
    copier.close(0.1)
    assert time.monotonic() - began < 5
    with monkeypatch.context() as patch:
        patch.setattr("probemb.runs.copy.PATIENCE", 0.1)
        with pytest.raises(UserError, match=r"cannot be reached or written \(TimeoutError: no answer\)"):
            check_copy(place, run, None, print)
    assert "not up to date after 0 s; --resume completes it" in capfd.readouterr().out
    Hanging.answers.set()
    assert copied(run, place) == [8]
