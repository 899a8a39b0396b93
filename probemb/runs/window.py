"""Means and speed over the steps between two log lines."""

import resource
import time
from collections.abc import Callable

import torch
from torch import Tensor

from probemb import distributed


class Window:
    """Means over the steps between two log lines; scalars stay on the device until then.

    Args:
        unit: the items of a batch, for the name of the speed: "images" gives images_per_second.
        waited: seconds spent waiting for data so far.
        device: of the scalars.
        state: from `state`, of the run that this one resumes.
    """

    def __init__(self, unit: str, waited: Callable[[], float], device: torch.device | str = "cpu", state=None):
        self.unit, self.waited, self.device = unit, waited, torch.device(device)
        self.restart()
        if state:
            self.sums = {name: value.to(device) for name, value in state["sums"].items()}
            self.counts = dict(state["counts"])

    def restart(self) -> None:
        """Drop all sums and restart the clock."""
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}
        self.restart_clock()

    def restart_clock(self) -> None:
        self.n, self.began, self.waited_before = 0, time.perf_counter(), self.waited()
        self.last = self.began

    def skip_time(self) -> None:
        """Leave out the time since the last step."""
        self.began += time.perf_counter() - self.last

    def add(self, terms: dict[str, Tensor | float] | None) -> None:
        """Add one step's detached scalars, which may differ between steps; None for a skipped step."""
        self.n, self.last = self.n + 1, time.perf_counter()
        for name, value in (terms or {}).items():
            self.sums[name] = self.sums[name] + value if name in self.sums else torch.as_tensor(value)
            self.counts[name] = self.counts.get(name, 0) + 1

    def state(self) -> dict:
        """{"sums": CPU tensors by name, "counts": numbers of steps}, for a checkpoint between two log lines.

        Copies: after one step a loss and its only term may be one tensor, which a file cannot hold under two names.
        """
        sums = {name: value.detach().to("cpu", copy=True) for name, value in self.sums.items()}
        return {"sums": sums, "counts": dict(self.counts)}

    def close(self, batch_size: int, steps_left: int) -> dict[str, float]:
        """`read`, then restart."""
        values = self.read(batch_size, steps_left)
        self.restart()
        return values

    def read(self, batch_size: int, steps_left: int) -> dict[str, float]:
        """Means over steps and ranks; samples/s over all ranks, share of time waiting for data, ETA in s; memory: the
        bytes that a rank has used at most so far (on a GPU its own, on a CPU the process'). tokens/s over all ranks,
        if the terms have "text_tokens", the tokens of each text that a step computes.

        Has no means if every step was skipped. Collective.
        """
        sums = [self.sums[name].to(self.device).double().reshape(()) / n for name, n in self.counts.items()]
        means = dict(zip(self.counts, torch.stack(sums).tolist() if sums else []))
        seconds = time.perf_counter() - self.began
        waited = (self.waited() - self.waited_before) / seconds
        values = distributed.mean_over_ranks(means | {"data_wait": waited}, self.device)
        values["memory"] = distributed.max_over_ranks(_peak_memory(self.device), self.device)
        values |= {f"{self.unit}_per_second": self.n * batch_size / seconds, "eta": steps_left * seconds / self.n}
        if "text_tokens" in values:
            values["tokens_per_second"] = values["text_tokens"] * self.n * batch_size / seconds
        return values


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
