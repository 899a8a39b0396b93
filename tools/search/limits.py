"""Refuse a query: the values of its scores above which it is not answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from probemb.errors import UserError

if TYPE_CHECKING:
    from tools.search.calibration import Calibration
    from tools.search.wish import Wish


def find_limits(calibration: Calibration | None, name: str, kinds: Sequence[str], wish: Wish) -> dict[str, float]:
    """Of "u" and the calibrated score `name` the values above which a query of these parts is refused, if any.

    Raises UserError: no calibration, or one that promises nothing.
    """
    given = [("u", wish.max_uncertainty)]
    for value, what in ((wish.min_precision, "the precision of its answers"), (wish.max_score, "its score")):
        if value is not None and calibration is None:
            raise UserError(
                f"This index has no calibration, so {what} is unknown.",
                "Make one with `python -m tools.search --index INDEX --calibrate DATA`, or use --max-uncertainty.",
            )
    if wish.min_precision is not None:
        given.append((name, calibration.threshold(kinds, wish.min_precision)))
    given.append((name, wish.max_score))
    limits: dict[str, float] = {}
    for score, limit in given:
        if limit is not None:
            limits[score] = min(limit, limits.get(score, limit))
    return limits


def is_above(values: dict[str, float], limits: dict[str, float]) -> bool:
    """True if a known score is above its limit."""
    return any(name in limits and value > limits[name] for name, value in values.items())
