"""Worlds of this folder, each made once."""

import gc

import numpy as np
import pytest
import torch

from tests.world import make_scenes

WORDS = ("red", "green", "blue", "round", "flat", "small")


@pytest.fixture(autouse=True)
def alone():
    """One thread: what is forked from a process whose OpenMP has had several hangs."""
    torch.set_num_threads(1)


def world(tmp_path_factory, **plan):
    return make_scenes(tmp_path_factory, **{"train": 0, "val": 0, "classes_images": 0, "size": 32, **plan})


@pytest.fixture(scope="session")
def scenes(tmp_path_factory):
    """16 images for training and 8 for validation, three captions each."""
    return world(tmp_path_factory, train=16, val=8, shard_size=16, captions=3)


@pytest.fixture(scope="session")
def few(tmp_path_factory):
    """Four images with three captions each: one batch an epoch."""
    out = world(tmp_path_factory, train=4, shard_size=4, captions=3)
    gc.freeze()  # what is there already is not looked through, nor copied, in every forked rank
    yield out
    gc.unfreeze()


@pytest.fixture(scope="session")
def birds(tmp_path_factory):
    """48 images of 48 classes with two captions each; 6 of val."""
    return world(tmp_path_factory, shard_size=48, captions=2, class_captions=48) / "by-class"


@pytest.fixture(scope="session")
def queries(composed_scenes):
    """Composed queries and their images."""
    return composed_scenes / "compositions"


@pytest.fixture(scope="session")
def regions(tmp_path_factory):
    """Files in SCAN's form: images of three regions (of six, 437 numbers), each a word, which captions say."""
    folder, random = tmp_path_factory.mktemp("regions"), np.random.RandomState(0)
    looks = random.randn(len(WORDS), 437).astype(np.float32)
    for name, n in (("train", 24), ("dev", 8)):
        shown = np.stack([random.permutation(len(WORDS))[:3] for _ in range(n)])
        array = np.zeros((n, 6, 437), np.float32)
        array[:, :3] = looks[shown] + 0.1 * random.randn(n, 3, 437)
        np.save(folder / f"{name}_ims.npy", array)
        captions = [" ".join(WORDS[w] for w in row[: 1 + k % 3]) for row in shown for k in range(5)]
        (folder / f"{name}_caps.txt").write_text("\n".join(captions) + "\n")
    (folder / "vocabulary.txt").write_text("".join(f"{word}\t9\n" for word in WORDS))
    return folder
