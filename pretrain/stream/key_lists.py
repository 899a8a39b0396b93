"""Lists of samples, for `data.filter.keep` and `drop`: files with one key a line, kept as hashes.

    KEY                    of any shard
    SHARD.tar/KEY          of the shards of that name
    FOLDER/SHARD.tar/KEY   of the shards whose path or address ends so; the whole of it names one shard

Keys are numbered anew in each corpus, so a line that is true of samples of several corpora is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from probemb.data.shards.columns import key_hash
from probemb.data.shards.index import Shard
from probemb.errors import UserError

FORMS = "KEY, SHARD.tar/KEY or FOLDER/SHARD.tar/KEY"
_MAX_BYTES = 8 << 30
_LINES = 1 << 14  # lines hashed at a time, so that the text of a list is never held


class KeyList:
    """The samples that a file lists: 8 bytes a key.

    Args:
        path: the file.
        shards: of all corpora, which its lines may name.

    Attributes:
        path: the file.
        digest: of the keys, and of the shards that they are looked for in.

    Raises:
        UserError: it cannot be read, or holds no key.
    """

    def __init__(self, path: str, shards: Sequence[Shard]):
        self.path = path
        hashes, groups, self._named = [], [], _Named(shards)
        for piece in self._pieces():
            hashes.append(key_hash(piece.keys))
            groups.append(np.array(piece.groups, np.int32))
        if not hashes:
            raise UserError(f"{path} holds no keys.", f"Write one key a line: {FORMS}.")
        hashes, groups = np.concatenate(hashes), np.concatenate(groups)
        self._hashes, groups = _sorted(hashes, groups)
        self._bounds = np.searchsorted(groups, np.arange(len(self._named.groups) + 1)).tolist()
        digest = hashlib.sha256(self._hashes)
        self._of_shard: dict[int, list[int]] = {}
        for numbers, group in self._named.groups.items():
            digest.update(np.array([len(numbers), *numbers, self._bounds[group]], np.int64))
            for number in numbers:
                self._of_shard.setdefault(number, []).append(group)
        self.digest = digest.hexdigest()
        self._named.forget()

    def __len__(self) -> int:
        return len(self._hashes)

    def listed(
        self, first: int, samples: Sequence[int], keys: np.ndarray, see: Callable[[np.ndarray], None] | None = None
    ) -> np.ndarray:
        """Mask of the listed samples of shards first, first + 1, … of so many samples, (n,) bool.

        Args:
            keys: hashes of the samples' keys, (n,).
            see: is given the places in the list of the keys that were found.
        """
        found = self._search(0, keys, see)
        if not self._of_shard:
            return found
        start = 0
        for shard, count in enumerate(samples, start=first):
            for group in self._of_shard.get(shard, ()):
                found[start : start + count] |= self._search(group, keys[start : start + count], see)
            start += count
        return found

    def refuse_several(self, several: np.ndarray) -> None:
        """Raise UserError if keys are in several corpora; `several` (len(self),) bool."""
        if not several.any():
            return
        raise UserError(
            f"{np.count_nonzero(several):,} of the {len(self):,} keys of {self.path} are in more than one corpus of "
            f"data.train, such as {self._first_of(several)}.",
            "Write FOLDER/SHARD.tar/KEY, as log_samples does, with as much of the path as tells the corpora apart, "
            "and a line for each corpus that is meant.",
        )

    def _search(self, group: int, keys: np.ndarray, see: Callable[[np.ndarray], None] | None) -> np.ndarray:
        start, stop = self._bounds[group], self._bounds[group + 1]
        if start == stop:
            return np.zeros(len(keys), bool)
        hashes = self._hashes[start:stop]
        places = np.minimum(np.searchsorted(hashes, keys), stop - start - 1)
        found = hashes[places] == keys
        if see is not None:
            see(start + places[found])
        return found

    def _first_of(self, chosen: np.ndarray) -> str:
        """The first line of the file that says one of the chosen keys."""
        for piece in self._pieces():
            for line, group, key in zip(piece.lines, piece.groups, key_hash(piece.keys)):
                start, stop = self._bounds[group : group + 2] if group + 1 < len(self._bounds) else (0, 0)
                place = start + int(np.searchsorted(self._hashes[start:stop], key))
                if place < stop and self._hashes[place] == key and chosen[place]:
                    return line
        raise UserError(f"{self.path} has changed since it was read.", "Start the run again.")

    def _pieces(self) -> Iterator[_Piece]:
        """The lines of the file, some at a time."""
        try:
            if Path(self.path).stat().st_size > _MAX_BYTES:
                what = f"{self.path} is larger than {_MAX_BYTES >> 30} GiB."
                raise UserError(what, "Split the data and its list.")
            with open(self.path, encoding="utf-8", errors="surrogateescape") as file:
                while some := list(islice(file, _LINES)):
                    if lines := [line for line in (line.rstrip("\r\n") for line in some) if line]:
                        groups, keys = zip(*map(self._named.split, lines))
                        yield _Piece(lines, groups, keys)
        except OSError as error:
            what = f"{self.path} cannot be read: {error.strerror}."
            raise UserError(what, "Name a file with one key a line.") from None


class _Piece(NamedTuple):
    """Some lines: the group of shards that each is true of, and its key."""

    lines: list[str]
    groups: Sequence[int]
    keys: Sequence[str]


class _Named:
    """The groups of shards that lines name; group 0 is any shard.

    Attributes:
        groups: number of each group, by its shards; none for group 0.
    """

    def __init__(self, shards: Sequence[Shard]):
        self._shards, self.groups = shards, {(): 0}
        self.forget()

    def forget(self) -> None:
        """Give back the memory of look-ups; a later one makes what it needs again."""
        self._addresses: list[str] = []
        self._by_name: dict[str, list[int]] = {}
        self._by_address: dict[str, list[int]] = {}
        self._known: dict[str, int] = {}  # by what a line has before its key

    def split(self, line: str) -> tuple[int, str]:
        """The group of a line, and its key. A line that names none of the shards is a key as a whole."""
        cut = line.rfind("/", 0, -1)
        while cut > 0:
            if group := self._group(line[:cut]):
                return group, line[cut + 1 :]
            cut = line.rfind("/", 0, cut)
        return 0, line

    def _group(self, given: str) -> int:
        if (group := self._known.get(given)) is not None:
            return group
        if not self._addresses:
            self._index()
        name = given.rpartition("/")[2]
        if name not in self._by_name:  # a part of a key, of which there may be millions: not remembered
            return 0
        numbers = self._by_address.get(given) or [
            number
            for number in self._by_name[name]
            if self._shards[number].name == given or self._addresses[number].endswith(f"/{given}")
        ]
        group = self.groups.setdefault(tuple(numbers), len(self.groups))
        self._known[given] = group
        return group

    def _index(self) -> None:
        self._addresses = [str(shard.path) for shard in self._shards]
        for number, (shard, address) in enumerate(zip(self._shards, self._addresses, strict=True)):
            self._by_address.setdefault(address, []).append(number)
            for name in {shard.name, address.rpartition("/")[2]}:  # they differ in some web addresses and commands
                self._by_name.setdefault(name, []).append(number)


class Sightings:
    """Corpora in which the keys of a list were found.

    Args:
        keys: how many it has.
        corpora: how many there are.
    """

    def __init__(self, keys: int, corpora: int):
        self._none, self._several = corpora, corpora + 1
        self._corpus = np.full(keys, self._none, np.min_scalar_type(self._several))

    def add(self, places: np.ndarray, corpus: int) -> None:
        """Keys at these places of the list are in a corpus."""
        before = self._corpus[places]
        self._corpus[places] = np.where((before == self._none) | (before == corpus), corpus, self._several)

    @property
    def missing(self) -> int:
        """Keys that were not found."""
        return int(np.count_nonzero(self._corpus == self._none))

    @property
    def several(self) -> np.ndarray:
        """Mask of the keys that are in more than one corpus, (keys,) bool."""
        return self._corpus == self._several


def _sorted(hashes: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sorted by group and then by hash, each once."""
    if groups.any():
        order = np.lexsort((hashes, groups))
        hashes, groups = hashes[order], groups[order]
    else:
        hashes.sort()
    first = np.ones(len(hashes), bool)
    first[1:] = (hashes[1:] != hashes[:-1]) | (groups[1:] != groups[:-1])
    return hashes[first], groups[first]
