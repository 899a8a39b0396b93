"""From the numbers of the seeds to means, spreads and verdicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

HOLDS, FAILS, WITHIN, ONE_SEED = "holds", "does not hold", "within the spread", "one seed, no spread"
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


def verdict(difference: float, spread: float | None) -> str:
    """Whether a difference that should be positive is larger than the spread, smaller than minus it, or neither.

    The spread is the standard deviation over the seeds of the difference within a seed, because what is compared has
    its scenes, their order and its start in common: seeds differ far more from each other than methods do.
    """
    if spread is None:
        return ONE_SEED
    return HOLDS if difference > spread else FAILS if difference < -spread else WITHIN


def compare(what: str, better: Value | None, worse: Value | None, unit: str = "points", factor: float = 100.0) -> dict:
    """One comparison that the claim decides in favour of `better`."""
    if better is None or worse is None:
        return {"what": what, "verdict": "undefined", "difference": None, "spread": None, "text": "undefined"}
    within = value([a - b for a, b in zip(better.numbers, worse.numbers, strict=True)])
    difference, spread = within.mean, within.spread
    text = f"{factor * difference:+.2f}" + ("" if spread is None else f", spread {factor * spread:.2f}") + f" {unit}"
    return {
        "what": what,
        "verdict": verdict(difference, spread),
        "difference": difference,
        "spread": spread,
        "text": text.replace("-", "\N{MINUS SIGN}").rstrip(),
    }


class Found:
    """What was measured, by variant, one after the other of its seeds."""

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
        """Whether there is such a variant."""
        return variant in self._by

    def names(self, variant: str) -> list[str]:
        """The names of its trainings' files."""
        return self._names[variant]

    def all(self, variant: str) -> list[dict]:
        """Every seed's."""
        return self._by[variant]


def sign_of(what: str, found: Value | None, sign: int) -> dict:
    """Whether a correlation has the sign that the claim says, 1 or -1."""
    signed = None if found is None else value([sign * number for number in found.numbers])
    zero = None if found is None else value([0.0] * len(found.numbers))
    return {**compare(what, signed, zero), "text": f"correlation {cell(found, 1.0, 2, '+')}"}


def cell(one: Value | None, factor: float = 100.0, digits: int = 1, sign: str = "") -> str:
    return "undefined" if one is None else one.text(factor, digits, sign)


def table(found: Found, variants: dict[str, str], columns: Sequence[tuple[str, Get]]) -> list[list[str]]:
    return [[title, *(cell(found.of(name, get)) for _, get in columns)] for name, title in variants.items()]
