"""Training pairs: their order, what it depends on, bad images, resuming, and shuffled captions."""

import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from finetune.loading.noise import NOISE_FILE, assign_captions, load_noise, noisy_captions, save_noise
from finetune.loading.noise import shuffle_captions as shuffle
from finetune.loading.pair_loader import PairLoader
from finetune.loading.rows import epoch_order
from probemb.data.captions.find import find_captions
from probemb.data.scenes import draw_captions, sample_to_json, scene
from probemb.errors import UserError
from tests.truth import matches
from tests.world import jpeg, write_tar

N, PER_IMAGE = 12, 3


def noisy_transform(image):
    """Draws from all three global random numbers."""
    tensor = torch.from_numpy(np.array(image.resize((4, 4)))).permute(2, 0, 1).float()
    return tensor + torch.rand(3, 1, 1) + np.random.rand() + random.random()


def plain_transform(image):
    return torch.from_numpy(np.array(image.resize((4, 4)))).permute(2, 0, 1).float()


def tokenizer(texts):
    """The number that a caption ends with."""
    return torch.tensor([[int(text.split()[-1]), len(text)] for text in texts])


def picture(i):
    data = io.BytesIO()
    Image.new("RGB", (8, 8), (10 * i, 0, 200)).save(data, "PNG")
    return data.getvalue()


def make(path, n=N, bad=()):
    members = []
    for i in range(n):
        members += [(f"{i:03d}.png", b"no image" if i in bad else picture(i))]
        members += [(f"{i:03d}.txt", "\n".join(f"caption {PER_IMAGE * i + c}" for c in range(PER_IMAGE)).encode())]
    return find_captions(write_tar(path, members))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return make(tmp_path_factory.mktemp("pairs") / "train-0.tar")


def batches(captioned, epoch=0, start=0, transform=noisy_transform, **options):
    with PairLoader(captioned, transform, tokenizer, **{"batch_size": 8, "seed": 5, **options}) as loader:
        return list(loader.epoch(epoch, start))


def same(left, right):
    return len(left) == len(right) and all(torch.equal(a, b) for x, y in zip(left, right) for a, b in zip(x, y))


