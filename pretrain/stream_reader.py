"""Where the bytes of a training sample come from: one reader for each open shard, and a bounded number of open shards.

A reader knows where every sample of its shard lies after one walk over the tar headers, and then reads single samples.
Another source (a pipe, an object store) becomes a subclass of `ShardReader` and an entry of `READERS`.
"""

import errno
import re
from abc import ABC, abstractmethod
from collections import OrderedDict
from pathlib import Path

import numpy as np

from probemb.data.shards import BadSample, BadShard, Member, SampleSpan, list_samples, read_sample
from probemb.errors import UserError

_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class ShardReader(ABC):
    """An open shard. Samples are counted as `tools.index_shards` counts them."""

    @abstractmethod
    def __len__(self) -> int:
        """How many samples the shard really holds."""

    @abstractmethod
    def read(self, index: int) -> tuple[str, dict[str, bytes]]:
        """Key of a sample, and its bytes by extension. Raises BadSample."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the reader holds open."""


class LocalShard(ShardReader):
    """A tar in the file system, read at the places that its headers name.

    The places are kept in arrays: as Python objects they would take about a kilobyte a sample, times the samples of
    all shards that are open at the same time.
    """

    def __init__(self, path: str):
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115  stays open, see close()
        except OSError as error:
            raise _unreadable(path, error) from None
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
        return len(self._keys)

    def read(self, index: int) -> tuple[str, dict[str, bytes]]:
        key, extensions = self._keys[index], self._extensions[index]
        places = self._places[self._first[index] : self._first[index + 1]].tolist()
        parts = {ext: Member(ext, offset, size) for ext, (offset, size) in zip(extensions, places, strict=True)}
        try:
            return key, read_sample(self._file.fileno(), SampleSpan(key, parts))
        except OSError as error:
            raise _unreadable(key, error) from None

    def close(self) -> None:
        self._file.close()


READERS: dict[str, type[ShardReader]] = {"": LocalShard}  # by the scheme of the address; none is a path


def scheme_of(address: str) -> str:
    """ "https" of "https://host/a.tar", "pipe" of "pipe:cat a.tar", "" of a path."""
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):", address)  # a drive letter is one character
    return found[1].lower() if found and not Path(address).exists() else ""


def check_address(address: str) -> None:
    """Raises UserError for an address that no reader knows."""
    scheme = scheme_of(address)
    if scheme not in READERS:
        raise UserError(
            f"Shards cannot be read from {address}: '{scheme}:' is not a known source.",
            "Copy the shards to a local or mounted folder and name that.",
        )


class OpenShards:
    """The shards that are open now, at most `limit`, the longest unused one closed first.

    A shard that cannot be opened is remembered as such, so that its thousands of samples fail at no cost.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._open: OrderedDict[str, ShardReader | BadSample] = OrderedDict()

    def get(self, address: str) -> ShardReader:
        """The reader of a shard. Raises BadSample if the shard cannot be used."""
        reader = self._open.get(address)
        if reader is None:
            while len(self._open) >= self._limit:
                _close(self._open.popitem(last=False)[1])
            try:
                reader = READERS[scheme_of(address)](address)
            except BadSample as error:
                reader = error
            self._open[address] = reader
        self._open.move_to_end(address)
        if isinstance(reader, BadSample):
            raise BadShard(str(reader))
        return reader

    def close(self) -> None:
        """Close them all."""
        while self._open:
            _close(self._open.popitem()[1])


def _close(reader: ShardReader | BadSample) -> None:
    if isinstance(reader, ShardReader):
        reader.close()


def _unreadable(what: str, error: OSError) -> BadSample:
    if error.errno in _OUT_OF_RESOURCES:  # says nothing about the data
        raise UserError(
            f"{what} cannot be read: {error.strerror}.", "Raise the limit (ulimit -n), or use fewer lanes or workers."
        )
    return BadShard(f"{what}: cannot be read ({error.strerror})")
