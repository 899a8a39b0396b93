"""Counts of a filter that are kept: used again only if nothing has changed, and never needed."""

import json
import os
import shutil
import subprocess

import numpy as np
import pytest

from pretrain.stream import counts
from pretrain.stream.filter import Filter
from pretrain.stream.selection import Selection
from probemb.data.shards.columns import Columns
from probemb.data.shards.index import read_index
from probemb.errors import UserError
from tests.pretrain.stream.test_selection import make_corpus

RULES = Filter(min_side=20, min_words=2)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "corpus"
    make_corpus(folder)
    return folder


@pytest.fixture
def corpus(made, tmp_path):
    """A copy of 79 samples in four shards, with columns and without counts."""
    shutil.copytree(made, tmp_path / "corpus", ignore=shutil.ignore_patterns("*.counts"))
    return tmp_path / "corpus"


@pytest.fixture
def passes(monkeypatch):
    """The columns that were read, by name."""
    names, read = [], Columns.read

    def counted(self, name, start, stop):
        names.append(name)
        return read(self, name, start, stop)

    monkeypatch.setattr(Columns, "read", counted)
    return names


def counted(*folders, rules=RULES, shards=slice(None)):
    found = Selection([read_index(folder)[shards] for folder in folders], rules)
    return found.sizes.tolist(), found.left_out, found.digest, found.identity, found.describe()


def kept_in(folder):
    return sorted((folder / "columns").glob("*.counts"))


def test_a_later_start_reads_no_column(corpus, passes):
    first = counted(corpus)
    assert set(passes) == {"width", "height", "fewest_words"}
    assert len(kept_in(corpus)) == 1
    passes.clear()
    assert counted(corpus) == first
    assert not passes
    selection = Selection([read_index(corpus)], RULES)
    assert [len(selection.places(shard)) for shard in range(4)] == first[0]  # of a shard when it is reached
    assert passes


def test_counts_are_taken_again_when_what_they_depend_on_changes(corpus, made, tmp_path, passes):
    """Each case is compared with a selection that has never counted before."""
    keys, other = tmp_path / "keys", tmp_path / "other"
    keys.write_text("k0001\nk1002\n")
    other.write_text("k0001\n2.tar/k2003\n")
    lists = [Filter(drop=str(keys)), Filter(drop=str(other)), Filter(keep=str(keys)), Filter(keep=str(other))]
    scores = [Filter(score="clip_l14", min_score=0.5), Filter(score="clip_l14", max_score=0.5)]
    rules = [RULES, Filter(min_side=21, min_words=2), Filter(min_side=20), Filter(max_side=20), *scores, *lists]
    cases = [dict(rules=one) for one in rules]
    cases += [dict(shards=slice(2)), dict(shards=slice(2, None)), dict(shards=slice(None, None, -1))]
    taken = []
    for case in cases:
        passes.clear()
        taken.append(counted(corpus, **case))
        assert passes
    assert len(kept_in(corpus)) == len(cases)
    passes.clear()
    for case, first in zip(cases, taken):
        assert counted(corpus, **case) == first
    assert not passes
    keys.write_text("k0001\nk1003\nk1004\n")  # a list of another content under the same name
    assert counted(corpus, rules=lists[0])[1] == {"drop": 3}
    assert passes
    for case, first in zip(cases[:-3], taken):
        if case["rules"] not in lists:
            shutil.rmtree(tmp_path / "fresh", ignore_errors=True)
            shutil.copytree(made, tmp_path / "fresh", ignore=shutil.ignore_patterns("*.counts"))
            assert counted(tmp_path / "fresh", **case) == first


@pytest.mark.parametrize("keep_time", [False, True])
def test_a_rewritten_column_is_counted_again(keep_time, corpus, passes):
    """Also in place, of the same size, and with its old time of modification, as `cp -p` and `touch -r` leave it."""
    counted(corpus)
    path = corpus / "columns" / "width.npy"
    status = path.stat()
    np.save(path, np.load(path) + np.uint32(1000))
    if keep_time:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    passes.clear()
    after = counted(corpus)
    assert passes
    height = np.load(corpus / "columns" / "height.npy")
    words = np.load(corpus / "columns" / "fewest_words.npy")
    assert sum(after[0]) == ((height >= 20) & (words >= 2)).sum()  # the width no longer decides


def test_a_column_that_changes_while_it_is_counted_leaves_no_counts(corpus, monkeypatch):
    read = Columns.read

    def touched(self, name, start, stop):
        os.utime(corpus / "columns" / "width.npy")
        return read(self, name, start, stop)

    monkeypatch.setattr(Columns, "read", touched)
    counted(corpus)
    assert not kept_in(corpus)


