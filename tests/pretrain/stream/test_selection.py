"""Filters of samples: which are kept, by plain loops; the order over them on any ranks and after a restart."""

import random
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from pretrain.config import Data
from pretrain.stream.filter import Filter, KeyList, Selection
from pretrain.stream.stream import Stream
from probemb.data.shards.index import Shard, key_hash, read_index
from probemb.data.shards.write import tar_writer
from probemb.errors import UserError
from tests.world import picture
from tools.shards import main

SIZES = (23, 17, 30, 9)


def make_corpus(folder: Path, prefix: str = "k", sizes=SIZES) -> list[dict]:
    """Shards of images of many sizes with one to three captions, their columns and a score; returns the truth."""
    numbers, truth = random.Random(prefix), []
    folder.mkdir()
    for shard, size in enumerate(sizes):
        keys, scores = [], []
        with open(folder / f"{shard}.tar", "wb") as file, tar_writer(file) as tar:
            for i in range(size):
                width, height = numbers.randint(8, 60), numbers.randint(8, 60)
                captions = [" ".join(["wörd"] * numbers.randint(1, 9)) for _ in range(numbers.randint(1, 3))]
                image = picture((i, shard, 0), (width, height), "JPEG") if (shard, i) != (0, 3) else b"broken"
                key = f"{prefix}{shard}{i:03d}"
                tar.write({"__key__": key, "jpg": image, "txt": "\n".join(captions).encode()})
                score = numbers.random()
                if numbers.random() < 0.8:  # the others have none
                    keys.append(key)
                    scores.append(score)
                known = image != b"broken"
                truth.append(
                    {"key": key, "place": (shard, i), "width": width * known, "height": height * known}
                    | {"captions": captions, "score": score if keys and keys[-1] == key else None}
                )
        order = numbers.sample(range(len(keys)), len(keys))
        table = {"uid": [keys[i] for i in order], "clip_l14": [scores[i] for i in order]}
        pq.write_table(pa.table(table), folder / f"{shard}.parquet")
    assert main(["index", str(folder), "--workers", "1"]) == 0
    assert main(["measure", str(folder), "--score", "clip_l14", "--score-key", "uid", "--workers", "2"]) == 0
    return truth


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "corpus"
    return folder, make_corpus(folder)


def sizes_of(one: dict) -> tuple[int, int]:
    return min(one["width"], one["height"]), max(one["width"], one["height"])


RULES = [
    (dict(min_side=20), lambda one: sizes_of(one)[0] >= 20),
    (dict(max_side=40), lambda one: 0 < sizes_of(one)[1] <= 40),
    (dict(max_aspect=1.5), lambda one: sizes_of(one)[0] and sizes_of(one)[1] / sizes_of(one)[0] <= 1.5),
    (dict(min_words=3), lambda one: all(len(caption.split()) >= 3 for caption in one["captions"])),
    (dict(max_words=6), lambda one: all(len(caption.split()) <= 6 for caption in one["captions"])),
    (dict(min_chars=14, max_chars=40), lambda one: all(14 <= len(caption) <= 40 for caption in one["captions"])),
    (dict(score="clip_l14", min_score=0.5), lambda one: one["score"] is not None and one["score"] >= 0.5),
    (dict(score="clip_l14", max_score=0.5), lambda one: one["score"] is not None and one["score"] <= 0.5),
]


def chosen(selection: Selection) -> set[tuple[int, int]]:
    return {(shard, int(i)) for shard in range(len(selection.sizes)) for i in selection.places(shard)}


@pytest.mark.parametrize(("rules", "keeps"), [*RULES, (RULES[0][0] | RULES[3][0], None)])
def test_rules_keep_what_plain_loops_keep(corpus, rules, keeps):
    folder, truth = corpus
    keeps = keeps or (lambda one: RULES[0][1](one) and RULES[3][1](one))
    expected = {one["place"] for one in truth if keeps(one)}
    assert 0 < len(expected) < len(truth)
    selection = Selection([read_index(folder)], Filter(**rules))
    assert chosen(selection) == expected
    assert selection.kept == len(expected) == sum(selection.sizes)
    assert selection.describe().startswith(f"{len(expected)} of {len(truth)} samples kept")


def to_tensor(image: Image.Image) -> torch.Tensor:
    return torch.tensor(image.size, dtype=torch.float32).reshape(2, 1, 1).expand(2, 2, 2) + torch.rand(())


def tokenize(texts: list[str]) -> torch.Tensor:
    return torch.tensor([[len(text), len(text.split())] for text in texts])


