"""Read many shards in batches, decoded and tokenised in worker processes.

One loader serves all shards, so workers keep decoding while a shard is being written. Batches come in order and never
mix shards, so an embedding does not depend on where a run was interrupted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from probemb.data.failures import BadSample, BadShard
from probemb.data.images import decode_image
from probemb.data.shards.index import Shard, file_sha256
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
from probemb.reports.text import web_link
from tools.embed.shard_files import ShardFiles

MAX_CAPTIONS = 1_000  # of a sample: a file of 1 MiB could have 500,000, which would be embedded at once

if TYPE_CHECKING:
    import torch

    from probemb.data.remote.sources import Remote


@dataclass
class ShardTask:
    """A shard to embed and its results so far.

    Attributes:
        shard: the tar; name: of its partitions.
        kinds: those of KINDS that are missing.
        damage: why it cannot be used, "" if it can.
        file: the local file; version: of a remote shard, as its server stated when it was fetched.
        times: size, times of modification and of change of the file, from before it was read.
        sha256: its hash, computed while it is embedded; None if it could not be opened.
        spans: its samples; skipped: number of file groups without an image.
        images: rows of `spans` whose image was embedded.
        failures: (key, reason) of samples that were left out.
        captions: of each row of `spans`; None for an unreadable sample.
        urls: by row, where an image came from, as far as its sample says so.
        tokens: one tensor (n, L) for each batch.
    """

    shard: Shard
    name: str
    kinds: tuple[str, ...]
    damage: str = ""
    replaced: bool = False  # while it was read: nothing of it is written
    file: Path | None = None
    version: str | None = None
    times: tuple[int, int, int] | None = None
    sha256: Future[str] | None = None
    spans: list[SampleSpan] = field(default_factory=list)
    skipped: int = 0
    images: list[int] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)
    captions: list[list[str] | None] = field(default_factory=list)
    urls: dict[int, str] = field(default_factory=dict)
    tokens: list[torch.Tensor] = field(default_factory=list)

    @property
    def path(self) -> Path | Remote:
        return self.shard.path


class ReadRequest(NamedTuple):
    """One sample to read; `span` is None in the message that ends a shard."""

    number: int
    row: int
    path: str
    span: SampleSpan | None
    kinds: tuple[str, ...]


class Batch(NamedTuple):
    """Samples of shard `number`.

    Attributes:
        rows: of the images in `pixels` (B, 3, H, W).
        pixels, tokens: None if there are none; tokens (n, L) of all captions of the batch.
        captions: by row; None for an unreadable sample.
        urls: by row, of samples that state one.
        failures: (row, reason).
        last: the shard ends here.
    """

    number: int
    rows: list[int]
    pixels: torch.Tensor | None
    tokens: torch.Tensor | None
    captions: dict[int, list[str] | None]
    urls: dict[int, str]
    failures: list[tuple[int, str]]
    last: bool


class _Samples:
    """Map-style data set whose keys are `ReadRequest`s."""

    def __init__(self, transform: Callable, tokenizer: Callable):
        self.transform, self.tokenizer = transform, tokenizer
        self._path, self._file = "", None

    def __getitem__(self, job: ReadRequest):
        """(job, pixels, tokens, captions, URL, reason of a failure); each of the middle four may be None."""
        if job.span is None:
            return job, None, None, None, None, ""
        try:
            wanted = job.span if "image" in job.kinds else _without_image(job.span)
            if job.path != self._path:
                self._file, self._path = open(job.path, "rb", buffering=0), job.path  # noqa: SIM115 - one at a time
            parts = read_sample(self._file.fileno(), wanted)
            if "image" not in job.kinds:
                parts["jpg"] = b"-"  # parse_sample requires one and does not read it
            sample = parse_sample(parts, job.span.key, need_caption=None)
        except OSError as error:
            return job, None, None, None, None, f"cannot be read ({error.strerror})"
        except BadSample as error:
            return job, None, None, None, None, str(error)
        if len(sample.captions or ()) > MAX_CAPTIONS:
            why = f"it has {len(sample.captions):,} captions, more than {MAX_CAPTIONS:,}"
            return job, None, None, None, None, why
        pixels, tokens, why = None, None, ""
        if "image" in job.kinds:
            try:
                pixels = self.transform(decode_image(sample.image, exif=True))
            except BadSample as error:
                why = str(error)
            except Exception as error:  # one image must not end a run
                why = f"cannot be transformed ({type(error).__name__})"
        if "text" in job.kinds and sample.captions:
            try:
                tokens = self.tokenizer(sample.captions).int()
            except Exception as error:
                return job, None, None, None, None, f"its captions cannot be tokenised ({type(error).__name__})"
        return job, pixels, tokens, sample.captions, web_link(sample.meta.get("url")), why


def list_images(path: Path) -> tuple[list[SampleSpan], int]:
    """Samples of a tar that have an image, and the number of other file groups. Raises BadShard."""
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

    from probemb.data.pixels import stack

    if not rows:
        return None
    good = [(job.row, pixels) for job, pixels, *_ in rows if pixels is not None]
    tokens = [tokens for _, _, tokens, *_ in rows if tokens is not None]
    return Batch(
        rows[0][0].number,
        [row for row, _ in good],
        stack([pixels for _, pixels in good]) if good else None,
        torch.cat(tokens) if tokens else None,
        {job.row: captions for job, _, _, captions, *_ in rows if job.span},
        {job.row: url for job, *_, url, _ in rows if url},
        [(job.row, why) for job, *_, why in rows if why],
        rows[0][0].span is None,
    )


def read_batches(
    tasks: Sequence[ShardTask], transform: Callable, tokenizer: Callable, batch_size: int, workers: int, limit: int
) -> Iterator[Batch | None]:
    """Batches of all shards in order, the last one of a shard with `last`; fills `spans` and `damage`.

    Yields None many times a second while it waits for a shard. `limit`: see `ShardFiles`.
    """
    import torch

    files, hashing = ShardFiles(tasks, limit), ThreadPoolExecutor(1, "hash-shard")

    def jobs() -> Iterator[list[ReadRequest]]:
        for number, task in enumerate(tasks):
            try:
                while not files.take(number):
                    yield []  # lets the batches of earlier shards through, which gives room back
                with suppress(OSError):  # list_images says why
                    status = task.file.stat()
                    task.times = status.st_size, status.st_mtime_ns, status.st_ctime_ns
                    task.sha256 = hashing.submit(file_sha256, task.file)
                task.spans, task.skipped = list_images(task.file)
                if len(task.spans) < task.shard.samples:
                    raise BadShard(f"holds {len(task.spans):,} samples, but its index says {task.shard.samples:,}")
            except BadShard as error:
                task.damage = str(error).removeprefix(f"{task.file}: ").removeprefix(f"{task.path}: ")
            except OSError as error:
                task.damage = f"cannot be read ({error.strerror})"
            task.captions = [None] * len(task.spans)
            every = [ReadRequest(number, row, str(task.file), span, task.kinds) for row, span in enumerate(task.spans)]
            for start in range(0, len(every), batch_size):
                yield every[start : start + batch_size]
            yield [ReadRequest(number, -1, "", None, task.kinds)]

    loader = make_loader(
        _Samples(transform, tokenizer),
        workers,
        batch_sampler=jobs(),
        collate_fn=_collate,
        pin_memory=torch.cuda.is_available(),
    )
    with closing(files), hashing, closing(read(loader)) as batches:
        for batch in batches:
            yield batch
            if batch and batch.last:
                files.give_back(batch.number)


def default_workers(wanted: int | None, device: str, samples: int) -> int:
    """Reading processes of this rank: `wanted`, or what suits the machine and the number of samples."""
    from probemb.cli.device import loader_workers
    from probemb.cli.machine import refuse_crowd

    shared = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    refuse_crowd(wanted or 0, "--workers", shared)
    found = loader_workers(wanted, samples, device)
    return found if wanted is not None else -(-found // shared)
