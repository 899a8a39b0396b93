"""The stream of training batches: a pure function of the data, the seed and the position.

    stream = Stream([read_index("data/cc3m")], Data(workers=4), transform, tokenizer, batch_size=1024)
    for batch in stream:  # endless: epochs roll on
        engine(batch.images, batch.tokens)

`order.py` defines the order of the samples. A rank owns a contiguous run of the rows of every global batch, which its
workers share out. So the global batches are the same for every world size that divides them and for any number of
workers, and the position is one integer, the samples seen.

A sample is a function of the seed and the slot: the drawn caption and the transform's random numbers do not depend on
the rank, the worker, or earlier samples. Remote shards are fetched whole, if possible in the background.
"""

import errno
import hashlib
import mmap
import threading
import time
from bisect import bisect
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import accumulate, chain, count, islice
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from pretrain.config import Data
from pretrain.stream.filter import Selection
from pretrain.stream.order import Order, draw
from probemb.data.failures import BadSample, BadShard, Failure, Tally, escaped, worst_places
from probemb.data.images import decode_image, empty_stack
from probemb.data.randomness import isolated_randomness, seed_all
from probemb.data.remote import DEFAULT_POLICY, FetchPolicy, Remote, ShardCache, in_background
from probemb.data.shards.index import Shard
from probemb.data.shards.samples import (
    CAPTIONS,
    IMAGE_EXTENSIONS,
    TEXT_EXTENSIONS,
    Member,
    SampleSpan,
    caption_names,
    group_members,
    list_samples,
    parse_sample,
    read_sample,
    sort_groups,
    split_caption_name,
    walk_tar,
)
from probemb.data.workers import LOOK_UP_SECONDS, make_loader, name_workers, next_batch, start_workers
from probemb.errors import UserError, nearest

JUDGED_FROM = 1000  # samples of all ranks, or a whole epoch, from which on data.failure_share counts
AHEAD = 2  # batches that workers prepare
FETCHES = 4  # at a time, in the background
_CAPTION, _TRANSFORM, _NAME = 11, 12, 13  # uses of random numbers
_LOOKED_AT, _LOOKED_AT_SAMPLES = (32, 2), 100  # shards of a corpus, local or remote, and samples of each, for names
_LONGEST_REASON = 300
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SPARE = 16  # shards that stay open beside those of the lanes
_SEARCH_LIMIT = 20_000  # samples tried in place of a bad one


# -------------------------------------------------------------------------------------------------------------- samples
class OpenShard:
    """An open tar; places of `members` are kept in arrays, as Python objects would take about a kilobyte a sample.

    Raises BadShard, OSError; with `verify` UserError: another SHA-256 than its index says.
    """

    def __init__(self, file: BinaryIO, shard: Shard, verify: bool, members: Collection[str]):
        self._file = file
        samples, _ = list_samples(file)
        if (size := file.seek(0, 2)) != shard.bytes:  # after the walk, which says more of a damaged tar
            raise BadShard(f"{shard.path}: has {size:,} bytes, but its index says {shard.bytes:,}")
        file.seek(0)
        if verify and hashlib.file_digest(file, "sha256").hexdigest() != shard.sha256:
            what = f"{shard.path} has other content than when it was indexed (another SHA-256, or the index has none)."
            raise UserError(what, "Fetch it again, or bring the index up to date: `python -m tools.shards index`.")
        samples = [span._replace(parts={e: m for e, m in span.parts.items() if e in members}) for span in samples]
        kinds: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._keys = [sample.key for sample in samples]
        self._extensions = [kinds.setdefault(tuple(sample.parts), tuple(sample.parts)) for sample in samples]
        self._first = np.cumsum([0, *map(len, self._extensions)], dtype=np.int64)
        places = [(member.offset, member.size) for sample in samples for member in sample.parts.values()]
        self._places = np.array(places, np.int64).reshape(-1, 2)

    def read(self, index: int) -> tuple[str, dict[str, bytes]]:
        """Key of a sample, and its bytes by extension. Raises BadSample."""
        if index >= len(self._keys):
            raise BadSample(f"sample {index}: the shard holds only {len(self._keys)} samples")
        key, places = self._keys[index], self._places[self._first[index] : self._first[index + 1]].tolist()
        parts = {ext: Member(ext, *place) for ext, place in zip(self._extensions[index], places, strict=True)}
        try:
            return key, read_sample(self._file.fileno(), SampleSpan(key, parts))
        except OSError as error:
            raise _unreadable(key, error) from None


