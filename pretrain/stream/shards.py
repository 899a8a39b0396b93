"""Single samples of many shards, of which a bounded number is open.

A shard's headers are read once, then single samples. A remote shard is fetched whole into a cache, if possible in the
background.
"""

import errno
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import BinaryIO

import numpy as np

from probemb.data.failures import BadSample, BadShard
from probemb.data.remote.cache import ShardCache
from probemb.data.shards.index import Shard
from probemb.data.shards.samples import SampleSpan, list_samples, read_sample
from probemb.data.shards.tar import Member
from probemb.errors import UserError

FETCHES = 4  # at a time, in the background
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class OpenShard:
    """An open tar; samples are numbered as in `tools.shards`.

    Places are kept in arrays, as Python objects would take about a kilobyte a sample.
    """

    def __init__(self, file: BinaryIO):
        self._file = file
        samples, _ = list_samples(file)
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

    def close(self) -> None:
        self._file.close()


class OpenShards:
    """At most `limit` open shards; the least recently used one is closed first.

    A shard that cannot be opened is remembered, so that its samples fail at no cost. `verify`: compare each with the
    SHA-256 of its index when it is opened.
    """

    def __init__(self, shards: Sequence[Shard], limit: int, cache: ShardCache | None = None, verify: bool = False):
        self._shards, self._limit, self._cache, self._verify = shards, limit, cache, verify
        self._open: OrderedDict[int, OpenShard | str] = OrderedDict()
        self._fetches: dict[int, Future[BinaryIO]] = {}
        self._turns = threading.Semaphore(FETCHES)

    def get(self, number: int) -> OpenShard:
        """Raises BadSample: the shard cannot be used; UserError: it has other content than its index says."""
        if number not in self._open:
            while len(self._open) >= self._limit:
                _, oldest = self._open.popitem(last=False)
                if isinstance(oldest, OpenShard):
                    oldest.close()
            try:
                self._open[number] = self._read(number)
            except BadSample as error:
                self._open[number] = str(error)
        self._open.move_to_end(number)
        if isinstance(opened := self._open[number], str):
            raise BadShard(opened)
        return opened

    def prepare(self, numbers: Iterable[int]) -> list[Future[BinaryIO]]:
        """Fetch the remote shards that are not open, in this order and in the background."""
        return [self._fetch(n) for n in numbers if n not in self._open and not isinstance(self._shards[n].path, Path)]

    def close(self) -> None:
        """Close all shards."""
        for opened in self._open.values():
            if isinstance(opened, OpenShard):
                opened.close()
        self._open.clear()

    def _read(self, number: int) -> OpenShard:
        shard = self._shards[number]
        try:
            if isinstance(shard.path, Path):
                file = open(shard.path, "rb", buffering=0)  # noqa: SIM115  stays open
            else:
                self._fetch(number)
                file = self._fetches.pop(number).result()
            try:
                opened = OpenShard(file)  # first, as it says more of a damaged tar
                if (size := file.seek(0, 2)) != shard.bytes:
                    raise BadShard(f"{shard.path}: has {size:,} bytes, but its index says {shard.bytes:,}")
                file.seek(0)
                if self._verify and hashlib.file_digest(file, "sha256").hexdigest() != shard.sha256:
                    raise UserError(
                        f"{shard.path} has other content than when it was indexed (another SHA-256).",
                        "Fetch it again, or bring the index up to date with `python -m tools.shards index`.",
                    )
            except BaseException:
                file.close()
                raise
            return opened
        except OSError as error:
            raise _unreadable(str(shard.path), error) from None

    def _fetch(self, number: int) -> Future[BinaryIO]:
        """In a daemon, so that a long fetch does not delay the end of the program."""
        if number not in self._fetches:
            done = self._fetches[number] = Future()

            def work(shard: Shard) -> None:
                with self._turns:
                    try:
                        done.set_result(self._cache.open(shard.path, shard.bytes))
                    except BaseException as error:
                        done.set_exception(error)

            threading.Thread(target=work, args=(self._shards[number],), daemon=True, name="fetch shard").start()
        return self._fetches[number]


def _unreadable(what: str, error: OSError) -> BadSample:
    if error.errno in _OUT_OF_RESOURCES:  # not a fault of the data
        raise UserError(
            f"{what} cannot be read: {error.strerror}.", "Raise the limit (ulimit -n), or use fewer lanes or workers."
        )
    return BadShard(f"{what}: cannot be read ({error.strerror})")
