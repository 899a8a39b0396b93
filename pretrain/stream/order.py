"""The order of training samples: a pure function of the shard sizes, a seed and a position.

The same arguments give the same slots on every rank, in every worker and after every restart. One epoch is laid out in
four steps, each drawn from (seed, epoch):

1. the shards are permuted; the slots (shard, index inside it) of all shards, one after the other, form one line;
2. the line is cut to a whole number of global batches; the slots cut off, fewer than one batch, differ each epoch;
3. the rest is cut into `lanes` equal pieces; a lane reads its shards one after the other and feeds the same rows of
   every global batch, so that a batch draws from as many places of the corpus as there are lanes;
4. inside a lane, slots are shuffled within windows, which restart at each shard and after every `window` slots.

Random numbers are SplitMix64 values of counters (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", 2014), which no library version changes.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from probemb.errors import UserError

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FACTOR_1, _FACTOR_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_PASS, _LAYOUT, _WINDOW = 1, 2, 3  # uses of random numbers


def draw(*keys: int) -> int:
    """A 64-bit random number that is a pure function of the integers given."""
    state = _GOLDEN
    for key in keys:
        state = ((state ^ (key & _MASK)) + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * _FACTOR_1) & _MASK
        state = ((state ^ (state >> 27)) * _FACTOR_2) & _MASK
        state ^= state >> 31
    return state


def permutation(n: int, *keys: int) -> np.ndarray:
    """A random order of range(n), (n,) int64, that is a pure function of the integers given."""
    # The counters are distinct and every step is invertible, so the sort has no ties.
    x = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(draw(*keys))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FACTOR_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_FACTOR_2)
    return np.argsort(x ^ (x >> np.uint64(31)))


class Slots(NamedTuple):
    """Places in the corpus, three arrays (n,) int64: the shard, the index inside it, the pass over the corpus."""

    shard: np.ndarray
    index: np.ndarray
    visit: np.ndarray


class _Layout(NamedTuple):
    """One epoch's line: range i holds slots [begin_i, begin_i + length_i) of a shard, from place start_i on."""

    shard: np.ndarray
    begin: np.ndarray
    visit: np.ndarray
    start: np.ndarray  # (ranges + 1,), the last entry is the number of slots


