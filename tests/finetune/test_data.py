"""Training rows: their order, what it depends on, bad images, resuming, and shuffled captions."""

import random
from collections import Counter

import numpy as np
import pytest
import torch

from finetune.data import Loader, Pairs, Tuples, epoch_order, pairs_digest
from finetune.data import shuffle_captions as shuffle
from probemb.data.captions.find import find_captions
from probemb.errors import UserError
from tests.compositions import made
from tests.world import picture, save, write_samples

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


def make(path, n=N, bad=()):
    texts = ["\n".join(f"caption {PER_IMAGE * i + c}" for c in range(PER_IMAGE)) for i in range(n)]
    pictures = [b"no image" if i in bad else picture((10 * i, 0, 200), 8) for i in range(n)]
    return find_captions(write_samples(path, [{"png": one, "txt": text} for one, text in zip(pictures, texts)]))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return make(tmp_path_factory.mktemp("pairs") / "train-0.tar")


def read(rows, epoch=0, start=0, **options):
    """The rest of an epoch."""
    return list(Loader(rows, **options).epoch(epoch, start))


def batches(captioned, epoch=0, start=0, transform=noisy_transform, batch_size=8, seed=5, rank=0, world=1, **options):
    unpaired = options.pop("unpaired", None)
    rows = Pairs(captioned, transform, tokenizer, batch_size, seed, rank, world, unpaired=unpaired)
    return read(rows, epoch, start, **options)


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


def test_the_order_is_a_function_of_seed_and_epoch_alone():
    assert epoch_order(36, 8, seed=0, epoch=0).shape == (4, 8)
    assert (epoch_order(36, 8, 0, 3) == epoch_order(36, 8, 0, 3)).all()
    assert (epoch_order(36, 8, 0, 3).ravel() == epoch_order(36, 4, 0, 3).ravel()[:32]).all()
    orders = [tuple(epoch_order(36, 8, s, e).ravel()) for s in (-1, 0, 1, 2**70) for e in (0, 1)]
    assert len(set(orders)) == len(orders)
    assert tuple(epoch_order(36, 8, 1, 2).ravel()) != tuple(epoch_order(36, 8, 2, 1).ravel())


