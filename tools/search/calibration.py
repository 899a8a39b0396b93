"""Calibration of an index: the score by which queries are refused, and how precise the answers of the others are.

One curve per number of query parts: thresholds, the share of queries that they answer, the share of correct answers,
and its lower bound; and a test of every score in `scoring.py`, whether refusing by it gains anything. Where the chosen
score does not beat chance, no precision is promised. `calibrating.py` measures both.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from probemb.errors import UserError
from tools.search.scoring import SCORES

if TYPE_CHECKING:
    from probemb.metrics import PrecisionCurve

NAME = "calibration.json"
BETTER, CHANCE, WORSE = "better than chance", "chance", "worse than chance"
GENERATOR = "probemb tools.search --calibrate"
FORMAT = 2  # 1: thresholds of u, without tests


@dataclass(frozen=True)
class Calibration:
    """Content of INDEX/calibration.json.

    Attributes:
        kind: of the queries, "text" or "image".
        curves: number of parts -> PrecisionCurve.
        weights: digest of the model's weights.
        data, gallery: the validation set and its size.
        rivals, within: see `calibrate`.
        score: name in `scoring.SCORES` by which queries are refused; the curves' thresholds are of it.
        tests: number of parts -> score -> {"gain", "se" of `rejection_gain`, "verdict": BETTER, CHANCE or WORSE}; None
            for a file of format 1, which used u untested.
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
    score: str = "u"
    tests: dict[int, dict[str, dict]] | None = None
    tolerance: float | None = None

    def doubt(self, parts: int) -> str | None:
        """Reason that nothing is promised for queries of so many parts; None if something is."""
        if self.curves[parts].precision[-1] == 1:  # nothing needs to be refused
            return None
        if self.tests is None or self.tests[parts].get(self.score, {}).get("verdict") == BETTER:
            return None
        tests, queries = self.tests[parts], f"queries of {parts} {self.kind}{'' if parts == 1 else 's'}"
        better = [name for name in tests if tests[name]["verdict"] == BETTER]
        best = self.score if better and self.score in tests else max(tests, key=lambda name: tests[name]["gain"])
        against = [SCORES[name][0] for name, test in tests.items() if test["verdict"] == WORSE]
        who = f"the calibration's score, {SCORES[best][0]}, does not tell" if better else "no score tells"
        return (
            f"On {self.data} {who} better than chance which {queries} are answered correctly (gain of "
            f"{SCORES[best][0]} {tests[best]['gain']:+.3f} +- {tests[best]['se']:.3f}"
            f"{'; worse than chance: ' + ', '.join(against) if against else ''})"
        )

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
        """The score above which to refuse. Raises UserError: nothing is promised, or the precision is out of reach."""
        from probemb.metrics import highest_threshold

        curve = self.curve(kinds)
        if doubt := self.doubt(len(kinds)):
            raise UserError(
                f"{doubt}, so no precision is promised.",
                "Calibrate on more queries, or finetune so that u keeps its sign (docs/finetune.md).",
            )
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

    content = {"format": FORMAT, **asdict(calibration)}
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
        if content["format"] not in (1, FORMAT):
            raise ValueError("another format")
        curves = {int(parts): PrecisionCurve(**curve) for parts, curve in content["curves"].items()}
        names = ("kind", "weights", "data", "gallery", "rivals", "within")
        chosen = {} if content["format"] == 1 else {"score": content["score"], "tests": read_tests(content, curves)}
        calibration = Calibration(curves=curves, **{name: content[name] for name in names}, **chosen)
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


def read_tests(content: dict, curves: dict) -> dict[int, dict[str, dict]]:
    """The tests of a file, for every curve. Raises KeyError, TypeError or ValueError: they do not fit."""
    tests = {int(parts): found for parts, found in content["tests"].items()}
    if content["score"] not in SCORES or set(tests) != set(curves):
        raise ValueError("tests do not fit the curves")
    for found in tests.values():
        for name, test in found.items():
            numbers = all(type(test[key]) in (int, float) for key in ("gain", "se"))
            if name not in SCORES or not numbers or test["verdict"] not in (BETTER, CHANCE, WORSE):
                raise ValueError("no test of a score")
    return tests


def is_curve(curve: PrecisionCurve) -> bool:
    """True if a curve read from JSON holds lists of numbers of equal length."""
    lists = (curve.threshold, curve.coverage, curve.precision, curve.at_least)
    whole = all(isinstance(one, list) and len(one) == len(curve.threshold) > 0 for one in lists)
    return whole and all(type(x) in (int, float) for one in lists for x in one)
