"""Filters of samples: which are kept, by plain loops; the order over them on any ranks and after a restart."""

import io
import random
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from pretrain.config import Config
from pretrain.stream.corpora import Corpus
from pretrain.stream.filter import Filter
from pretrain.stream.selection import Selection
from pretrain.stream.settings import Settings
from pretrain.stream.stream import Stream
from probemb.cli.configuration import parse_config
from probemb.data.shards.index import read_index
from probemb.data.shards.writer import tar_writer
from probemb.errors import UserError
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
                buffer = io.BytesIO()
                Image.new("RGB", (width, height), (i, shard, 0)).save(buffer, "JPEG")
                image = b"broken" if (shard, i) == (0, 3) else buffer.getvalue()
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


def test_lists_of_keys(corpus, tmp_path):
    folder, truth = corpus
    some = random.Random(0).sample(truth, 30)
    lines = [one["key"] if i % 2 else f"{one['place'][0]}.tar/{one['key']}" for i, one in enumerate(some)]
    listed = tmp_path / "keys.txt"
    listed.write_text("\n".join([*lines, "unknown", f"3.tar/{truth[0]['key']}", ""]))  # the last is another shard's
    places = {one["place"] for one in some}
    shards = read_index(folder)
    assert chosen(Selection([shards], Filter(keep=str(listed)))) == places
    assert chosen(Selection([shards], Filter(drop=str(listed)))) == {one["place"] for one in truth} - places


def test_a_part_of_the_shards_and_pieces_of_any_size(corpus, monkeypatch):
    folder, truth = corpus
    keeps, rules = RULES[0][1], Filter(**RULES[0][0])
    whole = Selection([read_index(folder)], rules)
    part = Selection([read_index([folder / "3.tar", folder / "1.tar"])], rules)
    assert chosen(part) == {
        ({3: 0, 1: 1}[s], i) for s, i in (one["place"] for one in truth if keeps(one)) if s in (1, 3)
    }
    one_shard = Selection([read_index([folder / "2.tar"])], rules)
    assert chosen(one_shard) == {(0, i) for s, i in (one["place"] for one in truth if keeps(one)) if s == 2}
    for piece in (1, 25, 50):
        monkeypatch.setattr("pretrain.stream.selection._PIECE", piece)
        other = Selection([read_index(folder)], rules)
        assert other.identity == whole.identity
        np.testing.assert_array_equal(other.sizes, whole.sizes)


# ------------------------------------------------------------------------------------------------------------- streams


def to_tensor(image: Image.Image) -> torch.Tensor:
    return torch.tensor(image.size, dtype=torch.float32).reshape(2, 1, 1).expand(2, 2, 2) + torch.rand(())


def tokenize(texts: list[str]) -> torch.Tensor:
    return torch.tensor([[len(text), len(text.split())] for text in texts])


def read(corpora, rules: Filter, steps: int, **place) -> list:
    settings = Settings(batch_size=8, lanes=4, window=6, seed=2, workers=place.pop("workers", 0), filter=rules)
    with Stream(corpora, settings, to_tensor, tokenize, steps=steps, **place) as stream:
        return list(stream)


def test_left_out_samples_never_appear_and_others_once_an_epoch(corpus):
    folder, truth = corpus
    shards, rules = read_index(folder), Filter(min_words=2, max_aspect=3)
    with Stream(shards, Settings(batch_size=8, lanes=4, filter=rules), to_tensor, tokenize) as stream:
        steps, kept = stream.order.steps, chosen(stream.selection)
        assert "max_aspect 3, min_words 2 (" in stream.identity["filter"]
        assert stream.order.slots_per_epoch == len(kept) < len(truth)
    for epoch in range(3):
        batches = read(shards, rules, steps, start_samples=8 * steps * epoch)
        seen = [tuple(slot) for batch in batches for slot in batch.slots.tolist()]
        assert len(seen) == len(set(seen)) == 8 * steps
        assert set(seen) <= kept
        assert not any(batch.replaced.any() for batch in batches)  # the broken image has no size
        keys = {one["place"]: one["key"] for one in truth}
        shown = [key for batch in batches for key in batch.keys]
        assert shown == [f"{shard}.tar/{keys[shard, i]}" for shard, i in seen]


