"""Match loss of PCME++, forward and backward, against the (B, B, D) broadcast.

    python -m tools.bench.loss --batch 1024 --dim 512
    python -m tools.bench.loss --ranks 8 --batch 512 --dim 512    # every objective against open_clip's losses

Aims: at most 1/150 of the broadcast's time, and memory of O(B^2). With --ranks (gloo processes of one thread on this
machine; --batch is of each): siglip and prolip take at most the time of open_clip's ring, in memory that does not grow
with the ranks.
"""

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from open_clip.loss import ClipLoss, SigLipLoss
from torch import Tensor
from torch.nn import functional as F
from torch.utils.benchmark import Measurement

from pretrain.objectives import OBJECTIVES, Pairs
from probemb import Gaussian
from probemb.cli.command import run_command
from probemb.losses import pairwise_match_loss
from tools.bench.timing import Variant, in_turn, on_ranks, options, peak_memory, report

BROADCAST, OURS = "broadcast", "probemb"
PEERS = ("open_clip CLIP, gathered", "open_clip SigLIP, bidir", "open_clip SigLIP, shift")


def main() -> None:
    o = options(__doc__, batch=1024, dim=512, repeats=3, ranks=1)
    if o.ranks > 1:
        compare_on_ranks(o.ranks, o.batch, o.dim, o.repeats)
    else:
        compare(o.batch, o.dim, o.repeats)


def compare(b: int, d: int, repeats: int, device: str = "cuda" if torch.cuda.is_available() else "cpu") -> None:
    """The match loss on one device."""

    def peak(name: str, b: int) -> str:  # on the CPU in a process of its own
        args = name, b, d, device
        return _mib(first_call(0, 1, *args) if device == "cuda" else on_ranks(1, first_call, *args)[0])

    memory = {BROADCAST: {"peak": peak(BROADCAST, b)}, OURS: {"peak": peak(OURS, b), "peak at 2B": peak(OURS, 2 * b)}}
    runs = {name: gradients(name, 0, 1, b, d, device) for name in (BROADCAST, OURS)}
    torch.testing.assert_close(runs[OURS](), runs[BROADCAST](), rtol=1e-3, atol=1e-6)
    measured = in_turn(runs, repeats)
    report(f"match loss, forward and backward, B = {b}, D = {d}, {device}", measured, BROADCAST, memory)


def compare_on_ranks(world: int, batch: int, dim: int, repeats: int) -> None:
    """Every objective, timed on all ranks together; memory is what a rank's first call adds to its peak."""
    names = (*PEERS, *OBJECTIVES)
    most = {(name, ranks): max(on_ranks(ranks, first_call, name, batch, dim)) for name in names for ranks in (world, 2)}
    memory = {name: {f"memory, {n} ranks": _mib(most[name, n]) for n in (world, 2)} for name in names}
    measured = on_ranks(world, times, names, batch, dim, repeats)[0]
    title = f"losses on {world} ranks of {batch} pairs, D = {dim}, forward and backward"
    for peer in PEERS[:2]:
        report(title, measured, peer, memory)


def first_call(rank: int, world: int, name: str, batch: int, dim: int, device: str = "cpu") -> int:
    """Bytes that it adds to this rank's peak."""
    gradients(name, rank, world, 8, 8, device)()  # imports, and what gloo and autograd allocate once
    return peak_memory(gradients(name, rank, world, batch, dim, device), device)[1]


def times(rank: int, world: int, names: tuple[str, ...], batch: int, dim: int, repeats: int) -> dict[str, Measurement]:
    """Every loss between two barriers."""
    runs = {name: gradients(name, rank, world, batch, dim) for name in names}
    return in_turn({name: lambda run=run: (run(), dist.barrier()) for name, run in runs.items()}, repeats)


def gradients(name: str, rank: int, world: int, b: int, d: int, device: str = "cpu") -> Variant:
    """A function that computes a loss and its gradients by this rank's means and log-variances, scale and bias."""
    warnings.simplefilter("ignore")  # torch's, of a function that open_clip calls
    g, loss = torch.Generator().manual_seed(rank), loss_of(name, rank, world)
    leaves = [F.normalize(torch.randn(b, d, generator=g), dim=1) for _ in range(2)]
    leaves += [torch.randn(b, d, generator=g) - 6 for _ in range(2)] + [torch.tensor(10.0), torch.tensor(-10.0)]
    image, text, *log_vars, scale, bias = leaves = [leaf.to(device).requires_grad_() for leaf in leaves]

    def run() -> tuple:
        value = loss(Gaussian(image, log_vars[0]), Gaussian(text, log_vars[1]), scale, bias)
        return value, *torch.autograd.grad(value, leaves, allow_unused=True)

    return run


def loss_of(name: str, rank: int, world: int) -> Callable[[Gaussian, Gaussian, Tensor, Tensor], Tensor]:
    """The loss of images, texts, the scale and the bias of logits."""
    if name == BROADCAST:
        return broadcast_loss
    if name == OURS:
        return lambda image, text, scale, bias: pairwise_match_loss(image, text, scale=scale, shift=-bias).loss
    if name == PEERS[0]:
        clip = ClipLoss(local_loss=True, gather_with_grad=True, rank=rank, world_size=world)
        return lambda image, text, scale, bias: clip(image.mean, text.mean, scale)
    if name in PEERS:
        siglip = SigLipLoss(rank=rank, world_size=world, dist_impl=name.split()[-1])
        return lambda image, text, scale, bias: siglip(image.mean, text.mean, scale, bias)

    def objective(image: Gaussian, text: Gaussian, scale: Tensor, bias: Tensor) -> Tensor:
        match = (scale / 2, scale + bias) if name in ("siglip", "prolip") else (scale, bias)
        return OBJECTIVES[name]()(Pairs(image, text, scale, *match)).loss

    return objective


def broadcast_loss(image: Gaussian, text: Gaussian, scale: Tensor, bias: Tensor) -> Tensor:
    """Eq. 1 and 2 of PCME++ literally: every pair and every dimension at once."""
    difference = image.mean[:, None, :] - text.mean[None, :, :]  # (B, B, D)
    variance = image.log_var.exp()[:, None, :] + text.log_var.exp()[None, :, :]  # (B, B, D)
    distance = (difference.square() + variance).sum(-1)
    match = torch.eye(len(distance), device=distance.device)
    return 2 * F.binary_cross_entropy_with_logits(-bias - scale * distance, match)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


if __name__ == "__main__":
    run_command(main)
