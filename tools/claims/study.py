"""Study: a world and the trainings in it, as `tools.claims` runs, resumes and reports any of them.

A study owns its settings, its plan, its trainings and its findings; queue, resuming, verdicts and the page are shared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from pathlib import Path

    from tools.claims.queue import Archive
    from tools.claims.verdicts import Found

Tell = Callable[[str], object]


class Study(ABC):
    """One world.

    Attributes:
        settings: a dataclass; trainings of different settings do not share a folder.
        title, reading: heading of the page, and how its numbers are to be read.
        metric: name of the validation metric that selects the epoch; `percent` times it is printed.
        modules: imported once, before workers are forked.
    """

    settings: Any
    title: ClassVar[str]
    reading: ClassVar[str]
    metric: ClassVar[str]
    percent: ClassVar[float] = 1.0
    modules: ClassVar[tuple[str, ...]] = ("accelerate", "timm.optim")

    @abstractmethod
    def plan(self, seeds: Sequence[int]) -> list:
        """All trainings in the order of their start: dataclasses with at least `name` and `seed`."""

    @abstractmethod
    def identity(self, training) -> dict:
        """Everything that a training depends on besides the settings."""

    @abstractmethod
    def prepare(self, seeds: Sequence[int], out: Path, tell: Tell) -> Any:
        """The world that forked workers inherit."""

    @abstractmethod
    def step_cost(self, training) -> float:
        """Cost of a training's step, in steps of InfoNCE."""

    @abstractmethod
    def steps(self, world: Any, training) -> float:
        """Cost of a training, in steps of InfoNCE."""

    def steps_before(self, training, archive: Archive) -> float:
        """The share of `steps` that an interrupted training resumes behind; 0 where trainings begin anew."""
        return 0.0

    def starting_steps(self, world: Any) -> float:
        """Cost of the pretraining that a seed's trainings start from; 0 for none."""
        return 0.0

    def pretrain(self, world: Any, seed: int, step_done: Callable[[], object]) -> dict:
        """The weights that all trainings of a seed start from."""
        raise NotImplementedError

    @abstractmethod
    def train(
        self, world: Any, training, start: dict | None, step_done: Callable[[], object], archive: Archive, test: bool
    ) -> dict:
        """Train and measure: plain numbers, "validation" among them; `test` False measures nothing else."""

    def interrupt(self) -> None:  # noqa: B027
        """End the processes that this worker's training has started: the command was killed."""

    def measure_again(self, world: Any, training, found: dict, archive: Archive) -> dict:
        """Measurements that `--report` repeats on a finished training; by default what is kept."""
        return found

    @abstractmethod
    def judge(self, found: Found, archive: Archive) -> list[dict]:
        """The claims, each with "title", "claim", "head", "rows", "comparisons" and "notes"."""

    @abstractmethod
    def charts(self, found: Found, claims: list[dict]) -> list[list]:
        """The charts of every claim."""

    @abstractmethod
    def describe(self, trainings: int, seeds: Sequence[int]) -> str:
        """The trainings and their data, in two sentences."""

    @abstractmethod
    def choose(self, out: Path, workers: int) -> None:
        """Compare loss scalars and learning rates on validation data, and print."""
