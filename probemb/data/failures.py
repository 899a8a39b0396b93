"""Samples that cannot be used: counted by where they come from, told once, and too many of them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_WORST = 5  # places that an error or a report names
_MOST_WARNINGS = 20  # places whose first failure is told at once
_log = logging.getLogger(__name__)


class BadSample(Exception):
    """A sample that cannot be used; the message is the reason."""


class BadShard(BadSample):
    """A tar that cannot be read, so that none of its samples can be used; the message is the reason."""


@dataclass
class Failure:
    """What could not be used of one place, a shard or an image."""

    count: int
    reason: str  # the last one


class Tally:
    """Failures of this process.

    Args:
        share: largest share of what was read that may fail,
        judged_from: … once so much was read.

    Attributes:
        failures: by name of the place.
        read, failed: samples so far.
    """

    def __init__(self, share: float, judged_from: int):
        self.share, self.judged_from = share, judged_from
        self.failures: dict[str, Failure] = {}
        self.read = self.failed = 0

    def add(self, read: int, failures: Iterable[tuple[str, str]]) -> bool:
        """Count samples that were read, and (place, reason) of those that failed; whether there are too many now."""
        self.read += read
        for name, reason in failures:
            if name not in self.failures and len(self.failures) < _MOST_WARNINGS:
                _log.warning("data: %s: %s", name, reason)  # now, and not only when the run is over
            failure = self.failures.setdefault(name, Failure(0, reason))
            failure.count, failure.reason = failure.count + 1, reason
            self.failed += 1
        return self.read >= self.judged_from and self.failed > self.share * self.read

    def worst(self) -> list[tuple[str, Failure]]:
        """The places with the most failures, at most five."""
        return sorted(self.failures.items(), key=lambda item: -item[1].count)[:_WORST]


def describe_failures(of_ranks: Sequence[Mapping[str, Failure]], what: str, places: str) -> list[str]:
    """Lines on what could not be used, from every rank's failures, the worst places first; none if all is well."""
    counts, reasons = Counter(), {}
    for failures in of_ranks:
        for name, failure in failures.items():
            counts[name] += failure.count
            reasons.setdefault(name, failure.reason)
    if not counts:
        return []
    worst = "; ".join(f"{name}: {count} ({reasons[name]})" for name, count in counts.most_common(_WORST))
    return [f"{what}, replaced by others: {counts.total():,} in {len(counts)} {places}; {worst}"]
