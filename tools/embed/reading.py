"""The samples of many shards as batches that know where they belong: decoded and tokenised in worker processes.

One loader serves all shards, so that workers go on decoding while a shard is being written. Batches come in order and
never mix shards: what an image is embedded to does not depend on where a run was interrupted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from probemb.data.failures import BadSample, BadShard
from probemb.data.images import decode_image
from probemb.data.remote.cache import ShardCache, TemporaryCache
from probemb.data.remote.sources import Remote
from probemb.data.shards.index import Shard
from probemb.data.shards.prefetch import Prefetcher
from probemb.data.shards.samples import (
    IMAGE_EXTENSIONS,
    TEXT_EXTENSIONS,
    SampleSpan,
    group_members,
    parse_sample,
    read_sample,
)
from probemb.data.shards.tar import walk_tar
from probemb.data.workers import make_loader, read
from probemb.errors import UserError

if TYPE_CHECKING:
    from typing import BinaryIO

    import torch

AHEAD = 3  # remote shards that are fetched while one is read
MOMENT = 0.05  # seconds


@dataclass
class Work:
    """A shard to embed: which kinds of it are wanted, and what has come of it so far.

    Attributes:
        shard: the tar; name: of its partitions.
        kinds: of KINDS, those that are not there yet.
        damage: why it cannot be used, "" if it can.
        file: where it could be read; version: of a remote one, as its server stated when it was fetched.
        spans: its samples, once it was walked; skipped: groups of files that are none.
        images: rows of `spans` whose image was embedded.
        failures: (key, reason) of samples that were left out.
        captions: of each row of `spans`; None for one that cannot be read.
        tokens: one tensor (n, L) for each batch.
    """

    shard: Shard
    name: str
    kinds: tuple[str, ...]
    damage: str = ""
    file: Path | None = None
    version: str | None = None
    spans: list[SampleSpan] = field(default_factory=list)
    skipped: int = 0
    images: list[int] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)
    captions: list[list[str] | None] = field(default_factory=list)
    tokens: list[torch.Tensor] = field(default_factory=list)

    @property
    def path(self) -> Path | Remote:
        """Where the shard lies."""
        return self.shard.path


class Job(NamedTuple):
    """One sample to read; `span` is None in the message that ends a shard."""

    number: int
    row: int
    path: str
    span: SampleSpan | None
    kinds: tuple[str, ...]


class Batch(NamedTuple):
    """Samples of shard `number`.

    Attributes:
        rows: of those whose image is in `pixels` (B, 3, H, W); None if none is.
        tokens: (n, L) of all captions of the batch, or None.
        captions: row -> its captions, or None for a sample that cannot be read.
        failures: (row, reason).
        last: whether the shard is read to its end.
    """

    number: int
    rows: list[int]
    pixels: torch.Tensor | None
    tokens: torch.Tensor | None
    captions: dict[int, list[str] | None]
    failures: list[tuple[int, str]]
    last: bool


class _Samples:
    """Map-style data set for a DataLoader whose keys are `Job`s."""

    def __init__(self, transform: Callable, tokenizer: Callable):
        self.transform, self.tokenizer = transform, tokenizer
        self._path, self._file = "", None

    def __getitem__(self, job: Job):
        """job, pixels or None, tokens or None, captions or None, why there are none."""
        if job.span is None:
            return job, None, None, None, ""
        try:
            wanted = job.span if "image" in job.kinds else _without_image(job.span)
            if job.path != self._path:
                self._file, self._path = open(job.path, "rb", buffering=0), job.path  # noqa: SIM115 - one at a time
            parts = read_sample(self._file.fileno(), wanted)
            if "image" not in job.kinds:
                parts["jpg"] = b"-"  # parse_sample wants one, and does not look at it
            sample = parse_sample(parts, job.span.key, need_caption=None)
        except OSError as error:
            return job, None, None, None, f"cannot be read ({error.strerror})"
        except BadSample as error:
            return job, None, None, None, str(error)
        pixels, tokens, why = None, None, ""
        if "image" in job.kinds:
            try:
                pixels = self.transform(decode_image(sample.image))
            except BadSample as error:
                why = str(error)
            except Exception as error:  # one image must not end a run
                why = f"cannot be transformed ({type(error).__name__})"
        if "text" in job.kinds and sample.captions:
            try:
                tokens = self.tokenizer(sample.captions).int()
            except Exception as error:
                return job, None, None, None, f"its captions cannot be tokenised ({type(error).__name__})"
        return job, pixels, tokens, sample.captions, why


def list_images(path: Path) -> tuple[list[SampleSpan], int]:
    """Samples of a tar that have an image, with or without captions, and the number of groups that are none.

    Raises BadShard.
    """
    samples, others = [], 0
    for key, parts in group_members(walk_tar(path)):
        image = next((ext for ext in IMAGE_EXTENSIONS if ext in parts), None)
        if image is None:
            others += 1
        else:
            samples.append(SampleSpan(key, {ext: parts[ext] for ext in (image, *TEXT_EXTENSIONS) if ext in parts}))
    return samples, others


def _without_image(span: SampleSpan) -> SampleSpan:
    return SampleSpan(span.key, {ext: part for ext, part in span.parts.items() if ext not in IMAGE_EXTENSIONS})


def _collate(rows: list) -> Batch | None:
    import torch

    if not rows:
        return None

    good = [(job.row, pixels) for job, pixels, *_ in rows if pixels is not None]
    tokens = [tokens for _, _, tokens, _, _ in rows if tokens is not None]
    return Batch(
        rows[0][0].number,
        [row for row, _ in good],
        torch.stack([pixels for _, pixels in good]) if good else None,
        torch.cat(tokens) if tokens else None,
        {job.row: captions for job, _, _, captions, _ in rows if job.span},
        [(job.row, why) for job, _, _, _, why in rows if why],
        rows[0][0].span is None,
    )


class Shelf:
    """Shards as files: what lies elsewhere is fetched, a few of them ahead, and removed once it has been read.

    Args:
        limit: bytes that fetched shards may take together; at least those of the largest.
    """

    def __init__(self, works: Sequence[Work], limit: int):
        self._works, self._limit = works, limit
        self._temporary_cache = TemporaryCache() if any(isinstance(work.path, Remote) for work in works) else None
        self._cache = self._temporary_cache and ShardCache(self._temporary.folder, limit, option="--cache-gib")
        self._prefetcher = self._temporary_cache and Prefetcher(self._cache)
        self._requested = 0  # shards before this one have been asked for
        self._room: dict[int, int] = {}  # bytes of those that are here or on their way
        self._open: dict[int, BinaryIO] = {}

    def take(self, number: int) -> bool:
        """Say in a work where its file is; False if that is not known yet, after a moment.

        It may then be that a shard must be given back first. Raises BadShard: it cannot be fetched, and UserError.
        """
        work = self._works[number]
        if isinstance(work.path, Path):
            work.file = work.path
            return True
        self._request(number + 1 + AHEAD)
        if number >= self._requested:
            return False
        try:
            file = self._prefetcher.take(work.shard, MOMENT)
        except OSError as error:
            raise UserError(
                f"A fetched shard cannot be kept in {self._temporary_cache.folder}: {error.strerror}.",
                "Free some space, or name another folder with TMPDIR.",
            ) from error
        if file is None:
            return False
        self._open[number] = file
        work.file, work.version = self._cache.path(work.path, work.shard.bytes), self._cache.versions.get(work.path)
        return True

    def _request(self, end: int) -> None:
        """Ask for the shards before `end`, in their order, as far as there is room for them."""
        for number in range(self._requested, min(end, len(self._works))):
            shard = self._works[number].shard
            if isinstance(shard.path, Remote):
                if sum(self._room.values()) + shard.bytes > self._limit:
                    return
                self._room[number] = shard.bytes
                self._prefetcher.request(shard, keep=True)
            self._requested = number + 1

    def give_back(self, number: int) -> None:
        """Its batches have all come."""
        if number in self._open:
            self._open.pop(number).close()
            self._cache.remove(self._works[number].path, self._works[number].shard.bytes)
        self._room.pop(number, None)

    def close(self) -> None:
        """Remove what is left."""
        for number in list(self._open):
            self.give_back(number)
        if self._temporary_cache:
            self._prefetcher.close()
            self._temporary_cache.close()


def read_batches(
    works: Sequence[Work], transform: Callable, tokenizer: Callable, batch_size: int, workers: int, limit: int
) -> Iterator[Batch | None]:
    """Batches of all shards in their order, each shard ended by one with `last`; fills `spans` and `damage`.

    None comes instead, many times a second, while a shard is waited for. `limit`: see `Shelf`.
    """
    import torch

    shelf = Shelf(works, limit)

    def jobs() -> Iterator[list[Job]]:
        for number, work in enumerate(works):
            try:
                while not shelf.take(number):
                    yield []  # what is being read comes meanwhile, and is given back
                work.spans, work.skipped = list_images(work.file)
                if len(work.spans) < work.shard.samples:
                    raise BadShard(f"holds {len(work.spans):,} samples, but its index says {work.shard.samples:,}")
            except BadShard as error:
                work.damage = str(error).removeprefix(f"{work.file}: ").removeprefix(f"{work.path}: ")
            except OSError as error:
                work.damage = f"cannot be read ({error.strerror})"
            work.captions = [None] * len(work.spans)
            every = [Job(number, row, str(work.file), span, work.kinds) for row, span in enumerate(work.spans)]
            for start in range(0, len(every), batch_size):
                yield every[start : start + batch_size]
            yield [Job(number, -1, "", None, work.kinds)]

    loader = make_loader(
        _Samples(transform, tokenizer),
        workers,
        batch_sampler=jobs(),
        collate_fn=_collate,
        pin_memory=torch.cuda.is_available(),
    )
    with closing(shelf), closing(read(loader)) as batches:
        for batch in batches:
            yield batch
            if batch and batch.last:
                shelf.give_back(batch.number)


def default_workers(wanted: int | None, device: str, samples: int) -> int:
    """Processes that read: `wanted`, or none for a few samples, else at most 8 and half of the cores beside a CPU."""
    from probemb.cli.device import loader_workers

    shared = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    found = loader_workers(wanted, samples, device)
    return found if wanted is not None else -(-found // shared)
