"""Copies of a run's checkpoints in a folder, through the processes that also write to object stores."""

import gc
import json
import shutil
import subprocess
import sys
import threading
import time

import pytest
from fsspec import AbstractFileSystem
from fsspec.spec import AbstractBufferedFile

from pretrain.config import Config
from probemb import UserError
from probemb.runs.best import Best
from probemb.runs.checkpoints import WEIGHTS, complete_steps, find_checkpoint
from probemb.runs.copies import worker
from probemb.runs.copies.copier import Copier
from probemb.runs.copies.start import fetch_newest, lacks_fetch, refuse_another_copy
from probemb.runs.copies.store import CopyFailed, Store, check_address
from probemb.runs.folder import newest_checkpoint, refuse_something_else
from tests.runs.test_best import save


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


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_copy_has_what_a_resumption_needs_and_an_empty_folder_gets_it(scheme, run, tmp_path):
    store, told = Store(f"{scheme}{tmp_path}/copy"), []
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


def test_a_copy_that_cannot_be_made_ends_with_a_line_and_not_with_an_error(run, tmp_path, capfd):
    (tmp_path / "copy").write_text("")
    one = copier(run, Store(str(tmp_path / "copy")))
    one.wake()
    one.close(60)
    assert "not up to date" in capfd.readouterr().out.splitlines()[-1]


def test_a_silent_server_is_given_up(tmp_path, monkeypatch):
    silent = tmp_path / "worker.py"
    silent.write_text("import time; time.sleep(60)")
    monkeypatch.setattr("probemb.runs.copies.store._WORKER", silent)
    began = time.monotonic()
    with pytest.raises(CopyFailed, match="no sign of life in 1 s"):
        Store(str(tmp_path), silence=1.0).steps()
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("fails", ["the best", "the small files"])
def test_a_fetch_that_failed_is_completed_by_the_next(run, tmp_path, monkeypatch, fails):
    store, other = Store(str(tmp_path / "copy")), tmp_path / "other"
    assert brought(run, store, best={4}) == [8, 4]

    def broken(*_):
        raise CopyFailed("503")

    get = Store.get
    with monkeypatch.context() as patch:
        if fails == "the best":
            patch.setattr(Store, "get", lambda self, step, *more: broken() if step == 4 else get(self, step, *more))
        else:
            patch.setattr(Store, "get_small", broken)
        with pytest.raises(UserError, match=r"cannot be fetched \(503\)"):
            fetch_newest(store, other, lambda line: None)
    assert lacks_fetch(other)
    fetch_newest(store, other, lambda line: None)
    assert not lacks_fetch(other)
    assert complete_steps(other) == [8, 4]
    assert (other / "metrics.jsonl").read_text() == '{"step": 8}\n'


def test_ranks_that_start_while_another_fetches(run, tmp_path):
    """Each looks at the folder at any moment of the fetch, and finds nothing in the way of a run."""
    store, looks = Store(str(tmp_path / "copy")), 0
    assert brought(run, store, best={4}) == [8, 4]
    for turn in range(3):
        other = tmp_path / f"other-{turn}"
        fetch = threading.Thread(target=fetch_newest, args=(store, other, lambda line: None))
        fetch.start()
        while fetch.is_alive():
            refuse_something_else(other, Config)
            looks += 1
        fetch.join()
        assert newest_checkpoint(other, True, Config).name == "step-8"
    assert looks > 30


def test_a_fetch_that_was_killed_is_begun_again(run, tmp_path):
    store, other = Store(str(tmp_path / "copy")), tmp_path / "other"
    assert brought(run, store) == [8]
    killed = (
        "import os; from pathlib import Path; from probemb.runs.copies.start import fetch_newest, Store\n"
        "Store.get = lambda *_: os.kill(os.getpid(), 9)\n"
        f"fetch_newest(Store({str(store)!r}), Path({str(other)!r}), print)"
    )
    assert subprocess.run([sys.executable, "-c", killed], check=False).returncode == -9
    assert newest_checkpoint(other, True, Config) is None
    assert lacks_fetch(other)
    fetch_newest(store, other, lambda line: None)
    assert newest_checkpoint(other, True, Config).name == "step-8"
    (tmp_path / "mine" / "checkpoints" / "paper").mkdir(parents=True)
    with pytest.raises(UserError, match="something else than a run"):
        refuse_something_else(tmp_path / "mine", Config)


def test_a_run_that_went_on_without_its_copy_is_left_alone(run, tmp_path):
    store, other = Store(str(tmp_path / "copy")), tmp_path / "other"
    assert brought(run, store) == [8]
    fetch_newest(store, other, lambda line: None)
    (other / "checkpoints" / ".fetch-begun").touch()
    save(other, 9)
    (other / "metrics.jsonl").write_text('{"step": 9}\n')
    fetch_newest(store, other, lambda line: None)
    assert (other / "metrics.jsonl").read_text() == '{"step": 9}\n'
    assert not lacks_fetch(other)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        fetch_newest(store, tmp_path / "file" / "run", lambda line: None)


