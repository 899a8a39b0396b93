"""The checks by name: where they are, how long they may take, and whether the GPU must be theirs alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from tools.bench.gpu.notes import Notes, Place

AT_ONCE = 4  # checks that share the GPU; timings run alone, after them


@dataclass(frozen=True)
class Check:
    """A check.

    Attributes:
        function: "module.function" in this package; takes (place, notes).
        seconds: it may take, start included, in the run of 9 minutes.
        alone: nothing runs beside it, because it measures time.
    """

    function: str
    seconds: int
    alone: bool = False

    def load(self) -> Callable[[Place, Notes], None]:
        """The function; imports its module."""
        module, _, name = self.function.rpartition(".")
        return getattr(import_module(f"tools.bench.gpu.{module}"), name)


CHECKS = {  # the longest first
    "compile": Check("compiling.objectives", 150),
    "resume": Check("stages.exact_resume", 100),
    "precision": Check("training.precision", 90),
    "engine": Check("training.engine", 90),
    "memory": Check("memory.against_the_plan", 90),
    "finetune": Check("stages.finetuning", 80),
    "faiss": Check("stages.search_on_the_gpu", 70),
    "devices": Check("devices.placement", 60),
    "attention": Check("devices.attention", 45),
    "decoding": Check("loading.decoding", 60),
    "waits": Check("waits.host_waits", 60),
    "loader": Check("loading.loader", 55, alone=True),
    "speed-B-32": Check("throughput.vit_b_32", 45, alone=True),
    "speed-B-16": Check("throughput.vit_b_16", 125, alone=True),
    "speed-L-14": Check("throughput.vit_l_14", 65, alone=True),
}


def longest(checks: dict[str, Check], at_once: int) -> int:
    """Seconds that the checks need at most: each one's whole time, in order, `at_once` beside each other."""
    lanes = [0] * at_once
    for check in checks.values():
        if not check.alone:
            lanes[lanes.index(min(lanes))] += check.seconds
    return max(lanes) + sum(check.seconds for check in checks.values() if check.alone)
