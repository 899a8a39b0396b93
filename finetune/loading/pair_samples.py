"""Read, decode, transform and tokenise training pairs; replace unreadable images."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from probemb.data.captions.find import CaptionDataset
from probemb.data.failures import BadSample
from probemb.data.randomness import isolated_randomness, seed_all
from probemb.errors import UserError

_ORDER, _TRANSFORM = "order", "transform"  # uses of random numbers


class PairBatch(NamedTuple):
    """This rank's rows of one global batch, b = batch_size / world.

    images       (b, 3, H, W) float32
    tokens       (b, L) int64
    image_index  (b,) int64: which image of the `CaptionDataset`; rows with the same one match each other
    pair_index   (b,) int64: which caption, counted image after image, as in `CaptionDataset.flat`
    """

    images: torch.Tensor
    tokens: torch.Tensor
    image_index: torch.Tensor
    pair_index: torch.Tensor


def epoch_order(n_pairs: int, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of the pairs drawn from (seed, epoch), cut into whole batches, (steps, batch_size) int64."""
    number = _number(_ORDER, seed, epoch)
    # RandomState's numbers are the same in every version of numpy, in contrast to Generator's.
    permutation = np.random.RandomState([number & 0xFFFFFFFF, number >> 32]).permutation(n_pairs)
    steps = n_pairs // batch_size
    return permutation[: steps * batch_size].reshape(steps, batch_size)


def _number(*parts: int | str) -> int:
    """64 random bits that are a function of the parts."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest(), "little")


class Pairs:
    """Data set for a DataLoader: (epoch, step, row) of a whole batch -> (PairBatch or the error, failures)."""

    def __init__(self, dataset: CaptionDataset, transform: Callable, tokenizer: Callable, batch_size: int, seed: int):
        self.images, self.transform, self.tokenizer = dataset.images, transform, tokenizer
        self.texts, self.owner = dataset.flat(), dataset.owner()
        self.batch_size, self.seed = batch_size, seed
        self._epoch, self._order = -1, np.empty((0, 0), np.int64)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, row: tuple[int, int, int]):
        return self.__getitems__([row])

    def __getitems__(self, rows: list[tuple[int, int, int]]):
        failures: list[tuple[str, str]] = []
        try:
            with isolated_randomness():
                return self._batch(rows, failures), failures
        except UserError as error:  # PyTorch rebuilds exceptions from one argument
            return error, failures

    def _batch(self, rows: list[tuple[int, int, int]], failures: list) -> PairBatch:
        images, tokens, pairs = torch.empty(0), [], []
        for i, row in enumerate(rows):
            image, words, pair = self._row(*row, failures)
            if i == 0:
                images = image.new_empty(len(rows), *image.shape)
            if image.shape != images.shape[1:]:
                raise UserError(
                    f"The transform gave an image of shape {tuple(image.shape)} where others have "
                    f"{tuple(images.shape[1:])}.",
                    "Use a transform that crops or resizes every image to the same size.",
                )
            images[i] = image
            tokens.append(words)
            pairs.append(pair)
        owner = torch.tensor([self.owner[pair] for pair in pairs])
        return PairBatch(images, torch.stack(tokens), owner, torch.tensor(pairs))

    def _row(self, epoch: int, step: int, row: int, failures: list) -> tuple[torch.Tensor, torch.Tensor, int]:
        """The pair of a row; if its image cannot be used, the next usable pair of the global batch."""
        if epoch != self._epoch:
            self._epoch, self._order = epoch, epoch_order(len(self.texts), self.batch_size, self.seed, epoch)
        batch = self._order[step]
        for ahead in range(self.batch_size):
            pair = int(batch[(row + ahead) % self.batch_size])
            try:
                return *self._example(epoch, pair), pair
            except BadSample as error:
                last = self.images.places[self.owner[pair]].name, str(error)
                if not ahead:
                    failures.append(last)
        raise UserError(
            f"Not one image of a whole batch of {self.batch_size} can be used (the last, {last[0]}: {last[1]}).",
            "Check the images.",
        )

    def _example(self, epoch: int, pair: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self.images.open(self.owner[pair])
        try:
            seed_all(_number(_TRANSFORM, self.seed, epoch, pair))
            return self.transform(image), torch.as_tensor(self.tokenizer([self.texts[pair]]))[0]
        except (UserError, MemoryError):
            raise
        except Exception as error:  # one bad image must not stop a run
            raise BadSample(f"the transform or tokenizer failed ({type(error).__name__}: {error})") from None


def whole(batch):
    return batch