def test_every_pair_once_an_epoch_in_another_order(pairs):
    one, two = (batches(pairs, epoch=n, batch_size=6, transform=plain_transform) for n in (0, 1))
    for epoch in (one, two):
        assert sorted(torch.cat([b.pair_index for b in epoch]).tolist()) == list(range(N * PER_IMAGE))
    assert not torch.equal(one[0].pair_index, two[0].pair_index)
    for batch in one:
        assert batch.images.shape == (6, 3, 4, 4)
        assert batch.images.dtype == torch.float32
        assert torch.equal(batch.image_index, batch.pair_index // PER_IMAGE)
        assert torch.equal(batch.tokens[:, 0], batch.pair_index)
        assert torch.equal(batch.images[:, 0, 0, 0], 10.0 * batch.image_index)


def test_an_incomplete_batch_is_left_out(pairs):
    assert [len(b.images) for b in batches(pairs, batch_size=8)] == [8] * 4  # of 36


def test_the_order_is_a_function_of_seed_and_epoch_alone():
    assert epoch_order(36, 8, seed=0, epoch=0).shape == (4, 8)
    assert (epoch_order(36, 8, 0, 3) == epoch_order(36, 8, 0, 3)).all()
    assert (epoch_order(36, 8, 0, 3).ravel() == epoch_order(36, 4, 0, 3).ravel()[:32]).all()
    orders = [tuple(epoch_order(36, 8, s, e).ravel()) for s in (-1, 0, 1, 2**70) for e in (0, 1)]
    assert len(set(orders)) == len(orders)
    assert tuple(epoch_order(36, 8, 1, 2).ravel()) != tuple(epoch_order(36, 8, 2, 1).ravel())


@pytest.mark.parametrize(("world", "workers"), [(1, 2), (2, 0), (4, 1), (8, 0)])
def test_the_same_global_batches_for_every_world_and_worker_count(tmp_path, world, workers):
    captioned = make(tmp_path / "a.tar", bad=(4,))
    options = {"failure_share": 1.0}
    alone = batches(captioned, epoch=2, **options)
    ranks = [batches(captioned, epoch=2, rank=r, world=world, workers=workers, **options) for r in range(world)]
    joined = [tuple(map(torch.cat, zip(*parts))) for parts in zip(*ranks)]
    assert same(alone, joined)


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_gives_the_rest_and_reads_nothing_before_it(pairs, workers):
    whole = batches(pairs, epoch=1)
    seen = []

    def transform(image):
        seen.append(1)
        return noisy_transform(image)

    assert same(batches(pairs, epoch=1, start=3, workers=workers, transform=transform), whole[3:])
    assert len(seen) == (0 if workers else 8)
    assert batches(pairs, epoch=1, start=4) == []


def test_unpaired_rows_stand_behind_the_pairs_and_go_on_where_a_run_resumes(pairs, tmp_path):
    others = make(tmp_path / "train-0.tar", n=5)  # two batches of 6 an epoch

    def joined(epoch, start=0):
        unpaired = PairLoader(others, plain_transform, tokenizer, 6, 1)
        return batches(pairs, epoch, start, plain_transform, unpaired=unpaired)

    found, alone = joined(1), batches(pairs, 1, transform=plain_transform)
    expected = [b for n in (2, 3) for b in batches(others, n, transform=plain_transform, batch_size=6, seed=1)]
    assert len(found) == len(expected) == 4
    for batch, own, other in zip(found, alone, expected):
        assert torch.equal(batch.images, torch.cat([own.images, other.images]))
        assert torch.equal(batch.tokens, torch.cat([own.tokens, other.tokens]))
        assert torch.equal(batch.pair_index, own.pair_index)
    assert same(joined(1, start=3), found[3:])


def test_epochs_follow_each_other_also_when_one_is_given_up(pairs):
    expected = [batches(pairs, epoch=n) for n in range(3)]
    with PairLoader(pairs, noisy_transform, tokenizer, 8, 5, workers=2) as loader:
        assert same(list(loader.epoch(0)), expected[0])
        given_up = loader.epoch(1)
        assert same([next(given_up)], expected[1][:1])
        assert same(list(loader.epoch(2)), expected[2])
        with pytest.raises(ValueError, match="another epoch"):
            next(given_up)
        assert loader.waited > 0
    with pytest.raises(ValueError, match="closed"):
        loader.epoch(0)


def test_global_random_numbers_are_left_as_they_were(pairs):
    def draws():
        return torch.rand(1).item(), np.random.rand(), random.random()

    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = draws()
    for workers in (0, 1):
        torch.manual_seed(1), np.random.seed(1), random.seed(1)
        batches(pairs, workers=workers)
        assert draws() == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_image_is_replaced_within_the_batch_counted_and_named(tmp_path, workers):
    captioned = make(tmp_path / "a.tar", bad=(4, 7))
    with PairLoader(captioned, plain_transform, tokenizer, 6, 0, workers=workers, failure_share=0.2) as loader:
        found = list(loader.epoch(0))
        failures = loader.failures
    assert {name: failure.count for name, failure in failures.items()} == {"004": 3, "007": 3}
    assert "cannot be decoded" in failures["004"].reason
    for batch, order in zip(found, epoch_order(N * PER_IMAGE, 6, 0, 0).tolist()):
        good = [pair // PER_IMAGE not in (4, 7) for pair in order]
        stand_in = [order[next((i + a) % 6 for a in range(6) if good[(i + a) % 6])] for i in range(6)]
        assert batch.pair_index.tolist() == stand_in
        assert batch.image_index.tolist() == [pair // PER_IMAGE for pair in stand_in]
        assert torch.equal(batch.tokens[:, 0], batch.pair_index)


@pytest.mark.parametrize("workers", [0, 1])
def test_too_many_bad_images_stop_the_run(tmp_path, workers):
    captioned = make(tmp_path / "a.tar", bad=(1, 5))
    with pytest.raises(
        UserError, match=r"images of 6 of 36 pairs .*16\.7%, allowed are 5\.0%\): .*00[15]: the image can"
    ):
        batches(captioned, batch_size=6, workers=workers)
    with pytest.raises(UserError, match="Not one image of a whole batch of 8"):
        batches(make(tmp_path / "b.tar", bad=range(N)), workers=workers)


def test_samples_without_captions_count_as_well(tmp_path):
    members = [(f"{i}.png", picture(i)) for i in range(9)] + [("9.png", picture(9)), ("9.txt", b"caption 9")]
    members[1:1] = [("0.txt", b"caption 0")]
    members[3:3] = [("1.txt", b" ")]
    captioned = find_captions(write_tar(tmp_path / "a.tar", members))
    with pytest.raises(UserError, match=r"1 of 3 samples of .* cannot be used \(1: there is no caption\)"):
        batches(captioned, batch_size=1)
    assert len(batches(captioned, batch_size=1, failure_share=0.5)) == 2


def test_a_transform_that_fails_or_gives_other_shapes_is_reported(pairs):
    def fails(image):
        raise KeyError("x")

    def grows(image):
        return torch.zeros(3, image.getpixel((0, 0))[0] + 1, 4)

    with pytest.raises(UserError, match="transform or tokenizer failed"):
        batches(pairs, transform=fails)
    with pytest.raises(UserError, match="The transform gave an image of shape"):
        batches(pairs, transform=grows, workers=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 37}, "has 36 pairs, from which no batch of 37"),
        ({"batch_size": 0}, "no batch of 0"),
        ({"world": 3}, "3 processes cannot share a batch of 8 evenly"),
        ({"workers": -1}, "-1 workers"),
    ],
)
def test_settings_that_do_not_fit(pairs, options, message):
    with pytest.raises(UserError, match=message):
        batches(pairs, **options)


