"""The stream: the same batches whatever the ranks, workers and restarts, also when samples are damaged."""

import io
import multiprocessing
import os
import random
import signal
import struct
import subprocess
import sys
import tarfile
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from pretrain.stream.corpora import Corpus, labels_of
from pretrain.stream.settings import Settings
from pretrain.stream.stream import Stream
from pretrain.stream.workers import Team
from probemb.data.shards.index import Shard
from probemb.data.shards.samples import list_samples
from probemb.data.shards.writer import tar_writer
from probemb.errors import UserError

SIZES = (11, 7, 9, 13, 5)  # 45 samples: 5 steps of 8 in an epoch, 5 are dropped
BATCH, LANES = 8, 4


def image_bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header states this size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def write_shard(path: Path, size: int, bad: dict[int, str] | None = None, seed: int = 0) -> Shard:
    """A tar of tiny photographs with three captions each; `bad` says which are damaged, and how."""
    numbers = np.random.default_rng([seed, *path.name.encode()])
    with open(path, "wb") as file, tar_writer(file) as tar:
        for i in range(size):
            kind = (bad or {}).get(i)
            buffer = io.BytesIO()
            noise = numbers.integers(0, 256, (int(numbers.integers(16, 30)), 20, 3), dtype=np.uint8)
            Image.fromarray(noise).save(buffer, "JPEG")
            image = buffer.getvalue()
            caption = "\n".join(f"{path.stem} {i} caption {c}" for c in "abc").encode()
            if kind == "image":
                image = image[: len(image) // 2]
            elif kind == "zero bytes":
                image = b""
            elif kind == "bomb":  # 1,200 bytes that ask for 3.6 gigapixels
                image = image_bomb(60_000, 60_000)
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
    settings = {"batch_size": BATCH, "lanes": LANES, "window": 4, "seed": 5} | settings
    inputs = [settings.pop(name, default) for name, default in (("transform", augment), ("tokenizer", tokenize))]
    place = {name: settings.pop(name) for name in ("rank", "world_size", "start_samples", "steps") if name in settings}
    return Stream(shards, Settings(**settings), *inputs, **place)


def read(shards, **settings) -> list:
    with make(shards, **settings) as stream:
        return list(stream)


def take(stream: Stream, count: int) -> list:
    return [next(stream) for _ in range(count)]


def assert_same(batches, expected) -> None:
    """Equal to the last bit, and made by the same samples."""
    assert len(batches) == len(expected)
    for one, other in zip(batches, expected, strict=True):
        assert one.samples_seen == other.samples_seen
        assert one.keys == other.keys
        for name in "images", "tokens", "slots", "replaced":
            assert torch.equal(getattr(one, name), getattr(other, name)), name


def assert_ranks_make_up(by_rank, expected) -> None:
    """Row by row, the ranks' batches put together are the batches of one process."""
    for batches in zip(*by_rank, strict=True):
        batch = expected[batches[0].samples_seen // BATCH - 1]
        assert [key for one in batches for key in one.keys] == batch.keys
        for name in "images", "tokens", "slots", "replaced":
            assert torch.equal(torch.cat([getattr(one, name) for one in batches]), getattr(batch, name)), name


# ------------------------------------------------------------------------------------------------------- sound data


@pytest.fixture(scope="module")
def uninterrupted(corpus):
    """Two and a half epochs in one process without workers."""
    return read(corpus, steps=13)


def test_batches_hold_every_sample_once_an_epoch(uninterrupted):
    for epoch in range(2):
        batches = uninterrupted[epoch * 5 : epoch * 5 + 5]
        slots = {tuple(slot) for batch in batches for slot in batch.slots.tolist()}
        assert len(slots) == 40
        assert [batch.samples_seen for batch in batches] == [(epoch * 5 + step + 1) * 8 for step in range(5)]
    batch = uninterrupted[0]
    assert batch.images.shape == (8, 3, 12, 12)
    assert batch.images.dtype == torch.float32
    assert batch.tokens.shape == (8, 24)
    assert batch.tokens.dtype == torch.int64
    for row in range(8):
        shard, index = batch.slots[row].tolist()
        assert batch.keys[row] == f"{shard:05d}.tar/{index:04d}"
        caption = bytes(batch.tokens[row].tolist()).decode().strip()
        assert caption.startswith(f"{shard:05d} {index} caption ")  # image and caption belong together


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_batches_do_not_depend_on_ranks_and_workers(corpus, uninterrupted, world_size, workers):
    by_rank = [read(corpus, steps=13, rank=rank, world_size=world_size, workers=workers) for rank in range(world_size)]
    assert all(batch.images.shape[0] == 8 // world_size for batches in by_rank for batch in batches)
    assert_ranks_make_up(by_rank, uninterrupted)


def test_resuming_at_any_step_continues_the_uninterrupted_stream(corpus, uninterrupted):
    for step in range(12):
        assert_same(read(corpus, steps=13 - step, start_samples=step * 8), uninterrupted[step:])


def test_resuming_on_other_ranks_and_workers(corpus, uninterrupted):
    by_rank = [read(corpus, steps=8, start_samples=24, rank=rank, world_size=2, workers=2) for rank in range(2)]
    assert_ranks_make_up(by_rank, uninterrupted)
    with make(corpus, workers=2, prefetch=3) as stream:
        first = take(stream, 4)  # workers are ahead by now; the position counts what was handed out
        assert stream.samples_seen == 32
    assert_same(first + read(corpus, steps=9, start_samples=first[-1].samples_seen), uninterrupted)


def test_resuming_reads_at_most_one_shard_per_lane(tmp_path, monkeypatch):
    shards = write_corpus(tmp_path / "data", sizes=(30,) * 12)
    opened, count = {}, 0
    pread = os.pread

    def counting(fd, size, offset):
        nonlocal count
        path = os.readlink(f"/proc/self/fd/{fd}")
        opened[path] = opened.get(path, 0) + size
        count += 1
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", counting)
    for step in 7, 44, 89, 100:
        opened.clear()
        with make(shards, batch_size=4, lanes=4, start_samples=step * 4, steps=1) as stream:
            expected = stream.order.rows(*stream.order.locate(step * 4), 0, 4)
            next(stream)
        assert set(opened) == {str(shards[shard].path) for shard in expected.shard}  # one a lane, none before it
        for path, size in opened.items():
            assert size < os.stat(path).st_size / 2  # headers and single samples, not the shard
    assert count


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_bytes_read_before_the_first_batch_after_a_restart(tmp_path, workers):
    """What the kernel counts as read by this process and the workers: never more than a shard for each lane."""
    shards = write_corpus(tmp_path / "data", sizes=(40,) * 24)
    largest = max(shard.bytes for shard in shards)
    for step in 3, 61, 131, 200:
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=_count_bytes, args=(shards, step, workers, theirs))
        process.start()
        count = ours.recv()
        process.join()
        assert 0 < count <= 4 * largest


def _count_bytes(shards, step, workers, connection) -> None:
    """Send the bytes of shards that are read for the first batch after `step`, in all processes."""
    torch.set_num_threads(1)  # several do not survive the fork
    count, pread = multiprocessing.Value("q", 0), os.pread

    def counting(fd, size, offset):
        data = pread(fd, size, offset)
        with count.get_lock():
            count.value += len(data)
        return data

    os.pread = counting
    # One batch ahead, so that what is read is for the first one alone; shards hold 40 samples, a lane reads 1 a step.
    with make(shards, batch_size=4, lanes=4, workers=workers, prefetch=1, start_samples=step * 4, steps=1) as stream:
        next(stream)
        connection.send(count.value)


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_mixtures_do_not_depend_on_ranks_and_workers(tmp_path, world_size, workers):
    mixture = [
        Corpus(write_corpus(tmp_path / "a", sizes=(9, 5)), weight=2),
        Corpus(write_corpus(tmp_path / "b", sizes=(6, 7)), 0.5),
    ]
    expected = read(mixture, steps=9)
    settings = {"world_size": world_size, "workers": workers}
    assert_ranks_make_up([read(mixture, steps=9, rank=rank, **settings) for rank in range(world_size)], expected)


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
    assert set(captions(read(corpus, steps=5, caption="first")).values()) == {"a"}


def test_augmentation_of_a_sample_depends_on_nothing_else(corpus, uninterrupted):
    """Another batch size, other lanes and another window: other batches, of the same images in the same epoch."""
    images = {key: image for batch in uninterrupted[:5] for key, image in zip(batch.keys, batch.images, strict=True)}
    again = read(corpus, steps=4, batch_size=10, lanes=2, window=100)
    common = 0
    for batch in again:
        for key, image in zip(batch.keys, batch.images, strict=True):
            if key in images:
                assert torch.equal(image, images[key])
                common += 1
    assert common >= 35


def test_global_random_states_are_left_alone(corpus):
    def draws() -> list[float]:
        return [torch.rand(()).item(), random.random(), float(np.random.rand())]

    for workers in 0, 2:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        expected = draws()
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        read(corpus, steps=2, workers=workers)
        assert draws() == expected


def test_corpora_are_mixed_with_weights(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    a = [write_shard(tmp_path / "a" / "a.tar", 12)]
    b = [write_shard(tmp_path / "b" / f"b{i}.tar", 8) for i in range(2)]
    mixture = [Corpus(a, weight=2), Corpus(b, weight=0.5)]
    with make(mixture, batch_size=4, lanes=2, steps=16) as stream:
        assert (stream.order.steps, stream.order.dropped) == (8, 0)  # 24 + 8 slots
        batches = list(stream)
    for epoch in range(2):
        keys = [key for batch in batches[epoch * 8 : epoch * 8 + 8] for key in batch.keys]
        assert sorted(key for key in keys if key.startswith("a")) == sorted([f"a.tar/{i:04d}" for i in range(12)] * 2)
        assert sum(key.startswith("b") for key in keys) == 8
    keys = [key for batch in batches for key in batch.keys if key.startswith("b")]
    assert len(keys) == len(set(keys)) == 16
    repeats = [
        image.numpy().tobytes()
        for batch in batches[:8]
        for key, image in zip(batch.keys, batch.images, strict=True)
        if key.startswith("a")
    ]
    assert len(set(repeats)) == 24  # a repeat within an epoch is another crop


def test_identity_names_what_the_order_depends_on(corpus):
    with make(corpus) as one, make(corpus, rank=1, world_size=2, workers=1, start_samples=8) as other:
        assert one.identity == other.identity
    changed = {"seed": 6, "lanes": 2, "window": 5, "batch_size": 4, "caption": "first"}
    for name, value in changed.items():
        with make(corpus, **{name: value}) as other:
            assert {key for key in one.identity if one.identity[key] != other.identity[key]} == {name}
    with make(corpus[:-1]) as other:
        assert other.identity["corpus"] != one.identity["corpus"]


def test_time_spent_waiting_is_added_up(corpus):
    for workers in 0, 1:
        with make(corpus, steps=3, workers=workers) as stream:
            began, times = time.perf_counter(), []
            for _ in stream:
                times.append(stream.wait_seconds)
            assert 0 < times[0] < times[1] < times[2] < time.perf_counter() - began


# ----------------------------------------------------------------------------------------------------- damaged data


@pytest.fixture(scope="module")
def damaged(tmp_path_factory, uninterrupted) -> tuple[list[Shard], dict[tuple[int, int], str]]:
    """All kinds of damage, also in the first batch of an epoch and in two batches of a row in succession."""
    slots = [[tuple(slot) for slot in batch.slots.tolist()] for batch in uninterrupted]
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
    """What each row should show in an epoch, (steps, rows), from the rule: the row's last good one, else its first."""
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
    with make(shards, steps=10, failure_share=1) as stream:
        batches = list(stream)
    for epoch in range(2):
        of_epoch = batches[epoch * 5 : epoch * 5 + 5]
        slots = np.stack([batch.slots.numpy() for batch in of_epoch])
        assert [batch.keys for batch in of_epoch] == expected_keys(slots, bad)
        for batch, line in zip(of_epoch, slots.tolist(), strict=True):
            assert batch.replaced.tolist() == [tuple(slot) in bad for slot in line]
            assert batch.images.shape == (8, 3, 12, 12)
            assert len(set(batch.keys)) == 8  # no repeat inside a batch, which would be a false negative
    for batch, sound in zip(batches, uninterrupted, strict=False):  # all the others are as they would be
        assert torch.equal(batch.slots, sound.slots)
        assert torch.equal(batch.images[~batch.replaced], sound.images[~batch.replaced])
    assert batches[4].replaced[2]  # a stand-in is a repeat, to the last bit
    assert batches[3].replaced[2]
    assert torch.equal(batches[4].images[2], batches[2].images[2])

    counts = {}
    for batch in batches:
        for shard, index in batch.slots.tolist():
            if (shard, index) in bad:
                counts[f"{shard:05d}.tar"] = counts.get(f"{shard:05d}.tar", 0) + 1
    assert {name: failure.count for name, failure in stream.failures.items()} == counts
    assert all(failure.reason.isprintable() for failure in stream.failures.values())


def test_replacements_do_not_depend_on_ranks_workers_and_restarts(damaged):
    shards, _ = damaged
    expected = read(shards, steps=10, failure_share=1)
    for world_size, workers in (1, 3), (2, 0), (2, 1), (4, 2):
        settings = {"world_size": world_size, "workers": workers, "failure_share": 1}
        by_rank = [read(shards, steps=10, rank=rank, **settings) for rank in range(world_size)]
        assert_ranks_make_up(by_rank, expected)
    for step in range(10):
        assert_same(read(shards, steps=10 - step, start_samples=step * 8, failure_share=1), expected[step:])


def test_failures_are_reported_by_workers(damaged):
    shards, _ = damaged
    reports = []
    for workers in 0, 2:
        with make(shards, steps=5, workers=workers, failure_share=1) as stream:
            list(stream)
        reports.append(stream.failures)
    assert reports[0] == reports[1]
    assert reports[0]


def test_whole_shards_that_cannot_be_used(tmp_path):
    shards = write_corpus(tmp_path / "data", sizes=(10,) * 6)
    shards[0].path.unlink()
    shards[1].path.write_bytes(b"<html>not found</html>" * 100)
    shards[2].path.write_bytes(shards[2].path.read_bytes()[:5000])
    write_shard(shards[3].path, 7)  # the index says 10
    expected = read(shards, steps=16, failure_share=1)
    with make(shards, steps=7, failure_share=1, workers=2) as stream:
        list(stream)
    counts = {name: failure.count for name, failure in stream.failures.items()}
    dropped = stream.order.dropped
    assert set(counts) == {f"{shard:05d}.tar" for shard in range(4)}
    assert 40 - dropped <= sum(counts.values()) <= 40
    assert "No such file" in stream.failures["00000.tar"].reason
    assert "not a tar" in stream.failures["00001.tar"].reason
    assert "cut off" in stream.failures["00002.tar"].reason
    assert f"but its index says {shards[3].bytes:,}" in stream.failures["00003.tar"].reason
    for step in range(0, 16, 3):
        assert_same(
            read(shards, steps=16 - step, start_samples=step * 8, failure_share=1, workers=step % 3), expected[step:]
        )


@pytest.mark.chaos
def test_every_kind_of_damage_is_counted_with_its_reason(tmp_path):
    kinds = {"image": "cannot be decoded", "zero bytes": "no image", "bomb": "64,000,000 pixels"}
    kinds |= {"caption": "no caption", "encoding": "not UTF-8"}
    bad = {(shard, 3): kind for shard, kind in enumerate(kinds)}
    shards = write_corpus(tmp_path / "data", bad, sizes=(8,) * 5)
    with make(shards, steps=5, failure_share=1, workers=2) as stream:
        batches = list(stream)
    assert {batch.images.shape for batch in batches} == {(8, 3, 12, 12)}
    assert torch.isfinite(torch.stack([batch.images for batch in batches])).all()
    assert [stream.failures[f"{shard:05d}.tar"].count for shard in range(5)] == [1] * 5
    for shard, reason in enumerate(kinds.values()):
        assert stream.failures[f"{shard:05d}.tar"].reason.startswith("0003: ")
        assert reason in stream.failures[f"{shard:05d}.tar"].reason


@pytest.mark.chaos
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", ["vanishes", "is cut", "is emptied"])
def test_a_shard_that_is_lost_while_training(tmp_path, how, workers):
    """More shards than may be open at once, so that this one is opened anew after it is lost."""
    shards = write_corpus(tmp_path / "data", sizes=(10,) * 30)
    with make(shards, steps=74, failure_share=1, workers=workers, prefetch=1) as stream:
        before = take(stream, 10)
        for shard in shards:
            if shard.name != "00004.tar":
                continue
            if how == "vanishes":
                shard.path.unlink()
            else:
                os.truncate(shard.path, 1024 if how == "is cut" else 0)
        after = list(stream)
    assert len(before + after) == 74
    assert {batch.images.shape for batch in after} == {(8, 3, 12, 12)}
    assert set(stream.failures) == {"00004.tar"}
    seen = sum(int((batch.slots[:, 0] == 4).sum()) for batch in after)
    failed = stream.failures["00004.tar"].count
    assert failed == sum(int(batch.replaced.sum()) for batch in after)
    assert 0 < failed <= seen
    assert {"vanishes": "No such file", "is cut": "cut off", "is emptied": "empty"}[how] in stream.failures[
        "00004.tar"
    ].reason or "has become shorter" in stream.failures["00004.tar"].reason


@pytest.mark.chaos
@pytest.mark.parametrize("workers", [0, 2])
def test_too_many_failures_stop_the_run_and_name_the_worst_shards(tmp_path, workers):
    bad = {(1, i): "image" for i in range(8)} | {(3, i): "caption" for i in range(4)}
    shards = write_corpus(tmp_path / "data", bad, sizes=(40,) * 6)
    with make(shards, failure_minimum=80, workers=workers) as stream, pytest.raises(UserError) as caught:
        take(stream, 100)
    assert "allowed are 5.0%" in caught.value.what
    assert "00001.tar" in caught.value.what
    assert stream.samples_seen >= 72
    with pytest.raises(StopIteration):  # it is over, rather than half alive
        next(stream)
    with make(shards, failure_share=0.06, steps=60, workers=workers) as stream:  # 12 of 240 are 5 %
        assert len(list(stream)) == 60


def test_small_data_is_judged_after_one_epoch(tmp_path):
    shards = write_corpus(tmp_path / "data", {(0, i): "image" for i in range(4)})
    with make(shards) as stream, pytest.raises(UserError, match=r"worst shards are 00000\.tar"):
        take(stream, 6)
    assert stream.samples_seen == 32  # the last step of the first epoch is the one that is refused


def test_a_row_without_any_good_sample_borrows_from_the_next(tmp_path):
    """Tiny data, one step an epoch: one damaged image must not end the run."""
    shards = write_corpus(tmp_path / "data", {(0, 3): "image", (0, 4): "caption"}, sizes=(8,))
    expected = read(shards, steps=6, failure_share=1)
    for batch in expected:
        keys = batch.keys * 2
        for row in batch.replaced.nonzero().flatten().tolist():
            good = next(r for r in range(row + 1, row + 8) if not batch.replaced[r % 8])
            assert keys[row] == keys[good]
        assert batch.replaced.sum() == 2
    assert_same(read(shards, steps=3, start_samples=24, workers=3, failure_share=1), expected[3:])


def test_data_without_one_good_sample_stops_at_once(tmp_path):
    shards = write_corpus(tmp_path / "data", {(0, i): "zero bytes" for i in range(16)}, sizes=(16,))
    with pytest.raises(UserError, match=r"00000\.tar"):
        read(shards, steps=1)


# ---------------------------------------------------------------------------------------------------------- workers


def refuse(image: Image.Image) -> torch.Tensor:
    if image.size != (256, 256):  # the size of the trial at the start
        raise UserError("This is wrong.", "Do that.")
    return augment(image)


@pytest.mark.parametrize("workers", [0, 2])
def test_user_errors_come_out_of_workers_as_they_are(corpus, workers):
    with make(corpus, transform=refuse, workers=workers) as stream, pytest.raises(UserError) as caught:
        next(stream)
    assert (caught.value.what, caught.value.remedy) == ("This is wrong.", "Do that.")


def die(image: Image.Image) -> torch.Tensor:
    if multiprocessing.parent_process() is not None and torch.rand(()) < 0.2:
        os.kill(os.getpid(), signal.SIGKILL)
    return augment(image)


@pytest.mark.chaos
def test_a_killed_worker_is_noticed(corpus):
    with make(corpus, transform=die, workers=2) as stream, pytest.raises(UserError, match="exit code -9"):
        take(stream, 20)


def send_eight_mib(step: int) -> bytes:
    return bytes(8 << 20)


@pytest.mark.chaos
def test_a_worker_that_is_killed_in_the_middle_of_its_answer_is_noticed():
    team = Team([send_eight_mib], ahead=1)
    (process,), (connection,) = team._processes, team._connections
    assert connection.poll(20)  # the answer has begun, and does not fit into the socket
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(UserError, match="exit code -9"):
        team.collect()
    team.close()


def leave(image: Image.Image) -> torch.Tensor:
    if multiprocessing.parent_process() is not None:
        raise SystemExit(3)
    return augment(image)


def test_other_errors_come_with_the_workers_traceback(corpus):
    with (
        make(corpus, transform=leave, workers=1) as stream,
        pytest.raises(RuntimeError, match=r"in leave(.|\n)*SystemExit"),
    ):
        next(stream)


def test_workers_end_with_the_stream(corpus):
    before = set(multiprocessing.active_children())
    with make(corpus, workers=2) as stream:
        stream.start()
        team = set(multiprocessing.active_children()) - before
        assert len(team) == 2
        next(stream)
    assert not any(process.is_alive() for process in team)
    stream = make(corpus, workers=2)
    next(stream)
    team = set(multiprocessing.active_children()) - before
    assert len(team) == 2
    del stream
    assert not any(process.is_alive() for process in team)


def test_workers_ignore_signals_that_are_meant_for_the_trainer(corpus, uninterrupted):
    before = set(multiprocessing.active_children())
    with make(corpus, workers=2, steps=13) as stream:
        batches = [next(stream)]
        for process in set(multiprocessing.active_children()) - before:
            for number in signal.SIGTERM, signal.SIGINT, signal.SIGUSR1:
                os.kill(process.pid, number)
        batches += list(stream)
    assert_same(batches, uninterrupted)


SCRIPT = """
import multiprocessing, sys
from pathlib import Path
from tests.pretrain.stream.test_stream import make
from probemb.data.shards.index import Shard
places = [(Path(path), int(size)) for path, size in zip(sys.argv[1::2], sys.argv[2::2])]
shards = [Shard(path.name, path, size, path.stat().st_size) for path, size in places]
stream = make(shards, workers=2)
next(stream)
print(*[process.pid for process in multiprocessing.active_children()])
"""


def wait_until_gone(pids: list[str], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(is_running(pid) for pid in pids):
        time.sleep(0.05)
    return not any(is_running(pid) for pid in pids)


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_the_program_ends_with_a_stream_that_was_never_closed(corpus):
    places = [text for shard in corpus for text in (str(shard.path), str(shard.samples))]
    command = [sys.executable, "-c", SCRIPT, *places]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    pids = done.stdout.split()
    assert len(pids) == 2
    assert wait_until_gone(pids, 2)


def stay(corpus, connection) -> None:
    """A trainer with workers, and another child that keeps the workers' pipes open when the trainer is killed."""
    torch.set_num_threads(1)  # several do not survive the fork
    stream = make(corpus, workers=2)
    next(stream)
    bystander = os.fork()
    if bystander == 0:
        time.sleep(20)
        os._exit(0)
    connection.send((bystander, [str(process.pid) for process in multiprocessing.active_children()]))
    time.sleep(20)


def test_workers_do_not_outlive_a_trainer_that_is_killed(corpus):
    ours, theirs = multiprocessing.Pipe()
    trainer = multiprocessing.get_context("fork").Process(target=stay, args=(corpus, theirs))
    trainer.start()
    bystander, pids = ours.recv()
    assert len(pids) == 2
    assert all(map(is_running, pids))
    trainer.kill()
    trainer.join()
    gone = wait_until_gone(pids, 5)
    os.kill(bystander, signal.SIGKILL)
    assert gone


# ---------------------------------------------------------------------------------------------- settings, real data


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"world_size": 3}, "Start 1, 2 or 4 processes"),
        ({"lanes": 3}, "numbers of lanes: 1, 2, 4, 8"),
        ({"start_samples": 12}, "not a whole number of global batches"),
        ({"batch_size": 64, "lanes": 8}, "fewer than one global batch"),
        ({"caption": "frist"}, "Did you mean 'first'"),
        ({"workers": -1}, "0 or more workers"),
        ({"transform": lambda image: image}, "float32 tensor"),
        ({"tokenizer": lambda texts: torch.zeros(1, 4)}, "int64"),
    ],
)
def test_settings_that_do_not_fit_are_refused(corpus, settings, message):
    with pytest.raises(UserError, match=message):
        make(corpus, **settings)


