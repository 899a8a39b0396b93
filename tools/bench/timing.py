"""Time variants in turn within one run, so that their ratios hold on a noisy machine, and measure memory."""

import gc
import os
import pickle
import resource
import statistics
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.benchmark import Measurement, Timer
from torch.utils.benchmark.utils.timer import timer as default_timer

from probemb.cli.command import Parser
from probemb.distributed import leave_process_group

Variant = Callable[..., object]


def options(doc: str, **defaults) -> Namespace:
    """The command line: --NAME of each default's type, of a list's items several; False: a switch."""
    parser = Parser(prog=f"python -m {sys.modules['__main__'].__spec__.name}", description=doc.splitlines()[0])
    for name, default in defaults.items():
        many = isinstance(default, list)
        kind = {"type": type(default[0] if many else default), "default": default, "nargs": "*" if many else None}
        kind = {"action": "store_true"} if default is False else kind
        parser.add_argument(f"--{name.replace('_', '-')}", help="(default: %(default)s)", **kind)
    return parser.parse_args()


def in_turn(
    variants: Mapping[str, Variant], repeats: int, start: Mapping[str, Callable] | None = None, clock=default_timer
) -> dict[str, Measurement]:
    """Seconds of every repeat, after two warm-up calls; a slow moment of the machine hits all variants.

    `start`: of each variant, a function that gives its arguments and is not timed.
    """
    timers, threads = {}, torch.get_num_threads()
    for name, run in variants.items():
        known = {"run": run, "start": start[name] if start else tuple}
        timers[name] = Timer("run(*given)", "given = start()", timer=clock, globals=known, num_threads=threads)
    turns = [{name: timed.timeit(1) for name, timed in timers.items()} for _ in range(repeats)]
    return {name: Measurement.merge([turn[name] for turn in turns])[0] for name in timers}


def ratio(measured: Mapping[str, Measurement], name: str, peer: str) -> float:
    """Time of a variant over the peer's: the median over turns, as both ran at about the same time."""
    return statistics.median(a / b for a, b in zip(measured[name].times, measured[peer].times))


def report(title: str, measured: Mapping[str, Measurement], peer: str, extra: Mapping[str, Mapping[str, str]] = {}):
    """Print median, interquartile range, and time over the peer's; `extra` has more columns by variant."""
    rows = {name: {"median": f"{times.median:.4g} s", "IQR": f"{times.iqr:.2g}"} for name, times in measured.items()}
    for name, row in rows.items():
        row |= {f"time / {peer}": f"{ratio(measured, name, peer):.3f}", **extra.get(name, {})}
    show(title, rows)


def show(title: str, rows: Mapping[str, Mapping[str, str]]) -> None:
    table = pd.DataFrame.from_dict(rows, orient="index").fillna("")
    print(title, machine(), table.to_string(), "", sep="\n", flush=True)


def machine() -> str:
    """The hardware and torch's version."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{gpu}, {os.cpu_count()} CPU cores, {torch.get_num_threads()} threads, torch {torch.__version__}"


def peak_memory(run: Callable, device: str) -> tuple[Any, int]:
    """Its result, and what it adds to the peak, in bytes: the GPU allocator's, or that of this process, a new one."""
    if device == "cuda":
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
    before = _peak(device)
    result = run()
    return result, _peak(device) - before


def _peak(device: str) -> int:
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def on_ranks(world: int, fn: Callable, *args) -> list:
    """The results of fn(rank, world, *args) in rank order, in processes forked from this one, with gloo."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (world, folder, fn, args), nprocs=world, start_method="fork")
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(world)]


def _rank(rank: int, world: int, folder: str, fn: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    if world > 1:
        os.environ.update(RANK=f"{rank}", WORLD_SIZE=f"{world}", LOCAL_RANK=f"{rank}")  # DeepSpeed reads them
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(fn(rank, world, *args)))
    if world > 1:  # else it may be the group of the process that forked this one
        dist.barrier()
        leave_process_group()
