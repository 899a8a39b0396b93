"""Match loss of PCME++, forward and backward, against the (B, B, D) broadcast.

    python -m tools.bench.loss --batch 1024 --dim 512
    python -m tools.bench.loss --ranks 8 --batch 512 --dim 512    # every objective against open_clip's losses

Aims: at most 0.01 of the broadcast's time, and memory of O(B^2). With --ranks (gloo processes of one thread on this
machine; --batch is of each): siglip and prolip take at most the time of open_clip's ring, in memory that does not grow
with the ranks.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional as F
from torch.utils.benchmark import Measurement

from pretrain.objectives import OBJECTIVES, Pairs
from probemb import Gaussian
from probemb.cli.command import Parser, run_command
from probemb.distributed import settle
from probemb.losses import LossOutput, pairwise_match_loss
from tools.bench.timing import in_turn, peak_memory, report, timer

PEERS = ("open_clip CLIP, gathered", "open_clip SigLIP, bidir", "open_clip SigLIP, shift")


def main() -> None:
    parser = Parser(prog="python -m tools.bench.loss", description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1, help="processes; with several, of --batch pairs each")
    options = parser.parse_args()
    if options.ranks > 1:
        compare_on_ranks(options.ranks, options.batch, options.dim, options.repeats)
    else:
        compare(options.batch, options.dim, options.repeats)


def compare(b: int, d: int, repeats: int, device: str = "cuda" if torch.cuda.is_available() else "cpu") -> None:
    """The match loss on one device."""
    variants = {"broadcast": broadcast_loss, "probemb": lambda x, y: pairwise_match_loss(x, y, scale=5, shift=5)}
    memory = {name: {"peak": _peak(f, b, d, device)} for name, f in variants.items()}
    memory["probemb"]["peak at 2B"] = _peak(variants["probemb"], 2 * b, d, device)
    runs = {name: step(loss, b, d, device) for name, loss in variants.items()}
    for ours, theirs in zip(runs["probemb"](), runs["broadcast"]()):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)
    measured = in_turn({name: timer(lambda _, run=run: run()) for name, run in runs.items()}, repeats)
    report(f"match loss, forward and backward, B = {b}, D = {d}, {device}", measured, "broadcast", memory)


def _peak(loss, b: int, d: int, device: str) -> str:
    """On the CPU in a process of its own."""

    def measure(*_) -> int:
        return peak_memory(step(loss, b, d, device), device)

    return _mib(measure() if device == "cuda" else on_ranks(1, measure)[0])


def step(loss, b: int, d: int, device: str):
    """A function that returns the loss and the gradients of both modalities' means and log-variances."""
    g = torch.Generator().manual_seed(0)
    leaves = [F.normalize(torch.randn(b, d, generator=g), dim=1) for _ in range(2)]
    leaves = [x.to(device).requires_grad_() for x in (*leaves, *(torch.randn(b, d, generator=g) - 6 for _ in range(2)))]

    def run():
        out = loss(Gaussian(leaves[0], leaves[2]), Gaussian(leaves[1], leaves[3])).loss
        return out, *torch.autograd.grad(out, leaves)

    return run


def broadcast_loss(image: Gaussian, text: Gaussian) -> LossOutput:
    """Eq. 1 and 2 of PCME++ literally: every pair and every dimension at once."""
    difference = image.mean[:, None, :] - text.mean[None, :, :]  # (B, B, D)
    variance = image.log_var.exp()[:, None, :] + text.log_var.exp()[None, :, :]  # (B, B, D)
    distance = (difference.square() + variance).sum(-1)
    match = torch.eye(len(distance), device=distance.device)
    return LossOutput(2 * F.binary_cross_entropy_with_logits(5 - 5 * distance, match))


def compare_on_ranks(world: int, batch: int, dim: int, repeats: int) -> None:
    """Every objective, timed on all ranks together; memory is what a rank's first call adds to its peak."""
    names = (*PEERS, *OBJECTIVES)
    memory = {name: {} for name in names}
    for name in names:
        for ranks in (world, 2):
            most = max(on_ranks(ranks, first_call, name, batch, dim))
            memory[name][f"memory, {ranks} ranks"] = _mib(most)
    measured = on_ranks(world, times, names, batch, dim, repeats)[0]
    title = f"losses on {world} ranks of {batch} pairs, D = {dim}, forward and backward"
    for peer in PEERS[:2]:
        report(title, measured, peer, memory)


def first_call(rank: int, world: int, name: str, batch: int, dim: int) -> int:
    """Bytes that it adds to this rank's peak."""
    rank_step(name, rank, world, 8, 8)()  # imports, and what gloo and autograd allocate once
    return peak_memory(rank_step(name, rank, world, batch, dim), "cpu")


def times(rank: int, world: int, names: tuple[str, ...], batch: int, dim: int, repeats: int) -> dict[str, Measurement]:
    """Every loss between two barriers."""
    runs = {name: rank_step(name, rank, world, batch, dim) for name in names}
    return in_turn({name: timer(lambda _, run=run: (run(), dist.barrier())) for name, run in runs.items()}, repeats)


def rank_step(name: str, rank: int, world: int, batch: int, dim: int):
    """A function that computes a loss and the gradients of this rank's embeddings."""
    from open_clip.loss import ClipLoss, SigLipLoss  # takes seconds to import

    warnings.simplefilter("ignore")  # torch's, of a function that open_clip calls
    g = torch.Generator().manual_seed(rank)
    means = [F.normalize(torch.randn(batch, dim, generator=g), dim=1).requires_grad_() for _ in range(2)]
    log_vars = [(torch.randn(batch, dim, generator=g) - 10).requires_grad_() for _ in range(2)]
    scale, bias = torch.tensor(10.0, requires_grad=True), torch.tensor(-10.0, requires_grad=True)

    def value():
        if name in OBJECTIVES:
            a, b = (scale / 2, scale + bias) if name in ("siglip", "prolip") else (scale, bias)
            pairs = Pairs(Gaussian(means[0], log_vars[0]), Gaussian(means[1], log_vars[1]), scale, a, b)
            return OBJECTIVES[name]()(pairs).loss
        if name == PEERS[0]:
            loss = ClipLoss(local_loss=True, gather_with_grad=True, rank=rank, world_size=world)
            return loss(*means, scale)
        return SigLipLoss(rank=rank, world_size=world, dist_impl=name.split()[-1])(*means, scale, bias)

    return lambda: torch.autograd.grad(value(), [*means, *log_vars, scale, bias], allow_unused=True)


def on_ranks(world: int, fn, *args) -> list:
    """The results of fn(rank, world, *args) in rank order, in processes forked from this one, with gloo."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (world, folder, fn, args), nprocs=world, start_method="fork")
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(world)]


def _rank(rank: int, world: int, folder: str, fn, args: tuple) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=f"{rank}", WORLD_SIZE=f"{world}", LOCAL_RANK=f"{rank}")  # DeepSpeed reads them
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(fn(rank, world, *args)))
    dist.barrier()
    settle()
    dist.destroy_process_group()


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


if __name__ == "__main__":
    run_command(main)
