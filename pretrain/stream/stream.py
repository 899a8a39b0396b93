"""The stream of training batches: a pure function of the data, the seed and the position.

    stream = Stream([read_index("data/cc3m")], Data(workers=4), transform, tokenizer, batch_size=1024)
    for batch in stream:  # endless: epochs roll on
        engine(batch.images, batch.tokens)

`order.py` defines the order of the samples. A rank owns a contiguous run of the lanes, which is a contiguous run of the
rows of every global batch, and its workers share out these rows. So the global batches are the same for every world
size that divides the lanes and for any number of workers, and the position is one integer, the samples seen.
"""

import hashlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from pretrain.config import Data
from pretrain.stream.filter import select
from pretrain.stream.order import Order
from pretrain.stream.samples import AHEAD, Part, Parts
from pretrain.stream.shards import OpenShards
from probemb.data.failures import Failure, Tally, worst_places
from probemb.data.pixels import empty_stack
from probemb.data.remote.cache import GIB, ShardCache, temporary_folder
from probemb.data.remote.sources import DEFAULT_POLICY, FetchPolicy, Remote
from probemb.data.shards.index import Shard, refuse_repeats
from probemb.data.workers import (
    LOOK_UP_SECONDS,
    describe_process,
    end_workers,
    make_loader,
    next_item,
    starting_workers,
)
from probemb.errors import UserError

JUDGED_FROM = 1000  # samples of all ranks, or a whole epoch, from which on data.failure_share counts
_SPARE = 16  # shards that stay open beside those of the lanes


@dataclass(frozen=True)
class Batch:
    """This rank's rows of one global batch, b = batch_size / world_size, on the CPU.

    images        (b, 3, H, W) uint8, or what else the transform gives, in the memory order that it gives
    tokens        (b, L) int64
    slots         (b, 2) int64: number of the shard, index of the sample in it
    replaced      (b,) bool: the slot's own sample cannot be used, and another one stands in for it
    keys          "shard/key" of the sample that is shown, for logs
    samples_seen  the position after this batch, over all ranks: where to resume
    """

    images: torch.Tensor
    tokens: torch.Tensor
    slots: torch.Tensor
    replaced: torch.Tensor
    keys: list[str]
    samples_seen: int