def test_a_path_is_never_taken_for_a_command(tmp_path, monkeypatch):
    """A file whose name looks like one is a file, also when it vanishes: such names may come from an index."""
    monkeypatch.chdir(tmp_path)
    good = write_shard(tmp_path / "good.tar", 8)
    name = "pipe:touch run; cat good.tar"
    Path(name).write_bytes(good.path.read_bytes())
    bad = Shard(name, Path(name), 8, good.bytes)
    with make([good, bad], failure_share=1, steps=2) as stream:
        assert {key.rpartition("/")[0] for batch in stream for key in batch.keys} == {"good.tar", name}
        assert not stream.failures
    Path(name).unlink()
    with make([good, bad], failure_share=1, steps=2) as stream:
        list(stream)
    assert stream.failures[name].count == 8
    assert not Path("run").exists()


def test_images_of_different_sizes_are_refused(corpus):
    def whole(image: Image.Image) -> torch.Tensor:
        return torch.zeros(3, image.height, image.width)

    with pytest.raises(UserError, match="crops or resizes every image to the same size"):
        read(corpus, transform=whole, steps=1)


def test_real_photographs(shared_data):
    folder = shared_data("flickr8k")
    from torchvision.transforms import v2

    crop = v2.Compose([v2.RandomResizedCrop(32), v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)])
    paths = sorted(folder.glob("train-*.tar"))[:2]
    shards = [Shard(path.name, path, len(list_samples(path)[0]), path.stat().st_size) for path in paths]
    streams = [read(shards, batch_size=32, lanes=16, steps=2, transform=crop, workers=workers) for workers in (0, 2)]
    assert_same(*streams)
    with tarfile.open(paths[0]) as tar:
        first = {member.name.rpartition(".")[0]: None for member in tar}
    shown = [key for batch in streams[0] for key in batch.keys if key.startswith(paths[0].name)]
    assert shown
    assert all(key.partition("/")[2] in first for key in shown)
    assert 0.2 < torch.cat([batch.images for batch in streams[0]]).mean() < 0.7
    assert not any(batch.replaced.any() for batch in streams[0])


def test_shards_of_one_name_in_several_corpora_are_told_apart(tmp_path):
    shards = [Shard("0.tar", tmp_path / "a" / "0.tar", 1, 1), Shard("0.tar", tmp_path / "b" / "0.tar", 1, 1)]
    assert labels_of([*shards, Shard("1.tar", tmp_path / "b" / "1.tar", 1, 1)]) == [
        str(tmp_path / "a" / "0.tar"), str(tmp_path / "b" / "0.tar"), "1.tar",
    ]  # fmt: skip
