"""The pretended GPU refuses what a GPU refuses, computes what the CPU computes, and counts where the host waits."""

import numpy as np
import torch
from torch import nn

from probemb.distributed import any_rank
from tests.pretended_gpu import Mismatch, PretendedGPU, needs_pretended_gpu
from tests.ranks import run_ranks


def refused(call) -> bool:
    try:
        call()
    except Mismatch:
        return True
    return False


def mixed(rank, world):
    """What is refused, and what is not."""
    with PretendedGPU() as gpu:
        here, there = torch.ones(3, 3), torch.ones(3, 3, device=gpu.device)
        rows = torch.arange(2)
        bad = {
            "sum": lambda: here + there,
            "product": lambda: nn.functional.linear(there, here),
            "in place": lambda: here.add_(there),
            "index": lambda: here[rows.to(gpu.device)],
            "generator": lambda: torch.randn(3, device=gpu.device, generator=torch.Generator()),
            "generator there": lambda: torch.randn(3, generator=torch.Generator(gpu.device)),
        }
        good = {
            "number": lambda: there + torch.tensor(2.0),
            "index from the host": lambda: there[rows],
            "copy": lambda: there.copy_(here),
            "generator": lambda: torch.randn(3, device=gpu.device, generator=torch.Generator(gpu.device)),
        }
        return {name: refused(call) for name, call in bad.items()}, {name: refused(call) for name, call in good.items()}


@needs_pretended_gpu
def test_tensors_of_two_devices_do_not_meet():
    bad, good = run_ranks(1, mixed, fresh=True)[0]
    assert all(bad.values()), bad
    assert not any(good.values()), good


def computed(rank, world):
    """Gradients of a GRU over packed texts on both devices, and where the host waited."""
    grads, waits = [], {}
    for gpu in (None, PretendedGPU()):
        torch.manual_seed(0)
        gru, x = nn.GRU(4, 5, batch_first=True, bidirectional=True), torch.randn(3, 6, 4)
        if gpu is None:
            grads.append(grads_of(gru, x))
            continue
        with gpu:
            grads.append(grads_of(gpu.move(gru), x.to(gpu.device)))
            gpu.waits.clear()
            any_rank([x.to(gpu.device).isfinite().all()], gpu.device)
            waits = dict(gpu.waits)
    return *grads, waits


def grads_of(gru, x):
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([6, 4, 1]), batch_first=True)
    out, _ = nn.utils.rnn.pad_packed_sequence(gru(packed)[0], batch_first=True)
    (out * torch.linspace(-1, 1, 10, device=x.device)).square().sum().backward()
    return [parameter.grad.cpu().numpy() for parameter in gru.parameters()]


@needs_pretended_gpu
def test_it_computes_what_the_cpu_computes_and_counts_waits():
    here, there, waits = run_ranks(1, computed, fresh=True)[0]
    for one, other in zip(here, there, strict=True):
        np.testing.assert_allclose(other, one, atol=1e-5)
    assert waits == {"probemb/distributed.py:any_rank": 1}
