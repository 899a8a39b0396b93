"""The ranks' small agreements."""

import pytest
import torch
import torch.distributed as dist

from probemb import UserError, distributed
from tests.ranks import run_ranks


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
    monkeypatch.delenv("RANK")
    with pytest.raises(UserError, match="WORLD_SIZE to 2, but not RANK"):  # not a run of each process alone
        distributed.init_process_group()
