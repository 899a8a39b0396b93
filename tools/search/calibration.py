"""Calibration of an index: the uncertainty above which a query is refused.

One curve per number of query parts: thresholds, the share of queries that they answer, the share of correct answers,
and its lower bound. `calibrating.py` measures them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from probemb.errors import UserError

if TYPE_CHECKING:
    from probemb.metrics import PrecisionCurve

NAME = "calibration.json"
GENERATOR = "probemb tools.search --calibrate"


@dataclass(frozen=True)
class Calibration:
    """Content of INDEX/calibration.json.

    Attributes:
        kind: of the queries, "text" or "image".
        curves: number of parts -> PrecisionCurve.
        weights: digest of the model's weights.
        data, gallery: the validation set and its size.
        rivals, within: see `calibrate`.
        tolerance: weight of the gallery's variances that finds most of all that fits; None for data whose true matches
            are not all known.
    """

    kind: str
    curves: dict[int, PrecisionCurve]
    weights: str
    data: str
    gallery: int
    rivals: str
    within: int = 1
    tolerance: float | None = None

    def curve(self, kinds: Sequence[str]) -> PrecisionCurve:
        """The curve for a query of these parts. Raises UserError: such queries were not calibrated."""
        if set(kinds) != {self.kind} or len(kinds) not in self.curves:
            most = max(self.curves)
            asked = " and ".join(
                f"{kinds.count(kind)} {kind}{'' if kinds.count(kind) == 1 else 's'}" for kind in sorted(set(kinds))
            )
            raise UserError(
                f"The calibration of this index is for queries of 1{f' to {most}' if most > 1 else ''} {self.kind}"
                f"{'s' if most > 1 else ''}, and this one has {asked}.",
                "Use --max-uncertainty instead of a precision.",
            )
        return self.curves[len(kinds)]

    def threshold(self, kinds: Sequence[str], precision: float) -> float:
        """The uncertainty above which to refuse. Raises UserError: the precision is out of reach."""
        from probemb.metrics import highest_threshold

        curve = self.curve(kinds)
        threshold = highest_threshold(curve, precision)
        if threshold is None:
            most = f"the validation set promises at most {max(curve.at_least):.3f}"
            raise UserError(
                f"A precision of {precision:g} is out of reach: {most}.", "Ask for less, or calibrate on more queries."
            )
        return threshold


def save_calibration(folder: Path, calibration: Calibration) -> Path:
    """Write calibration.json beside the index. Raises UserError: the folder cannot be written."""
    from probemb.cli.results import write_json

    content = {"format": 1, **asdict(calibration)}
    content["curves"] = {str(parts): asdict(curve) for parts, curve in calibration.curves.items()}
    try:
        write_json(folder / NAME, content, GENERATOR)
    except OSError as error:
        raise UserError(
            f"The calibration cannot be written into {folder} ({error.strerror}).", "Make the folder writable."
        ) from None
    return folder / NAME


def load_calibration(folder: Path, weights: str) -> Calibration | None:
    """The calibration of an index, or None. Raises UserError: broken, or of another model."""
    from probemb.metrics import PrecisionCurve

    path = folder / NAME
    if not path.exists():
        return None
    again = f"Make it again with `python -m tools.search --index {folder} --calibrate DATA`."
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != 1:
            raise ValueError("another format")
        curves = {int(parts): PrecisionCurve(**curve) for parts, curve in content["curves"].items()}
        names = ("kind", "weights", "data", "gallery", "rivals", "within")
        calibration = Calibration(curves=curves, **{name: content[name] for name in names})
        if content.get("tolerance") is not None:
            calibration = replace(calibration, tolerance=float(content["tolerance"]))
        if not curves or not all(is_curve(curve) for curve in curves.values()):
            raise ValueError("no curves")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{path} is not a calibration.", again) from None
    if calibration.weights != weights:
        raise UserError(
            f"{path} was made with other weights ({calibration.weights[:12]}) than the index ({weights[:12]}).", again
        )
    return calibration


def is_curve(curve: PrecisionCurve) -> bool:
    """Whether a curve read from JSON holds lists of numbers of equal length."""
    lists = (curve.threshold, curve.coverage, curve.precision, curve.at_least)
    whole = all(isinstance(one, list) and len(one) == len(curve.threshold) > 0 for one in lists)
    return whole and all(type(x) in (int, float) for one in lists for x in one)