class Samples:
    """Samples by shard, index and pass over the corpus; of the open shards, `limit` at most, the least recently used
    one is closed first. `labels` are the shards' names for people, `reading` the number of the one that is read, (1,).
    """

    def __init__(
        self, shards: Sequence[Shard], data: Data, transform: Callable, tokenizer: Callable, seed: int, limit: int,
        cache: ShardCache | None,
    ):  # fmt: skip
        self.shards, self.data, self.transform, self.tokenizer, self.seed = shards, data, transform, tokenizer, seed
        counts = Counter(shard.name for shard in shards)
        self.labels = [shard.name if counts[shard.name] == 1 else str(shard.path) for shard in shards]
        self._limit, self._cache, self._crop = limit, cache, find_crop(transform)
        self._open: OrderedDict[int, OpenShard | str] = OrderedDict()
        self._fetches: dict[int, Future[BinaryIO]] = {}
        self.reading = np.array([-1])
        self.members = {*IMAGE_EXTENSIONS, *TEXT_EXTENSIONS}  # that are read
        if isinstance(data.captions, dict):
            self.members |= {split_caption_name(name)[0] for name in data.captions}
        self._turns = threading.Semaphore(FETCHES)

    def read(self, shard: int, index: int, visit: int) -> tuple[torch.Tensor, torch.Tensor, str]:
        """Image (3, H, W), tokens (L,), and "shard/key" for logs. Raises BadSample; UserError: another SHA-256."""
        self.reading[0] = shard
        key, parts = self._shard(shard).read(index)
        try:
            sample = parse_sample(parts, key, names=self.caption_order(shard, index, visit))
            seed = partial(seed_all, draw(self.seed, _TRANSFORM, shard, index, visit))
            draft = self._crop and partial(draft_size, self._crop, seed=seed)
            image = decode_image(sample.image, draft, exif=self.data.exif)
            which = draw(self.seed, _CAPTION, shard, index, visit) % len(sample.captions)
            caption = sample.captions[0 if self.data.captions == "first" else which]
            seed()
            name = printable(f"{self.labels[shard]}/{key}")
            return self.transform(image), torch.as_tensor(self.tokenizer([caption]))[0], name
        except BadSample as error:
            raise BadSample(f"{key}: {error}") from None
        except (UserError, MemoryError):
            raise
        except Exception as error:  # one bad image or caption must not stop a run
            raise BadSample(f"{key}: transform or tokenizer failed ({type(error).__name__}: {error})") from None

    def caption_order(self, *slot: int) -> Sequence[str]:
        """Names by which a sample's captions are looked for: one that is drawn, then all as they are listed."""
        if not isinstance(self.data.captions, dict):
            return CAPTIONS
        names, bounds = list(self.data.captions), list(accumulate(self.data.captions.values()))
        return [names[bisect(bounds[:-1], (draw(self.seed, _NAME, *slot) >> 11) / 2**53 * bounds[-1])], *names]

    def check_names(self, corpora: Sequence[Sequence[int]]) -> None:
        """Raise UserError for a name of `data.captions` by which no sample has captions, as far as is looked: at the
        first ones of shards from all over each corpus, given by its shards' numbers, until all names are found.
        """
        unknown, known, looked = [*self.data.captions], Counter(), 0
        for numbers in corpora:
            most = _LOOKED_AT[isinstance(self.shards[numbers[0]].path, Remote)]
            for names in chain.from_iterable(map(self._names, numbers[:: -(-len(numbers) // most)])):
                unknown, looked = [name for name in unknown if name not in names], looked + 1
                known.update(names)
                if not unknown:
                    return
        if looked:  # or training says why nothing can be read
            what = f"None of {looked:,} samples from all over the data has a caption by the name {unknown[0]}."
            listed = ", ".join(name for name, _ in known.most_common(20)) or "no texts"
            remedy = f"They have {printable(listed)}: name some of these in data.captions."
            raise UserError(f"{what}{nearest(unknown[0], known)}", remedy)

    def _names(self, number: int) -> Iterator[list[str]]:
        """Names of the captions of each of a shard's first samples that can be read."""
        with suppress(BadSample, OSError), self._file(number) as file:
            for key, parts in sort_groups(islice(group_members(walk_tar(file)), _LOOKED_AT_SAMPLES))[0]:
                texts = {ext: member for ext, member in parts.items() if ext not in IMAGE_EXTENSIONS}
                with suppress(BadSample):
                    yield caption_names(read_sample(file.fileno(), SampleSpan(key, texts)))

    def prepare(self, numbers: Iterable[int]) -> list[Future[BinaryIO]]:
        """Fetch the remote shards that are not open, in this order and in the background."""
        return [self._fetch(n) for n in numbers if n not in self._open and isinstance(self.shards[n].path, Remote)]

    def close(self) -> None:
        """Close all shards."""
        self._open.clear()

    def _shard(self, number: int) -> OpenShard:
        if number not in self._open:
            while len(self._open) >= self._limit:
                self._open.popitem(last=False)  # and no other reference keeps it open
            shard = self.shards[number]
            try:
                self._open[number] = OpenShard(self._file(number), shard, self.data.verify_hash, self.members)
            except BadSample as error:
                self._open[number] = str(error)  # so that its samples fail at no cost
            except OSError as error:
                self._open[number] = str(_unreadable(str(shard.path), error))
        self._open.move_to_end(number)
        if isinstance(opened := self._open[number], str):
            raise BadShard(opened)
        return opened

    def _file(self, number: int) -> BinaryIO:
        if isinstance(self.shards[number].path, Remote):
            self._fetch(number)
            return self._fetches.pop(number).result()
        return open(self.shards[number].path, "rb", buffering=0)

    def _fetch(self, number: int) -> Future[BinaryIO]:
        def work() -> BinaryIO:
            with self._turns:
                return self._cache.open(self.shards[number].path, self.shards[number].bytes)

        if number not in self._fetches:
            self._fetches[number] = in_background(work)
        return self._fetches[number]


def _unreadable(what: str, error: OSError) -> BadSample:
    if error.errno in _OUT_OF_RESOURCES:  # not a fault of the data
        remedy = "Free space for fetched shards (data.cache, TMPDIR), raise ulimit -n, or use fewer lanes or workers."
        raise UserError(f"{what} cannot be read: {error.strerror}.", remedy)
    return BadShard(f"{what}: cannot be read ({error.strerror})")


def find_crop(transform: Callable) -> Callable | None:
    """The random crop (torchvision's or `RandomCrop`) with which a transform starts; None if it starts otherwise."""
    first = next(iter(getattr(transform, "transforms", [transform])), None)
    return first if hasattr(first, "get_params") and len(getattr(first, "size", ())) == 2 else None


def draft_size(crop: Callable, width: int, height: int, seed: Callable[[], None]) -> tuple[int, int] | None:
    """Width and height, 1/8, 1/4 or 1/2 of its own, at which a JPEG is decoded for a crop, or None for all of it; after
    `seed` the crop is drawn as it will be, and both its sides keep as many pixels as its result has."""
    for factor in (8, 4, 2):
        if width < factor * crop.size[1] or height < factor * crop.size[0]:
            continue
        small = torch.empty(1, 1, 1).expand(1, -(-height // factor), -(-width // factor))  # no memory, only a size
        seed()
        _, _, crop_height, crop_width = crop.get_params(small, crop.scale, crop.ratio)
        if crop_height >= crop.size[0] and crop_width >= crop.size[1]:
            return width // factor, height // factor
    return None


def printable(text: str) -> str:
    """`escaped`, and not too long."""
    text = escaped(text)
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 1] + "…"


# -------------------------------------------------------------------------------------------------------------- batches
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
