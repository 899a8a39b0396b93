"""The training examples of composed retrieval, in an order that only the seed decides.

    loader = TupleLoader(find_compositions("data/composed", "train"), transform, tokenizer, batch_size=128, workers=4)
    for epoch in range(25):
        for batch in loader.epoch(epoch):
            ...

Every combination of concepts is there `repeats` times an epoch. Its target and its parts are drawn from (seed, epoch,
row); the global batches are the same for every number of workers, and of processes that divides the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from PIL import Image

from finetune.loading.batch_loader import BatchLoader
from finetune.loading.pair_loader import refuse_unusable
from finetune.loading.tuple_samples import TupleBatch, TupleRows
from probemb.data.compositions.dataset import Compositions


class TupleLoader(BatchLoader[TupleBatch]):
    """Batches of queries with their targets for one rank.

    Args:
        data: one split, all of whose combinations have targets. An incomplete last batch is left out of its epoch.
        transform: PIL image -> (3, H, W) uint8, for targets and parts alike, each with random numbers of its own.
        tokenizer: list of n texts -> (n, L) int64.
        batch_size: the global batch, over all ranks.
        seed: any integer.
        repeats: examples of each combination in an epoch.
        rank, world, workers, pin_memory, failure_share: see `BatchLoader`. A row counts as failed if its target or
            one of its parts cannot be used; the next usable row of the global batch takes its place.

    Raises:
        UserError: see `BatchLoader`.
    """

    def __init__(
        self,
        data: Compositions,
        transform: Callable[[Image.Image], torch.Tensor],
        tokenizer: Callable[[list[str]], torch.Tensor],
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
        *,
        repeats: int = 1,
        pin_memory: bool = False,
        failure_share: float = 0.05,
    ):
        refuse_unusable(data, failure_share)
        super().__init__(
            TupleRows(data, transform, tokenizer, batch_size, seed, repeats), data.source, "examples", rank, world,
            workers, pin_memory=pin_memory, failure_share=failure_share,
        )  # fmt: skip
        self._data, self.repeats = data, repeats

    @property
    def identity(self) -> dict[str, int | str]:
        """Everything that the batches depend on; a run must be resumed with the same."""
        return {
            "tuples": self._data.digest(),
            "repeats": self.repeats,
            "batch_size": self.batch_size,
            "seed": self.seed,
        }
