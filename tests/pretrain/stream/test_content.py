"""Shards of another content than when they were indexed."""

from dataclasses import replace

import pytest

from probemb.data.shards.index import file_sha256
from probemb.errors import UserError
from tests.pretrain.stream.test_stream import make, write_corpus


@pytest.fixture
def shards(tmp_path):
    written = write_corpus(tmp_path / "data")
    return [replace(shard, sha256=file_sha256(shard.path)) for shard in written]


@pytest.mark.chaos
def test_another_content_of_the_same_size_stops_the_run(shards):
    data = shards[3].path.read_bytes()  # a letter of a caption: the tar and the image stay sound
    shards[3].path.write_bytes(data.replace(b"caption a", b"caption b", 1))
    with make(shards, steps=5) as stream:
        list(stream)  # not asked for
        assert not stream.failures
    told = pytest.raises(UserError, match="has other content than when it was indexed")
    with make(shards, verify_hash=True, workers=2) as stream, told:
        next(stream)