def read(shards, rules: Filter, steps: int, **place) -> list:
    data = Data(lanes=4, window=6, workers=place.pop("workers", 0), filter=rules)
    with Stream([shards], data, to_tensor, tokenize, batch_size=8, seed=2, **place) as stream:
        return [next(stream) for _ in range(steps)]


def test_left_out_samples_never_appear_and_others_once_an_epoch(corpus):
    folder, truth = corpus
    shards, rules = read_index(folder), Filter(min_words=2, max_aspect=3)
    with Stream([shards], Data(lanes=4, filter=rules, workers=0), to_tensor, tokenize, batch_size=8) as stream:
        steps, kept = stream.order.steps, chosen(stream.selection)
        assert "max_aspect 3, min_words 2 (" in stream.identity["filter"]
        assert stream.order.slots_per_epoch == len(kept) < len(truth)
    for epoch in range(3):
        batches = read(shards, rules, steps, start_samples=8 * steps * epoch)
        places = {f"{one['place'][0]}.tar/{one['key']}": one["place"] for one in truth}
        seen = [places[key] for batch in batches for key in batch.keys]
        assert len(seen) == len(set(seen)) == 8 * steps  # none stands in for another: the broken image has no size
        assert set(seen) <= kept


def test_order_and_resume_do_not_depend_on_ranks(corpus):
    shards, rules = read_index(corpus[0]), Filter(min_side=15)
    expected = read(shards, rules, 16)
    for start in (0, 5):
        place = dict(world_size=2, workers=2, start_samples=8 * start)
        ranks = [read(shards, rules, 16 - start, rank=rank, **place) for rank in range(2)]
        for step, parts in enumerate(zip(*ranks, strict=True), start=start):
            assert [key for part in parts for key in part.keys] == list(expected[step].keys)
            for name in ("images", "tokens"):
                assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(expected[step], name))


def test_identity_follows_what_is_kept(corpus, tmp_path):
    folder, _ = corpus
    shards = read_index(folder)
    identities = {Selection([shards], Filter(**rules)).identity for rules, _ in RULES}
    assert len(identities) == len(RULES)
    listed = tmp_path / "drop.txt"
    seen = set()
    for key in ("k0001", "k0002"):  # the same name and number, other samples
        listed.write_text(key)
        seen.add(Selection([shards], Filter(drop=str(listed))).identity)
    assert len(seen) == 2


def test_lines_of_a_list_mean_what_their_text_says(tmp_path):
    numbers, path = random.Random(0), tmp_path / "keys"
    folders = ["/data/cc3m", "/data/cc12m", "/data/my cc3m", "/other/cc3m/train"]
    shards = [Shard(f"{i}.tar", Path(folder) / f"{i}.tar", 5, 1 << 20) for folder in folders for i in range(3)]
    keys = [*(f"{i}" for i in range(4)), "dog/1"]
    fronts = ["", "0.tar/", "1.tar/", "cc3m/0.tar/", "data/cc3m/2.tar/", "/data/cc3m/2.tar/", "train/1.tar/"]
    fronts += ["/other/cc3m/train/0.tar/", "c3m/1.tar/", "data/0.tar/", "cc3m/train/2.tar/", "my cc3m/2.tar/", "9.tar/"]
    for _ in range(50):
        lines = [f"{front}{numbers.choice(keys)}" for front in numbers.sample(fronts, numbers.randint(1, 4))]
        expected = {
            (number, place)
            for number, shard in enumerate(shards)
            for place, key in enumerate(keys)
            for line in lines
            if line == key or (line.endswith(f"/{key}") and f"/{shard.path}/{key}".endswith(f"/{line}"))
        }
        path.write_text("\n".join(lines))
        found = KeyList(str(path)).find(shards, key_hash(keys * len(shards)))
        assert {divmod(int(i), len(keys)) for i in np.flatnonzero(found)} == expected


def test_a_line_of_several_corpora_is_refused(corpus, tmp_path):
    """The same names of shards and keys in both."""
    shutil.copytree(corpus[0], tmp_path / "copy")
    corpora, path = [read_index(corpus[0]), read_index(tmp_path / "copy")], tmp_path / "keys"
    path.write_text("corpus/0.tar/k0001\nunknown\n1.tar/k1004\nk0002\n")
    with pytest.raises(UserError) as error:
        Selection(corpora, Filter(keep=str(path)))
    assert "2 of the 4 keys of" in error.value.what
    assert "more than one corpus of data.train." in error.value.what
    path.write_text("corpus/0.tar/k0001\ncopy/1.tar/k1004\n")
    assert Selection(corpora, Filter(drop=str(path))).sizes.tolist() == [22, 17, 30, 9, 23, 16, 30, 9]
