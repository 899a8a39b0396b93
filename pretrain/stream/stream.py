"""The stream of training batches: a pure function of the data, the seed and the position.

    stream = Stream([read_index("data/cc3m")], Data(workers=4), transform, tokenizer, batch_size=1024)
    for batch in stream:  # endless: epochs roll on
        engine(batch.images, batch.tokens)

`order.py` defines the order of the samples. A rank owns a contiguous run of the rows of every global batch, which its
workers share out. So the global batches are the same for every world size that divides them and for any number of
workers, and the position is one integer, the samples seen.
"""

import hashlib
import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from itertools import chain, count, islice
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from pretrain.config import Data
from pretrain.stream.filter import Selection
from pretrain.stream.order import Order
from pretrain.stream.samples import Samples, printable
from probemb.data.failures import BadSample, Failure, Tally, worst_places
from probemb.data.images import empty_stack
from probemb.data.randomness import isolated_randomness, seed_all
from probemb.data.remote import DEFAULT_POLICY, FetchPolicy, Remote, ShardCache
from probemb.data.shards.index import Shard
from probemb.data.workers import LOOK_UP_SECONDS, make_loader, name_workers, next_batch, start_workers
from probemb.errors import UserError

JUDGED_FROM = 1000  # samples of all ranks, or a whole epoch, from which on data.failure_share counts
AHEAD = 2  # batches that workers prepare
_SPARE = 16  # shards that stay open beside those of the lanes
_SEARCH_LIMIT = 20_000  # samples tried in place of a bad one


class Part(NamedTuple):
    """A worker's rows of a batch as in `Batch`, but for the images, which lie in memory that it shares."""

    tokens: np.ndarray
    keys: list[str]
    failures: list[tuple[str, str]]  # label of the shard, and reason, for every slot whose own sample cannot be used