def test_another_runs_copy_is_refused(run, tmp_path):
    store, told = Store(str(tmp_path / "copy")), []
    refuse_another_copy(store, None, told.append)
    assert brought(run, store) == [8]
    refuse_another_copy(store, 8, told.append)
    with pytest.raises(UserError, match="already holds a run"):
        refuse_another_copy(store, None, told.append)
    with pytest.raises(UserError, match=r"has step 8, and the run would resume from step 6"):
        refuse_another_copy(store, 6, told.append)
    assert told == []
    broken = Store(str(run / "metrics.jsonl") + "/x")
    refuse_another_copy(broken, 6, told.append)
    assert "the run tries again" in told[0]
    with pytest.raises(UserError, match="cannot be reached or written"):
        refuse_another_copy(broken, None, told.append)


@pytest.mark.parametrize(
    ("address", "what"),
    [
        ("runs/x", "in the run folder runs/x, or around it"),
        ("runs/x/copy", "in the run folder"),
        ("https://host/run", "cannot be written to https://host/run"),
        ("s4://bucket/run", "'s4:' is not a known place"),
        ("hdfs4://user:secret@host/run", "not a known place"),
    ],
)
def test_addresses_that_cannot_be_written_are_refused(address, what):
    with pytest.raises(UserError) as error:
        check_address(address, "runs/x")
    assert what in str(error.value)
    assert "secret" not in str(error.value)


def test_a_missing_package_is_named_with_its_extra():
    try:
        import s3fs  # noqa: F401
    except ImportError:
        with pytest.raises(UserError, match=r"needs a package that is not installed.*probemb\[s3\]"):
            check_address("s3://bucket/run", "runs/x")
    else:
        check_address("s3://bucket/run", "runs/x")


def test_a_small_file_is_replaced_as_a_whole_or_stays(run, tmp_path, monkeypatch):
    copy = worker.Copy(str(tmp_path / "copy"))
    copy.put_files(str(run / "best.json"))
    before = (tmp_path / "copy" / "best.json").read_bytes()

    def half(source, target):
        target.write(b"{")
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(worker, "copy", half)
        with pytest.raises(OSError, match="the disk is gone"):
            copy.put_files(str(run / "best.json"))
    assert (tmp_path / "copy" / "best.json").read_bytes() == before
    Best("rsum", values={2: 1.0, 8: 3.0}).write(run)
    copy.put_files(str(run / "best.json"))
    assert (tmp_path / "copy" / "best.json").read_bytes() == (run / "best.json").read_bytes() != before
    assert {path.name for path in (tmp_path / "copy").iterdir()} == {"best.json"}


STORED: dict[str, bytes] = {}


class Objects(AbstractFileSystem):
    """A store in which an object appears when the file is closed, with the files of fsspec's own kind."""

    protocol = "s3"

    def _open(self, path, mode="rb", **_):
        return ObjectFile(self, path, mode, block_size=1 << 20)


class ObjectFile(AbstractBufferedFile):
    def _initiate_upload(self):
        pass

    def _upload_chunk(self, final=False):
        if final:
            STORED[self.path] = self.buffer.getvalue()
        return final


def test_an_object_that_could_not_be_written_whole_is_not_stored(run, monkeypatch):
    def half(source, target):
        target.write(b"{")
        raise OSError("the disk is gone")

    monkeypatch.setattr(worker.fsspec, "url_to_fs", lambda address: (Objects(), address.partition("://")[2]))
    copy = worker.Copy("s3://bucket/run")
    copy.put_files(str(run / "best.json"))
    (stored,) = STORED.values()
    assert stored == (run / "best.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(worker, "copy", half)
        with pytest.raises(OSError, match="the disk is gone"):
            copy.put_files(str(run / "best.json"))
    gc.collect()
    assert list(STORED.values()) == [stored]


def test_a_rename_that_fails_leaves_the_old_file(run, tmp_path, monkeypatch):
    copy = worker.Copy(str(tmp_path / "copy"))
    copy.put_files(str(run / "best.json"))
    before = (tmp_path / "copy" / "best.json").read_bytes()
    Best("rsum", values={8: 3.0}).write(run)

    def lost(*_):
        raise OSError("connection lost")

    with monkeypatch.context() as patch:
        patch.setattr(copy.files, "mv", lost)
        with pytest.raises(OSError, match="connection lost"):
            copy.put_files(str(run / "best.json"))
    assert (tmp_path / "copy" / "best.json").read_bytes() == before
