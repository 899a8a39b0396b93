"""Shards that are not what their index says: another size, another content, more samples, or rewritten while read."""

import logging
import os
import time
from dataclasses import replace

import pytest

from probemb.data.shards.index import file_sha256
from probemb.errors import UserError
from tests.pretrain.stream.test_stream import make, write_corpus, write_shard


@pytest.fixture
def shards(tmp_path):
    written = write_corpus(tmp_path / "data")
    return [replace(shard, sha256=file_sha256(shard.path)) for shard in written]


def change_a_letter(path):
    """Of a caption: the tar and the image stay sound."""
    data = path.read_bytes()
    assert b"caption a" in data
    path.write_bytes(data.replace(b"caption a", b"caption b", 1))


def read_until(stream, seconds=20.0):
    """Batches until an error, as the check runs beside them."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        next(stream)


@pytest.mark.chaos
@pytest.mark.parametrize("workers", [0, 2])
def test_another_content_of_the_same_size_stops_the_run(shards, workers):
    change_a_letter(shards[3].path)
    with make(shards, steps=5, workers=workers) as stream:
        list(stream)  # not asked for
        assert not stream.failures
    with (
        make(shards, verify_hash=True, workers=workers) as stream,
        pytest.raises(UserError, match="has other content than when it was indexed"),
    ):
        read_until(stream)


def test_sound_shards_are_compared_and_unknown_ones_told(shards, caplog):
    with make(shards, steps=5, verify_hash=True) as stream:
        checked = [batch.keys for batch in stream]
    assert not caplog.records
    with make([replace(shards[0], sha256=None), *shards[1:]], steps=5, verify_hash=True) as stream:
        assert [batch.keys for batch in stream] == checked
    assert "1 of 5 shards have no SHA-256" in caplog.text


@pytest.mark.chaos
def test_a_shard_of_another_size_is_refused(shards):
    changed = write_shard(shards[1].path, shards[1].samples + 2)
    assert changed.bytes != shards[1].bytes
    with make(shards, steps=5, failure_share=1) as stream:
        list(stream)
    assert stream.failures["00001.tar"].reason.endswith(
        f"has {changed.bytes:,} bytes, but its index says {shards[1].bytes:,}"
    )


@pytest.mark.chaos
def test_more_samples_than_the_index_says_are_told_once(shards, caplog):
    less = [replace(shards[0], samples=6), *shards[1:]]
    with caplog.at_level(logging.WARNING), make(less, steps=12, workers=2) as stream:
        list(stream)
    told = [record.message for record in caplog.records]
    assert len(told) == 1
    assert "00000.tar: holds 11 samples, but its index says 6" in told[0]


@pytest.mark.chaos
@pytest.mark.parametrize("hashed", [True, False])
def test_a_shard_rewritten_in_place_is_noticed_and_a_touched_one_is_not_lost(shards, hashed):
    """Its index may have no hash."""
    if not hashed:
        shards = [replace(shard, sha256=None) for shard in shards]
    with make(shards, failure_share=1) as stream:
        next(stream)
        for shard in shards:  # as against the purge of a scratch disk
            os.utime(shard.path, ns=(1, 1))
        next(stream)
        assert not stream.failures
        content = shards[3].path.read_bytes()
        os.utime(shards[3].path, ns=(2, 2))
        with open(shards[3].path, "r+b") as file:
            file.write(content.replace(b"caption a", b"caption b") if hashed else content[2048:])
            file.truncate(len(content))
        while not stream.failures:
            next(stream)
    assert "was rewritten while it is being read" in stream.failures["00003.tar"].reason