def test_the_identity_tells_data_seed_and_batch_apart(pairs, tmp_path):
    def identity(captioned, **options):
        with PairLoader(captioned, plain_transform, tokenizer, **{"batch_size": 4, "seed": 0, **options}) as loader:
            return loader.identity

    base = identity(pairs)
    assert base == identity(pairs, workers=2, world=2)
    others = [identity(make(tmp_path / "a.tar", n=11)), identity(pairs, seed=1), identity(pairs, batch_size=6)]
    others.append(identity(shuffle(pairs, 0.5, 0)[0]))
    assert all(base != other for other in others)


def test_a_killed_worker_is_told(pairs):
    def transform(image):
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(UserError, match="A data worker was ended from outside"):
        batches(pairs, transform=transform, workers=1)


SCRIPT = """
import os, signal, sys
sys.path.insert(0, {root!r})
from tests.finetune.loading.test_pair_loader import PairLoader, make, plain_transform, tokenizer
from pathlib import Path
loader = PairLoader(make(Path(sys.argv[1])), plain_transform, tokenizer, 8, workers=2)
signal.signal(signal.SIGTERM, lambda *_: None)
steps = 0
for batch in loader.epoch(0):
    os.killpg(0, signal.SIGTERM)
    steps += 1
print(steps, flush=True)
again = loader.epoch(1)
next(again)  # and the interpreter ends with workers at work
"""


