"""Lists of keys: whose sample a line means, by plain comparison of text, in one corpus and in mixtures."""

import random
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pretrain.stream import key_lists
from pretrain.stream.corpora import Corpus, labels_of
from pretrain.stream.filter import Filter
from pretrain.stream.key_lists import KeyList
from pretrain.stream.selection import Selection
from probemb.data.remote.sources import Remote
from probemb.data.shards.columns import key_hash
from probemb.data.shards.index import Shard, read_index
from probemb.errors import UserError
from tests.pretrain.stream.test_selection import chosen, make_corpus, read

SIZES = (6, 5)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Two corpora whose shards and keys have the same names."""
    data = tmp_path_factory.mktemp("data")
    for name in ("cc3m", "cc12m"):
        make_corpus(data / name, sizes=SIZES)
    return [read_index(data / name) for name in ("cc3m", "cc12m")]


def listed(path: Path, lines: list[str], shards: list[Shard], keys: list[list[str]]) -> set[tuple[int, int]]:
    """Places of the samples that a list of these lines has."""
    path.write_text("\n".join(lines))
    flat = [(shard, place) for shard, own in enumerate(keys) for place in range(len(own))]
    hashes = key_hash(key for own in keys for key in own)
    found = KeyList(str(path), shards).listed(0, [len(own) for own in keys], hashes)
    return {flat[i] for i in np.flatnonzero(found)}


@pytest.mark.parametrize("lines_at_a_time", [1, 3, 1 << 14])
def test_lines_mean_what_their_text_says(tmp_path, monkeypatch, lines_at_a_time):
    monkeypatch.setattr(key_lists, "_LINES", lines_at_a_time)
    numbers = random.Random(0)
    folders = ["/data/cc3m", "/data/cc12m", "/data/my cc3m", "/other/cc3m/train"]
    shards = [Shard(f"{i}.tar", Path(folder) / f"{i}.tar", 5, 1 << 20) for folder in folders for i in range(3)]
    keys = [[*(f"{i}" for i in range(4)), "dog/1"] for _ in shards]
    fronts = ["", "0.tar/", "1.tar/", "cc3m/0.tar/", "data/cc3m/2.tar/", "/data/cc3m/2.tar/", "train/1.tar/"]
    fronts += ["/other/cc3m/train/0.tar/", "c3m/1.tar/", "data/0.tar/", "cc3m/train/2.tar/", "my cc3m/2.tar/", "9.tar/"]
    for _ in range(50):
        lines = [f"{front}{numbers.choice(keys[0])}" for front in numbers.sample(fronts, numbers.randint(1, 4))]
        expected = {
            (number, place)
            for number, shard in enumerate(shards)
            for place, key in enumerate(keys[number])
            for line in lines
            if line == key or (line.endswith(f"/{key}") and f"/{shard.path}/{key}".endswith(f"/{line}"))
        }
        assert listed(tmp_path / "keys", lines, shards, keys) == expected


def test_keys_with_slashes_and_names_without_a_folder(tmp_path):
    shards = [Shard("0.tar", Path("0.tar"), 3, 1 << 20), Shard("0.tar", Path("/x/0.tar"), 3, 1 << 20)]
    keys = [["a", "x/0.tar/a", "0.tar/"]] * 2
    path = tmp_path / "keys"
    assert listed(path, ["0.tar/a"], shards, keys) == {(0, 0)}  # the whole of a path is one shard's
    assert listed(path, ["x/0.tar/a"], shards, keys) == {(1, 0)}
    assert listed(path, ["0.tar/x/0.tar/a", "0.tar/"], shards, keys) == {(0, 1), (0, 2), (1, 2)}
    assert listed(path, ["y/0.tar/a"], shards, keys) == set()


def test_addresses_are_as_logs_have_them(corpora, tmp_path):
    addresses = [
        "https://me:secret@host/cc3m/{}.tar?signature=1",
        "s3://bucket/cc12m/{}.tar",
        "pipe:ssh host cat cc/{}.tar",
        "pipe:cat {}.tar | pv",
    ]
    shards = [replace(shard, path=Remote(form.format(i))) for form in addresses for i, shard in enumerate(corpora[0])]
    labels = labels_of(shards)
    assert labels[0] == "https://host/cc3m/0.tar"
    keys = [[f"k{i}00{n}" for n in range(size)] for _ in addresses for i, size in enumerate(SIZES)]
    for number, label in enumerate(labels):
        assert listed(tmp_path / "keys", [f"{label}/{keys[number][2]}"], shards, keys) == {(number, 2)}
    path = tmp_path / "keys"
    assert listed(path, ["cc12m/1.tar/k1003"], shards, keys) == {(3, 3)}
    assert listed(path, ["1.tar/k1003"], shards, keys) == {(number, 3) for number in (1, 3, 5, 7)}
    path.write_text("bucket/cc12m/1.tar/k1003\n")
    columns = str(Path(corpora[0][0].path).parent / "columns")
    mixture = [shards[:2], shards[2:4]]
    assert Selection(mixture, Filter(drop=str(path), columns=[columns] * 2)).sizes.tolist() == [6, 5, 6, 4]


def test_the_log_of_a_mixture_is_a_list(corpora, tmp_path):
    (batch,) = read([Corpus(shards) for shards in corpora], Filter(), 1)
    own = (~batch.replaced).nonzero().flatten().tolist()
    slots = {tuple(batch.slots[row].tolist()) for row in own}
    assert {shard // 2 for shard, _ in slots} == {0, 1}
    path = tmp_path / "keys"
    path.write_text("\n".join(batch.keys[row] for row in own))
    everything = {(shard, i) for shard in range(4) for i in range(SIZES[shard % 2])}
    assert chosen(Selection(corpora, Filter(keep=str(path)))) == slots
    assert chosen(Selection(corpora, Filter(drop=str(path)))) == everything - slots


def test_a_line_of_several_corpora_is_refused(corpora, tmp_path):
    path = tmp_path / "keys"
    path.write_text("cc3m/0.tar/k0001\nunknown\n1.tar/k1004\ncc12m/0.tar/k0001\nk0002\nk0002\n")
    for rules in (Filter(keep=str(path)), Filter(drop=str(path))):
        one = Selection([[*corpora[0], *corpora[1]]], rules)  # as one corpus
        assert (one.kept if rules.keep else one.total - one.kept) == 6
        with pytest.raises(UserError) as error:  # whatever was counted before
            Selection(corpora, rules)
        assert "2 of the 5 keys of" in error.value.what
        assert "more than one corpus of data.train, such as 1.tar/k1004." in error.value.what
        assert "FOLDER/SHARD.tar/KEY" in error.value.remedy
    path.write_text("cc3m/0.tar/k0001\ncc12m/1.tar/k1004\ncc12m/0.tar/k0002\n")
    assert Selection(corpora, Filter(drop=str(path))).sizes.tolist() == [5, 5, 5, 4]
    path.write_text("k0001\n")
    assert Selection(corpora[:1], Filter(drop=str(path))).sizes.tolist() == [5, 5]


def test_what_of_a_list_is_in_the_data(corpora, tmp_path):
    keep, drop = tmp_path / "good.txt", tmp_path / "twice.txt"
    keep.write_text("".join(f"cc3m/{i}.tar/k{i}00{n}\n" for i in range(2) for n in range(5)) + "cc12m/0.tar/k0001\n")
    drop.write_text("cc3m/0.tar/k0001\ncc3m/0.tar/k0001\nk9999\ncc3m/1.tar/k0001\ncc1m/0.tar/k0001\n")
    for _ in range(2):  # counted, and recalled
        selection = Selection(corpora, Filter(keep=str(keep), drop=str(drop)))
        assert selection.lists == {"keep": [0, 10, 1], "drop": [3, 1, 0]}
        assert selection.describe_lists() == {
            "keep": "good.txt: 0 of 11 keys are not in the data; samples listed: 11 (corpus 1: 10, corpus 2: 1)",
            "drop": "twice.txt: 3 of 4 keys are not in the data; samples listed: 1 (corpus 1: 1, corpus 2: 0)",
        }
    assert selection.kept == 10
    one = Selection(corpora[:1], Filter(drop=str(drop)))
    assert one.describe_lists() == {"drop": "twice.txt: 3 of 4 keys are not in the data; samples listed: 1"}
    assert Selection(corpora, Filter(min_side=10)).describe_lists() == {}


def test_a_list_takes_the_memory_of_its_hashes(tmp_path, monkeypatch):
    monkeypatch.setattr(key_lists, "_LINES", 1 << 10)
    shards = [Shard(f"{i}.tar", Path(f"/data/{i}.tar"), 1000, 1 << 30) for i in range(200)]
    path = tmp_path / "keys"
    for line in ("{:09d}", "{1}.tar/{0:09d}", "/data/{1}.tar/{0:09d}"):
        path.write_text("\n".join(line.format(i, i % 200) for i in range(50_000)))
        tracemalloc.start()
        keys = KeyList(str(path), shards)
        held, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(keys) == 50_000
        assert held < 9 * 50_000 + (1 << 18)
        assert peak < 44 * 50_000 + (1 << 20)  # while it is read: of the lines, some at a time