@pytest.mark.parametrize(("world", "workers"), [(1, 2), (4, 0)])
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
        unpaired = Pairs(others, plain_transform, tokenizer, 6, 1)
        return batches(pairs, epoch, start, plain_transform, unpaired=unpaired)

    found, alone = joined(1), batches(pairs, 1, transform=plain_transform)
    expected = [b for n in (2, 3) for b in batches(others, n, transform=plain_transform, batch_size=6, seed=1)]
    assert len(found) == len(expected) == 4
    for batch, own, other in zip(found, alone, expected):
        assert torch.equal(batch.images, torch.cat([own.images, other.images]))
        assert torch.equal(batch.tokens, torch.cat([own.tokens, other.tokens]))
        assert torch.equal(batch.pair_index, own.pair_index)
    assert same(joined(1, start=3), found[3:])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_image_is_replaced_within_the_batch_counted_and_named(tmp_path, workers):
    captioned = make(tmp_path / "a.tar", bad=(4, 7))
    loader = Loader(Pairs(captioned, plain_transform, tokenizer, 6), workers, failure_share=0.2)
    found, failures = list(loader.epoch(0)), loader.failures
    assert {name: failure.count for name, failure in failures.items()} == {"004": 3, "007": 3}
    assert "cannot be decoded" in failures["004"].reason
    for batch, order in zip(found, epoch_order(N * PER_IMAGE, 6, 0, 0).tolist()):
        good = [pair // PER_IMAGE not in (4, 7) for pair in order]
        stand_in = [order[next((i + a) % 6 for a in range(6) if good[(i + a) % 6])] for i in range(6)]
        assert batch.pair_index.tolist() == stand_in
        assert batch.image_index.tolist() == [pair // PER_IMAGE for pair in stand_in]
        assert torch.equal(batch.tokens[:, 0], batch.pair_index)


def test_the_digest_is_of_the_pairs(pairs, tmp_path):
    others = [make(tmp_path / "a.tar", n=11), shuffle(pairs, 0.5, 0)]
    assert len({pairs_digest(data) for data in (pairs, *others)} | {pairs_digest(pairs, others[0])}) == 4
    assert pairs_digest(pairs) == pairs_digest(make(tmp_path / "train-0.tar"))


# ------------------------------------------------------------------------------------------------- noisy correspondence


@pytest.mark.parametrize("ratio", [0.0, 0.2, 1.0])
def test_a_share_of_the_captions_is_permuted_among_itself(tmp_path, ratio):
    captioned = make(tmp_path / "a.tar", n=100)
    noisy = shuffle(captioned, ratio, seed=3)
    owner = np.repeat(np.arange(100), PER_IMAGE)
    caption = [int(text.removeprefix("caption ")) for text in noisy.flat()]
    assert sorted(caption) == list(range(300))
    assert 0.95 * ratio <= (owner[caption] != owner).mean() <= ratio
    assert list(map(len, noisy.captions)) == [PER_IMAGE] * 100
    assert noisy.images is captioned.images
    assert captioned.flat() == [f"caption {c}" for c in range(300)]  # the clean data is as it was
    assert shuffle(captioned, ratio, seed=3).captions == noisy.captions
    assert ratio == 0 or shuffle(captioned, ratio, seed=4).captions != noisy.captions


# -------------------------------------------------------------------------------------------------- composed queries


N_TARGETS, C, SIDE = 30, 5, 8
HELD = [sorted({i % C, (i + 1) % C, (i // C) % C}) for i in range(N_TARGETS)]
TUPLES = np.array([(c, (c + 1) % C) for c in range(C)] + [(c, (c + 1) % C) for c in range(C)])
BOX = (2.0, 2.0, 4.0, 4.0)  # of every second image


def first_pixel(image):
    """The first pixel, with noise, and the crop's size: (3, 2, 2)."""
    red = image.getpixel((0, 0))[0]
    made = torch.zeros(3, 2, 2)
    made[0], made[1], made[2] = red, image.width, torch.rand(1)
    return made


def make_queries(folder):
    files = [save(folder / f"{i}.png", picture((i, 0, 0), SIDE)) for i in range(N_TARGETS)]
    return made(HELD, C, [[(c, BOX) for c in mine] if i % 2 else None for i, mine in enumerate(HELD)], files, TUPLES)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_queries(tmp_path_factory.mktemp("images"))


def tuples(data, epoch=0, start=0, batch_size=8, seed=5, rank=0, world=1, repeats=4, **options):
    rows = Tuples(data, first_pixel, tokenizer, batch_size, seed, rank, world, repeats=repeats)
    return read(rows, epoch, start, **options)


def test_a_batch_has_what_its_rows_say(data):
    modalities, crops = Counter(), Counter()
    for epoch in range(3):
        found = tuples(data, epoch)
        assert len(found) == 5  # 10 combinations x 4
        for batch in found:
            b, k = batch.part_rows.shape
            assert (b, k) == (8, 2)
            places = batch.part_rows.flatten()
            assert sorted(places[places >= 0].tolist()) == list(range(len(batch.images) - b))
            assert sorted((-places[places < 0] - 1).tolist()) == list(range(len(batch.tokens)))
            for row in range(b):
                concepts = batch.concepts[row].tolist()
                target = batch.target_index[row].item()
                assert concepts in TUPLES.tolist()
                assert set(concepts) <= set(HELD[target])
                assert batch.images[row, 0, 0, 0] == target
                assert batch.images[row, 1, 0, 0] == SIDE
                for concept, place in zip(concepts, batch.part_rows[row].tolist()):
                    modalities[place >= 0] += 1
                    if place < 0:
                        assert batch.tokens[-place - 1].tolist() == [concept, len(f"concept {concept}")]
                        continue
                    image = batch.images[b + place]
                    shown = int(image[0, 0, 0])
                    assert concept in HELD[shown]
                    assert shown != target
                    assert image[1, 0, 0] == (2 if shown % 2 else SIDE)
                    crops[shown % 2] += 1
    assert min(modalities.values()) > 90  # of 240
    assert len(crops) == 2


def test_a_rank_without_text_parts_has_one_unused_text(data):
    alone = tuples(data, batch_size=8, rank=3, world=8, repeats=12)
    texts = [batch for batch in alone if (batch.part_rows >= 0).all()]
    images = [batch for batch in alone if (batch.part_rows < 0).all()]
    assert texts
    assert images
    for batch in texts:
        assert batch.tokens.shape == (1, 2)
        assert len(batch.images) == 3
    for batch in images:
        assert len(batch.tokens) == 2
        assert len(batch.images) == 1  # the target stands for the image tower


@pytest.mark.parametrize("workers", [0, 1])
def test_too_many_bad_images_stop_the_run(tmp_path, workers):
    captioned = make(tmp_path / "a.tar", bad=(1, 5))
    told = r"images of 6 of 36 pairs .*16\.7%, allowed are 5\.0%\): .*00[15]: 3 \(the image can"
    with pytest.raises(UserError, match=told):
        batches(captioned, batch_size=6, workers=workers)
    with pytest.raises(UserError, match="Not one image of a whole batch of 8"):
        batches(make(tmp_path / "b.tar", bad=range(N)), workers=workers)
