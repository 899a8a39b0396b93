"""Time variants in turn within one run, so that their ratios hold on a noisy machine, and measure memory."""

from __future__ import annotations

import gc
import os
import resource
import statistics
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.benchmark import Measurement, Timer
from torch.utils.benchmark.utils.timer import timer as default_timer

Variant = Callable[[], object]


def timer(run: Callable, setup: Callable[[], object] = lambda: None, clock: Callable = default_timer) -> Timer:
    """Times run(x) by the clock, x a fresh setup() that is not timed."""
    variables = {"run": run, "setup": setup}
    return Timer("run(x)", "x = setup()", timer=clock, globals=variables, num_threads=torch.get_num_threads())


def in_turn(timers: dict[str, Timer], repeats: int) -> dict[str, Measurement]:
    """Seconds of every repeat, after two warm-up calls; a slow moment of the machine hits all variants."""
    turns = [{name: timed.timeit(1) for name, timed in timers.items()} for _ in range(repeats)]
    return {name: Measurement.merge([turn[name] for turn in turns])[0] for name in timers}


def ratio(measured: dict[str, Measurement], name: str, peer: str) -> float:
    """Time of a variant over the peer's: the median over turns, as both ran at about the same time."""
    return statistics.median(a / b for a, b in zip(measured[name].times, measured[peer].times))


def report(title: str, measured: dict[str, Measurement], peer: str, extra: dict[str, dict[str, str]] | None = None):
    """Print median, interquartile range, and time over the peer's; `extra` has more columns by variant."""
    extra = extra or {}
    more = list(dict.fromkeys(column for values in extra.values() for column in values))
    table = Table(title=f"{title}\n{machine()}", title_justify="left")
    for column in ("variant", "median", "IQR", f"time / {peer}", *more):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for name, times in measured.items():
        cells = [f"{times.median:.4g} s", f"{times.iqr:.2g}", f"{ratio(measured, name, peer):.3f}"]
        table.add_row(name, *cells, *(extra.get(name, {}).get(column, "") for column in more))
    Console(width=None if Console().is_terminal else 140).print(table)


def machine() -> str:
    """The hardware and torch's version."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{gpu}, {os.cpu_count()} CPU cores, {torch.get_num_threads()} threads, torch {torch.__version__}"


def peak_memory(run: Variant, device: str) -> int:
    """Bytes that a run adds to the peak of the GPU's allocator, or of this process: a new one (`loss.on_ranks`)."""
    if device == "cuda":
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
    before = _peak(device)
    run()
    return _peak(device) - before


def _peak(device: str) -> int:
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