def spoil(path, **changes):
    line, _, sizes = path.read_bytes().partition(b"\n")
    path.write_bytes(json.dumps({**json.loads(line), **changes}).encode() + b"\n" + sizes)


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: os.truncate(path, path.stat().st_size - 8),
    "longer": lambda path: path.write_bytes(path.read_bytes() + bytes(8)),
    "a flipped bit": lambda path: path.write_bytes(path.read_bytes()[:-8] + b"\x01" + path.read_bytes()[-7:]),
    "no JSON": lambda path: path.write_bytes(b"[" * 50_000),
    "a long line": lambda path: path.write_bytes(b" " * (1 << 20)),
    "another key": lambda path: spoil(path, key="0" * 64),
    "another format": lambda path: spoil(path, format=counts.FORMAT + 1),
    "other rules": lambda path: spoil(path, left_out={"min_side": 3}),
    "no lists": lambda path: spoil(path, lists=None),
    "other lists": lambda path: spoil(path, lists={"drop": [0, 1]}),
    "a wrong number": lambda path: spoil(path, left_out={"min_side": 3, "min_words": "4"}),
    "too many": lambda path: spoil(path, left_out={"min_side": 80, "min_words": 4}),
    "no digest": lambda path: spoil(path, digest="../../etc"),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_counts_as_missing(name, corpus, passes):
    before = counted(corpus)
    (path,) = kept_in(corpus)
    DAMAGE[name](path)
    passes.clear()
    assert counted(corpus) == before
    assert passes
    passes.clear()
    assert counted(corpus) == before
    assert bool(passes) == (name == "a folder")  # the others were rewritten


@pytest.mark.parametrize("wrong", [{}, {"keep": [0, 1]}, {"drop": [0]}, {"drop": [-1, 1]}, {"drop": [0, "1"]}])
def test_damaged_numbers_of_a_list_count_as_missing(wrong, corpus, tmp_path, passes):
    (tmp_path / "keys").write_text("k0001\nunknown\n")
    rules = Filter(drop=str(tmp_path / "keys"))
    before = Selection([read_index(corpus)], rules).lists
    assert before == {"drop": [1, 1]}
    (path,) = kept_in(corpus)
    spoil(path, lists=wrong)
    passes.clear()
    assert Selection([read_index(corpus)], rules).lists == before
    assert passes


def test_sizes_that_no_shard_has_are_refused(corpus, passes):
    before = counted(corpus)
    (path,) = kept_in(corpus)
    key = json.loads(path.read_bytes().partition(b"\n")[0])["key"]
    samples = [shard.samples for shard in read_index(corpus)]
    for sizes in ([24, 1, 1, 1], [-1, 1, 1, 1], [0, 0, 0, 0]):
        made = counts.Counts(np.array(sizes), {"min_side": 0, "min_words": 0}, "0" * 16, {})
        counts.write_counts([corpus / "columns"], key, made)
        assert counts.read_counts([corpus / "columns"], key, np.array(samples), ["min_side", "min_words"], {}) is None
    assert counted(corpus) == before
    wrong = counts.Counts(np.array([1, 1, 1, 1]), {"min_side": 0, "min_words": 0}, "0" * 16, {})
    counts.write_counts([corpus / "columns"], key, wrong)
    with pytest.raises(UserError, match="have changed since"):  # what was kept is counted where it is used
        Selection([read_index(corpus)], RULES).places(2)


def test_a_read_only_folder_is_just_counted(corpus, made, small_disk, passes):
    """The next folder takes the counts of both; without one, every start counts."""
    disk = small_disk(1 << 20)
    shutil.copytree(made / "columns", disk / "columns", ignore=shutil.ignore_patterns("*.counts"))
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    there = Filter(min_side=20, min_words=2, columns=[str(disk / "columns")])
    first = counted(corpus, rules=there)
    passes.clear()
    assert counted(corpus, rules=there) == first
    assert passes
    assert not list((disk / "columns").glob("*.counts"))
    mixed = Filter(min_side=20, min_words=2, columns=[str(disk / "columns"), str(corpus / "columns")])
    both = counted(made, corpus, rules=mixed)
    assert len(kept_in(corpus)) == 1
    passes.clear()
    assert counted(made, corpus, rules=mixed) == both
    assert not passes
    assert sum(counted(corpus, made)[0]) == sum(both[0])  # in another order, which is counted
    assert passes


def test_one_rank_of_a_machine_writes_and_few_files_stay(corpus, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    counted(corpus)
    assert not kept_in(corpus)
    monkeypatch.setenv("LOCAL_RANK", "0")
    for side in range(1, 20):
        counted(corpus, rules=Filter(min_side=side))
    assert len(kept_in(corpus)) == 16
    assert not list((corpus / "columns").glob(".*"))