class Parts(Dataset):
    """One rank's rows of all global batches: item n is part n % parts of batch n // parts, so that each of as many
    workers reads its own lanes, in the order of their steps. `rows`: each part's first row, and the end of the last.

    Attributes:
        images: of batch n in images[n % len(images)], (b, 3, H, W); workers are at most AHEAD batches ahead.
        reading: for each worker the number of the shard that it reads, -1 for none; shared by processes.
    """

    def __init__(self, order: Order, samples: Samples, rows: Sequence[int]):
        self.order, self.samples, self.rows = order, samples, rows
        with isolated_randomness():
            seed_all(0)
            like = empty_stack(samples.transform(Image.new("RGB", (256, 256))), rows[-1] - rows[0])
        flat = [_shared_tensor(like.numel(), like.dtype) for _ in range(AHEAD + 1)]
        self.images = [memory.as_strided(like.shape, like.stride()) for memory in flat]
        self.reading = _shared_tensor(len(rows) - 1, torch.int64).fill_(-1).numpy()
        self._epoch = -1
        self._good: dict[int, tuple[int, int]] = {}  # step and row of each row's stand-in, once known

    def __getitem__(self, item: int) -> Part | UserError:
        batch, part = divmod(item, len(self.reading))
        self.fetch_ahead(item)
        self.samples.reading = self.reading[part : part + 1]
        try:
            with isolated_randomness():
                return self._part(batch, part)
        except UserError as error:  # PyTorch rebuilds exceptions from one argument
            return error
        finally:
            self.reading[part] = -1

    def fetch_ahead(self, item: int) -> list[Future]:
        """Fetch the remote shards of a part's lanes, then the lanes' next ones; those that it needs are returned."""
        batch, part = divmod(item, len(self.reading))
        (epoch, step), share = divmod(batch, self.order.steps), self.order.share
        lanes = range(self.rows[part] // share, (self.rows[part + 1] - 1) // share + 1)
        shards = zip(*(self.order.shards_ahead(epoch, lane, step * share) for lane in lanes))
        needed, _ = map(self.samples.prepare, shards)
        return needed

    def _part(self, batch: int, part: int) -> Part:
        epoch, step = divmod(batch, self.order.steps)
        if epoch != self._epoch:
            self._epoch = epoch
            self._good.clear()
        start, stop = self.rows[part : part + 2]
        images = self.images[batch % len(self.images)][start - self.rows[0] : stop - self.rows[0]]
        slots = self.order.rows(epoch, step, start, stop)
        tokens, keys, failures = [], [], []
        for i, slot in enumerate(zip(*(column.tolist() for column in slots), strict=True)):
            try:
                image, row_tokens, key = self.samples.read(*slot)
                self._good[start + i] = step, start + i
            except BadSample as error:
                failures.append((self.samples.labels[slot[0]], printable(str(error))))
                image, row_tokens, key = self._stand_in(epoch, step, start + i)
            images[i] = image
            tokens.append(row_tokens)
            keys.append(key)
        return Part(torch.stack(tokens).numpy(), keys, failures)

    def _stand_in(self, epoch: int, step: int, row: int) -> tuple[torch.Tensor, torch.Tensor, str]:
        """The last good sample of the same row in this epoch, the first good one if there is none before, or the next
        row's; read again, as after a restart. The lane's last one may be in this batch: it would be a false negative.
        """
        order = self.order
        known = [self._good[row]] if row in self._good else []
        same_row = ((other, row) for other in chain(range(step - 1, -1, -1), range(step + 1, order.steps)))
        next_rows = ((s, (row + d) % order.batch_size) for d in range(1, order.batch_size) for s in range(order.steps))
        last = None
        for other in islice(chain(known, same_row, next_rows), _SEARCH_LIMIT):
            slot = (int(column[0]) for column in order.rows(epoch, other[0], other[1], other[1] + 1))
            try:
                found, self._good[row] = self.samples.read(*slot), other
                return found
            except BadSample as error:
                last = error
        what = f"No sample can be used in place of a bad one (the last that was tried: {printable(str(last))})."
        raise UserError(what, "Check the shards: most of their samples are damaged or have no captions.")


def _shared_tensor(numbers: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros in memory that processes forked from now on share; not in /dev/shm, which is small in containers."""
    return torch.frombuffer(mmap.mmap(-1, numbers * dtype.itemsize), dtype=dtype)


class Batch(NamedTuple):
    """This rank's rows of one global batch, b = batch_size / world_size, on the CPU."""

    images: torch.Tensor  # (b, 3, H, W), in the type and memory order of the transform
    tokens: torch.Tensor  # (b, L) int64
    keys: list[str]  # "shard/key" of the sample that is shown, for logs


def make_order(
    corpora: Sequence[Sequence[Shard]], data: Data, batch_size: int, seed: int
) -> tuple[Order, Selection | None]:
    """The order of the samples that `data.filter` keeps, and which these are."""
    selection = Selection(corpora, data.filter) if data.filter.rules else None
    sizes = selection.sizes if selection else [shard.samples for shards in corpora for shard in shards]
    mixture = {"weights": data.weights or [1.0] * len(corpora), "places": selection.places if selection else None}
    mixture["corpus"] = [number for number, shards in enumerate(corpora) for _ in shards]
    return Order(sizes, batch_size=batch_size, lanes=data.lanes, window=data.window, seed=seed, **mixture), selection


class Stream(AbstractContextManager, Iterator):
    """Endless batches for one rank, as an iterator and a context manager.

    Args:
        transform: PIL image -> (3, H, W) uint8 or float32; draws from global random numbers, seeded for every sample.
        tokenizer: list of n captions -> (n, L) int64.
        batch_size: the global batch, over all ranks, whose number divides it.
        start_samples: position to start from, a multiple of the batch size.

    Attributes:
        samples_seen: the position after the last batch handed out, over all ranks.
        failures: this rank's unusable samples so far, by name of the shard, or by its path where names are not unique.

    Raises UserError: settings do not fit each other or the data; from `next`, too many samples cannot be used (with
    several ranks `check_failures` raises it), or a worker was killed.
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
        self.shards, self.data, self._pin = [*chain(*corpora)], data, pin_memory
        self.order, self.selection = make_order(corpora, data, batch_size, seed)
        self.samples_seen, self.rows, self.wait_seconds = start_samples, batch_size // world_size, 0.0
        self._alone, self._closed = world_size == 1, False
        self.tally = Tally(data.failure_share, min(JUDGED_FROM, self.order.steps * batch_size))
        self.failures: dict[str, Failure] = self.tally.failures

        workers = min(data.workers, self.rows)
        parts = max(1, workers)
        lanes = self.rows // parts // self.order.share + 2  # of a part, at most
        remote = any(isinstance(shard.path, Remote) for shard in self.shards)
        self._cache = ShardCache(data.cache, int(data.cache_gib * 2**30), fetch) if remote else None
        samples = Samples(self.shards, data, transform, tokenizer, seed, lanes + _SPARE, self._cache)
        if rank == 0 and isinstance(data.captions, dict):
            samples.check_names([np.flatnonzero(self.order.corpus == c).tolist() for c in range(len(corpora))])
        rows = [rank * self.rows + self.rows * i // parts for i in range(parts + 1)]
        self._parts, self._item = Parts(self.order, samples, rows), start_samples // batch_size * parts
        options = {"batch_size": None, "sampler": count(self._item), "collate_fn": lambda part: part}
        options["generator"] = torch.Generator()  # otherwise it would draw from the global random numbers
        if workers:
            options |= {"multiprocessing_context": "fork", "prefetch_factor": AHEAD, "timeout": LOOK_UP_SECONDS}
        self._loader = make_loader(self._parts, workers, **options)
        self._batches = None

    @property
    def identity(self) -> dict[str, int | str]:
        """Everything that the samples and their order depend on; a run must be resumed with the same."""
        digest, order = hashlib.sha256(), self.order
        for shard, corpus in zip(self.shards, order.corpus.tolist(), strict=True):
            weight = order.weights[corpus]
            digest.update(f"{shard.name}\0{shard.samples}\0{shard.bytes}\0{corpus}\0{weight}\n".encode())
        return {
            "corpus": digest.hexdigest()[:16],
            **{name: getattr(order, name) for name in ("batch_size", "lanes", "window", "seed")},
            "caption": str(self.data.captions),
            **({"exif": True} if self.data.exif else {}),
            **({"filter": self.selection.identity} if self.selection else {}),
        }

    def start(self) -> None:
        """Start the workers now, not with the first batch: forking is safest before a GPU or network is in use."""
        if self._batches is None and not self._closed:
            self._batches = start_workers(self._loader, self)

    def close(self) -> None:
        """End the workers and close the shards; dropping the stream does the same."""
        self._closed = True
        if self._batches is not None:
            self._batches.end()
        self._parts.samples.close()
        if self._cache:
            self._cache.close()

    def __exit__(self, *_) -> None:
        self.close()

    def __next__(self) -> Batch:
        return self.load()

    def load(self, while_waiting: Callable[[], object] = lambda: None) -> Batch:
        """The next batch; `while_waiting` is called about every half second until it is ready. An error, of that too,
        closes the stream before the batch. Raises StopIteration once it is closed."""
        if self._closed:
            raise StopIteration
        began, parts, images = time.perf_counter(), [], self._parts.images
        try:
            self.start()
            for _ in self._parts.reading:
                if not self._loader.num_workers:
                    fetches = self._parts.fetch_ahead(self._item)
                    while wait(fetches, LOOK_UP_SECONDS).not_done:
                        while_waiting()
                part = next_batch(self._batches, while_waiting)
                if isinstance(part, UserError):
                    raise part
                parts.append(part)
                self._item += 1
            self.tally.add(self.rows, [failure for part in parts for failure in part.failures])
            if self._alone:
                self.check_failures(self.tally.read, self.tally.failed, lambda: [self.failures])
        except BaseException:
            self.close()
            raise
        ready = images[self.samples_seen // self.order.batch_size % len(images)]
        self.samples_seen += self.order.batch_size
        pixels = empty_stack(ready[0], self.rows, self._pin).copy_(ready)
        tokens = torch.from_numpy(np.concatenate([part.tokens for part in parts]))
        tokens = tokens.pin_memory() if self._pin else tokens
        self.wait_seconds += time.perf_counter() - began
        return Batch(pixels, tokens, [key for part in parts for key in part.keys])

    def waiting_for(self) -> str:
        """The worker that `load` waits for and the shard that it reads; for another thread."""
        worker = self._item % len(self._parts.reading)
        shard = self._parts.reading[worker]
        reads = str(self.shards[shard].path) if shard >= 0 else "no shard at present"
        names = name_workers(self._batches)
        return f"waiting for {names[worker]}, which reads {reads}" if names else f"reading {reads}"

    def check_failures(self, read: int, failed: int, of_ranks: Callable[[], Sequence[dict[str, Failure]]]) -> None:
        """Raise UserError if too many of so many samples of all ranks have failed; `of_ranks`: all `failures`."""
        if self.tally.too_many(read, failed):
            what = (
                f"{failed} of {read} samples cannot be used ({failed / read:.1%}, allowed are {self.tally.share:.1%})"
            )
            what += f"; the worst shards are {worst_places(of_ranks())[1]}."
            raise UserError(what, "Repair these shards or leave them out, or raise data.failure_share.")
