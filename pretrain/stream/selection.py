"""The samples that a filter keeps: their number in each shard, and their places.

The order is drawn over the kept samples alone, so it stays a function of the seed and the position, and nothing is read
of a sample that is left out. The first start counts them in one pass over the columns that the rules name (a few bytes
a sample), and keeps the counts (`counts.py`) for later ones; the places in a shard are computed again when a lane
reaches it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pretrain.stream.counts import Counts, read_counts, write_counts
from pretrain.stream.filter import BOUNDS, Filter
from pretrain.stream.key_lists import FORMS, KeyList, Sightings
from probemb.data.remote.sources import Remote
from probemb.data.shards.columns import FOLDER_NAME, Columns, score_column
from probemb.data.shards.index import Shard
from probemb.errors import UserError

_PIECE = 1 << 20  # samples judged at a time


class Rule(NamedTuple):
    """A condition on some columns: arrays (n,) -> kept, (n,) bool."""

    name: str
    columns: tuple[str, ...]
    keeps: Callable[..., np.ndarray]


class Selection:
    """The kept samples of several corpora.

    Args:
        corpora: the shards of each.
        filter: the rules; at least one is set.

    Attributes:
        sizes: kept samples in each shard of all corpora, (n,) int64.
        total: samples in all, kept or not.
        left_out: samples that each rule alone leaves out, by its name.
        digest: of which samples are kept.
        lists: for `keep` and `drop`, how many keys are not in the data, and the listed samples of each corpus.

    Raises:
        UserError: a column, score or file of keys is missing; rules that exclude each other; nothing is kept; a list
            has a key that is in several corpora.
    """

    def __init__(self, corpora: Sequence[Sequence[Shard]], filter: Filter):
        self.filter, self._shards = filter, [shard for shards in corpora for shard in shards]
        _check(filter, len(corpora))
        self._rules = [_make_rules(filter.of_corpus(number)) for number in range(len(corpora))]
        lists = {name: getattr(filter, name) for name in ("keep", "drop")}
        self._lists = {name: KeyList(path, self._shards) for name, path in lists.items() if path}
        self._columns, starts = [], []
        for number, shards in enumerate(corpora):
            groups = _by_folder(shards, filter.columns[number] if filter.columns else None)
            for folder, group in groups:
                columns = Columns(folder, _command(group))
                for name in self._wanted(number):
                    columns.need(name)
                starts.append(columns.rows_of(group))
                self._columns += [columns] * len(group)
        self._starts = np.concatenate(starts)
        self._corpora = [len(shards) for shards in corpora]
        self._corpus = np.repeat(np.arange(len(corpora)), self._corpora)
        self._samples = np.array([shard.samples for shard in self._shards], np.int64)
        self.total = int(self._samples.sum())
        self._count_or_recall()

    @property
    def kept(self) -> int:
        """Samples kept in all shards."""
        return int(self.sizes.sum())

    @property
    def identity(self) -> str:
        """The rules and which samples they keep, for comparison when a run is resumed."""
        rules = {**self.filter.rules, **{name: Path(getattr(self.filter, name)).name for name in self._lists}}
        return f"{', '.join(f'{name} {value}' for name, value in rules.items())} ({self.kept:,} kept, {self.digest})"

    def describe(self) -> str:
        """The kept share, and what each rule leaves out, in one line."""
        share = f"{self.kept:,} of {self.total:,} samples kept ({self.kept / self.total:.1%})"
        return f"{share}; left out by {', '.join(f'{name} {count:,}' for name, count in self.left_out.items())}"

    def describe_lists(self) -> dict[str, str]:
        """For `keep` and `drop`, what of the list is in the data, in one line."""
        lines = {}
        for name, (missing, *found) in self.lists.items():
            keys = self._lists[name]
            parts = ", ".join(f"corpus {number}: {count:,}" for number, count in enumerate(found, start=1))
            share = f"{missing:,} of {len(keys):,} keys are not in the data"
            listed = f"samples listed: {sum(found):,}" + (f" ({parts})" if len(found) > 1 else "")
            lines[name] = f"{Path(keys.path).name}: {share}; {listed}"
        return lines

    def places(self, shard: int) -> np.ndarray:
        """Indices of the kept samples in a shard, ascending, (sizes[shard],) int32."""
        start, samples = int(self._starts[shard]), int(self._samples[shard])
        verdicts = self._judge(shard, shard + 1, start, start + samples, {})
        found = np.flatnonzero(_all(verdicts, samples)).astype(np.int32)
        if len(found) != self.sizes[shard]:
            raise UserError(
                f"The columns in {self._columns[shard].folder} have changed since the run was started.",
                "Start it again; with --resume if they are as they were.",
            )
        return found

    def _count_or_recall(self) -> None:
        """The attributes, as an earlier start has counted them if nothing has changed since."""
        key = self._key()
        folders = list(dict.fromkeys(columns.folder for columns in dict.fromkeys(self._columns)))
        numbers = dict.fromkeys(self._lists, 1 + len(self._corpora))
        if found := read_counts(folders, key, self._samples, self._names, numbers):
            self.sizes, self.left_out, self.digest, self.lists = found
            return
        self._count()
        if self._key() == key:  # no column was replaced meanwhile
            write_counts(folders, key, Counts(self.sizes, self.left_out, self.digest, self.lists))

    def _key(self) -> str:
        """A hash of all on which the counts depend."""
        lists = {name: keys.digest for name, keys in self._lists.items()}
        shards = hashlib.sha256(self._starts)
        shards.update(self._samples)
        shards.update(np.array(self._corpora, np.int64))
        files, first = [], 0
        for columns, group in groupby(self._columns):
            files.append([len(list(group)), columns.versions(self._wanted(self._corpus[first]))])
            first += files[-1][0]
        return hashlib.sha256(
            json.dumps([{**self.filter.rules, **lists}, shards.hexdigest(), files]).encode()
        ).hexdigest()

    @property
    def _names(self) -> list[str]:
        """Names of the rules, of all corpora."""
        found = {rule.name for rules in self._rules for rule in rules}
        return [name for name in self.filter.rules if name in found or name in self._lists]

    def _wanted(self, corpus: int) -> list[str]:
        """Names of the columns of a corpus that are read."""
        names = dict.fromkeys(name for rule in self._rules[corpus] for name in rule.columns)
        return [*names, *(["key"] if self._lists else [])]

    def _count(self) -> None:
        """The attributes, from one pass over the columns."""
        self.sizes = np.zeros(len(self._shards), np.int64)
        self.left_out = dict.fromkeys(self._names, 0)
        self.lists = {name: [0] * (1 + len(self._corpora)) for name in self._lists}
        seen = {name: Sightings(len(keys), len(self._corpora)) for name, keys in self._lists.items()}
        digest, rest = hashlib.sha256(), np.empty(0, bool)
        for first, last in self._pieces():
            start, corpus = int(self._starts[first]), int(self._corpus[first])
            see = {name: partial(sightings.add, corpus=corpus) for name, sightings in seen.items()}
            verdicts = self._judge(first, last, start, start + int(self._samples[first:last].sum()), see)
            for name, kept in verdicts.items():
                self.left_out[name] += len(kept) - int(np.count_nonzero(kept))
                if name in self.lists:
                    self.lists[name][1 + corpus] += int(np.count_nonzero(kept == (name == "keep")))
            kept = _all(verdicts, int(self._samples[first:last].sum()))
            ends, counted = np.cumsum(self._samples[first:last]), np.concatenate([[0], np.cumsum(kept)])
            self.sizes[first:last] = counted[ends] - counted[ends - self._samples[first:last]]
            rest = np.concatenate([rest, kept])
            whole = len(rest) // 8 * 8  # the digest does not depend on how the pass is cut
            digest.update(np.packbits(rest[:whole]).data)
            rest = rest[whole:]
        digest.update(np.packbits(rest).data)
        self.digest = digest.hexdigest()[:16]
        for name, keys in self._lists.items():
            self.lists[name][0] = seen[name].missing
            if seen[name].missing == len(keys):
                raise UserError(
                    f"Not one key of {keys.path} occurs in the data.",
                    f"Write one key a line as the tars have it: {FORMS}.",
                )
            keys.refuse_several(seen[name].several)
        if not self.kept:
            raise UserError(f"The filter leaves no sample: {self.describe()}.", "Loosen the rules of data.filter.")

    def _pieces(self) -> Iterator[tuple[int, int]]:
        """Runs of shards whose numbers lie one after the other, of about `_PIECE` samples."""
        stops = self._starts + self._samples
        others = np.array([a is not b for a, b in pairwise(self._columns)], bool)
        breaks = (self._starts[1:] != stops[:-1]) | others
        runs = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(self._shards)]
        for run, end in pairwise(runs):
            while run < end:
                last = int(np.searchsorted(stops[run:end], self._starts[run] + _PIECE, side="right")) + run
                last = max(last, run + 1)
                yield run, last
                run = last

    def _judge(
        self, first: int, last: int, start: int, stop: int, see: Mapping[str, Callable[[np.ndarray], None]]
    ) -> dict[str, np.ndarray]:
        """By rule, which samples of shards [first, last) it keeps; their numbers are [start, stop) of the columns.

        `see` may have, for a list of keys, what is given the places of those that are found.
        """
        columns, corpus = self._columns[first], int(self._corpus[first])
        numbers = {name: columns.read(name, start, stop) for name in self._wanted(corpus)}
        verdicts = {rule.name: rule.keeps(*(numbers[name] for name in rule.columns)) for rule in self._rules[corpus]}
        for name, keys in self._lists.items():
            listed = keys.listed(first, self._samples[first:last].tolist(), numbers["key"], see.get(name))
            verdicts[name] = listed if name == "keep" else ~listed
        return verdicts


def select(corpora: Sequence[Sequence[Shard]], filter: Filter) -> Selection | None:
    """The selection of a filter; None if it has no rule."""
    return Selection(corpora, filter) if filter.rules else None


def _all(verdicts: Mapping[str, np.ndarray], samples: int) -> np.ndarray:
    """Mask of the samples that every rule keeps; a corpus may have no rules."""
    return np.logical_and.reduce([np.ones(samples, bool), *verdicts.values()])


def _make_rules(filter: Filter) -> list[Rule]:
    f, size = filter, ("width", "height")
    score = () if f.score is None else (score_column(f.score),)
    possible = {
        "min_side": (size, lambda w, h: np.minimum(w, h) >= f.min_side),
        "max_side": (size, lambda w, h: (np.maximum(w, h) <= f.max_side) & (w > 0)),  # 0 is unreadable
        "max_aspect": (size, lambda w, h: (np.maximum(w, h) <= f.max_aspect * np.minimum(w, h)) & (w > 0)),
        "min_words": (("fewest_words",), lambda n: n >= f.min_words),
        "max_words": (("most_words",), lambda n: n <= f.max_words),
        "min_chars": (("fewest_chars",), lambda n: n >= f.min_chars),
        "max_chars": (("most_chars",), lambda n: n <= f.max_chars),
        "min_score": (score, lambda s: s >= np.float32(f.min_score)),  # NaN is not
        "max_score": (score, lambda s: s <= np.float32(f.max_score)),
    }
    return [Rule(name, *rule) for name, rule in possible.items() if getattr(f, name) is not None]


def _check(filter: Filter, corpora: int) -> None:
    """Refuse rules that say nothing or exclude each other."""
    bounded = filter.min_score is not None or filter.max_score is not None
    if bounded != (filter.score is not None):
        raise UserError(
            "data.filter.score needs min_score or max_score, and these need it.",
            "Set data.filter.score to the name given to `tools.shards measure --score`, and a bound.",
        )
    for name in BOUNDS:
        bound = getattr(filter, name)
        if isinstance(bound, list) and (len(bound) != corpora or set(bound) == {None}):
            raise UserError(
                f"data.filter.{name} has {len(bound)} values for {corpora} training paths, "
                f"{sum(one is not None for one in bound)} of them a bound.",
                "Give it one value for each path, null for no bound, or a single one for all.",
            )
    for number in range(corpora):
        _check_ranges(filter.of_corpus(number))
    if filter.columns and len(filter.columns) != corpora:
        raise UserError(
            f"There are {len(filter.columns)} folders of columns for {corpora} training paths.",
            "Give data.filter.columns one folder for each path.",
        )


def _check_ranges(filter: Filter) -> None:
    """Refuse a lower bound above the upper one."""
    for low, high in ("min_side", "max_side"), ("min_words", "max_words"), ("min_chars", "max_chars"), (
        "min_score", "max_score",
    ):  # fmt: skip
        least, most = getattr(filter, low), getattr(filter, high)
        if least is not None and most is not None and least > most:
            raise UserError(f"data.filter.{low} {least} is above {high} {most}.", "Exchange or correct them.")


def _by_folder(shards: Sequence[Shard], given: str | None) -> list[tuple[Path, list[Shard]]]:
    """Neighbouring shards that share a folder of columns."""
    groups: list[tuple[str, Path, list[Shard]]] = []
    for shard in shards:
        if given is None and isinstance(shard.place, Remote):
            raise UserError(
                f"{shard.path} is remote, and data.filter needs columns on this machine.",
                "Copy the folder `columns` from beside the shards, and name it in data.filter.columns.",
            )
        folder = given or shard.place[: shard.place.rfind(os.sep) + 1]
        if not groups or groups[-1][0] != folder:
            groups.append((folder, Path(given or os.path.join(folder, FOLDER_NAME)), []))
        groups[-1][2].append(shard)
    return [(path, group) for _, path, group in groups]


def _command(shards: Sequence[Shard]) -> str:
    path = shards[0].path
    where = "FOLDER" if isinstance(path, Remote) else shlex.quote(str(path.parent))
    return f"python -m tools.shards measure {where}"