@pytest.mark.parametrize(("world_size", "workers"), [(2, 0), (4, 2)])
def test_order_and_resume_do_not_depend_on_ranks(corpus, world_size, workers):
    shards, rules = read_index(corpus[0]), Filter(min_side=15)
    expected = read(shards, rules, 16)
    for start in (0, 5):
        place = dict(world_size=world_size, workers=workers, start_samples=8 * start)
        ranks = [read(shards, rules, 16 - start, rank=rank, **place) for rank in range(world_size)]
        for step, parts in enumerate(zip(*ranks, strict=True), start=start):
            for name in ("images", "tokens", "slots"):
                assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(expected[step], name))


def test_mixtures_weigh_what_is_kept(corpus, tmp_path):
    folder, truth = corpus
    other = make_corpus(tmp_path / "other", "o", (20, 12))
    rules, keeps = Filter(min_words=2), lambda one: all(len(caption.split()) >= 2 for caption in one["captions"])
    corpora = [Corpus(read_index(folder)), Corpus(read_index(tmp_path / "other"), 2.0)]
    with Stream(corpora, Settings(batch_size=4, filter=rules), to_tensor, tokenize) as stream:
        assert stream.order.slots_per_epoch == sum(map(keeps, truth)) + 2 * sum(map(keeps, other))
    # The same columns, named apart from the shards
    moved = [
        shutil.copytree(path / "columns", tmp_path / f"c{i}") for i, path in enumerate((folder, tmp_path / "other"))
    ]
    named = Selection([one.shards for one in corpora], Filter(min_words=2, columns=[str(path) for path in moved]))
    assert chosen(named) == chosen(stream.selection)
    assert named.identity == stream.identity["filter"]


def test_bounds_of_one_corpus(corpus, tmp_path):
    folder, truth = corpus
    make_corpus(tmp_path / "other", "o", (20, 12))
    (tmp_path / "other" / "columns" / "score.clip_l14.npy").unlink()
    first, second = read_index(folder), read_index(tmp_path / "other")
    good = {one["place"] for one in truth if one["score"] is not None and one["score"] >= 0.5}
    rest = {(4 + shard, i) for shard, size in enumerate((20, 12)) for i in range(size)}
    for rules in (dict(min_score=[0.5, None]), dict(min_score=[0.5, None], max_score=[1.0, None])):
        for _ in range(2):  # counted, and recalled
            selection = Selection([first, second], Filter(score="clip_l14", **rules))
            assert chosen(selection) == good | rest
            assert [*selection.left_out] == [*rules]
            assert selection.left_out["min_score"] == len(truth) - len(good)
    swapped = Selection([second, first], Filter(score="clip_l14", min_score=[None, 0.5]))
    assert swapped.sizes.tolist() == [20, 12, *selection.sizes[:4]]
    words = ["--data.filter.score=clip_l14", "--data.filter.min_score=[0.5, null]"]
    parsed = parse_config(Config, "run", "", words).data.filter
    assert Selection([first, second], parsed).sizes.tolist() == selection.sizes.tolist()
    bounds = {Selection([first[1:], first[:1]], Filter(score="clip_l14", min_score=[0.5, x])).kept for x in (0.1, 0.9)}
    assert len(bounds) == 2
    with pytest.raises(UserError, match=r"no column score\.clip_l14"):
        Selection([first, second], Filter(score="clip_l14", min_score=0.5))


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
    plain = Stream(shards, Settings(batch_size=8), to_tensor, tokenize)
    assert "filter" not in plain.identity
    assert plain.selection is None


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("rules", "what", "remedy"),
    [
        (dict(min_side=1000), "no sample: 0 of 79 samples kept", "Loosen"),
        (dict(score="other", min_score=1), "no column score.other", "--score other"),
        (dict(score="clip_l14"), "min_score", "bound"),
        (dict(min_score=0.2), "min_score", "bound"),
        (dict(score="../x", min_score=0.2), "cannot name", "letters"),
        (dict(min_words=5, max_words=4), "above max_words 4", "correct"),
        (dict(score="clip_l14", min_score=[0.1, None]), "min_score has 2 values for 1 training paths", "one value for"),
        (dict(score="clip_l14", max_score=[None]), "0 of them a bound", "a single one"),
        (dict(score="clip_l14", min_score=[0.5], max_score=0.4), "above max_score 0.4", "correct"),
        (dict(drop="no/such/file"), "cannot be read", "one key a line"),
        (dict(min_words=1, columns=["a", "b"]), "2 folders of columns for 1", "one folder"),
    ],
)
def test_rules_that_cannot_be_followed(corpus, rules, what, remedy):
    with pytest.raises(UserError) as error:
        Selection([read_index(corpus[0])], Filter(**rules))
    assert what in error.value.what
    assert remedy in error.value.remedy


