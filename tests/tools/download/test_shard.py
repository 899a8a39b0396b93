"""Shards that are there as a whole or not at all, and images that are kept once."""

import hashlib
import json
import resource
from contextlib import contextmanager

import pytest

from probemb.data.shards.index import read_index
from tests.imagesite import picture
from tests.shards import iterate_samples
from tools.download.shard import (
    GOT,
    STATE,
    NotWritten,
    Record,
    ShardPaths,
    ShardWriter,
    drop_duplicates,
    read_marker,
    read_records,
    write_shard_index,
)
from tools.shards import check_shard


@pytest.fixture
def folder(tmp_path):
    (tmp_path / STATE / "records").mkdir(parents=True)
    return tmp_path


def write(folder, number, names, unique=True):
    writer = ShardWriter(folder, number, unique)
    for i, name in enumerate(names):
        record = Record(f"{number}{i:03d}", f"http://a.b/{name}", GOT, width=96, height=64, words=2)
        record.hash = hashlib.sha256(str(name).encode()).hexdigest()
        if name is None:
            record.cause = "HTTP 404"
            writer.drop(record)
        else:
            writer.add(record, picture(name), [f"the {name}"], {"url": record.url})
    return writer.finish(len(names))


def held(folder, number) -> list[str]:
    path = ShardPaths(folder, number).tar
    return [sample.captions[0] for sample in iterate_samples(path)] if path.exists() else []


@contextmanager
def files_of_at_most(size):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_counts_and_histograms(folder):
    marker = write(folder, 0, ["a", "b", None, "a", "c"])
    assert marker.causes == {"got": 3, "HTTP 404": 1, "duplicate image": 1}
    assert marker.samples == 3
    assert marker.sides == [0, 3, 0, 0, 0, 0, 0, 0, 0]  # 64 is not below 64
    assert marker.aspects == [0, 0, 0, 3, 0, 0, 0]
    assert read_marker(ShardPaths(folder, 0)) == marker
    assert marker.sha256 == hashlib.sha256(ShardPaths(folder, 0).tar.read_bytes()).hexdigest()
    assert write(folder, 1, ["a", "a"], unique=False).samples == 2


def test_duplicates_are_kept_in_the_first_shard(folder):
    write(folder, 0, ["a", "b"])
    write(folder, 1, ["c", "b", "d"])
    write(folder, 2, ["b", "a"])
    before = ShardPaths(folder, 0).tar.read_bytes()
    assert drop_duplicates(folder, 3) == 3
    assert [held(folder, n) for n in range(3)] == [["the a", "the b"], ["the c", "the d"], []]
    assert ShardPaths(folder, 0).tar.read_bytes() == before
    assert not ShardPaths(folder, 2).tar.exists()
    assert read_marker(ShardPaths(folder, 1)).causes == {"got": 2, "duplicate image": 1}
    assert read_marker(ShardPaths(folder, 2)).causes == {"duplicate image": 2}
    assert [row["cause"] for row in read_records(ShardPaths(folder, 1))] == ["got", "duplicate image", "got"]
    assert check_shard(ShardPaths(folder, 1).tar, None).samples == 2
    assert drop_duplicates(folder, 3) == 0


def test_the_index_has_the_hashes_of_the_shards_as_they_are(folder):
    write(folder, 0, ["a", "b"])
    write(folder, 1, ["c", "b", "d"])
    write(folder, 2, ["a"])
    drop_duplicates(folder, 3)
    markers = [read_marker(ShardPaths(folder, number)) for number in range(3)]
    assert [path.name for path in write_shard_index(folder, markers)] == ["00000.tar", "00001.tar"]
    for shard in read_index(folder):
        assert shard.sha256 == hashlib.sha256(shard.path.read_bytes()).hexdigest()


def test_markers_of_older_versions_have_no_hash(folder):
    write(folder, 0, ["a"])
    path = ShardPaths(folder, 0).marker
    older = json.loads(path.read_text())
    del older["sha256"]
    path.write_text(json.dumps(older))
    write_shard_index(folder, [read_marker(ShardPaths(folder, 0))])
    assert [(shard.samples, shard.sha256) for shard in read_index(folder)] == [(1, None)]


def test_no_room_while_duplicates_are_dropped(folder):
    write(folder, 0, ["a"])
    write(folder, 1, ["a", *range(30)])
    paths = ShardPaths(folder, 1)
    before = paths.tar.read_bytes()
    with files_of_at_most(20_000), pytest.raises(OSError, match="too large"):
        drop_duplicates(folder, 2)
    assert paths.tar.read_bytes() == before
    assert read_marker(paths).samples == 31
    assert not paths.part.exists()
    assert drop_duplicates(folder, 2) == 1
    assert len(held(folder, 1)) == 30


@pytest.mark.parametrize("size", [100, 5_000, 30_000])
def test_no_room_for_a_shard(folder, size):
    with files_of_at_most(size), pytest.raises(OSError, match="too large"):
        write(folder, 0, range(40))
    assert [path.name for path in folder.iterdir()] == [STATE]
    assert list((folder / STATE / "records").iterdir()) == []


def test_lost_rows_are_noticed(folder):
    writer = ShardWriter(folder, 0)
    writer.drop(Record("0", "http://a.b/c", "HTTP 404"))
    with pytest.raises(NotWritten, match="1 of 2 rows"):
        writer.finish(2)
    assert [path.name for path in folder.iterdir()] == [STATE]


def test_a_shard_that_does_not_read_back_is_not_kept(folder):
    writer = ShardWriter(folder, 0)
    writer.add(Record("0", "http://a.b/c", GOT), b"no image", ["x"], {})
    with pytest.raises(NotWritten, match="does not read back: the image cannot be decoded"):
        writer.finish(1)
    assert [path.name for path in folder.iterdir()] == [STATE]


def test_markers_that_do_not_fit_their_tar(folder):
    paths = ShardPaths(folder, 0)
    assert read_marker(paths) is None
    write(folder, 0, ["a", "b"])
    with open(paths.tar, "ab") as file:
        file.write(bytes(512))
    assert read_marker(paths) is None
    paths.tar.unlink()
    assert read_marker(paths) is None
    for text in ("", "{", "[]", json.dumps({"shard": 0, "more": 1})):
        paths.marker.write_text(text)
        assert read_marker(paths) is None
