"""Training pairs: an image with one of its captions."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from finetune.loading.rows import Rows, stacked
from probemb.data.captions.find import CaptionDataset


class PairBatch(NamedTuple):
    """This rank's rows of one global batch, b = batch_size / world.

    Images and tokens may have more rows, unpaired ones, behind those of the pairs.

    images       (b, 3, H, W) uint8, or what else the transform gives, in the memory order that it gives
    tokens       (b, L) int64
    image_index  (b,) int64: which image of the `CaptionDataset`; rows with the same one match each other
    pair_index   (b,) int64: which caption, counted image after image, as in `CaptionDataset.flat`
    """

    images: torch.Tensor
    tokens: torch.Tensor
    image_index: torch.Tensor
    pair_index: torch.Tensor


class Pairs(Rows[tuple, PairBatch]):
    """Reads pairs; a row's number is that of its caption, in the order of `CaptionDataset.flat`."""

    def __init__(self, dataset: CaptionDataset, transform: Callable, tokenizer: Callable, batch_size: int, seed: int):
        self.texts, self.owner = dataset.flat(), dataset.owner()
        super().__init__(len(self.texts), dataset.images, transform, tokenizer, batch_size, seed)

    def read(self, epoch: int, number: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        image = self.image(self.owner[number], epoch, number)
        return image, self.tokens(self.texts[number], self.owner[number]), number

    def batch(self, rows: list[tuple[torch.Tensor, torch.Tensor, int]]) -> PairBatch:
        images, tokens, pairs = map(list, zip(*rows))
        rows.clear()
        owner = torch.tensor([self.owner[pair] for pair in pairs])
        return PairBatch(stacked(images), torch.stack(tokens), owner, torch.tensor(pairs))
