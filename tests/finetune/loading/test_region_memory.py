"""An epoch over precomputed regions: its peak memory does not depend on the size of the file."""

import numpy as np
import pytest
import torch

from finetune.loading.pair_loader import PairLoader
from probemb.data.captions.find import find_captions
from tools.bench.timing import peak_memory

REGION = (36, 2048)  # as published: 288 KiB an image


def as_they_are(regions):
    return regions


def tokenizer(texts):
    return torch.ones(len(texts), 4, dtype=torch.int64)


@pytest.fixture
def measured(tmp_path):
    def epoch(images: int) -> int:
        """Peak memory in bytes of reading an epoch, one caption of each image."""
        folder = tmp_path / str(images)
        folder.mkdir()
        np.lib.format.open_memmap(folder / "train_ims.npy", "w+", np.float32, (images, *REGION))  # a hole in the file
        (folder / "train_caps.txt").write_text("a dog\n\n\n\n\n" * images)

        def read_all():
            loader = PairLoader(find_captions(folder, "train"), as_they_are, tokenizer, 32)
            read = sum(len(batch.images) for batch in loader.epoch(0))
            loader.close()
            assert read == images // 32 * 32

        return peak_memory(lambda: read_all)

    return epoch


def test_peak_memory_is_that_of_a_batch(measured):
    small, large = measured(680), measured(2720)  # 200 and 800 MB
    assert abs(large - small) < 40 << 20
