"""What the benchmarks share: variants timed in turn in one run, so that ratios hold on a noisy machine."""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable
from multiprocessing import get_context

Variant = Callable[[], object]


def time_in_turn(variants: dict[str, Variant], repeats: int, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds of every repeat; the variants take turns, so a slow moment of the machine hits all of them."""
    for _ in range(warmup):
        for run in variants.values():
            run()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, run in variants.items():
            synchronize()
            start = time.perf_counter()
            run()
            synchronize()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_memory(make: Callable[[], Variant]) -> int:
    """Bytes that the variant's first run adds to the peak: on a GPU that of its allocator, else of a fresh process.

    To be measured before this process has computed with several threads: what is forked from it then waits for ever.
    """
    import torch

    if torch.cuda.is_available():
        run = make()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    context = get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_measure_peak, args=(make, send))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"the measured process ended with code {process.exitcode}")
    return receive.recv()


def _measure_peak(make: Callable[[], Variant], send) -> None:
    run = make()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run()
    send.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)


def report(
    title: str, seconds: dict[str, list[float]], peer: str, target: str, extra: dict[str, dict] | None = None
) -> None:
    """A table of medians with the ratio to the peer, and the same as one line of JSON."""
    import torch
    from rich.console import Console
    from rich.table import Table

    extra = extra or {}
    columns = list(dict.fromkeys(key for values in extra.values() for key in values))
    table = Table(title=f"{title}\n{machine()}", title_justify="left")
    for name in ("variant", "median", "min", "max", f"time / {peer}", *columns):
        table.add_column(name, justify="left" if name == "variant" else "right")
    base = statistics.median(seconds[peer])
    for name, values in seconds.items():
        # pair by pair, as both ran in the same moment of the machine
        ratio = statistics.median(mine / other for mine, other in zip(values, seconds[peer]))
        row = [f"{statistics.median(values):.4g} s", f"{min(values):.4g}", f"{max(values):.4g}", f"{ratio:.3f}"]
        table.add_row(name, *row, *(str(extra.get(name, {}).get(c, "")) for c in columns))
    console = Console()
    console.print(table)
    console.print(f"target: {target}")
    record = {"title": title, "peer": peer, "median_s": {n: statistics.median(v) for n, v in seconds.items()}}
    ratios = {n: statistics.median(a / b for a, b in zip(v, seconds[peer])) for n, v in seconds.items()}
    print(json.dumps(record | {"ratio": ratios, "extra": extra, "base_s": base, "torch": torch.__version__}))


def machine() -> str:
    """What the figures were measured on."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    model = platform.processor() or platform.machine()
    return f"{os.cpu_count()} CPU cores ({model}), {torch.get_num_threads()} threads, torch {torch.__version__}"
