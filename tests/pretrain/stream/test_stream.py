"""The stream: the same batches whatever the ranks, workers and restarts, also when samples are damaged."""

import multiprocessing
import os
import random
import re
import signal
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from pretrain.config import Data
from pretrain.stream.stream import Stream
from probemb.data.shards.index import Shard
from probemb.data.shards.write import tar_writer
from probemb.errors import UserError
from probemb.files import file_sha256
from tests.imagesite import bomb
from tests.world import encode, picture

SIZES = (11, 7, 9, 13, 5)  # 45 samples: 5 steps of 8 in an epoch, 5 are dropped
BATCH, LANES = 8, 4


def write_shard(path: Path, size: int, bad: dict[int, str] | None = None, seed: int = 0) -> Shard:
    """A tar of tiny photographs with three captions each; `bad` says which are damaged, and how."""
    numbers = np.random.default_rng([seed, *path.name.encode()])
    with open(path, "wb") as file, tar_writer(file) as tar:
        for i in range(size):
            kind = (bad or {}).get(i)
            noise = numbers.integers(0, 256, (int(numbers.integers(16, 30)), 20, 3), dtype=np.uint8)
            image = encode(Image.fromarray(noise))
            caption = "\n".join(f"{path.stem} {i} caption {c}" for c in "abc").encode()
            if kind == "image":
                image = image[: len(image) // 2]
            elif kind == "zero bytes":
                image = b""
            elif kind == "bomb":
                image = bomb()
            elif kind == "caption":
                caption = b"\n  \n"
            elif kind == "encoding":
                caption = "ein Käfer".encode("latin-1")
            key = "\x1b[31m" if kind == "name" else f"{i:04d}"
            tar.write({"__key__": key, "jpg": image, "txt": b"" if kind == "name" else caption})
    return Shard(path.name, path, size, path.stat().st_size)


def write_corpus(folder: Path, bad: dict[tuple[int, int], str] | None = None, sizes=SIZES) -> list[Shard]:
    """Shards of these sizes; `bad` is keyed by (shard, index)."""
    folder.mkdir(exist_ok=True)
    of_shard = [{i: kind for (s, i), kind in (bad or {}).items() if s == shard} for shard in range(len(sizes))]
    return [write_shard(folder / f"{s:05d}.tar", size, of_shard[s]) for s, size in enumerate(sizes)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> list[Shard]:
    return write_corpus(tmp_path_factory.mktemp("data"))


def augment(image: Image.Image) -> torch.Tensor:
    """A random crop, and noise from every global source of random numbers that transforms use."""
    from torchvision.transforms.v2 import functional as F

    pixels = F.to_dtype(F.pil_to_tensor(image), torch.float32, scale=True)
    top, left = torch.randint(0, pixels.shape[1] - 12, ()), torch.randint(0, pixels.shape[2] - 12, ())
    pixels = pixels[:, top : top + 12, left : left + 12]
    return pixels + torch.rand(3, 1, 1) + random.random() + float(np.random.rand())


def tokenize(texts: list[str]) -> torch.Tensor:
    """Bytes as tokens, 24 of them."""
    return torch.stack([torch.tensor(list(text.encode()[:24].ljust(24)), dtype=torch.int64) for text in texts])


def make(shards, **settings) -> Stream:
    settings = {"batch_size": BATCH, "lanes": LANES, "window": 4, "seed": 5, "workers": 0} | settings
    inputs = [settings.pop(name, default) for name, default in (("transform", augment), ("tokenizer", tokenize))]
    names = {field.name for field in fields(Data)}
    data = Data(**{name: value for name, value in settings.items() if name in names})
    return Stream([shards], data, *inputs, **{name: value for name, value in settings.items() if name not in names})


def read(shards, steps: int, **settings) -> list:
    with make(shards, **settings) as stream:
        return take(stream, steps)


def take(stream: Stream, count: int) -> list:
    return [next(stream) for _ in range(count)]


def assert_same(batches, expected) -> None:
    """Equal to the last bit, and made by the same samples."""
    assert len(batches) == len(expected)
    for one, other in zip(batches, expected, strict=True):
        assert one.keys == other.keys
        for name in "images", "tokens":
            assert torch.equal(getattr(one, name), getattr(other, name)), name


def places(batch) -> list[tuple[int, int]]:
    """Shard and index of each sample, from its key, "00003.tar/0004"."""
    return [tuple(map(int, re.findall(r"\d+", key))) for key in batch.keys]


def assert_ranks_make_up(by_rank, expected) -> None:
    """Row by row, the ranks' batches put together are the batches of one process."""
    for batch, *batches in zip(expected, *by_rank, strict=True):
        assert [key for one in batches for key in one.keys] == batch.keys
        for name in "images", "tokens":
            assert torch.equal(torch.cat([getattr(one, name) for one in batches]), getattr(batch, name)), name


@pytest.fixture(scope="module")
def uninterrupted(corpus):
    """Two and a half epochs in one process without workers."""
    return read(corpus, steps=13)


def test_batches_hold_every_sample_once_an_epoch(uninterrupted):
    for epoch in range(2):
        batches = uninterrupted[epoch * 5 : epoch * 5 + 5]
        assert len({place for batch in batches for place in places(batch)}) == 40
    batch = uninterrupted[0]
    assert batch.images.shape == (8, 3, 12, 12)
    assert batch.images.dtype == torch.float32
    assert batch.tokens.shape == (8, 24)
    assert batch.tokens.dtype == torch.int64
    for (shard, index), tokens in zip(places(batch), batch.tokens):
        caption = bytes(tokens.tolist()).decode().strip()
        assert caption.startswith(f"{shard:05d} {index} caption ")  # image and caption belong together


@pytest.mark.parametrize(("world_size", "workers"), [(1, 3), (4, 2), (8, 0)])
def test_batches_do_not_depend_on_ranks_and_workers(corpus, uninterrupted, world_size, workers):
    by_rank = [read(corpus, steps=13, rank=rank, world_size=world_size, workers=workers) for rank in range(world_size)]
    assert all(batch.images.shape[0] == 8 // world_size for batches in by_rank for batch in batches)
    assert_ranks_make_up(by_rank, uninterrupted)


def test_resuming_at_any_step_continues_the_uninterrupted_stream(corpus, uninterrupted):
    for step in range(12):
        assert_same(read(corpus, steps=13 - step, start_samples=step * 8), uninterrupted[step:])


def test_seed_epoch_and_caption_choice(corpus, uninterrupted):
    other = read(corpus, steps=1, seed=6)
    assert other[0].keys != uninterrupted[0].keys

    def captions(batches) -> dict[str, str]:
        return {
            key: bytes(tokens.tolist()).decode().strip()[-1]
            for batch in batches
            for key, tokens in zip(batch.keys, batch.tokens, strict=True)
        }

    first, second = captions(uninterrupted[:5]), captions(uninterrupted[5:10])
    assert set(first.values()) == set(second.values()) == {"a", "b", "c"}
    common = first.keys() & second.keys()
    assert 0.4 < np.mean([first[key] != second[key] for key in common]) < 0.95  # drawn anew: two thirds on average
    assert set(captions(read(corpus, steps=5, captions="first")).values()) == {"a"}


def test_captions_by_name_are_drawn_by_seed_and_position(tmp_path):
    """A third of the samples lacks the synthetic ones, and falls back to the first name that it has."""
    (tmp_path / "data").mkdir()
    for number in range(4):
        with open(tmp_path / "data" / f"{number}.tar", "wb") as file, tar_writer(file) as tar:
            for i in range(64):
                texts = {"txt": b"t", "long.txt": b"l", "json": b'{"made": {"by": ["x", "y"]}}' if i % 3 else b"{}"}
                tar.write({"__key__": f"{i}", "jpg": picture("red", format="JPEG"), **texts})
    shards = [Shard(path.name, path, 64, path.stat().st_size) for path in sorted((tmp_path / "data").iterdir())]
    wanted = {"long.txt": 0.0, "json.made.by": 3.0, "txt": 1.0}

    def seen(steps=32, **settings):
        batches = read(shards, steps, **{"captions": wanted, "transform": augment, **settings})
        return [
            (key, bytes(tokens.tolist())[:1].decode())
            for batch in batches
            for key, tokens in zip(batch.keys, batch.tokens, strict=True)
        ]

    drawn = seen()
    counts = Counter((int(key.rpartition("/")[2]) % 3 > 0, letter) for key, letter in drawn)
    have = counts[True, "x"] + counts[True, "y"] + counts[True, "t"]
    assert counts[True, "t"] / have == pytest.approx(1 / 4, abs=4 * (3 / 16 / have) ** 0.5)
    assert counts[True, "x"] / (counts[True, "x"] + counts[True, "y"]) == pytest.approx(1 / 2, abs=0.2)
    assert counts[False, "l"] == pytest.approx(3 / 4 * (256 - have), abs=4 * (3 / 16 * (256 - have)) ** 0.5)
    assert set(counts) == {(True, "x"), (True, "y"), (True, "t"), (False, "l"), (False, "t")}
    assert seen(20, start_samples=12 * BATCH, workers=2) == drawn[12 * BATCH :]
    by_rank = [seen(rank=rank, world_size=2) for rank in range(2)]
    assert sorted(by_rank[0] + by_rank[1]) == sorted(drawn)
    assert seen(seed=6) != drawn
    told = r"256 samples .* the name json\.made\.bye\. Did you mean 'json.made.by'\? They have txt, long\.txt, json"
    with pytest.raises(UserError, match=told):
        make(shards, captions={"txt": 1, "json.made.bye": 1})


def test_identity_names_what_the_order_depends_on(corpus):
    with make(corpus) as one, make(corpus, rank=1, world_size=2, workers=1, start_samples=8) as other:
        assert one.identity == other.identity
    options = {"seed": 6, "lanes": 2, "window": 5, "batch_size": 4, "captions": "first"}
    for name, value in options.items():
        with make(corpus, **{name: value}) as other:
            changed = {key for key in one.identity if one.identity[key] != other.identity[key]}
            assert changed == {"caption" if name == "captions" else name}
    with make(corpus[:-1]) as other:
        assert other.identity["corpus"] != one.identity["corpus"]


@pytest.fixture(scope="module")
def damaged(tmp_path_factory, uninterrupted) -> tuple[list[Shard], dict[tuple[int, int], str]]:
    """All kinds of damage, also in the first batch of an epoch and in two batches of a row in succession."""
    slots = list(map(places, uninterrupted))
    bad = {
        slots[0][1]: "image",
        slots[1][1]: "caption",
        slots[0][7]: "encoding",
        slots[3][2]: "zero bytes",
        slots[4][2]: "image",
        slots[2][4]: "name",
        slots[7][0]: "encoding",
        slots[4][5]: "bomb",
    }
    return write_corpus(tmp_path_factory.mktemp("damaged"), bad), bad


def expected_keys(slots: np.ndarray, bad) -> list[list[str]]:
    """The sample of each row in an epoch, (steps, rows), by the rule: the row's last good one, else its first."""
    keys = []
    for step in range(len(slots)):
        line = []
        for row in range(slots.shape[1]):
            nearest_first = [*range(step, -1, -1), *range(step + 1, len(slots))]
            good = next(s for s in nearest_first if tuple(slots[s, row]) not in bad)
            line.append("{:05d}.tar/{:04d}".format(*slots[good, row]))
        keys.append(line)
    return keys


def test_damaged_samples_are_replaced_by_their_rows_last_good_one(damaged, uninterrupted):
    shards, bad = damaged
    with make(shards, failure_share=1) as stream:
        batches = take(stream, 10)
    slots = list(map(places, uninterrupted[:10]))
    for start in (0, 5):
        keys = [batch.keys for batch in batches[start : start + 5]]
        assert keys == expected_keys(np.array(slots[start : start + 5]), bad)
        assert all(len(set(row)) == 8 for row in keys)  # no repeat inside a batch, which would be a false negative
    for batch, sound, line in zip(batches, uninterrupted, slots):  # all the others are as they would be
        same = [place not in bad for place in line]
        assert torch.equal(batch.images[same], sound.images[same])
    assert torch.equal(batches[4].images[2], batches[2].images[2])  # a stand-in is a repeat, to the last bit
    counts = Counter(f"{place[0]:05d}.tar" for line in slots for place in line if place in bad)
    assert {name: failure.count for name, failure in stream.failures.items()} == counts
    assert all(failure.reason.isprintable() for failure in stream.failures.values())


@pytest.mark.chaos
@pytest.mark.parametrize(("how", "workers"), [("vanishes", 0), ("is cut", 2), ("is emptied", 0)])
def test_a_shard_that_is_lost_while_training(tmp_path, how, workers):
    """More shards than may be open at once, so that this one is opened anew after it is lost."""
    shards = write_corpus(tmp_path / "data", sizes=(10,) * 30)
    with make(shards, failure_share=1, workers=workers) as stream:
        before = take(stream, 10)
        for shard in shards:
            if shard.name != "00004.tar":
                continue
            if how == "vanishes":
                shard.path.unlink()
            else:
                os.truncate(shard.path, 1024 if how == "is cut" else 0)
        after = take(stream, 64)
    assert len(before + after) == 74
    assert {batch.images.shape for batch in after} == {(8, 3, 12, 12)}
    assert set(stream.failures) == {"00004.tar"}
    rows = [stream.order.rows(*divmod(n, stream.order.steps), 0, BATCH) for n in range(10, 74)]
    slots = [slot for row in rows for slot in zip(row.shard.tolist(), row.index.tolist())]
    shown = [place for batch in after for place in places(batch)]
    seen, failed = sum(shard == 4 for shard, _ in slots), stream.failures["00004.tar"].count
    assert failed == sum(own != place for own, place in zip(slots, shown, strict=True))
    assert 0 < failed <= seen
    assert {"vanishes": "No such file", "is cut": "cut off", "is emptied": "empty"}[how] in stream.failures[
        "00004.tar"
    ].reason or "has become shorter" in stream.failures["00004.tar"].reason


@pytest.mark.chaos
def test_too_many_failures_stop_the_run_and_name_the_worst_shards(tmp_path):
    bad = {(1, i): "image" for i in range(8)} | {(3, i): "caption" for i in range(4)}
    shards = write_corpus(tmp_path / "data", bad, sizes=(40,) * 6)
    stream = make(shards, workers=2)
    stream.tally.judged_from = 80
    with stream, pytest.raises(UserError) as caught:
        take(stream, 100)
    assert "allowed are 5.0%" in caught.value.what
    assert "00001.tar" in caught.value.what
    assert stream.samples_seen >= 72
    with pytest.raises(StopIteration):  # it is over, rather than half alive
        next(stream)
    with make(shards, failure_share=0.06, workers=2) as stream:  # 12 of 240 are 5 %
        assert len(take(stream, 60)) == 60


def die(image: Image.Image) -> torch.Tensor:
    if multiprocessing.parent_process() is not None and torch.rand(()) < 0.2:
        os.kill(os.getpid(), signal.SIGKILL)
    return augment(image)


@pytest.mark.chaos
def test_a_killed_worker_is_noticed(corpus):
    with make(corpus, transform=die, workers=2) as stream, pytest.raises(UserError, match="ended from outside"):
        take(stream, 20)


def test_workers_ignore_signals_that_are_meant_for_the_trainer(corpus, uninterrupted):
    before = set(multiprocessing.active_children())
    with make(corpus, workers=2) as stream:
        batches = [next(stream)]
        for process in set(multiprocessing.active_children()) - before:
            for number in signal.SIGTERM, signal.SIGINT, signal.SIGUSR1:
                os.kill(process.pid, number)
        batches += take(stream, 12)
    assert_same(batches, uninterrupted)


@pytest.mark.chaos
def test_another_content_of_the_same_size_stops_the_run(tmp_path):
    shards = [replace(shard, sha256=file_sha256(shard.path)) for shard in write_corpus(tmp_path / "data")]
    data = shards[3].path.read_bytes()  # a letter of a caption: the tar and the image stay sound
    shards[3].path.write_bytes(data.replace(b"caption a", b"caption b", 1))
    assert len(read(shards, steps=5)) == 5  # not asked for
    told = pytest.raises(UserError, match="has other content than when it was indexed")
    with make(shards, verify_hash=True, workers=2) as stream, told:
        next(stream)
