"""Unusable samples: counted per shard or image, logged once each, and limited to a share."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_WORST = 5  # places that an error or a report lists
_MOST_WARNINGS = 20  # places whose first failure is logged at once
_log = logging.getLogger(__name__)


class BadSample(Exception):
    """A sample that cannot be used; the message is the reason."""


class BadShard(BadSample):
    """A tar that cannot be read, so that none of its samples can be used; the message is the reason."""


@dataclass
class Failure:
    """The failures of one place, a shard or an image."""

    count: int
    reason: str  # the last one


class Tally:
    """Failures of this process.

    Args:
        share: largest share of the samples that may fail.
        judged_from: samples that must have been read before the share is judged.

    Attributes:
        failures: by name of the shard or image.
        read, failed: samples so far.
    """

    def __init__(self, share: float, judged_from: int):
        self.share, self.judged_from = share, judged_from
        self.failures: dict[str, Failure] = {}
        self.read = self.failed = 0

    def add(self, read: int, failures: Iterable[tuple[str, str]]) -> bool:
        """Count read samples, and (place, reason) of failed ones; returns whether there are too many."""
        self.read += read
        for name, reason in failures:
            if name not in self.failures and len(self.failures) < _MOST_WARNINGS:
                _log.warning("data: %s: %s", name, reason)  # now, not only at the end of the run
            failure = self.failures.setdefault(name, Failure(0, reason))
            failure.count, failure.reason = failure.count + 1, reason
            self.failed += 1
        return self.read >= self.judged_from and self.failed > self.share * self.read

    def worst(self) -> list[tuple[str, Failure]]:
        """The places with the most failures, at most five."""
        return sorted(self.failures.items(), key=lambda item: -item[1].count)[:_WORST]


def describe_failures(of_ranks: Sequence[Mapping[str, Failure]], what: str, places: str) -> list[str]:
    """Lines about the failures of all ranks, the worst places first; empty if there are none."""
    counts, reasons = Counter(), {}
    for failures in of_ranks:
        for name, failure in failures.items():
            counts[name] += failure.count
            reasons.setdefault(name, failure.reason)
    if not counts:
        return []
    worst = "; ".join(f"{name}: {count} ({reasons[name]})" for name, count in counts.most_common(_WORST))
    return [f"{what}, replaced by others: {counts.total():,} in {len(counts)} {places}; {worst}"]
