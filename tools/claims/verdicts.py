"""From the numbers of the seeds to means, spreads and verdicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scipy.stats import t as student

HOLDS, FAILS, NOT_TOLD_APART, ONE_SEED = "holds", "does not hold", "not told apart", "one seed, no interval"
LEVEL = 0.05  # of verdicts: intervals are of 95 %
ALONE = " †"  # told apart on its own, but not after Holm's correction
Get = Callable[[dict], float | None]


@dataclass(frozen=True)
class Value:
    """Mean and standard deviation (of a sample) over the seeds' numbers; the latter None for one seed."""

    mean: float
    spread: float | None
    numbers: tuple[float, ...]

    def text(self, factor: float = 100.0, digits: int = 1, sign: str = "") -> str:
        """ "12.3 ± 0.4", in percent unless `factor` says otherwise."""
        mean = f"{factor * self.mean:{sign}.{digits}f}"
        text = mean if self.spread is None else f"{mean} ± {factor * self.spread:.{digits}f}"
        return text.replace("-", "\N{MINUS SIGN}")


def value(numbers: Sequence[float | None]) -> Value | None:
    """None if any seed has no number (a correlation with a constant)."""
    if any(number is None for number in numbers):
        return None
    n, mean = len(numbers), sum(numbers) / len(numbers)
    spread = math.sqrt(sum((x - mean) ** 2 for x in numbers) / (n - 1)) if n > 1 else None
    return Value(mean, spread, tuple(numbers))


def verdict(low: float, high: float) -> str:
    """Judge a difference that should be positive by its interval."""
    return HOLDS if low > 0 else FAILS if high < 0 else NOT_TOLD_APART


def compare(what: str, better: Value | None, worse: Value | None, unit: str = "points", factor: float = 100.0) -> dict:
    """Compare two methods where the claim expects `better` ahead: mean difference, 95 % interval, two-sided p.

    Paired over seeds, with Student's t: the methods of a seed share data, order and start, and seeds differ far more
    from each other than methods do.
    """
    result = {"what": what, "difference": None, "low": None, "high": None, "p": None}
    if better is None or worse is None:
        return {**result, "verdict": "undefined", "text": "undefined"}
    paired = value([a - b for a, b in zip(better.numbers, worse.numbers, strict=True)])
    text, judged = f"{factor * paired.mean:+.2f}", ONE_SEED
    if paired.spread is not None:
        freedom = len(paired.numbers) - 1
        error = paired.spread / math.sqrt(freedom + 1)
        half = float(student.ppf(1 - LEVEL / 2, freedom)) * error
        low, high = paired.mean - half, paired.mean + half
        ratio = abs(paired.mean) / error if error else math.inf if paired.mean else 0.0
        result |= {"low": low, "high": high, "p": float(2 * student.sf(ratio, freedom))}
        text, judged = f"{text} [{factor * low:+.2f}, {factor * high:+.2f}]", verdict(low, high)
    text = f"{text} {unit}".rstrip().replace("-", "\N{MINUS SIGN}")
    return {**result, "difference": paired.mean, "verdict": judged, "text": text}


def mark_family(comparisons: Sequence[dict]) -> None:
    """Mark the comparisons of a claim whose verdict does not survive Holm's correction for their number."""
    told = sorted((one for one in comparisons if one.get("p") is not None), key=lambda one: one["p"])
    rejected = True
    for i, one in enumerate(told):
        rejected = rejected and one["p"] <= LEVEL / (len(told) - i)
        one["holm"] = rejected
        if not rejected and one["p"] <= LEVEL:
            one["text"] += ALONE


class Found:
    """Measurements by variant, one after the other of its seeds."""

    def __init__(self, trainings: Sequence, found: dict[str, dict], name: Callable):
        self._by: dict[str, list[dict]] = {}
        self._names: dict[str, list[str]] = {}
        for training in trainings:
            self._by.setdefault(training.name, []).append(found[name(training)])
            self._names.setdefault(training.name, []).append(name(training))

    def of(self, variant: str, get: Get) -> Value | None:
        """Mean and spread of a number."""
        return value([get(one) for one in self._by[variant]])

    def has(self, variant: str) -> bool:
        """True if there is such a variant."""
        return variant in self._by

    def names(self, variant: str) -> list[str]:
        """The names of its trainings' files."""
        return self._names[variant]

    def all(self, variant: str) -> list[dict]:
        """Every seed's."""
        return self._by[variant]


def sign_of(what: str, found: Value | None, sign: int) -> dict:
    """Compare a correlation with 0, where the claim expects `sign`, 1 or -1."""
    signed = None if found is None else value([sign * number for number in found.numbers])
    zero = None if found is None else value([0.0] * len(found.numbers))
    result = compare(what, signed, zero, "", 1.0)
    text = cell(found, 1.0, 2, "+")
    return {**result, "text": f"correlation {text}"}


def cell(one: Value | None, factor: float = 100.0, digits: int = 1, sign: str = "") -> str:
    return "undefined" if one is None else one.text(factor, digits, sign)


def table(found: Found, variants: dict[str, str], columns: Sequence[tuple[str, Get]]) -> list[list[str]]:
    return [[title, *(cell(found.of(name, get)) for _, get in columns)] for name, title in variants.items()]
