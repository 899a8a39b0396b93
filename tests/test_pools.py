"""Processes that share the work of a command, and commands one of whose processes is killed."""

import os
import signal
import time

import pytest

from probemb.errors import UserError
from probemb.pools import process_pool
from tests.pretrain.stream.test_stream import write_corpus
from tools import make_scenes, shards


def be_killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_is_told_with_the_option_to_change():
    with pytest.raises(UserError, match="process was killed") as refused, process_pool(2, "--hands") as pool:
        list(pool.map(be_killed, range(4)))
    assert refused.value.remedy == "Start the command again with fewer --hands."


def test_what_has_not_begun_is_left_when_the_block_fails():
    def interrupted() -> None:
        with process_pool(1, "--workers") as pool:
            jobs.extend(pool.submit(time.sleep, 0.2) for _ in range(50))
            raise KeyboardInterrupt

    began, jobs = time.monotonic(), []
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert time.monotonic() - began < 5
    assert jobs[-1].cancelled()


def test_a_killed_process_of_shards(tmp_path, monkeypatch):
    write_corpus(tmp_path, sizes=(2, 2, 2))
    monkeypatch.setattr(shards, "check_shard", be_killed)
    with pytest.raises(UserError, match="process was killed") as refused:
        shards.main(["index", str(tmp_path), "--workers", "2"])
    assert "fewer --workers" in refused.value.remedy
    assert not (tmp_path / "index.json").exists()


def test_a_killed_process_of_make_scenes(tmp_path, monkeypatch):
    monkeypatch.setattr(make_scenes, "write_shard", be_killed)
    with pytest.raises(UserError, match="process was killed"):
        make_scenes.main([str(tmp_path / "out"), "--train", "4", "--shard-size", "1", "--workers", "2"])
    assert list(tmp_path.iterdir()) == []