class Order:
    """The place of every sample, for every epoch, of which each has `steps` global batches.

    Args:
        batch_size: the global batch, B, over all ranks.
        lanes: a divisor of it, by default the largest up to 64; lane l feeds `share` = B / L rows, from l·B/L on.
        corpus: for a mixture, the number 0, 1, … of the corpus that each shard belongs to.
        weights: for a mixture, passes over each corpus in an epoch; 0.5 uses half of the samples in one epoch and the
            other half in the next. A corpus of n samples contributes round(weight · n) slots to every epoch and
            continues where the epoch before stopped.
        places: for samples that a filter selects, indices in a shard of those that `shard_sizes` counts, ascending.

    Raises UserError: the lanes do not divide the batch, or there are fewer slots than one batch.
    """

    def __init__(
        self,
        shard_sizes: Sequence[int],
        *,
        batch_size: int,
        lanes: int | None = None,
        window: int = 4096,
        seed: int = 0,
        corpus: Sequence[int] | None = None,
        weights: Sequence[float] | None = None,
        places: Callable[[int], np.ndarray] | None = None,
    ):
        lanes = lanes or next(n for n in range(min(batch_size, 64), 0, -1) if batch_size % n == 0)
        if batch_size % lanes:
            fits = ", ".join(str(n) for n in range(1, min(batch_size, 1024) + 1) if batch_size % n == 0)
            what = f"{lanes} lanes do not divide the global batch of {batch_size}."
            raise UserError(what, f"Take one of these numbers of lanes: {fits}.")
        self.sizes = np.asarray(shard_sizes, dtype=np.int64)
        self.corpus = np.zeros(len(self.sizes), np.int64) if corpus is None else np.asarray(corpus, dtype=np.int64)
        corpora = int(self.corpus.max(initial=-1)) + 1
        self.weights = [1.0] * corpora if weights is None else [float(weight) for weight in weights]
        self.batch_size, self.lanes, self.window, self.seed = batch_size, lanes, window, seed
        self._members = [np.flatnonzero((self.corpus == c) & (self.sizes > 0)) for c in range(len(self.weights))]
        totals = [int(self.sizes[members].sum()) for members in self._members]
        self._takes = [math.floor(weight * total + 0.5) for weight, total in zip(self.weights, totals, strict=True)]
        self.slots_per_epoch = sum(self._takes)
        self.steps = self.slots_per_epoch // batch_size
        if self.steps == 0:
            what = f"The data has {self.slots_per_epoch} samples, fewer than one global batch of {batch_size}."
            raise UserError(what, "Use a smaller batch or more data.")
        self.share = batch_size // lanes
        self.lane_length = self.steps * self.share
        self._layout, self._window = lru_cache(2)(self._make_layout), lru_cache(2 * lanes + 8)(self._make_window)
        self._places = places and lru_cache(2 * lanes + 8)(places)

    def slots(self, epoch: int, lane: int, start: int, stop: int) -> Slots:
        """Slots [start, stop) of a lane, 0 <= start <= stop <= lane_length; step s has [s · share, (s + 1) · share)."""
        layout = self._layout(epoch)
        lane_start = lane * self.lane_length
        begin, end = lane_start + start, lane_start + stop
        places = np.empty(end - begin, np.int64)  # on the epoch's line, after shuffling
        place = begin
        while place < end:
            i = int(np.searchsorted(layout.start, place, side="right")) - 1
            first = max(int(layout.start[i]), lane_start)  # where the lane enters this shard
            first += (place - first) // self.window * self.window
            last = min(int(layout.start[i + 1]), lane_start + self.lane_length, first + self.window)
            until = min(last, end)
            shuffled = self._window(epoch, first, last)
            places[place - begin : until - begin] = first + shuffled[place - first : until - first]
            place = until
        i = np.searchsorted(layout.start, places, side="right") - 1
        shard, index = layout.shard[i], layout.begin[i] + places - layout.start[i]
        for one in np.unique(shard).tolist() if self._places else ():
            index[shard == one] = self._places(one)[index[shard == one]]
        return Slots(shard, index, layout.visit[i])

    def rows(self, epoch: int, step: int, start: int, stop: int) -> Slots:
        """Slots of rows [start, stop) of one global batch, 0 <= start < stop <= batch_size."""
        pieces, share = [], self.share
        for lane in range(start // share, (stop - 1) // share + 1):
            first, last = max(start - lane * share, 0), min(stop - lane * share, share)
            pieces.append(self.slots(epoch, lane, step * share + first, step * share + last))
        return Slots(*(np.concatenate(columns) for columns in zip(*pieces, strict=True)))

    def shards_ahead(self, epoch: int, lane: int, slot: int) -> tuple[int, int]:
        """A lane's shard at a slot, and its next shard, perhaps of the next epoch."""
        layout, end = self._layout(epoch), (lane + 1) * self.lane_length
        i = int(np.searchsorted(layout.start, lane * self.lane_length + slot, side="right")) - 1
        if layout.start[i + 1] < end:
            return int(layout.shard[i]), int(layout.shard[i + 1])
        following = self._layout(epoch + 1)
        first = int(np.searchsorted(following.start, lane * self.lane_length, side="right")) - 1
        return int(layout.shard[i]), int(following.shard[first])

    def _make_layout(self, epoch: int) -> _Layout:
        shards, begins, lengths, visits = [], [], [], []
        for c, (members, take) in enumerate(zip(self._members, self._takes, strict=True)):
            if take == 0:
                continue
            # A corpus is an endless line, pass after pass; this epoch takes the next `take` slots.
            total = int(self.sizes[members].sum())
            for visit in range(epoch * take // total, (epoch * take + take - 1) // total + 1):
                order = members[permutation(len(members), self.seed, _PASS, c, visit)]
                stops = np.cumsum(self.sizes[order])
                starts = stops - self.sizes[order]
                begin = np.clip(epoch * take - visit * total, starts, stops)
                end = np.clip(epoch * take + take - visit * total, starts, stops)
                used = end > begin
                shards.append(order[used])
                begins.append((begin - starts)[used])
                lengths.append((end - begin)[used])
                visits.append(np.full(int(used.sum()), visit, np.int64))
        shard, begin, length, visit = map(np.concatenate, (shards, begins, lengths, visits))
        mixed = permutation(len(shard), self.seed, _LAYOUT, epoch)
        start = np.concatenate([np.zeros(1, np.int64), np.cumsum(length[mixed])])
        return _Layout(shard[mixed], begin[mixed], visit[mixed], start)

    def _make_window(self, epoch: int, first: int, last: int) -> np.ndarray:
        return permutation(last - first, self.seed, _WINDOW, epoch, first).astype(np.int32)