def test_workers_outlive_a_schedulers_signal_and_end_with_the_process(tmp_path):
    root = str(Path(__file__).resolve().parents[3])
    command = [sys.executable, "-c", SCRIPT.format(root=root), str(tmp_path / "a.tar")]
    began = time.monotonic()
    done = subprocess.run(command, start_new_session=True, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("4\n", 0), done.stderr
    assert time.monotonic() - began < 30


# ------------------------------------------------------------------------------------------------- noisy correspondence


@pytest.mark.parametrize("ratio", [0.0, 0.2, 0.5, 1.0])
def test_a_share_of_the_captions_is_permuted_among_itself(tmp_path, ratio):
    captioned = make(tmp_path / "a.tar", n=100)
    noisy, image_of = shuffle(captioned, ratio, seed=3)
    owner = np.repeat(np.arange(100), PER_IMAGE)
    assert 0.95 * ratio <= (image_of != owner).mean() <= ratio
    assert (np.bincount(image_of) == PER_IMAGE).all()
    for image, texts in enumerate(noisy.captions):
        assert texts == [f"caption {c}" for c in np.flatnonzero(image_of == image)]
    assert noisy.images is captioned.images
    assert captioned.flat() == [f"caption {c}" for c in range(300)]  # the clean data is as it was
    assert (shuffle(captioned, ratio, seed=3)[1] == image_of).all()
    assert ratio == 0 or (shuffle(captioned, ratio, seed=4)[1] != image_of).any()


def test_ids_and_scenes_move_with_their_captions(tmp_path):
    members = []
    for i in range(6):
        one = scene("noise", i)
        row = sample_to_json(one, draw_captions(one, 2)) | {"image_id": i, "caption_ids": [10 * i, 10 * i + 1]}
        members += [(f"{i}.jpg", jpeg(one)), (f"{i}.json", json.dumps(row).encode())]
    captioned = find_captions(write_tar(tmp_path / "a.tar", members))
    noisy, _ = shuffle(captioned, 1.0, seed=0)
    known = dict(zip((i for row in captioned.caption_ids for i in row), captioned.flat()))
    for texts, ids, (own, told), (before, _) in zip(noisy.captions, noisy.caption_ids, noisy.scenes, captioned.scenes):
        assert texts == [known[i] for i in ids] == [caption.text for caption in told]
        assert own is before
    clean = [caption // 10 == image for image, ids in enumerate(noisy.caption_ids) for caption in ids]
    true = [matches(caption, own) for own, told in noisy.scenes for caption in told]
    assert all(fits for fits, right in zip(true, clean) if right)
    assert not all(true)


def test_the_noise_is_kept_with_the_run(tmp_path):
    captioned = make(tmp_path / "a.tar", n=100)
    run = tmp_path / "run"
    noisy_captions(captioned, 0.5, 0, tmp_path / "other", write=False)
    assert not (tmp_path / "other").exists()
    first = noisy_captions(captioned, 0.5, 0, run)
    assert noisy_captions(captioned, 0.5, 0, run).captions == first.captions
    assert noisy_captions(captioned, 0.5, 99, run).captions == first.captions  # the file decides
    assert load_noise(run / NOISE_FILE, captioned, 0.5).dtype == np.int64
    for ratio in (0.0, 0.2, 0.9):
        with pytest.raises(UserError, match=r"has \d+\.\d% of the captions at wrong images, but the noise ratio is"):
            noisy_captions(captioned, ratio, 0, run)
    with pytest.raises(UserError, match="does not fit the 36 captions"):
        noisy_captions(make(tmp_path / "b.tar"), 0.5, 0, run)
    assert noisy_captions(captioned, 0.0, 0, tmp_path / "clean").captions == captioned.captions
    assert not (tmp_path / "clean").exists()


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(36, int),
        np.arange(36),
        np.full(36, -1),
        np.zeros((6, 6), int),
        np.zeros(36),
        np.array({}),
        b"not numpy",
    ],
)
def test_files_of_noise_that_do_not_fit(pairs, tmp_path, array):
    path = tmp_path / NOISE_FILE
    if isinstance(array, bytes):
        path.write_bytes(array)
    else:
        np.save(path, array, allow_pickle=True)
    with pytest.raises(UserError, match=r"noise\.npy"):
        load_noise(path, pairs, 0.5)
    if not isinstance(array, bytes) and array.dtype != object:
        with pytest.raises(ValueError, match="number of captions"):
            assign_captions(pairs, array)


@pytest.mark.parametrize("ratio", [-0.1, 1.5, float("nan")])
def test_ratios_out_of_range(pairs, ratio):
    with pytest.raises(UserError, match="The noise ratio is"):
        shuffle(pairs, ratio, 0)


def test_saved_noise_is_replaced_as_a_whole(tmp_path):
    save_noise(tmp_path / "x" / NOISE_FILE, np.arange(3))
    assert [file.name for file in (tmp_path / "x").iterdir()] == [NOISE_FILE]
    assert np.load(tmp_path / "x" / NOISE_FILE).tolist() == [0, 1, 2]


# ------------------------------------------------------------------------------------------------------------ real data


def test_flickr8k_is_read(shared_data):
    def lengths(texts):
        return torch.tensor([[len(text)] for text in texts])

    captioned = find_captions(shared_data("flickr8k"), split="train")
    with PairLoader(captioned, plain_transform, lengths, 64, workers=1) as loader:
        assert (loader.n_pairs, loader.steps) == (30_000, 468)
        last = list(loader.epoch(0, start_step=466))
        assert [batch.images.shape for batch in last] == [(64, 3, 4, 4)] * 2
        assert loader.failures == {}
    texts = captioned.flat()
    assert [len(texts[pair]) for pair in last[0].pair_index] == last[0].tokens[:, 0].tolist()
