"""The device of a rank, the precision of a GPU, and the memory of a container."""

import pytest
import torch

from probemb.errors import UserError
from probemb.machine import machine_memory, memory_limits, training_device, training_precision
from tests.world import save


def test_bf16_is_for_gpus_that_have_it():
    v100, a100, none = (7, 0), (8, 0), None
    assert [training_precision("auto", gpu) for gpu in (v100, a100, none)] == ["fp32", "bf16", "fp32"]
    assert [training_precision("bf16", gpu) for gpu in (a100, none)] == ["bf16", "bf16"]
    with pytest.raises(UserError, match="has no bf16"):
        training_precision("bf16", v100)


@pytest.mark.parametrize(
    ("launched", "device"),
    [
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, "cuda:1"),  # torchrun, two machines of two GPUs
        ({"LOCAL_RANK": "1", "LOCAL_SIZE": "2"}, "cuda:1"),  # deepspeed
        ({}, "cuda:0"),  # one process for each machine, as Kubeflow starts them
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}, "starts 3 processes on a machine with 2 GPUs"),
        ({"LOCAL_RANK": "2"}, "starts 3 processes on a machine with 2 GPUs"),
    ],
)
def test_a_rank_has_a_gpu_of_its_machine(monkeypatch, launched, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", **launched}.items():
        monkeypatch.setenv(name, value)
    threads = torch.get_num_threads()
    if device.startswith("cuda"):
        assert training_device(threads) == device
    else:
        with pytest.raises(UserError, match=device):
            training_device(threads)


def test_a_container_has_the_memory_of_its_control_group(tmp_path):
    files = {"memory.max": "max", "slurm/memory.max": str(8 << 30), "slurm/job_7/memory.max": str(4 << 30)}
    files["memory/docker/memory.limit_in_bytes"] = str(2 << 30)
    for name, limit in files.items():
        save(tmp_path / name, f"{limit}\n")
    (tmp_path / "own").write_text("0::/slurm/job_7\n")
    assert sorted(memory_limits(tmp_path / "own", tmp_path)) == [4 << 30, 8 << 30]
    (tmp_path / "own").write_text("5:cpu,memory:/docker\n0::/\n")
    assert memory_limits(tmp_path / "own", tmp_path) == [2 << 30]
    assert memory_limits(tmp_path / "absent", tmp_path) == []
    assert machine_memory() >= 1 << 20
