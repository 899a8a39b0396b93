"""Training examples of composed retrieval: what is in a batch, and what batches depend on."""

from collections import Counter

import numpy as np
import pytest
import torch

from finetune.loading.rows import epoch_order
from finetune.loading.tuple_loader import TupleLoader
from probemb.data.compositions import Compositions
from probemb.data.compositions.crops import Crops
from probemb.data.compositions.holdings import Holdings
from probemb.data.image_loader import Images, Place
from probemb.errors import UserError
from tests.data.compositions.drawn import picture

N, C, SIDE = 30, 5, 8
HELD = [sorted({i % C, (i + 1) % C, (i // C) % C}) for i in range(N)]
TUPLES = np.array([(c, (c + 1) % C) for c in range(C)] + [(c, (c + 1) % C) for c in range(C)])
BOX = (2.0, 2.0, 4.0, 4.0)  # of every second image


def transform(image):
    """The first pixel, with noise, and the crop's size: (3, 2, 2)."""
    red = image.getpixel((0, 0))[0]
    made = torch.zeros(3, 2, 2)
    made[0], made[1], made[2] = red, image.width, torch.rand(1)
    return made


def tokenizer(texts):
    return torch.tensor([[int(text.split()[-1]), 7] for text in texts])


def make(folder, bad=(), tuples=TUPLES):
    places = []
    for i in range(N):
        file = folder / f"{i}.png"
        file.write_bytes(b"no image" if i in bad else picture((i, 0, 0), SIDE))
        places.append(Place(f"image {i}", str(file)))
    pairs = np.array([(i, c) for i, mine in enumerate(HELD) for c in mine])
    boxes = np.array([BOX if i % 2 else (np.nan,) * 4 for i in pairs[:, 0]])
    crops = tuple(Crops(pairs[pairs[:, 1] == c, 0], boxes[pairs[:, 1] == c]) for c in range(C))
    empty = np.empty((0, 2), np.int64)
    concepts = tuple(f"concept {c}" for c in range(C))
    images, holds = Images(places=places, source="made"), Holdings(pairs, N, C)
    return Compositions("made", "train", images, concepts, holds, crops, np.array(tuples), empty, empty)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make(tmp_path_factory.mktemp("images"))


def batches(data, epoch=0, start=0, **options):
    with TupleLoader(data, transform, tokenizer, **{"batch_size": 8, "seed": 5, "repeats": 4, **options}) as loader:
        return list(loader.epoch(epoch, start))


def same(left, right):
    return len(left) == len(right) and all(torch.equal(a, b) for x, y in zip(left, right) for a, b in zip(x, y))


def rows_of(batch):
    """Each row as it is meant: combination, target, its pixels, and the content of every part."""
    b, found = len(batch.part_rows), []
    for row in range(b):
        parts = []
        for place in batch.part_rows[row].tolist():
            part = batch.images[b + place] if place >= 0 else batch.tokens[-place - 1]
            parts.append((place >= 0, *part.flatten().tolist()))
        pixels = batch.images[row].flatten().tolist()
        target, example = batch.target_index[row].item(), batch.example_index[row].item()
        found.append((example, target, tuple(batch.concepts[row].tolist()), tuple(pixels), tuple(parts)))
    return found


def test_a_batch_has_what_its_rows_say(data):
    modalities, crops = Counter(), Counter()
    for epoch in range(3):
        found = batches(data, epoch)
        assert len(found) == 5  # 10 combinations x 4
        for batch in found:
            b, k = batch.part_rows.shape
            assert (b, k) == (8, 2)
            assert batch.text_used.all()
            places = batch.part_rows.flatten()
            assert sorted(places[places >= 0].tolist()) == list(range(len(batch.images) - b))
            assert sorted((-places[places < 0] - 1).tolist()) == list(range(len(batch.tokens)))
            for row in range(b):
                concepts = batch.concepts[row].tolist()
                target = batch.target_index[row].item()
                assert concepts == TUPLES[batch.example_index[row]].tolist()
                assert set(concepts) <= set(HELD[target])
                assert batch.images[row, 0, 0, 0] == target
                assert batch.images[row, 1, 0, 0] == SIDE
                for concept, place in zip(concepts, batch.part_rows[row].tolist()):
                    modalities[place >= 0] += 1
                    if place < 0:
                        assert batch.tokens[-place - 1].tolist() == [concept, 7]
                        continue
                    image = batch.images[b + place]
                    shown = int(image[0, 0, 0])
                    assert concept in HELD[shown]
                    assert shown != target
                    assert image[1, 0, 0] == (2 if shown % 2 else SIDE)
                    crops[shown % 2] += 1
    assert min(modalities.values()) > 90  # of 240
    assert len(crops) == 2


def test_every_combination_as_often_as_asked_and_never_the_same_example(data):
    whole = [row for batch in batches(data, batch_size=10) for row in rows_of(batch)]
    assert Counter(row[0] for row in whole) == dict.fromkeys(range(10), 4)
    assert len(set(whole)) == 40
    assert not set(whole) & {row for batch in batches(data, epoch=1, batch_size=10) for row in rows_of(batch)}
    order = [row % 10 for step in epoch_order(40, 10, 5, 0) for row in step]
    assert [row[0] for row in whole] == order


@pytest.mark.parametrize(("world", "workers"), [(1, 2), (2, 0), (4, 1), (8, 0)])
def test_the_same_global_batches_for_every_world_and_worker_count(tmp_path, world, workers):
    made = make(tmp_path, bad=(4, 11))
    options = {"failure_share": 1.0}
    alone = batches(made, epoch=2, **options)
    ranks = [batches(made, epoch=2, rank=r, world=world, workers=workers, **options) for r in range(world)]
    for whole, *parts in zip(alone, *ranks):
        assert rows_of(whole) == [row for part in parts for row in rows_of(part)]


@pytest.mark.parametrize("workers", [0, 1])
def test_resuming_gives_the_rest(data, workers):
    assert same(batches(data, epoch=1, start=3, workers=workers), batches(data, epoch=1)[3:])
    assert not same(batches(data, epoch=1), batches(data, epoch=1, seed=6))


def test_a_rank_without_text_parts_has_one_unused_text(data):
    alone = batches(data, batch_size=8, rank=3, world=8, repeats=12)
    texts = [batch for batch in alone if (batch.part_rows >= 0).all()]
    images = [batch for batch in alone if (batch.part_rows < 0).all()]
    assert texts
    assert images
    for batch in texts:
        assert batch.tokens.shape == (1, 2)
        assert batch.text_used.tolist() == [False]
        assert len(batch.images) == 3
    for batch in images:
        assert batch.text_used.tolist() == [True, True]
        assert len(batch.images) == 1  # the target stands for the image tower


def test_a_row_with_a_bad_image_is_replaced_and_counted(tmp_path):
    made, good = make(tmp_path, bad=(3, 7)), []
    with TupleLoader(made, transform, tokenizer, 8, 5, repeats=4, failure_share=1.0) as loader:
        for batch in loader.epoch(0):
            good += rows_of(batch)
        failures = {name: failure.count for name, failure in loader.failures.items()}
    assert set(failures) <= {"image 3", "image 7"}
    assert sum(failures.values()) > 2
    (tmp_path / "whole").mkdir()
    wanted = [row for batch in batches(make(tmp_path / "whole")) for row in rows_of(batch)]
    replaced = [i for i, (row, other) in enumerate(zip(good, wanted)) if row != other]
    assert len(replaced) == sum(failures.values())
    for i in replaced:  # by the next usable row of its batch
        first = 8 * (i // 8)
        usable = (wanted[first + (i - first + ahead) % 8] for ahead in range(1, 8))
        assert good[i] == next(row for row in usable if not {3, 7} & pictures(row))


def pictures(row):
    return {row[1]} | {int(part[1]) for part in row[4] if part[0]}


def test_too_many_bad_images_stop_the_run(tmp_path):
    made = make(tmp_path, bad=range(0, N, 2))
    with pytest.raises(UserError, match="examples cannot be used"):
        batches(made, failure_share=0.1)
    with pytest.raises(UserError, match="Not one image of a whole batch"):
        batches(make(tmp_path, bad=range(N)), failure_share=1.0)


def test_the_identity_is_that_of_what_is_drawn_from(data, tmp_path):
    def identity(one, **options):
        return TupleLoader(one, transform, tokenizer, **{"batch_size": 2, **options}).identity

    assert identity(data) == identity(make(tmp_path))
    assert identity(data) != identity(make(tmp_path, tuples=TUPLES[:3]))
    assert identity(data) != identity(data, repeats=2)


def test_settings_that_do_not_fit_are_refused(data):
    for options, message in [
        ({"batch_size": 41}, "from which no batch of 41"),
        ({"world": 3}, "3 processes cannot share"),
        ({"workers": -1}, "-1 workers"),
    ]:
        with pytest.raises(UserError, match=message):
            batches(data, **options)
