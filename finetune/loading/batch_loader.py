"""Batches of training rows in an order that only the seed decides, prepared by worker processes.

`PairLoader` and `TupleLoader` say what a row is. The global batches and the replacements of unreadable rows are the
same for every number of workers, and of processes that divides the batch.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader

from finetune.loading.rows import Rows, epoch_order, whole
from probemb.data.failures import Failure, Tally
from probemb.data.workers import describe_process, make_loader, naming_ended_workers, starting_workers
from probemb.errors import UserError

Batch = TypeVar("Batch")
JUDGED_FROM = 1000  # rows


class BatchLoader(Generic[Batch]):
    """Batches of one rank.

    Args:
        rows: reads a row, and makes a batch of several.
        source: the path of the data, for messages; what: the name of a row in the plural.
        rank, world: of this process; `world` divides the global batch. Rank r has rows [r·b, (r+1)·b) of it.
        workers: processes that prepare batches ahead; 0 prepares them in this one.
        pin_memory: put batches into page-locked memory, for an asynchronous copy to a GPU.
        failure_share: the run stops when more than this share of this rank's rows cannot be used, once JUDGED_FROM of
            them, or its part of a whole epoch, were read since the process started.

    Attributes:
        steps: global batches in an epoch.
        rows: rows of every global batch that this rank gets, b.
        waited: seconds spent waiting for data so far.

    Raises:
        UserError: on construction for settings that do not fit each other or the data; while iterating when too many
            rows cannot be used, or a worker was killed.
    """

    def __init__(
        self, rows: Rows, source: str, what: str, rank: int, world: int, workers: int, *,
        pin_memory: bool, failure_share: float,
    ):  # fmt: skip
        batch_size, number = rows.batch_size, len(rows)
        if workers < 0:
            raise UserError(f"{workers} workers cannot work.", "Use 0 or more workers.")
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} of {world}")
        if batch_size < 1 or batch_size > number:
            raise UserError(
                f"{source} has {number} {what}, from which no batch of {batch_size} can be made.",
                f"Use a batch size from 1 to {number}.",
            )
        if batch_size % world:
            raise UserError(
                f"{world} processes cannot share a batch of {batch_size} evenly.",
                f"Use a batch size that {world} divides, such as {max(1, batch_size // world) * world}.",
            )
        self.steps, self.rows, self.seed = number // batch_size, batch_size // world, rows.seed
        self.batch_size, self.n_rows, self.what, self.waited = batch_size, number, what, 0.0
        self._tally = Tally(failure_share, min(JUDGED_FROM, self.steps * self.rows))
        self._turn = 0
        self._sampler = _Sampler(rank * self.rows, self.rows, self.steps)
        self._loader: DataLoader | None = make_loader(
            rows,
            workers,
            batch_sampler=self._sampler,
            collate_fn=whole,
            persistent_workers=workers > 0,
            multiprocessing_context="fork" if workers else None,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # otherwise each epoch would draw from the global random numbers
        )
        self._batches: Iterator | None = None

    def epoch(self, n: int, start_step: int = 0) -> Iterator[Batch]:
        """The batches of epoch n from a step on; nothing before it is read. One epoch runs at a time."""
        if not 0 <= start_step <= self.steps:
            raise ValueError(f"step {start_step} of an epoch with {self.steps} steps")
        if self._loader is None:
            raise ValueError("this loader is closed")
        self._turn += 1
        self._sampler.begin(n, start_step)
        return self._iterate(self._turn)

    def _iterate(self, turn: int) -> Iterator[Batch]:
        while True:
            if turn != self._turn or self._loader is None:
                raise ValueError("another epoch was started, or the loader was closed")
            began = time.perf_counter()
            try:
                if self._sampler.fresh:
                    self._sampler.fresh = False
                    self._start()
                with naming_ended_workers(self._loader.num_workers):
                    batch, failures = next(self._batches)
            except StopIteration:
                return
            finally:
                self.waited += time.perf_counter() - began
            self._count(failures)
            if isinstance(batch, UserError):
                raise batch
            yield batch

    def _start(self) -> None:
        first = self._batches is None
        with starting_workers():
            self._batches = iter(self._loader)
        if first and self._loader.num_workers:  # registered after PyTorch's own, so run before it
            atexit.register(_close, weakref.ref(self))

    def waiting_for(self) -> str:
        """The workers that prepare batches, with what keeps them from it; for another thread."""
        workers = getattr(self._batches, "_workers", ())
        return ", ".join(
            ["waiting for data", *(f"data-worker-{i} ({describe_process(w.pid)})" for i, w in enumerate(workers))]
        )

    def order(self, n: int) -> np.ndarray:
        """The rows of epoch n as global batches, (steps, batch_size) int64."""
        return epoch_order(self.n_rows, self.batch_size, self.seed, n)

    def close(self) -> None:
        """End the workers; dropping the loader or ending the interpreter does the same."""
        batches, self._batches, self._loader = self._batches, None, None
        # PyTorch does this when the last reference goes, but the traceback of an error may keep one.
        shut_down = getattr(batches, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()

    def __enter__(self) -> BatchLoader[Batch]:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @property
    def failures(self) -> dict[str, Failure]:
        """By name of the image, what this rank could not use since the process started."""
        return self._tally.failures

    def _count(self, failures: list[tuple[str, str]]) -> None:
        if self._tally.add(self.rows, failures):
            t = self._tally
            named = "; ".join(f"{name}: {failure.reason}" for name, failure in t.worst())
            raise UserError(
                f"The images of {t.failed} of {t.read} {self.what} cannot be used ({t.failed / t.read:.1%}, "
                f"allowed are {t.share:.1%}): {named}.",
                "Repair these images or leave them out, or allow a larger failure share.",
            )


class _Sampler:
    """Batch sampler: (epoch, step, row) of every row of one rank, for each step of the current epoch."""

    def __init__(self, first: int, rows: int, steps: int):
        self.first, self.rows, self.steps = first, rows, steps
        self.epoch = self.start = 0
        self.fresh = False

    def begin(self, epoch: int, start: int) -> None:
        self.epoch, self.start, self.fresh = epoch, start, True

    def __len__(self) -> int:
        return self.steps - self.start

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:
        for step in range(self.start, self.steps):
            yield [(self.epoch, step, self.first + row) for row in range(self.rows)]


def _close(loader: weakref.ref) -> None:
    if (one := loader()) is not None:
        one.close()
