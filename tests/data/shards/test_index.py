"""Shards that a path stands for, and the refusals where it stands for none."""

import json
import pickle
import re

import pytest

from probemb.data.shards.index import Shard, read_index, write_index
from probemb.data.shards.samples import list_samples
from probemb.errors import UserError
from tests.world import write_tar


@pytest.fixture
def corpus(tmp_path):
    """A folder of four indexed shards, two samples each."""
    folder = tmp_path / "my corpus"
    rows = []
    for number in range(4):
        files = [(f"{number}{i}.{ext}", b"data") for i in range(2) for ext in ("jpg", "txt")]
        path = write_tar(folder / f"{number:05d}.tar", files)
        rows.append({"name": path.name, "samples": len(list_samples(path)[0]), "bytes": path.stat().st_size})
    (folder / "index.json").write_text(json.dumps({"shards": rows}))
    return folder


def rewrite(folder, change):
    path = folder / "index.json"
    content = json.loads(path.read_text())
    change(content["shards"])
    path.write_text(json.dumps(content))


def names(source):
    return [shard.name for shard in read_index(source)]


def test_a_folder_and_its_index_mean_the_same(corpus):
    shards = read_index(corpus)
    assert shards == read_index(str(corpus)) == read_index(corpus / "index.json")
    assert [shard.name for shard in shards] == [f"{i:05d}.tar" for i in range(4)]
    assert all(shard.samples == 2 and shard.path == corpus / shard.name for shard in shards)
    assert pickle.loads(pickle.dumps(shards[0])) == shards[0]
    assert isinstance(shards[0], Shard)


def test_patterns_select_from_the_index(corpus):
    assert names(f"{corpus}/{{00001..00002}}.tar") == ["00001.tar", "00002.tar"]
    assert set(names(f"{corpus}/{{0000{{0..1}},00003}}.tar")) == {"00000.tar", "00001.tar", "00003.tar"}
    assert names(f"{corpus}/{{00003,00000}}.tar") == ["00003.tar", "00000.tar"]
    assert names(f"{corpus}/0000[23].tar") == ["00002.tar", "00003.tar"]
    assert names(f"{corpus}/*.tar") == names(corpus)
    assert names(corpus / "00002.tar") == ["00002.tar"]


def refusal(source):
    with pytest.raises(UserError) as refused:
        read_index(source)
    assert "\n" not in str(refused.value)
    return refused.value


def test_the_index_is_checked_against_the_files(corpus):
    (corpus / "00001.tar").write_bytes(b"other")
    assert re.search(r"00001.tar has 5 bytes, but its index says [\d,]+", refusal(corpus).what)
    assert names(corpus / "00002.tar") == ["00002.tar"]
    (corpus / "00001.tar").unlink()
    error = refusal(corpus)
    assert "00001.tar is missing" in error.what
    assert "tools.shards" in error.remedy


@pytest.mark.parametrize("name", ["../a.tar", "/etc/passwd"])
def test_names_that_lead_out_of_the_folder_are_refused(corpus, name):
    rewrite(corpus, lambda rows: rows[0].update(name=name))
    assert "outside its own folder" in refusal(corpus).what


@pytest.mark.parametrize("content", ["[" * 100_000, '{"shards": [{"name": "a.tar", "samples": -1, "bytes": 1}]}'])
def test_a_malformed_index_is_refused(corpus, content):
    (corpus / "index.json").write_text(content)
    assert "is not an index of shards" in refusal(corpus).what


def test_the_hash_of_a_shard_is_kept_and_may_be_missing(corpus):
    assert all(shard.sha256 is None for shard in read_index(corpus))
    rewrite(corpus, lambda rows: rows[1].update(sha256="ab" * 32))
    shards = read_index(corpus)
    assert [shard.sha256 for shard in shards] == [None, "ab" * 32, None, None]
    write_index(corpus, shards)
    assert read_index(corpus) == shards
