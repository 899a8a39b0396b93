"""Decoding on the device: the same crops and samples as by workers, and what cannot be decoded is replaced."""

import io
import threading
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
from PIL import Image

from pretrain.stream.decoding import crop_of, undecoded
from pretrain.stream.settings import Settings
from pretrain.stream.stream import Stream
from probemb.data.images import size_of_plain_jpeg
from probemb.data.shards.index import Shard
from probemb.errors import UserError
from probemb.models.inputs import Augmentation, create_transforms
from tests.orientation import stored
from tests.pretrain.stream.test_jpeg_draft import jpeg, photograph
from tests.pretrain.stream.test_stream import assert_same, tokenize
from tests.world import write_tar

SIZE, BATCH = 64, 8


def transform(**augmentation):
    return create_transforms({"preprocess": {"size": SIZE}}, Augmentation(**augmentation), "tensor").train


def other(image, kind) -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def damaged(data: bytes) -> bytes:
    """A JPEG that no decoder can read, although its markers are as they were."""
    counts = data.index(b"\xff\xc4") + 5  # of the codes in the first Huffman table, which would be too many
    return data[:counts] + b"\xff" * 16 + data[counts + 16 :]


def shard(folder, images: list[bytes], name="a.tar") -> Shard:
    folder.mkdir(exist_ok=True)
    files = [
        (f"{i:03d}.{ext}", data)
        for i, image in enumerate(images)
        for ext, data in (("jpg", image), ("txt", f"caption {i}".encode()))
    ]
    path = write_tar(folder / name, files)
    return Shard(path.name, path, len(images), path.stat().st_size)


