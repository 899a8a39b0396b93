"""The best checkpoint of a run by a metric, named in best.json of the run folder."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from probemb.errors import UserError
from probemb.files import replace_text
from probemb.runs.checkpoints import read_content

NAME = "best.json"


@dataclass
class Best:
    """The steps that were the best of the run when they were evaluated.

    Args:
        metric: its name in the log.
        lower: whether lower values are better.
        values: by step, each better than the one before; the last is the best.
    """

    metric: str
    lower: bool = False
    values: dict[int, float] = field(default_factory=dict)

    @property
    def step(self) -> int | None:
        """The best step so far."""
        return next(reversed(self.values), None)

    def add(self, step: int, value: float) -> bool:
        """Note the value of a later step, if it is the best so far; returns whether it is. NaN never is."""
        if self.values:
            best = self.values[self.step]
            is_best = value < best if self.lower else value > best
        else:
            is_best = value == value
        if is_best:
            self.values[step] = value
        return is_best

    def add_logged(self, step: int, rows: list[dict]) -> bool:
        """`add` what the log has of a step, unless that was noted; returns whether it is the best."""
        values = [row[self.metric] for row in rows if self.metric in row]
        return bool(values) and step not in self.values and self.add(step, values[0])

    def text(self) -> str:
        """The content of best.json."""
        steps = [{"step": step, "value": value} for step, value in self.values.items()]
        return json.dumps({"metric": self.metric, "lower_is_better": self.lower, "steps": steps}, indent=1) + "\n"

    def write(self, run: Path) -> None:
        """Write best.json. Raises OSError."""
        replace_text(run / NAME, self.text())


def recorded_steps(run: Path) -> list[int]:
    """The steps in best.json, the best last; empty if it is missing or damaged."""
    best = _read(run)
    return list(best.values) if best else []


def read_best(run: Path, step: int) -> Best | None:
    """The best of a run that resumes from `step`: later steps, and those without a whole checkpoint, are left out.

    None without any, or if best.json is missing or damaged.
    """
    best = _read(run)
    if best is None:
        return None
    best.values = {s: value for s, value in best.values.items() if s <= step and _is_whole(run, s)}
    return best if best.values else None


def _read(run: Path) -> Best | None:
    try:
        content = json.loads((run / NAME).read_text(encoding="utf-8"))
        values = {int(one["step"]): float(one["value"]) for one in content["steps"]}
        return Best(str(content["metric"]), bool(content["lower_is_better"]), values)
    except (OSError, ValueError, LookupError, TypeError, RecursionError, OverflowError):
        return None


def _is_whole(run: Path, step: int) -> bool:
    try:
        read_content(run / "checkpoints" / f"step-{step}")
    except UserError:
        return False
    return True
