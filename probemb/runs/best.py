"""The best checkpoint of a run by a metric, named in best.json of the run folder."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from probemb.files import replace_text
from probemb.runs.checkpoints import complete_steps

NAME = "best.json"


@dataclass
class Best:
    """The steps that were the best of the run when they were evaluated, by a metric's name in the log.

    `values`, by step, are each better than the one before: lower for a loss, else higher. The last is the best.
    """

    metric: str
    values: dict[int, float] = field(default_factory=dict)

    @property
    def step(self) -> int | None:
        """The best step so far."""
        return next(reversed(self.values), None)

    def add(self, step: int, value: float) -> bool:
        """Note the value of a later step, if it is the best so far; returns whether it is. NaN never is."""
        sign = -1 if self.metric.endswith("loss") else 1
        is_best = sign * value > (sign * self.values[self.step] if self.values else float("-inf"))
        if is_best:
            self.values[step] = value
        return is_best

    def write(self, run: Path) -> None:
        """Write best.json. Raises OSError."""
        steps = [{"step": step, "value": value} for step, value in self.values.items()]
        replace_text(run / NAME, json.dumps({"metric": self.metric, "steps": steps}, indent=1) + "\n")


def read_best(run: Path) -> Best | None:
    """The best of a run; None without best.json, or if it is damaged."""
    try:
        content = json.loads((run / NAME).read_text(encoding="utf-8"))
        return Best(str(content["metric"]), {int(one["step"]): float(one["value"]) for one in content["steps"]})
    except (OSError, ValueError, LookupError, TypeError):
        return None


def best_until(run: Path, step: int) -> Best | None:
    """The best of a run that resumes from `step`, without later steps and those that have no whole checkpoint."""
    if best := read_best(run):
        complete = complete_steps(run)
        best.values = {s: value for s, value in best.values.items() if s <= step and s in complete}
    return best if best and best.values else None