def damaged_markers(data: bytes) -> bytes:
    return data[: len(data) // 2]


def read(shards, decode, steps=4, crop=None, **settings):
    place = {name: settings.pop(name) for name in ("rank", "world_size", "start_samples", "device") if name in settings}
    settings = {"batch_size": BATCH, "lanes": 2, "window": 4, "seed": 3, "draft": True} | settings
    crop = crop or transform()
    with Stream(shards, Settings(decode=decode, **settings), crop, tokenize, steps=steps, **place) as stream:
        return list(stream), stream.failures


@pytest.fixture(scope="module")
def pictures() -> list[Image.Image]:
    return [photograph(70 + 9 * i, 150 - 5 * i, i) for i in range(20)]


@pytest.fixture(scope="module")
def shards(pictures, tmp_path_factory) -> list[Shard]:
    """JPEGs of all kinds, PNGs, and one that does not fit in the place of its pixels."""
    kinds = [
        lambda one: jpeg(one),
        lambda one: jpeg(one, progressive=True),
        lambda one: jpeg(one, subsampling=0),
        lambda one: jpeg(one.convert("L")),
        lambda one: jpeg(one.convert("CMYK")),
        lambda one: other(one, "PNG"),
    ]
    images = [kinds[i % len(kinds)](one) for i, one in enumerate(pictures)]
    noise = np.random.default_rng(0).integers(0, 256, (120, 130, 3), dtype=np.uint8)
    images.append(jpeg(Image.fromarray(noise)))
    assert len(images[-1]) > 3 * SIZE * SIZE
    folder = tmp_path_factory.mktemp("decoding")
    return [shard(folder, images[:11], "a.tar"), shard(folder, images[11:], "b.tar")]


@pytest.mark.parametrize("workers", [0, 2])
def test_pixels_are_those_of_the_workers_but_for_rounding(shards, workers):
    expected, _ = read(shards, "workers", workers=workers)
    found, failures = read(shards, "device", workers=workers)
    assert not failures
    assert [batch.keys for batch in found] == [batch.keys for batch in expected]
    for one, by_workers in zip(found, expected, strict=True):
        assert torch.equal(one.tokens, by_workers.tokens)
        away = (one.images.int() - by_workers.images.int()).abs()
        assert one.images.shape == (BATCH, 3, SIZE, SIZE)
        assert one.images.dtype == torch.uint8
        assert away.max() <= 2  # torch's resizing of uint8 rounds weights, that of floats does not
        assert away.float().mean() < 0.3


def test_only_plain_jpegs_are_left_undecoded(shards, pictures):
    one = pictures[0]
    crop, seed = crop_of(transform()), partial(torch.manual_seed, 0)
    plain = partial(undecoded, crop=crop, seed=seed, room=10**6, exif=False)
    for data in (jpeg(one), jpeg(one, progressive=True), jpeg(one, restart_marker_rows=1)):
        found = plain(data)
        assert found.data == data
        assert found.size == one.size
        seed()
        assert found.box == tuple(crop.get_params(one, crop.scale, crop.ratio))
        assert found.entry == (len(data), *one.size, *found.box)
    whole = jpeg(one)
    assert undecoded(whole, crop, seed, len(whole) - 1, False) is None
    for data in (
        jpeg(one.convert("L")),
        jpeg(one.convert("CMYK")),
        other(one, "PNG"),
        other(one, "WEBP"),
        whole[: len(whole) // 2],
        whole[:-2],
        jpeg(one, keep_rgb=True),
    ):
        assert plain(data) is None
    assert plain(jpeg(photograph(4001, 4000))) is None


def test_sideways_images_are_turned_by_workers(pictures, tmp_path):
    one = pictures[0]
    assert size_of_plain_jpeg(stored(one, 6)) == one.size[::-1]
    assert size_of_plain_jpeg(stored(one, 6), exif=True) is None
    assert size_of_plain_jpeg(stored(one, 1), exif=True) == one.size
    turned = [shard(tmp_path, [stored(one, 1 + i % 8) for i, one in enumerate(pictures)])]
    expected, found = (read(turned, decode, exif=True, steps=2)[0] for decode in ("workers", "device"))
    for a, b in zip(found, expected, strict=True):
        assert (a.images.int() - b.images.int()).abs().max() <= 2


def test_batches_do_not_depend_on_ranks_workers_and_restarts(shards):
    expected, _ = read(shards, "device")
    assert_same(read(shards, "device", workers=2)[0], expected)
    assert_same(read(shards, "device", steps=2, start_samples=2 * BATCH, workers=1)[0], expected[2:])
    ranks = [read(shards, "device", rank=rank, world_size=2)[0] for rank in range(2)]
    for batch, *parts in zip(expected, *ranks, strict=True):
        assert torch.equal(batch.images, torch.cat([part.images for part in parts]))
        assert batch.keys == [key for part in parts for key in part.keys]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_only_decoding_finds_damaged_is_replaced_and_counted(pictures, tmp_path, workers):
    images = [jpeg(one) for one in pictures]
    for i in (3, 12):
        images[i] = damaged(images[i])
    assert size_of_plain_jpeg(images[3]) == pictures[3].size  # nothing that its markers tell
    for i in (4, 5, 15):
        images[i] = damaged_markers(images[i])
    shards = [shard(tmp_path, images[:10], "a.tar"), shard(tmp_path, images[10:], "b.tar")]
    settings = {"failure_share": 0.5, "workers": workers, "steps": 9}  # of several epochs
    expected, by_workers = read(shards, "workers", **settings)
    found, failures = read(shards, "device", **settings)
    assert sum(int(batch.replaced.sum()) for batch in expected) >= 10
    assert_alike(found, expected)
    assert {name: failure.count for name, failure in failures.items()} == {
        name: failure.count for name, failure in by_workers.items()
    }
    assert [failure.reason for failure in failures.values()] == [failure.reason for failure in by_workers.values()]
    for done in range(1, 5):
        later, _ = read(shards, "device", **{**settings, "steps": 9 - done}, start_samples=done * BATCH)
        assert_alike(later, found[done:])
    with pytest.raises(UserError, match="cannot be used"):
        read(shards, "device", failure_share=0.01, failure_minimum=8, workers=workers)


def assert_alike(found, expected) -> None:
    for one, other_one in zip(found, expected, strict=True):
        assert one.keys == other_one.keys
        assert torch.equal(one.tokens, other_one.tokens)
        assert torch.equal(one.replaced, other_one.replaced)
        assert (one.images.int() - other_one.images.int()).abs().max() <= 2


def test_damage_that_the_markers_show_is_found_by_workers(pictures, tmp_path):
    images = [jpeg(one) for one in pictures]
    images[5] = images[5][: len(images[5]) // 2]
    shards = [shard(tmp_path, images)]
    expected, by_workers = read(shards, "workers", lanes=1, failure_share=0.5)
    found, failures = read(shards, "device", lanes=1, failure_share=0.5)
    assert [batch.keys for batch in found] == [batch.keys for batch in expected]
    assert failures == by_workers


def open_stream(shards, **settings):
    return Stream(shards, Settings(batch_size=BATCH, lanes=2, decode="device", **settings), transform(), tokenize)


def test_a_batch_is_decoded_while_the_one_before_is_used(shards):
    with open_stream(shards) as stream:
        first = next(stream)
        begun = stream._decoding
        assert stream.samples_seen == BATCH == first.samples_seen
        second = next(stream)
        assert torch.equal(second.images, begun.decoded.result().images)
        stream.load(last=True)
        assert stream._decoding is None
    assert stream.decoder.decoded > 0
    assert stream.decoder.by_workers > 0
    assert stream.decoder.refused == 0
    assert stream.decoder.decoded + stream.decoder.by_workers == 3 * BATCH


def test_an_error_of_the_batch_ahead_belongs_to_the_call_that_asks_for_it(shards):
    with open_stream(shards) as stream:
        wait = stream._batches.make
        stream._batches.make = lambda at, waiting: wait(at, waiting) if at < BATCH else gone()
        assert len(next(stream).keys) == BATCH
        with pytest.raises(UserError, match=r"a\.tar is gone"):
            next(stream)
        assert stream.samples_seen == BATCH


def gone():
    raise UserError("a.tar is gone.", "Find it.")


def test_a_decoder_that_decodes_nothing_ends_the_run(shards):
    with open_stream(shards) as stream:
        stream.decoder._decode_jpegs = refuse
        with pytest.raises(UserError, match="has decoded none of the first 16 JPEGs: no nvJPEG here") as error:
            list(islice(stream, 4))
        assert "data.decode" in error.value.remedy


def refuse(data, among: int = 1):
    if len(data) >= among:
        raise RuntimeError("no nvJPEG here")
    return io_decode(data)


def io_decode(data):
    from torchvision.io import decode_jpeg

    return decode_jpeg(data, mode="RGB")


def test_what_the_device_refuses_the_cpu_reads(shards, caplog):
    expected, _ = read(shards, "device", steps=2)
    with open_stream(shards, window=4, seed=3, draft=True) as stream:
        stream.decoder._decode_jpegs = partial(refuse, among=2)  # several at once
        found = [next(stream) for _ in range(2)]
    assert_alike(found, expected)
    assert stream.decoder.refused == 0
    assert not caplog.records
    with open_stream(shards, window=4, seed=3, draft=True) as stream:
        small = min(len(data) for data in plain_jpegs(shards))
        stream.decoder._decode_jpegs = lambda data: refuse(data, 99 if min(map(len, data)) > small else 1)
        found = [next(stream) for _ in range(4)]
    assert stream.decoder.refused >= 1
    assert "no nvJPEG here" in caplog.text
    assert_alike(found[:2], expected)


def plain_jpegs(shards):
    import tarfile

    for one in shards:
        with tarfile.open(one.path) as tar:
            for member in tar:
                data = tar.extractfile(member).read()
                if member.name.endswith("jpg") and len(data) <= 3 * SIZE * SIZE and size_of_plain_jpeg(data):
                    yield data


def test_missing_memory_is_said(shards):
    def no_memory(data):
        raise RuntimeError("Error while decoding JPEG images: CUDA out of memory. Tried to allocate 9 GiB")

    with open_stream(shards) as stream:
        stream.decoder._decode_jpegs = no_memory
        with pytest.raises(UserError, match="no memory for decoding on cpu"):
            next(stream)


def test_closing_does_not_wait_for_a_decoder_that_hangs(shards, monkeypatch):
    monkeypatch.setattr("pretrain.stream.decoding._CLOSING_SECONDS", 0.2)
    held = threading.Event()
    stream = open_stream(shards)
    stream.decoder._decode_jpegs = lambda data: held.wait(60) and io_decode(data)

    def stop():
        assert stream.waiting_for() == "waiting for cpu, which decodes"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stream.load(while_waiting=stop)
    held.set()
    with pytest.raises(StopIteration):
        next(stream)


def test_hostile_headers_are_left_to_the_workers():
    one = jpeg(photograph(200, 150))
    frame = one.index(b"\xff\xc0")
    length = int.from_bytes(one[frame + 2 : frame + 4], "big") + 2
    huge = bytearray(one[frame : frame + length])
    huge[5:9] = (65500).to_bytes(2, "big") * 2
    assert size_of_plain_jpeg(one) == (200, 150)
    assert size_of_plain_jpeg(one[:frame] + bytes(huge) + one[frame:]) is None  # two frames
    crop, seed = crop_of(transform()), partial(torch.manual_seed, 0)
    wide = jpeg(photograph(40 * SIZE, SIZE))
    assert size_of_plain_jpeg(wide) == (40 * SIZE, SIZE)
    crop.ratio = (30.0, 40.0)
    assert undecoded(wide, crop, seed, 10**6, False) is None  # reduced too much for CUDA's resizing


@pytest.mark.parametrize(
    "crop",
    [
        transform(color_jitter=(0.1, 0.1, 0.1, 0.1), color_jitter_prob=0.5),
        create_transforms({"preprocess": {"size": SIZE}}, resize="pil").train,
        create_transforms({"preprocess": {"size": SIZE}}, resize="tensor").evaluate,
    ],
)
def test_a_transform_that_does_more_is_refused(shards, crop):
    with pytest.raises(UserError, match="only crops and resizes") as error:
        read(shards, "device", crop=crop)
    assert "data.decode" in error.value.remedy


def test_an_unknown_decoder_is_refused():
    with pytest.raises(UserError, match=r"'devise' cannot decode images\. Did you mean 'device'\?"):
        Settings(batch_size=1, decode="devise")
