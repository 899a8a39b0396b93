"""Readers of single samples in shards, for a bounded number of open shards.

A reader walks over the tar headers once, then reads single samples. A remote shard is first fetched whole into a cache,
if possible in the background.
"""

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

from pretrain.stream.content_check import ContentCheck, open_sha256
from probemb.data.failures import BadSample, BadShard
from probemb.data.remote.cache import CacheFull, ShardCache
from probemb.data.remote.sources import Remote
from probemb.data.shards.index import Shard
from probemb.data.shards.prefetch import Prefetcher
from probemb.data.shards.samples import SampleSpan, list_samples, read_sample
from probemb.data.shards.tar import Member
from probemb.errors import UserError

LOOK_UP_SECONDS = 0.5  # how often `while_waiting` is called, here and in the stream
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class TarReader:
    """An open shard, a tar file; samples are numbered as in `tools.shards`.

    Places are kept in arrays, as Python objects would take about a kilobyte per sample. `watch`: notice when the file
    is rewritten; not for files whose time others set, as that of cached shards. `sha256`: that of its index, if known.
    """

    def __init__(self, file: BinaryIO, path: str, watch: bool = False, sha256: str | None = None):
        self._file, self._path, self._sha256 = file, path, sha256
        self._state = _state(file) if watch else None
        try:
            samples, _ = list_samples(self._file)
        except OSError as error:
            self._file.close()
            raise _unreadable(path, error) from None
        except BadShard:
            self._file.close()
            raise
        kinds: dict[tuple[str, ...], tuple[str, ...]] = {}
        extensions = [kinds.setdefault(tuple(sample.parts), tuple(sample.parts)) for sample in samples]
        self._keys = [sample.key for sample in samples]
        self._extensions = extensions
        self._first = np.concatenate([[0], np.cumsum([len(kind) for kind in extensions], dtype=np.int64)])
        places = [(member.offset, member.size) for sample in samples for member in sample.parts.values()]
        self._places = np.array(places, np.int64).reshape(-1, 2)

    def __len__(self) -> int:
        """Number of samples found in the shard."""
        return len(self._keys)

    def read(self, index: int) -> tuple[str, dict[str, bytes]]:
        """Key of a sample, and its bytes by extension. Raises BadSample."""
        key, extensions = self._keys[index], self._extensions[index]
        places = self._places[self._first[index] : self._first[index + 1]].tolist()
        parts = {ext: Member(ext, offset, size) for ext, (offset, size) in zip(extensions, places, strict=True)}
        try:
            content = read_sample(self._file.fileno(), SampleSpan(key, parts))
        except OSError as error:
            raise _unreadable(key, error) from None
        if self._state is not None and (state := _state(self._file)) != self._state:
            if state[0] != self._state[0] or not self._is_unchanged():
                raise BadShard(f"{self._path}: was rewritten while it is being read")
            self._state = state
        return key, content

    def _is_unchanged(self) -> bool:
        """True if the content has the hash of the index or, if that has none, all samples are where they were."""
        if self._sha256:
            return open_sha256(self._file.fileno()) == self._sha256
        try:
            now = TarReader(os.fdopen(os.dup(self._file.fileno()), "rb", buffering=0), self._path)
        except BadSample:
            return False
        now.close()
        return (now._keys, now._extensions) == (self._keys, self._extensions) and np.array_equal(
            now._places, self._places
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class OpenShards:
    """At most `limit` open shards; the least recently used one is closed first.

    A shard that cannot be opened is remembered, so that its samples fail at no cost. `spare` of them stay open only
    while the cache has room for others.

    Attributes:
        while_waiting: called repeatedly while waiting for a remote shard; its exceptions end the wait.
        notices: what is odd about shards that can be used, for the caller to take.

    `check`: compare the content of every shard with its index, see `ContentCheck`.
    """

    def __init__(self, limit: int, spare: int = 0, cache: ShardCache | None = None, check: bool = False):
        self._limit, self._spare, self._cache = limit, spare, cache
        self._open: OrderedDict[Path | Remote, TarReader | BadSample] = OrderedDict()
        self._prefetcher = Prefetcher(cache) if cache else None
        self._check = ContentCheck() if check else None
        self._told: set[Path | Remote] = set()
        self.while_waiting: Callable[[], None] | None = None
        self.notices: list[str] = []

    def get(self, shard: Shard) -> TarReader:
        """The reader of a shard.

        Raises BadSample if the shard cannot be used; UserError if any has other content than its index says.
        """
        if self._check:
            self._check.raise_difference()
        reader = self._open.get(shard.path)
        if reader is None:
            while len(self._open) >= self._limit:
                _close(self._open.popitem(last=False)[1])
            try:
                reader = self._read(shard)
            except BadSample as error:
                reader = error
            self._open[shard.path] = reader
        self._open.move_to_end(shard.path)
        if isinstance(reader, BadSample):
            raise BadShard(str(reader))
        return reader

    def _read(self, shard: Shard) -> TarReader:
        file = self._open_file(shard)
        size = os.fstat(file.fileno()).st_size
        # First, as it says more of a damaged tar.
        reader = TarReader(file, str(shard.path), isinstance(shard.path, Path), shard.sha256)
        if size != shard.bytes:
            file.close()
            raise BadShard(f"{shard.path}: has {size:,} bytes, but its index says {shard.bytes:,}")
        if self._check:
            self._check.request(shard, file)
        if len(reader) > shard.samples and shard.path not in self._told:
            self._told.add(shard.path)
            self.notices.append(
                f"{shard.path}: holds {len(reader):,} samples, but its index says {shard.samples:,}; the others are "
                "not used. Bring the index up to date with `python -m tools.shards index`."
            )
        return reader

    def prepare(self, shards: Iterable[Shard]) -> None:
        """Fetch the remote shards that are not open, in this order and in the background."""
        if self._prefetcher:
            for shard in shards:
                if isinstance(shard.path, Remote) and shard.path not in self._open:
                    self._prefetcher.request(shard)

    def _open_file(self, shard: Shard) -> BinaryIO:
        if isinstance(shard.path, Path):
            try:
                return open(shard.path, "rb", buffering=0)
            except OSError as error:
                raise _unreadable(str(shard.path), error) from None
        while True:
            try:
                return _in_thread(partial(self._fetch, shard), self.while_waiting)
            except CacheFull:
                if len(self._open) < self._limit - self._spare:
                    raise
                _close(self._open.popitem(last=False)[1])

    def _fetch(self, shard: Shard) -> BinaryIO:
        self._prefetcher.wait(shard)
        return self._cache.open(shard.path, shard.bytes)

    def close(self) -> None:
        """Close all shards."""
        if self._check:
            self._check.close()
        if self._prefetcher:
            self._prefetcher.close()
        while self._open:
            _close(self._open.popitem()[1])


def _in_thread(work: Callable[[], BinaryIO], while_waiting: Callable[[], None] | None) -> BinaryIO:
    """The result of `work`, run in a thread if `while_waiting` must be called meanwhile.

    A silent server or a locked file may block for minutes. An abandoned thread ends with the program.
    """
    if while_waiting is None:
        return work()
    done = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True, name="open-shard").start()
    while not wait([done], LOOK_UP_SECONDS).done:
        while_waiting()
    return done.result()


def _state(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def _close(reader: TarReader | BadSample) -> None:
    if isinstance(reader, TarReader):
        reader.close()


def _unreadable(what: str, error: OSError) -> BadSample:
    if error.errno in _OUT_OF_RESOURCES:  # not a fault of the data
        raise UserError(
            f"{what} cannot be read: {error.strerror}.", "Raise the limit (ulimit -n), or use fewer lanes or workers."
        )
    return BadShard(f"{what}: cannot be read ({error.strerror})")