@pytest.mark.parametrize(("content", "what"), [("unknown\nother\n", "Not one key"), ("\n\n", "holds no keys")])
def test_lists_without_a_known_key(corpus, tmp_path, content, what):
    (tmp_path / "keys").write_text(content)
    for name in ("keep", "drop"):
        with pytest.raises(UserError, match=what):
            Selection([read_index(corpus[0])], Filter(**{name: str(tmp_path / "keys")}))


def test_columns_that_do_not_fit_the_shards(corpus, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(corpus[0], folder)
    rules, columns = Filter(min_side=1), folder / "columns"

    def refused(match: str) -> None:
        with pytest.raises(UserError, match=match) as error:
            Selection([read_index(folder)], rules)
        assert f"tools.shards measure {folder}" in error.value.remedy

    whole = (columns / "width.npy").read_bytes()
    for damaged in (whole[:-4], b"", whole[:20]):
        (columns / "width.npy").write_bytes(damaged)
        refused("damaged")
    np.save(columns / "width.npy", np.array([{}] * 79), allow_pickle=True)
    refused("damaged")
    np.save(columns / "width.npy", np.zeros(78, "<u4"))
    refused("damaged")
    (columns / "width.npy").write_bytes(whole)
    with open(folder / "1.tar", "r+b") as file:  # the same size, other content
        file.seek(512)
        file.write(b"x")
    assert main(["index", str(folder)]) == 0
    refused("do not describe 1.tar")
    shutil.rmtree(columns)
    refused("no columns")


def test_columns_that_change_while_a_run_reads_them(corpus, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(corpus[0], folder)
    selection = Selection([read_index(folder)], Filter(min_side=20))
    np.save(folder / "columns" / "width.npy", np.zeros(79, "<u4"))
    with pytest.raises(UserError, match="have changed"):
        selection.places(0)


def test_scores_from_one_file_for_all_shards(corpus, tmp_path):
    folder, truth = tmp_path / "copy", corpus[1]
    shutil.copytree(corpus[0], folder, ignore=lambda *_: ["columns"])
    parts = [pq.read_table(folder / f"{shard}.parquet") for shard in range(len(SIZES))]
    pq.write_table(pa.concat_tables(reversed(parts)), tmp_path / "all.parquet")
    arguments = ["measure", str(folder), "--score", "clip_l14", "--workers", "1", "--scores"]
    assert main([*arguments, str(tmp_path / "all.parquet"), "--score-key", "uid"]) == 0
    selection = Selection([read_index(folder)], Filter(**RULES[6][0]))
    assert chosen(selection) == {one["place"] for one in truth if RULES[6][1](one)}
    for table, wrong in (
        ({"key": ["a"], "clip_l14": [1.0]}, "No sample"),
        ({"uid": ["a"], "clip_l14": [1.0]}, "no column key"),
        ({"key": ["a"]}, "no column clip_l14"),
        ({"key": ["a"], "clip_l14": ["b"]}, "cannot be read as a table"),
    ):
        pq.write_table(pa.table(table), tmp_path / "wrong.parquet")
        with pytest.raises(UserError, match=wrong):
            main([*arguments, str(tmp_path / "wrong.parquet")])
        assert chosen(Selection([read_index(folder)], Filter(**RULES[6][0]))) == chosen(selection)  # the old ones stay
    assert not [*folder.glob(".columns.*")]
