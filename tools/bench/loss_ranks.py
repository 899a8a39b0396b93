"""Contrastive losses on several ranks, forward and backward: time of all ranks together, memory of one.

python -m tools.bench.loss --ranks 8 --batch 512 --dim 512        # batch: of each rank

Peers are open_clip's losses: CLIP's with gathered features, and SigLIP's ring in both of its forms. Ranks are processes
with gloo and one thread each, on one machine. The ratio of memory is of what a rank's first call adds to its peak.
"""

from __future__ import annotations

import json
import resource
import statistics
import tempfile
import time
import warnings
from multiprocessing import get_context

PEERS = ("open_clip CLIP, gathered", "open_clip SigLIP, bidir", "open_clip SigLIP, shift")
OURS = ("clip", "pcmepp", "siglip", "prolip")


def measure(world: int, batch: int, dim: int, repeats: int) -> dict[str, dict]:
    """{name: {"seconds": one a repeat, "bytes": that the first call adds to the peak of the rank with the most}}."""
    found = {name: {"bytes": max(_on_ranks(world, _memory, name, batch, dim))} for name in (*PEERS, *OURS)}
    for name, seconds in _on_ranks(world, _times, (*PEERS, *OURS), batch, dim, repeats)[0].items():
        found[name]["seconds"] = seconds
    return found


def report(world: int, batch: int, dim: int, repeats: int) -> None:
    """Print the table, and the same as one line of JSON."""
    from rich.console import Console
    from rich.table import Table

    from tools.bench.timing import machine

    found = measure(world, batch, dim, repeats)
    few = {name: max(_on_ranks(2, _memory, name, batch, dim)) for name in (*PEERS, *OURS)}
    title = f"losses on {world} ranks of {batch} pairs, D = {dim}, forward and backward\n{machine()}"
    table = Table(title=title, title_justify="left")
    for heading in ("loss", "median", f"time / {PEERS[0]}", f"time / {PEERS[1]}", "memory", "of 2 ranks"):
        table.add_column(heading, justify="left" if heading == "loss" else "right")
    for name, values in found.items():
        values["memory_of_two"] = few[name]
        values["ratios"] = [
            statistics.median(a / b for a, b in zip(values["seconds"], found[peer]["seconds"])) for peer in PEERS[:2]
        ]
        shown = (f"{ratio:.2f}" for ratio in values["ratios"])
        memory = (f"{size / 2**20:,.0f} MiB" for size in (values["bytes"], few[name]))
        table.add_row(name, f"{statistics.median(values['seconds']):.3g} s", *shown, *memory)
    console = Console(width=130)
    console.print(table)
    console.print("target: siglip and prolip in at most the time of open_clip's ring, in memory that does not grow")
    print(json.dumps({"world": world, "batch": batch, "dim": dim, "found": found}))


def step(name: str, rank: int, world: int, batch: int, dim: int):
    """A closure that computes a loss and the gradients of this rank's embeddings."""
    import torch
    from torch.nn import functional as F

    from probemb import Gaussian

    g = torch.Generator().manual_seed(rank)
    means = [F.normalize(torch.randn(batch, dim, generator=g), dim=1).requires_grad_() for _ in range(2)]
    log_vars = [(torch.randn(batch, dim, generator=g) - 10).requires_grad_() for _ in range(2)]
    scale, bias = torch.tensor(10.0, requires_grad=True), torch.tensor(-10.0, requires_grad=True)

    def value():
        if name in OURS:
            from pretrain.objectives import OBJECTIVES, Pairs

            objective = OBJECTIVES[name]
            a, b = (scale / 2, scale + bias) if name in ("siglip", "prolip") else (scale, bias)
            pairs = Pairs(Gaussian(means[0], log_vars[0]), Gaussian(means[1], log_vars[1]), scale, a, b)
            return objective(objective.Options())(pairs).loss
        from open_clip.loss import ClipLoss, SigLipLoss

        if "CLIP," in name:
            loss = ClipLoss(local_loss=True, gather_with_grad=True, rank=rank, world_size=world)
            return loss(*means, scale)
        return SigLipLoss(rank=rank, world_size=world, dist_impl=name.split()[-1])(*means, scale, bias)

    def run() -> None:
        value().backward()
        for leaf in (*means, *log_vars, scale, bias):
            leaf.grad = None

    return run


def _memory(rank: int, world: int, name: str, batch: int, dim: int) -> int:
    step(name, rank, world, 8, 8)()  # imports, and what gloo and autograd allocate once
    run = step(name, rank, world, batch, dim)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run()
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def _times(rank: int, world: int, names: tuple[str, ...], batch: int, dim: int, repeats: int) -> dict[str, list[float]]:
    import torch.distributed as dist

    variants = {name: step(name, rank, world, batch, dim) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats + 1):
        for name, run in variants.items():
            dist.barrier()
            began = time.perf_counter()
            run()
            dist.barrier()
            if repeat:  # the first is for warming up
                seconds[name].append(time.perf_counter() - began)
    return seconds


def _on_ranks(world: int, fn, *args) -> list:
    """fn(rank, world, *args) in processes that form a gloo group; the results in rank order.

    They are forked from this one, which has imported everything and computed nothing.
    """
    import open_clip.loss  # noqa: F401
    import torch  # noqa: F401

    import probemb.losses  # noqa: F401

    context = get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        ranks = [
            context.Process(target=_rank, args=(send, f"{folder}/store", rank, world, fn, args))
            for rank, (_, send) in enumerate(pipes)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise RuntimeError(f"a rank of {world} failed")
        return [receive.recv() for receive, _ in pipes]


def _rank(send, store: str, rank: int, world: int, fn, args) -> None:
    import torch
    import torch.distributed as dist

    from probemb.distributed import settle

    warnings.simplefilter("ignore")  # torch's, of a function that open_clip calls
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    send.send(fn(rank, world, *args))
    dist.barrier()
    settle()
    dist.destroy_process_group()
