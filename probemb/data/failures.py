"""Unusable samples: counted per shard or image, logged once each, and limited to a share."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

_MOST_WARNINGS = 20  # places whose first failure is logged at once
_log = logging.getLogger(__name__)


class BadSample(Exception):
    """An unusable sample; the message is the reason."""


class BadShard(BadSample):
    """An unreadable tar, none of whose samples can be used; the message is the reason."""


class Failure(NamedTuple):
    """The failures of a shard or image; `reason` is the last one."""

    count: int
    reason: str


def escaped(text: str) -> str:
    """With escapes for characters of names in a tar that a terminal obeys or a log cannot encode."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class Tally:
    """Failures of this process, by name of the shard or image, of which at most a `share` of the samples may fail.

    It is checked from the sample `judged_from` on.
    """

    def __init__(self, share: float, judged_from: int):
        self.share, self.judged_from = share, judged_from
        self.failures: dict[str, Failure] = {}
        self.read = self.failed = 0

    def add(self, read: int, failures: Iterable[tuple[str, str]]) -> bool:
        """Count read samples, and (place, reason) of failed ones; returns whether too many of this process' failed."""
        self.read += read
        for name, reason in failures:
            if name not in self.failures and len(self.failures) < _MOST_WARNINGS:
                _log.warning("data: %s: %s", name, reason)  # now, not only at the end of the run
            count, _ = self.failures.get(name, (0, ""))
            self.failures[name] = Failure(count + 1, reason)
            self.failed += 1
        return self.too_many(self.read, self.failed)

    def too_many(self, read: int, failed: int) -> bool:
        """True if these numbers, perhaps of all processes, exceed the share."""
        return read >= self.judged_from and failed > self.share * read


def describe_failures(of_ranks: Sequence[Mapping[str, Failure]], what: str, places: str) -> list[str]:
    """Lines about the failures of all ranks, the worst places first; empty without failures."""
    counts, worst = worst_places(of_ranks)
    return [f"{what}, replaced by others: {counts.total():,} in {len(counts)} {places}; {worst}"] if counts else []


def worst_places(of_ranks: Sequence[Mapping[str, Failure]]) -> tuple[Counter, str]:
    """Failures of all ranks by place, and those of the five worst places in words."""
    counts, reasons = Counter(), {}
    for name, (count, reason) in (item for failures in of_ranks for item in failures.items()):
        counts[name] += count
        reasons.setdefault(name, reason)
    return counts, "; ".join(f"{name}: {count} ({reasons[name]})" for name, count in counts.most_common(5))
