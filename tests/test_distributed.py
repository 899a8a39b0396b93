"""Every loss over W ranks equals one process on the concatenated batch, in value and gradient."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from probemb import Gaussian, UserError, distributed
from probemb.distances import DISTANCES
from probemb.losses import clip_loss, pairwise_match_loss
from tests.ranks import run_ranks

WORLDS = [2, 3, 5]
PER_RANK, DIM = 3, 4


class Towers(nn.Module):
    """Two linear towers with the losses' scalars: enough parameters for every path of the gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = nn.Linear(6, 2 * DIM), nn.Linear(5, 2 * DIM)
        self.scalars = nn.Parameter(torch.tensor([2.0, 1.5, 3.0]))
        self.double()

    def forward(self, x_image, x_text):
        def gaussian(x):
            mean, log_var = x.chunk(2, 1)
            return Gaussian(nn.functional.normalize(mean, dim=1), log_var)

        return gaussian(self.image(x_image)), gaussian(self.text(x_text))


def data(world):
    g = torch.Generator().manual_seed(1)
    n = world * PER_RANK
    return torch.randn(n, 6, generator=g).double(), torch.randn(n, 5, generator=g).double()


def loss_of(model, image, text, all_image, all_text, offset, distance):
    logit_scale, scale, shift = model.scalars
    clip = clip_loss(image.mean, text.mean, logit_scale, all_image.mean, all_text.mean, offset).loss
    options = dict(scale=scale, shift=shift, distance=distance, pseudo_positive=0.2, vib=0.01, offset=offset)
    gathered = dict(all_image=all_image, all_text=all_text)
    identity = pairwise_match_loss(image, text, **options, **gathered).loss
    alone = pairwise_match_loss(image, text, **{**options, "pseudo_positive": 0.0}, **gathered).loss
    return torch.stack([clip, identity, alone])


def flat_gradient(loss, model):
    parameters = list(model.parameters())
    found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    return torch.cat([torch.zeros_like(p).flatten() if x is None else x.flatten() for x, p in zip(found, parameters)])


def on_one_rank(rank, world, distance):
    model = Towers()
    x_image, x_text = data(world)
    mine = slice(rank * PER_RANK, (rank + 1) * PER_RANK)
    image, text = model(x_image[mine], x_text[mine])
    gathered = distributed.gather_pairs(image, text)
    losses = loss_of(model, image, text, *gathered, rank * PER_RANK, distance)
    grads = []
    for loss in losses:
        flat = flat_gradient(loss, model)
        torch.distributed.all_reduce(flat)  # data-parallel training averages the gradients
        grads.append((flat / world).numpy())
    values = losses.detach().clone()
    torch.distributed.all_reduce(values)
    return (values / world).numpy(), np.stack(grads)


def on_one_process(world, distance):
    model = Towers()
    x_image, x_text = data(world)
    image, text = model(x_image, x_text)
    logit_scale, scale, shift = model.scalars
    options = dict(scale=scale, shift=shift, distance=distance, pseudo_positive=0.2, vib=0.01)
    losses = [
        clip_loss(image.mean, text.mean, logit_scale).loss,
        pairwise_match_loss(image, text, **options).loss,
        pairwise_match_loss(image, text, **{**options, "pseudo_positive": 0.0}).loss,
    ]
    return torch.stack(losses).detach().numpy(), np.stack([flat_gradient(loss, model).numpy() for loss in losses])


# All sizes for the paper's distance, two ranks for the others; match-probability draws samples.
OTHERS = sorted(set(DISTANCES) - {"csd"})
CASES = [("csd", world) for world in WORLDS] + [(name, 2) for name in OTHERS]


@pytest.mark.parametrize(("distance", "world"), CASES)
def test_losses_over_ranks_equal_one_process(distance, world):
    value, grad = on_one_process(world, distance)
    for rank_value, rank_grad in run_ranks(world, on_one_rank, distance):
        np.testing.assert_allclose(rank_value, value, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(rank_grad, grad, rtol=1e-9, atol=1e-12)


def helpers_on_one_rank(rank, world):
    assert (distributed.rank(), distributed.world_size(), distributed.is_main()) == (rank, world, rank == 0)
    mean = distributed.mean_over_ranks({"a": float(rank), "b": 2.0})
    assert distributed.sum_host([rank, 1]) == [sum(range(world)), world]
    bad, total = distributed.sum_over_ranks([torch.tensor(rank == 0), torch.tensor(2.0**rank)])
    good, _ = distributed.sum_over_ranks([torch.tensor(False), torch.tensor(float("nan"))])
    assert (bad.item(), good.item(), total.item()) == (True, False, 2.0**world - 1)
    return mean


def test_helpers():
    for world in (1, 3):
        for mean in run_ranks(world, helpers_on_one_rank):
            assert mean == {"a": (world - 1) / 2, "b": 2.0}
    assert distributed.mean_over_ranks({"a": 3.0}) == {"a": 3.0}
    assert distributed.world_size() == 1
    x = torch.ones(2, 3)
    assert distributed.gather(x) is distributed.gather_host(x) is x


def hosts_beside_devices(rank, world, folder):
    """With a default group that, as NCCL's, does nothing for tensors of the CPU: torch's fake one."""
    import torch.testing._internal.distributed.fake_pg  # registers it

    dist.barrier()  # all have come
    dist.destroy_process_group()
    dist.init_process_group("fake", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world)
    rows = distributed.gather_host(torch.tensor([[rank, 2**40], [rank, -1]])).tolist()
    told = distributed.sum_host([rank == 1, False]), distributed.all_of(rank), rows
    control = distributed.control_group()
    return *told, dist.get_backend(), dist.get_backend(control), distributed.control_group() is control


def test_hosts_agree_by_gloo_whatever_the_devices_use(tmp_path):
    for found in run_ranks(2, hosts_beside_devices, tmp_path):
        rows = [[rank, last] for rank in range(2) for last in (2**40, -1)]
        assert found == ([1, 0], [0, 1], rows, "fake", "gloo", True)


def test_port_zero_is_refused_rather_than_waited_at(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="port 0"):
        distributed.init_process_group()
