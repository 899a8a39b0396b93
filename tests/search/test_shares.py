"""One index built by several processes: each its share of the parts, then put together."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from probemb.errors import UserError
from probemb.runs.lock import RunLock
from probemb.search import load_index, search, set_effort
from probemb.search.embeddings import Embeddings
from probemb.search.unfinished import Share, Unfinished
from tests.search.test_folder import DIM, SIZES, contents, fill, queries
from tools.build_index import main

ROOT = Path(__file__).resolve().parents[2]
FACTORIES = ["Flat", "IVF16,Flat", "IVF16,PQ16x4np", "OPQ8_16,IVF8,PQ8x4np", "PQ8x4np", "SQ8", "IVF8,SQ8", "HNSW16"]


@pytest.fixture(scope="module")
def embeddings(tmp_path_factory):
    """700 images in five shards, one of them empty."""
    return fill(Embeddings(tmp_path_factory.mktemp("embeddings"), "runs/x", "f" * 64, DIM, {}), SIZES)


@pytest.fixture
def call(embeddings, tmp_path, capsys):
    """`call("--part", "1/3")`: the command for the index at tmp_path/index; returns what it prints."""

    def run(*more, factory="IVF8,Flat", out="index"):
        words = ["--embeddings", str(embeddings.folder), "--out", str(tmp_path / out), "--factory", factory]
        assert main([*words, *map(str, more)]) == 0
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("factory", FACTORIES)
def test_shares_make_the_index_of_one_process(factory, call, tmp_path):
    """The same files as one process with parts of that size; the same answers as one process with a single part."""
    assert "ready for --part 1/3 to 3/3" in call("--train-for", 3, factory=factory)
    for part in "3/3", "1/3", "2/3":  # in any order
        assert f"part {part} is complete" in call("--part", part, factory=factory)
    assert "700" in call("--merge", factory=factory)
    call("--part-items", 234, factory=factory, out="parts")
    assert contents(tmp_path / "index") == contents(tmp_path / "parts")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index", "parts"]
    if factory.startswith("HNSW"):  # a graph of all items is another one than graphs of their thirds
        return
    call(factory=factory, out="whole")
    index, whole = load_index(tmp_path / "index"), load_index(tmp_path / "whole")
    assert (len(index.parts), len(whole.parts)) == (3, 1)
    for effort in 2, 16:
        for one in index, whole:
            set_effort(one, effort)
        found, wanted = search(index, queries(), 20), search(whole, queries(), 20)
        torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=0)
        same = found[1] == wanted[1]
        assert same.all() or (wanted[0].diff(dim=1) == 0).any()  # items of equal codes in either order
        assert same.double().mean() > 0.95
    assert [index.item(i) for i in (0, 233, 234, 699)] == [whole.item(i) for i in (0, 233, 234, 699)]


def files(folder):
    """All but the name of the last holder."""
    return {path: content for path, content in contents(folder).items() if path.name != ".lock"}


def start(embeddings, out, *more):
    words = ["--embeddings", str(embeddings.folder), "--out", str(out), "--factory", "IVF8,SQ8", *more]
    return subprocess.Popen(
        [sys.executable, "-m", "tools.build_index", *words], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def test_all_shares_at_once_train_one_index(embeddings, call, tmp_path):
    running = [start(embeddings, tmp_path / "index", "--part", f"{i}/4") for i in (1, 2, 3, 4)]
    for process in running:
        said = process.communicate(timeout=120)[0]
        assert process.returncode == 0, said
    call("--merge", factory="IVF8,SQ8")
    call("--part-items", 175, factory="IVF8,SQ8", out="alone")
    assert contents(tmp_path / "index") == contents(tmp_path / "alone")


KILLED = """
import os, signal, sys
from contextlib import contextmanager
from pathlib import Path
from probemb.search import Choice
from probemb.search.embeddings import open_embeddings
from probemb.search.unfinished import Share, Unfinished
from probemb.search.writing import Recipe, write_share

keep = Unfinished.keep

def killed(self, path, write, first=False):
    def half(aside):
        write(aside)
        os.truncate(aside, 1000)
        os.kill(os.getpid(), signal.SIGKILL)

    keep(self, path, half if path.name == "part-00003.faiss" else write, first)

