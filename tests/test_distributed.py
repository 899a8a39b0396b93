"""Losses of a rank's own items against all ranks' equal those of one process; and the ranks' small agreements."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from probemb import UserError, distributed
from probemb.distances import DISTANCES
from probemb.losses import clip_loss, pairwise_match_loss
from tests.losses.test_gathered import PER_RANK, Towers, averaged
from tests.ranks import run_ranks

SCALARS = [2.0, 1.5, 3.0]


def run(rank, world, total):
    g = torch.Generator().manual_seed(1)
    x_image, x_text = torch.randn(total, 6, generator=g).double(), torch.randn(total, 5, generator=g).double()
    each, model, found = total // world, Towers(), {}
    mine, scalars = slice(rank * each, (rank + 1) * each), torch.tensor(SCALARS).double().requires_grad_()
    for name, pseudo in [("clip", 0.0), *((name, pseudo) for name in DISTANCES for pseudo in (0.0, 0.2))]:
        image, text = model(x_image[mine], x_text[mine])
        images, texts = distributed.gather_pairs(image, text)
        logit_scale, scale, shift = scalars
        if name == "clip":
            out = clip_loss(image.mean, text.mean, logit_scale, images.mean, texts.mean, rank * each)
        else:
            options = dict(scale=scale, shift=shift, distance=name, pseudo_positive=pseudo, vib=0.01)
            out = pairwise_match_loss(image, text, **options, all_image=images, all_text=texts, offset=rank * each)
        found[name, pseudo] = averaged(out.loss, [*model.parameters(), scalars], world)
    return found


@pytest.mark.parametrize("world", [2, 3, 5])
def test_losses_over_ranks_equal_one_process(world):
    expected = run(0, 1, world * PER_RANK)
    for found in run_ranks(world, run, world * PER_RANK):
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-12, err_msg=str(name))


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
    assert distributed.gather(x) is x


def hosts_beside_devices(rank, world, folder):
    """With a default group that, as NCCL's, does nothing for tensors of the CPU: torch's fake one."""
    import torch.testing._internal.distributed.fake_pg  # registers it

    dist.barrier()  # all have come
    dist.destroy_process_group()
    dist.init_process_group("fake", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world)
    rows = torch.cat(distributed.all_of(torch.tensor([[rank, 2**40], [rank, -1]]))).tolist()
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
