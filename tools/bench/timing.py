"""Time variants in turn within one run, so that ratios hold on a noisy machine; measure memory; report."""

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


def time_in_turn(
    variants: dict[str, Variant], repeats: int, warmup: int = 1, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of every repeat; the variants take turns, so a slow moment of the machine hits all of them."""
    for _ in range(warmup):
        for run in variants.values():
            run()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, run in variants.items():
            synchronize()
            start = clock()
            run()
            synchronize()
            seconds[name].append(clock() - start)
    return seconds


def device() -> str:
    """ "cuda" or "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def assert_equal(first: Variant, second: Variant, atol: float = 1e-6) -> None:
    """Check that two variants give the same (loss, gradients): only then is a comparison of their speed fair."""
    import torch

    (loss_a, grads_a), (loss_b, grads_b) = first(), second()
    torch.testing.assert_close(loss_a, loss_b, rtol=1e-4, atol=atol)
    for x, y in zip(grads_a, grads_b):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=atol)


def peak_memory(make: Callable[[], Variant]) -> int:
    """Bytes that the variant's first run adds to the peak: of the GPU's allocator, or else of a forked process.

    Must come before this process computes with several threads, after which a forked one would hang.
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
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    # Pair by pair, because both ran at about the same time.
    ratios = {name: statistics.median(a / b for a, b in zip(times, seconds[peer])) for name, times in seconds.items()}
    for name, values in seconds.items():
        row = [f"{medians[name]:.4g} s", f"{min(values):.4g}", f"{max(values):.4g}", f"{ratios[name]:.3f}"]
        table.add_row(name, *row, *(str(extra.get(name, {}).get(c, "")) for c in columns))
    console = Console()
    console.print(table)
    console.print(f"target: {target}")
    record = {"title": title, "peer": peer, "median_s": medians, "ratio": ratios, "extra": extra}
    print(json.dumps(record | {"base_s": medians[peer], "torch": torch.__version__}))


def machine() -> str:
    """The hardware and torch version."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    model = platform.processor() or platform.machine()
    return f"{os.cpu_count()} CPU cores ({model}), {torch.get_num_threads()} threads, torch {torch.__version__}"
