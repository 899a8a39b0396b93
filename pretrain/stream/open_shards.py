"""Where the bytes of a training sample come from: one reader for each open shard, and a bounded number of open shards.

A reader knows where every sample of its shard lies after one walk over the tar headers, and then reads single samples.
A remote shard is fetched whole into a cache before, if possible in the background while the one before it is used.
"""

import errno
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

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
    """An open shard: a tar read at the places that its headers name. Samples are counted as `tools.index_shards` does.

    The places are kept in arrays: as Python objects they would take about a kilobyte a sample, times the samples of
    all shards that are open at the same time.
    """

    def __init__(self, file: BinaryIO, path: str):
        self._file = file
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
        """How many samples the shard really holds."""
        return len(self._keys)

    def read(self, index: int) -> tuple[str, dict[str, bytes]]:
        """Key of a sample, and its bytes by extension. Raises BadSample."""
        key, extensions = self._keys[index], self._extensions[index]
        places = self._places[self._first[index] : self._first[index + 1]].tolist()
        parts = {ext: Member(ext, offset, size) for ext, (offset, size) in zip(extensions, places, strict=True)}
        try:
            return key, read_sample(self._file.fileno(), SampleSpan(key, parts))
        except OSError as error:
            raise _unreadable(key, error) from None

    def close(self) -> None:
        """Give back what the reader holds open."""
        self._file.close()


class OpenShards:
    """The shards that are open now, at most `limit`, the longest unused one closed first.

    A shard that cannot be opened is remembered as such, so that its thousands of samples fail at no cost.
    `spare` of them are kept open only while there is room for others in the cache.

    Attributes:
        while_waiting: called again and again while a remote shard is waited for; what it raises ends the wait.
    """

    def __init__(self, limit: int, spare: int = 0, cache: ShardCache | None = None):
        self._limit, self._spare, self._cache = limit, spare, cache
        self._open: OrderedDict[Path | Remote, TarReader | BadSample] = OrderedDict()
        self._prefetcher = Prefetcher(cache) if cache else None
        self.while_waiting: Callable[[], None] | None = None

    def get(self, shard: Shard) -> TarReader:
        """The reader of a shard. Raises BadSample if the shard cannot be used."""
        reader = self._open.get(shard.path)
        if reader is None:
            while len(self._open) >= self._limit:
                _close(self._open.popitem(last=False)[1])
            try:
                reader = TarReader(self._open_file(shard), str(shard.path))
            except BadSample as error:
                reader = error
            self._open[shard.path] = reader
        self._open.move_to_end(shard.path)
        if isinstance(reader, BadSample):
            raise BadShard(str(reader))
        return reader

    def prepare(self, shards: Iterable[Shard]) -> None:
        """Fetch the remote ones among these that are not open, in this order and in the background."""
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
        """Close them all."""
        if self._prefetcher:
            self._prefetcher.close()
        while self._open:
            _close(self._open.popitem()[1])


def _in_thread(work: Callable[[], BinaryIO], while_waiting: Callable[[], None] | None) -> BinaryIO:
    """What `work` gives. A thread does it where something else is to be done meanwhile: a silent server, or another
    process that holds a lock, would keep this one for minutes. A thread that is given up ends with the program.
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


def _close(reader: TarReader | BadSample) -> None:
    if isinstance(reader, TarReader):
        reader.close()


def _unreadable(what: str, error: OSError) -> BadSample:
    if error.errno in _OUT_OF_RESOURCES:  # says nothing about the data
        raise UserError(
            f"{what} cannot be read: {error.strerror}.", "Raise the limit (ulimit -n), or use fewer lanes or workers."
        )
    return BadShard(f"{what}: cannot be read ({error.strerror})")
