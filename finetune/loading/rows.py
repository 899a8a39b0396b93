"""Rows of training batches: which of them an epoch has in what order, and replacement of those that cannot be read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np
import torch

from probemb.data.boxes.geometry import Box
from probemb.data.failures import BadSample
from probemb.data.image_loader import Images
from probemb.data.pixels import empty_stack
from probemb.data.randomness import isolated_randomness, number_of, seed_all, stream_of
from probemb.errors import UserError

_ORDER, _TRANSFORM = "order", "transform"  # uses of random numbers
Row, Batch = TypeVar("Row"), TypeVar("Batch")


class Unusable(Exception):
    """A row that cannot be used: the name of its image, and why."""

    def __init__(self, name: str, why: str):
        super().__init__(name, why)
        self.name, self.why = name, why


def epoch_order(number: int, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of the rows drawn from (seed, epoch), cut into whole batches, (steps, batch_size) int64."""
    permutation = stream_of(_ORDER, seed, epoch).permutation(number)
    steps = number // batch_size
    return permutation[: steps * batch_size].reshape(steps, batch_size)


class Rows(ABC, Generic[Row, Batch]):
    """Data set for a DataLoader: (epoch, step, row) of a whole batch -> (the batch or the error, failures).

    Args:
        number: rows of an epoch, numbered from 0.
        images: where the images lie; transform: image -> tensor; tokenizer: list of n texts -> (n, L) int64.
        batch_size: the global batch. seed: any integer.
    """

    def __init__(
        self, number: int, images: Images, transform: Callable, tokenizer: Callable, batch_size: int, seed: int
    ):  # fmt: skip
        self.number, self.images, self.transform, self.tokenizer = number, images, transform, tokenizer
        self.batch_size, self.seed = batch_size, seed
        self._epoch, self._order = -1, np.empty((0, 0), np.int64)

    @abstractmethod
    def read(self, epoch: int, number: int) -> Row:
        """One row, a function of the seed and the arguments. Raises Unusable."""

    @abstractmethod
    def batch(self, rows: list[Row]) -> Batch:
        """A batch of rows."""

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, row: tuple[int, int, int]):
        return self.__getitems__([row])

    def __getitems__(self, rows: list[tuple[int, int, int]]):
        failures: list[tuple[str, str]] = []
        try:
            with isolated_randomness():
                return self.batch([self._row(*row, failures) for row in rows]), failures
        except UserError as error:  # PyTorch rebuilds exceptions from one argument
            return error, failures

    def _row(self, epoch: int, step: int, row: int, failures: list) -> Row:
        """A row; if it cannot be used, the next usable one of the global batch."""
        if epoch != self._epoch:
            self._epoch, self._order = epoch, epoch_order(self.number, self.batch_size, self.seed, epoch)
        batch = self._order[step]
        for ahead in range(self.batch_size):
            try:
                return self.read(epoch, int(batch[(row + ahead) % self.batch_size]))
            except Unusable as error:
                last = error.name, error.why
                if not ahead:
                    failures.append(last)
        raise UserError(
            f"Not one image of a whole batch of {self.batch_size} can be used (the last, {last[0]}: {last[1]}).",
            "Check the images.",
        )

    def image(self, index: int, *seeds: int, box: Box | None = None) -> torch.Tensor:
        """An image, or a part of it, transformed; the transform's random numbers are a function of the seeds."""
        try:
            found = self.images.part(index, box)
            seed_all(number_of(_TRANSFORM, self.seed, *seeds))
            return self._apply(self.transform, found)
        except BadSample as error:
            raise Unusable(self.images.places[index].name, str(error)) from None

    def tokens(self, text: str, index: int) -> torch.Tensor:
        """(L,) int64; `index`: the image that a failure is counted for."""
        try:
            return torch.as_tensor(self._apply(self.tokenizer, [text]))[0]
        except BadSample as error:
            raise Unusable(self.images.places[index].name, str(error)) from None

    def _apply(self, function: Callable, value):
        try:
            return function(value)
        except (UserError, MemoryError):
            raise
        except Exception as error:  # one bad image must not stop a run
            raise BadSample(f"the transform or tokenizer failed ({type(error).__name__}: {error})") from None


def stacked(images: list[torch.Tensor]) -> torch.Tensor:
    """Images of one shape as one tensor, in the first's memory order; the list is emptied, so that both do not fill the
    memory at once."""
    whole = empty_stack(images[0], len(images))
    for i in range(len(images)):
        if images[i].shape != whole.shape[1:]:
            raise UserError(
                f"The transform gave an image of shape {tuple(images[i].shape)} where others have "
                f"{tuple(whole.shape[1:])}.",
                "Use a transform that crops or resizes every image to the same size.",
            )
        whole[i] = images[i]
        images[i] = images[i].new_empty(0)
    images.clear()
    return whole


def whole(batch):
    return batch
