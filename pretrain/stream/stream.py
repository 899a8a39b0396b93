"""The stream of training batches: a pure function of the data, the seed and the position.

    stream = Stream(read_index("data/cc3m"), Settings(batch_size=1024, workers=4), transform, tokenizer)
    for batch in stream:  # endless: epochs roll on
        engine(batch.images, batch.tokens)

`order.py` defines the order of the samples. A rank owns a contiguous run of the lanes, which is a contiguous run of the
rows of every global batch, and its workers share out these rows. So the global batches are the same for every world
size that divides the lanes and for any number of workers, and the position is one integer, the samples seen.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from PIL import Image

from pretrain.stream.batches import Batches
from pretrain.stream.corpora import Corpus, labels_of, make_order, refuse_repeats, refuse_uneven_shares
from pretrain.stream.samples import Report, SampleMaker
from pretrain.stream.selection import select
from pretrain.stream.settings import Settings
from probemb.data.failures import Failure, Tally, worst_places
from probemb.data.remote.cache import GIB, ShardCache, TemporaryCache
from probemb.data.remote.sources import Remote
from probemb.data.shards.index import Shard
from probemb.errors import UserError

_log = logging.getLogger(__name__)


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
        shards: shards of one corpus, or a `Corpus` each for those to be mixed.
        transform: PIL image -> (3, H, W) uint8 or float32. It may draw from the global random numbers of torch, numpy
            and Python, which are seeded for every sample and restored afterwards.
        tokenizer: list of n captions -> (n, L) int64.
        rank, world_size: of this process; `world_size` divides the lanes.
        start_samples: position to start from, a multiple of the batch size.
        steps: number of batches after which to stop, None for no end.

    Attributes:
        selection: the samples that the filter keeps; None without one.
        order: the `Order`: steps in an epoch, what is dropped.
        samples_seen: the position after the last batch handed out, over all ranks.
        rows: rows of every global batch that this rank gets, b.
        wait_seconds: time spent inside `next` so far.

    Raises:
        UserError: on construction for settings that do not fit each other or the data; from `next` when too many
            samples cannot be used (with several ranks, whoever asks `judge` finds out), or a worker was killed.
    """

    def __init__(
        self,
        shards: Sequence[Shard] | Sequence[Corpus],
        settings: Settings,
        transform: Callable[[Image.Image], torch.Tensor],
        tokenizer: Callable[[list[str]], torch.Tensor],
        *,
        rank: int = 0,
        world_size: int = 1,
        start_samples: int = 0,
        steps: int | None = None,
    ):
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size}")
        corpora = list(shards) if shards and isinstance(shards[0], Corpus) else [Corpus(shards)]
        self.shards = [shard for corpus in corpora for shard in corpus.shards]
        self.settings = settings
        refuse_repeats(self.shards)
        self.selection = select([corpus.shards for corpus in corpora], settings.filter)
        self.order = make_order(corpora, settings, self.selection)
        refuse_uneven_shares(self.order.lanes, world_size)
        self.order.locate(start_samples)  # refuses a position inside a batch
        batch_size = settings.batch_size
        self.samples_seen, self.rows, self.wait_seconds = start_samples, batch_size // world_size, 0.0
        self._end = None if steps is None else start_samples + steps * batch_size
        self._labels = labels_of(self.shards)
        self._alone = world_size == 1
        self.tally = Tally(settings.failure_share, min(settings.failure_minimum, self.order.steps * batch_size))
        self._noticed: set[str] = set()
        if settings.verify_hash and rank == 0 and (unknown := sum(shard.sha256 is None for shard in self.shards)):
            _log.warning(
                "data: %d of %d shards have no SHA-256 in their index.json and are not compared with it "
                "(`python -m tools.shards index` writes it)",
                unknown,
                len(self.shards),
            )
        maker_of = partial(
            SampleMaker, self.order, self.shards, self._labels,
            transform=transform, tokenizer=tokenizer, settings=settings, cache=self._make_cache(),
        )  # fmt: skip
        self._batches = Batches(maker_of, rank * self.rows, (rank + 1) * self.rows, start_samples, settings)
        self._closed = False

    def _make_cache(self) -> ShardCache | None:
        """The cache of remote shards, None if all are local."""
        self._temporary_cache: TemporaryCache | None = None
        remote = [shard for shard in self.shards if isinstance(shard.place, Remote)]
        if not remote:
            return None
        settings = self.settings
        if settings.cache:
            folder = Path(settings.cache)
        else:
            self._temporary_cache = TemporaryCache()
            folder = self._temporary_cache.folder
        cache = ShardCache(folder, int(settings.cache_gib * GIB), settings.fetch)
        largest = max(remote, key=lambda shard: shard.bytes)
        if largest.bytes > cache.limit:
            raise UserError(
                f"{largest.path} has {largest.bytes / GIB:.2f} GiB, more than the cache of {settings.cache_gib:g} GiB.",
                "Raise data.cache_gib to several times that, as each lane reads a shard of its own.",
            )
        return cache

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self.order.locate(self.samples_seen)[0]

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
            "caption": self.settings.caption,
            # Runs before there was a choice have no such keys.
            **({"exif": True} if self.settings.exif else {}),
            **({"filter": self.selection.identity} if self.selection else {}),
        }

    def start(self) -> None:
        """Start the workers now, not with the first batch: forking is safest before a GPU or network is in use."""
        if not self._closed:
            self._batches.start()

    def close(self) -> None:
        """End the workers and close the shards; dropping the stream does the same."""
        self._closed = True
        self._batches.close()
        if self._temporary_cache is not None:
            self._temporary_cache.close()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Batch:
        return self.load()

    def load(self, while_waiting: Callable[[], None] | None = None) -> Batch:
        """The next batch; `while_waiting` is called about every half second until it is ready.

        An error, of `while_waiting` too, closes the stream; `samples_seen` then is the position before that batch.
        Raises StopIteration after the last batch, and what `Team.collect` and the reader raise.
        """
        if self._closed or self.samples_seen == self._end:
            self.close()
            raise StopIteration
        began = time.perf_counter()
        try:
            self.start()
            rows, reports = self._batches.make(self.samples_seen, while_waiting)
            self._count(reports)
        except BaseException:
            self.close()
            raise
        self.samples_seen += self.order.batch_size
        self.wait_seconds += time.perf_counter() - began
        keys = [key for report in reports for key in report.keys]
        return Batch(rows.images, rows.tokens, rows.slots, rows.replaced, keys, self.samples_seen)

    def waiting_for(self) -> str:
        """Description of what `load` waits for: workers and the shards they read; for another thread."""
        return self._batches.waiting_for()

    @property
    def failures(self) -> dict[str, Failure]:
        """By label of the shard (see `labels_of`), what this rank could not use since the process started."""
        return self.tally.failures

    def judge(self, read: int, failed: int, of_ranks: Callable[[], Sequence[dict[str, Failure]]]) -> None:
        """Raise UserError if too many of so many samples of all ranks have failed; `of_ranks`: all `failures`."""
        if self.tally.too_many(read, failed):
            raise UserError(
                f"{failed} of {read} samples cannot be used ({failed / read:.1%}, allowed are {self.tally.share:.1%}); "
                f"the worst shards are {worst_places(of_ranks())[1]}.",
                "Repair these shards or leave them out, or allow a larger failure share.",
            )

    def _count(self, reports: list[Report]) -> None:
        for notice in (notice for report in reports for notice in report.notices):
            if notice not in self._noticed:  # by another worker
                self._noticed.add(notice)
                _log.warning("data: %s", notice)
        failures = ((self._labels[number], reason) for report in reports for number, reason in report.failures)
        self.tally.add(self.rows, failures)
        if self._alone:
            self.judge(self.tally.read, self.tally.failed, lambda: [self.failures])