Unfinished.keep = killed
recipe = Recipe([open_embeddings(sys.argv[1])], "image", Choice("IVF8,Flat", "", 8), part_items=100)
write_share(Path(sys.argv[2]), recipe, Share(2, 2))
"""


def test_a_killed_share_resumes_and_a_complete_one_is_not_repeated(embeddings, call, tmp_path):
    unfinished = tmp_path / ".index.unfinished"
    words = [sys.executable, "-c", KILLED, str(embeddings.folder), str(tmp_path / "index")]
    assert (
        subprocess.run(words, cwd=ROOT, timeout=120).returncode == -signal.SIGKILL
    )  # while its second part is written
    assert [path.name for path in unfinished.glob("part-*")] == ["part-00001.faiss"]
    assert len(list((unfinished / "share-2-of-2").glob(".part*"))) == 1
    before = {path: path.stat().st_ino for path in [unfinished / "trained.faiss", *unfinished.glob("part-*")]}
    assert "resuming after 1 of 3 parts" in call("--part", "2/2")  # with its --part-items
    assert "4 parts" not in call("--part", "1/2")
    assert {path: path.stat().st_ino for path in before} == before
    times = {path: path.stat().st_mtime_ns for path in unfinished.glob("part-*")}
    assert len(times) == 7
    for again in "2/2", "1/3":  # also in other shares
        assert "nothing to do: the index has 7 parts" in call("--part", again)
    assert {path: path.stat().st_mtime_ns for path in unfinished.glob("part-*")} == times
    assert not list(unfinished.glob("share-*"))
    call("--merge")
    call("--part-items", 100, out="whole")
    assert contents(tmp_path / "index") == contents(tmp_path / "whole")


def test_a_missing_part_is_named_and_one_command_can_build_it(call, tmp_path):
    unfinished = tmp_path / ".index.unfinished"
    call("--part", "1/4")
    call("--part", "3/4")
    before = files(unfinished)
    with pytest.raises(UserError) as error:
        call("--merge")
    assert error.value.exit_code == 2
    assert "2 of the 4 parts of " in str(error.value)
    assert "part-00001.faiss, part-00003.faiss" in str(error.value)
    assert "--part 2/4, --part 4/4, or without --merge" in str(error.value)
    assert files(unfinished) == before
    assert not (tmp_path / "index").exists()
    assert "resuming after 2 of 4 parts" in call()  # without --merge it builds the rest
    assert len(load_index(tmp_path / "index").parts) == 4
    with pytest.raises(UserError, match="is there already"):
        call("--part", "2/4")
    with pytest.raises(UserError, match="is there already"):
        call("--merge")


def test_parts_of_other_settings_or_other_data_are_refused(tmp_path, capsys):
    made = fill(Embeddings(tmp_path / "embeddings", "runs/x", "f" * 64, DIM, {}), SIZES)
    words = ["--embeddings", str(made.folder), "--out", str(tmp_path / "index"), "--factory", "IVF8,Flat"]
    main([*words, "--part", "1/2"])
    before = files(tmp_path / ".index.unfinished")
    for more, named in (
        (["--form", "mean"], "form"), (["--factory", "IVF4,Flat"], "factory"), (["--seed", "1"], "seed"),
        (["--part-items", "99"], "--part-items"), (["--kind", "text"], "kind"), (["--tolerance", "-1"], "form"),
        (["--train-items", "300"], "--train-items"),
    ):  # fmt: skip
        for mode in (["--part", "2/2"], ["--merge"], ["--train-for", "2"]):
            with pytest.raises(
                UserError, match=f"unfinished work of a command that differed in .*{named}.*resumes, or"
            ):
                main([*words, *more, *mode])
    os.utime(made.path(made.partitions("image")[2]))
    for mode in (["--part", "2/2"], ["--merge"]):
        with pytest.raises(UserError, match=r"embeddings have changed since .* Remove that folder"):
            main([*words, *mode])
    assert files(tmp_path / ".index.unfinished") == before
    assert not (tmp_path / "index").exists()


def test_a_share_is_built_by_one_process_and_not_while_the_index_is_finished(call, tmp_path, monkeypatch):
    monkeypatch.setattr("probemb.runs.lock.PATIENCE", 0.2)
    unfinished = tmp_path / ".index.unfinished"
    call("--train-for", 2)
    mine = RunLock(unfinished / "share-1-of-2")
    with pytest.raises(UserError, match=r"share-1-of-2 is in use: process \d+"):
        call("--part", "1/2")
    mine.release()
    several = [RunLock(unfinished, shared=True), RunLock(unfinished, shared=True)]  # as running shares hold it
    call("--part", "1/2")
    for mode in (["--merge"], []):
        with pytest.raises(UserError, match=r"\.index\.unfinished is in use: another process is writing it"):
            call(*mode)
    for lock in several:
        lock.release()
    alone = RunLock(unfinished)
    with pytest.raises(UserError, match=r"is in use: process"):
        call("--part", "2/2")
    alone.release()
    call("--part", "2/2")
    call("--merge")


def test_machines_of_other_sizes_take_over_the_plan(call, embeddings, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tools.build_index.MIN_GIB", 0)
    words = ["--embeddings", str(embeddings.folder), "--out", str(tmp_path / "index")]
    main([*words, "--memory-gib", "8e-6", "--part", "1/2"])
    plan = json.loads((tmp_path / ".index.unfinished" / "plan.json").read_text())
    assert (plan["factory"], plan["rows"]) != ("Flat", 350)  # of a larger machine
    for mode in (["--part", "2/2"], ["--merge"]):
        assert main([*words, *mode]) == 0
    index = load_index(tmp_path / "index")
    assert (index.factory, index.why) == (plan["factory"], plan["why"])
    assert len(index.parts) == -(-700 // plan["rows"])


def test_more_shares_than_parts(call, tmp_path):
    assert "nothing to do: the index has 7 parts" in call("--part", "9/9", "--part-items", 100, factory="Flat")
    for i in range(1, 9):
        call("--part", f"{i}/9", factory="Flat")
    call("--merge", factory="Flat")
    assert len(load_index(tmp_path / "index").parts) == 7


def test_of_two_trained_indexes_the_first_one_stays(tmp_path):
    """Without locks two processes may train; parts of two trainings do not go together."""
    plan = {"rows": 1}
    one, other = (Unfinished(tmp_path / "index", plan, Share(i, 2)) for i in (1, 2))
    path = one.folder / "trained.faiss"
    one.keep(path, lambda aside: aside.write_bytes(b"first"), first=True)
    other.keep(path, lambda aside: aside.write_bytes(b"second"), first=True)
    assert path.read_bytes() == b"first"
    one.end_share()
    other.end_share()
    assert not list(one.folder.glob("share-*"))


def test_a_damaged_trained_index_is_named(call, tmp_path):
    call("--part", "1/2")
    os.truncate(tmp_path / ".index.unfinished" / "trained.faiss", 100)
    with pytest.raises(UserError, match=r"trained\.faiss is damaged\. Remove .*unfinished and build"):
        call("--part", "2/2")


def test_the_others_wait_for_the_one_that_trains(embeddings, call, tmp_path):
    call("--train-for", 2, factory="IVF8,SQ8")
    unfinished = tmp_path / ".index.unfinished"
    (unfinished / "trained.faiss").unlink()
    training = RunLock(unfinished / "training")
    process = start(embeddings, tmp_path / "index", "--part", "1/2")
    assert "IVF8,SQ8, as requested" in process.stdout.readline()
    assert "waiting for another process to train the index" in process.stdout.readline()
    time.sleep(0.5)
    assert not (unfinished / "trained.faiss").exists()
    training.release()
    assert "part 1/2 is complete" in process.communicate(timeout=60)[0]
    assert process.returncode == 0
    assert (unfinished / "trained.faiss").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--part", "0/2"], "--part 0/2 is not a part. Write it as 3/16"),
        (["--part", "3/2"], "--part 3/2 is not a part"),
        (["--part", "x"], "--part x is not a part"),
        (["--part", "1/1001"], "at most 1,000"),
        (["--train-for", "0"], "--train-for is 0. Give 1 to 1,000"),
        (["--part", "1/2", "--merge"], "not allowed with"),
        (["--merge"], "1 of the 1 parts of .* are missing: part-00000.faiss. Repeat the command without --merge"),
    ],
)
def test_what_is_refused_leaves_nothing(words, message, call, tmp_path):
    with pytest.raises(UserError, match=message):
        call(*words)
    assert not list(tmp_path.iterdir())


def test_a_share_that_finds_no_room_leaves_nothing(call, tmp_path):
    import resource

    handler, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, limits[1]))
    try:
        with pytest.raises(UserError, match=r"The index cannot be written to .*index: File too large"):
            call("--part", "1/2", factory="Flat")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(tmp_path.iterdir())
