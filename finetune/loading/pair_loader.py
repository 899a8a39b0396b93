"""The training pairs of finetuning: every caption with its image once an epoch, in an order that only the seed decides.

    loader = PairLoader(find_captions("data/flickr8k", "train"), transform, tokenizer, batch_size=128, workers=4)
    for epoch in range(25):
        for batch in loader.epoch(epoch):
            ...

The global batches, the random crops and the replacements of unreadable images are functions of the seed, the epoch
and the pair alone: they are the same for every number of workers, and of processes that divides the batch.
"""

from __future__ import annotations

import atexit
import hashlib
import time
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader

from finetune.loading.pair_samples import PairBatch, Pairs, epoch_order, whole
from probemb.data.captions.find import CaptionDataset
from probemb.data.failures import Failure, Tally
from probemb.data.workers import describe_process, make_loader, naming_ended_workers, starting_workers
from probemb.errors import UserError


class PairLoader:
    """Batches of training pairs for one rank.

    Args:
        dataset: images and captions; each caption is one pair. An incomplete last batch is left out of its epoch.
        transform: PIL image -> (3, H, W) float32. It may draw from the global random numbers of torch, numpy and
            Python, which are seeded for every pair and restored afterwards.
        tokenizer: list of n captions -> (n, L) int64.
        batch_size: the global batch, over all ranks.
        seed: any integer.
        rank, world: of this process; `world` divides `batch_size`. Rank r has rows [r·b, (r+1)·b) of a global batch.
        workers: processes that prepare batches ahead; 0 prepares them in this one.
        pin_memory: put batches into page-locked memory, for an asynchronous copy to a GPU.
        failure_share: the run stops when more than this share of this rank's pairs cannot be used,
        failure_minimum: … once so many, or its part of a whole epoch, were read since the process started.
        positives: "image" or "class", see `groups`.

    Attributes:
        steps: global batches in an epoch.
        n_pairs: number of captions, those left out of an epoch included.
        groups: (N,) int64, which images match the same captions: a number of their own, or their class'.
        rows: rows of every global batch that this rank gets, b.
        waited: seconds spent waiting for data so far.

    Raises:
        UserError: on construction for settings that do not fit each other or the data, or images that are not here;
            while iterating when too many images cannot be used, or a worker was killed.
    """

    def __init__(
        self,
        dataset: CaptionDataset,
        transform: Callable[[Image.Image], torch.Tensor],
        tokenizer: Callable[[list[str]], torch.Tensor],
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
        *,
        pin_memory: bool = False,
        failure_share: float = 0.05,
        failure_minimum: int = 1000,
        positives: str = "image",
    ):
        if workers < 0:
            raise UserError(f"{workers} workers cannot work.", "Use 0 or more workers.")
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} of {world}")
        self.n_pairs = dataset.n_captions
        if batch_size < 1 or batch_size > self.n_pairs:
            raise UserError(
                f"{dataset.source} has {self.n_pairs} pairs, from which no batch of {batch_size} can be made.",
                f"Use a batch size from 1 to {self.n_pairs}.",
            )
        if batch_size % world:
            raise UserError(
                f"{world} processes cannot share a batch of {batch_size} evenly.",
                f"Use a batch size that {world} divides, such as {max(1, batch_size // world) * world}.",
            )
        refuse_unusable(dataset, failure_share)
        by_class = positives == "class"
        self.groups = torch.tensor(dataset.class_numbers() if by_class else range(len(dataset)), dtype=torch.int64)
        self.steps, self.rows, self.seed = self.n_pairs // batch_size, batch_size // world, seed
        self.batch_size, self.waited = batch_size, 0.0
        self._dataset = dataset
        self._tally = Tally(failure_share, min(failure_minimum, self.steps * self.rows))
        self._turn = 0
        self._sampler = _Rows(rank * self.rows, self.rows, self.steps)
        self._loader: DataLoader | None = make_loader(
            Pairs(dataset, transform, tokenizer, batch_size, seed),
            workers,
            batch_sampler=self._sampler,
            collate_fn=whole,
            persistent_workers=workers > 0,
            multiprocessing_context="fork" if workers else None,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # otherwise each epoch would draw from the global random numbers
        )
        self._batches: Iterator | None = None

    def epoch(self, n: int, start_step: int = 0) -> Iterator[PairBatch]:
        """The batches of epoch n from a step on; nothing before it is read. One epoch runs at a time."""
        if not 0 <= start_step <= self.steps:
            raise ValueError(f"step {start_step} of an epoch with {self.steps} steps")
        if self._loader is None:
            raise ValueError("this loader is closed")
        self._turn += 1
        self._sampler.begin(n, start_step)
        return self._iterate(self._turn)

    def _iterate(self, turn: int) -> Iterator[PairBatch]:
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
        """The pairs of epoch n as global batches, (steps, batch_size) int64."""
        return epoch_order(self.n_pairs, self.batch_size, self.seed, n)

    @property
    def identity(self) -> dict[str, int | str]:
        """Everything that the batches depend on; a run must be resumed with the same."""
        digest = hashlib.sha256()
        for one, texts in zip(self._dataset.image_ids, self._dataset.captions):
            digest.update(f"{one}\0{len(texts)}\0".encode(errors="replace"))
            for text in texts:
                digest.update(f"{text}\0".encode(errors="replace"))
        return {"pairs": digest.hexdigest()[:16], "batch_size": self.batch_size, "seed": self.seed}

    def close(self) -> None:
        """End the workers; dropping the loader or ending the interpreter does the same."""
        batches, self._batches, self._loader = self._batches, None, None
        # PyTorch does this when the last reference goes, but the traceback of an error may keep one.
        shut_down = getattr(batches, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()

    def __enter__(self) -> PairLoader:
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
                f"The images of {t.failed} of {t.read} pairs cannot be used ({t.failed / t.read:.1%}, "
                f"allowed are {t.share:.1%}): {named}.",
                "Repair these images or leave them out, or allow a larger failure share.",
            )


def refuse_unusable(dataset: CaptionDataset, share: float) -> None:
    """Raise UserError if images are missing, or listing found more than this share of samples unusable."""
    bad, total = dataset.images.bad, len(dataset) + len(dataset.images.bad)
    of = f", split '{dataset.split}'," if dataset.split else ""
    if len(bad) > share * total:
        raise UserError(
            f"{len(bad)} of {total} samples of {dataset.source}{of} cannot be used ({bad[0][0]}: {bad[0][1]}).",
            "Repair them or leave their shards out, or allow a larger failure share.",
        )


class _Rows:
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