class Stream:
    """Endless batches for one rank, as an iterator and a context manager; see the module for what they depend on.

    Args:
        corpora: the shards of each corpus of `data.train`.
        transform: PIL image -> (3, H, W) uint8 or float32. It may draw from the global random numbers of torch, numpy
            and Python, which are seeded for every sample and restored afterwards.
        tokenizer: list of n captions -> (n, L) int64.
        batch_size: the global batch, over all ranks.
        pin_memory: put batches into page-locked memory, for an asynchronous copy to a GPU.
        fetch: attempts and time limits of remote shards.
        rank, world_size: of this process; `world_size` divides the lanes.
        start_samples: position to start from, a multiple of the batch size.

    Attributes:
        selection: the samples that the filter keeps; None without one.
        order: the `Order`: steps in an epoch, what is dropped.
        samples_seen: the position after the last batch handed out, over all ranks.
        rows: rows of every global batch that this rank gets, b.
        wait_seconds: time spent inside `next` so far.

    Raises:
        UserError: on construction for settings that do not fit each other or the data; from `next` when too many
            samples cannot be used (with several ranks, `judge` raises it), or a worker was killed.
    """

    def __init__(
        self,
        corpora: Sequence[Sequence[Shard]],
        data: Data,
        transform: Callable[[Image.Image], torch.Tensor],
        tokenizer: Callable[[list[str]], torch.Tensor],
        *,
        batch_size: int,
        seed: int = 0,
        pin_memory: bool = False,
        fetch: FetchPolicy = DEFAULT_POLICY,
        rank: int = 0,
        world_size: int = 1,
        start_samples: int = 0,
    ):
        self.shards = [shard for shards in corpora for shard in shards]
        self.data, self._pin, self._fetch = data, pin_memory, fetch
        refuse_repeats(self.shards)
        if data.verify_hash and (unknown := sum(shard.sha256 is None for shard in self.shards)):
            what = f"data.verify_hash needs hashes, which {unknown} of {len(self.shards)} shards lack in their index."
            raise UserError(what, "Write them with `python -m tools.shards index`.")
        self.selection = select(corpora, data.filter)
        self.order = Order(
            self.selection.sizes if self.selection else [shard.samples for shard in self.shards],
            batch_size=batch_size,
            lanes=data.lanes,
            window=data.window,
            seed=seed,
            corpus=[number for number, shards in enumerate(corpora) for _ in shards],
            weights=data.weights or [1.0] * len(corpora),
            places=self.selection.places if self.selection else None,
        )
        if self.order.lanes % world_size:
            fits = ", ".join(str(n) for n in range(1, self.order.lanes + 1) if self.order.lanes % n == 0)
            raise UserError(
                f"{world_size} processes cannot share the data's {self.order.lanes} lanes evenly.",
                f"Start one of {fits} processes, or start a new run with lanes that {world_size} divides.",
            )
        self.order.locate(start_samples)  # refuses a position inside a batch
        self.samples_seen, self.rows, self.wait_seconds = start_samples, batch_size // world_size, 0.0
        self._alone, self._closed = world_size == 1, False
        self.tally = Tally(data.failure_share, min(JUDGED_FROM, self.order.steps * batch_size))
        counts = Counter(shard.name for shard in self.shards)
        self._labels = [shard.name if counts[shard.name] == 1 else str(shard.path) for shard in self.shards]

        workers = min(data.workers, self.rows)
        self._parts = parts = max(1, workers)
        lanes = -(-self.order.lanes // world_size // parts) + 1  # of a part; their borders may share one
        self._open = OpenShards(self.shards, lanes + _SPARE, self._make_cache(), data.verify_hash)
        self._dataset = Parts(
            self.order, self._open, self._labels,
            [rank * self.rows + self.rows * i // parts for i in range(parts + 1)],
            transform=transform, tokenizer=tokenizer,
            caption=data.captions, exif=data.exif,
        )  # fmt: skip
        self._item = start_samples // batch_size * parts
        self._loader = make_loader(
            self._dataset,
            workers,
            batch_size=None,
            sampler=itertools.count(self._item),
            collate_fn=_identity,
            multiprocessing_context="fork" if workers else None,
            prefetch_factor=AHEAD if workers else None,
            timeout=LOOK_UP_SECONDS if workers else 0,
            generator=torch.Generator(),  # otherwise it would draw from the global random numbers
        )
        self._batches = None
        self._end_workers: Callable[[], object] | None = None

    def _make_cache(self) -> ShardCache | None:
        """The cache of remote shards, None if all are local."""
        self._remove_cache: Callable[[], object] | None = None
        remote = [shard for shard in self.shards if isinstance(shard.path, Remote)]
        if not remote:
            return None
        folder, limit = self.data.cache, int(self.data.cache_gib * GIB)
        largest = max(remote, key=lambda shard: shard.bytes)
        if largest.bytes > limit:
            raise UserError(
                f"{largest.path} has {largest.bytes / GIB:.2f} GiB, more than the cache of {limit / GIB:g} GiB.",
                "Raise data.cache_gib to several times that, as each lane reads a shard of its own.",
            )
        if not folder:
            folder, self._remove_cache = temporary_folder()
        return ShardCache(Path(folder), limit, self._fetch)

    @property
    def identity(self) -> dict[str, int | str]:
        """Everything that the samples and their order depend on; a run must be resumed with the same."""
        digest = hashlib.sha256()
        for shard, corpus in zip(self.shards, self.order.corpus.tolist(), strict=True):
            weight = self.order.weights[corpus]
            digest.update(f"{shard.name}\0{shard.samples}\0{shard.bytes}\0{corpus}\0{weight}\n".encode())
        order = self.order
        return {
            "corpus": digest.hexdigest()[:16],
            "batch_size": order.batch_size,
            "lanes": order.lanes,
            "window": order.window,
            "seed": order.seed,
            "caption": self.data.captions,
            **({"exif": True} if self.data.exif else {}),
            **({"filter": self.selection.identity} if self.selection else {}),
        }

    def start(self) -> None:
        """Start the workers now, not with the first batch: forking is safest before a GPU or network is in use."""
        if self._batches is None and not self._closed:
            with starting_workers():
                self._batches = iter(self._loader)
            self._end_workers = Finalize(self, end_workers, args=(self._batches,), exitpriority=10)

    def close(self) -> None:
        """End the workers and close the shards; dropping the stream does the same."""
        self._closed = True
        if self._end_workers:
            self._end_workers()
        self._open.close()
        if self._remove_cache:
            self._remove_cache()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Batch:
        return self.load()

    def load(self, while_waiting: Callable[[], object] = lambda: None) -> Batch:
        """The next batch; `while_waiting` is called about every half second until it is ready.

        An error, of `while_waiting` too, closes the stream; `samples_seen` then is the position before that batch.
        Raises StopIteration once it is closed.
        """
        if self._closed:
            raise StopIteration
        began, parts = time.perf_counter(), []
        try:
            self.start()
            for _ in range(self._parts):
                if not self._loader.num_workers:
                    fetches = self._dataset.fetch_ahead(self._item)
                    while wait(fetches, LOOK_UP_SECONDS).not_done:
                        while_waiting()
                part = next_item(self._batches, while_waiting)
                if isinstance(part, UserError):
                    raise part
                parts.append(part)
                self._item += 1
            failures = ((self._labels[number], reason) for part in parts for number, reason in part.failures)
            self.tally.add(self.rows, failures)
            if self._alone:
                self.judge(self.tally.read, self.tally.failed, lambda: [self.failures])
        except BaseException:
            self.close()
            raise
        self.samples_seen += self.order.batch_size
        ready = self._dataset.images[(self.samples_seen // self.order.batch_size - 1) % len(self._dataset.images)]
        images = empty_stack(ready[0], self.rows, self._pin).copy_(ready)
        tokens, slots, replaced = (torch.from_numpy(np.concatenate(arrays)) for arrays in list(zip(*parts))[:3])
        tokens = tokens.pin_memory() if self._pin else tokens
        self.wait_seconds += time.perf_counter() - began
        return Batch(images, tokens, slots, replaced, [key for part in parts for key in part.keys], self.samples_seen)

    def waiting_for(self) -> str:
        """Description of what `load` waits for: a worker and the shard that it reads; for another thread."""
        worker = self._item % self._parts
        pid, shard = self._dataset.reading[worker].tolist()
        reads = str(self.shards[shard].path) if shard >= 0 else "no shard at present"
        if not self._loader.num_workers:
            return f"reading {reads}"
        return f"waiting for data-worker-{worker} ({describe_process(pid)}), which reads {reads}"

    @property
    def failures(self) -> dict[str, Failure]:
        """This rank's unusable samples so far, by name of the shard, or by its path where names are not unique."""
        return self.tally.failures

    def judge(self, read: int, failed: int, of_ranks: Callable[[], Sequence[dict[str, Failure]]]) -> None:
        """Raise UserError if too many of so many samples of all ranks have failed; `of_ranks`: all `failures`."""
        if self.tally.too_many(read, failed):
            raise UserError(
                f"{failed} of {read} samples cannot be used ({failed / read:.1%}, allowed are {self.tally.share:.1%}); "
                f"the worst shards are {worst_places(of_ranks())[1]}.",
                "Repair these shards or leave them out, or allow a larger failure share.",
            )


def _identity(part: Part) -> Part:
    return part
