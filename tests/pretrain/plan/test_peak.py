"""Speeds at the devices' peaks, for the MFU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pretrain.config import Config, Model
from pretrain.plan.cost import flops
from pretrain.plan.peak import PEAKS, gpu_of_this_machine, images_at, images_at_peak, named_gpu, peak_flops
from pretrain.plan.trace import Setting, build
from probemb.errors import UserError
from tests.forked import Job


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA H200", 989e12, 67e12),
        ("NVIDIA H100 80GB HBM3", 989e12, 67e12),
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA L4", 121e12, 30.3e12),
        ("NVIDIA L40S", 362e12, 91.6e12),
        ("NVIDIA A1000", None, None),
        ("Somebody's GPU", None, None),
    ],
)
def test_peaks_by_name(name, bf16, fp32):
    assert peak_flops(name, "bf16") == bf16
    assert peak_flops(name, "fp32") == fp32


@pytest.mark.parametrize(
    ("written", "known"),
    [("h200", "H200"), ("a100-80gb", "A100"), ("H100 pcie", "H100 PCIe"), ("rtx_4090", "RTX 4090"), ("gh200", "GH200")],
)
def test_gpus_as_people_write_them(written, known):
    assert named_gpu(written) == known
    assert all(named_gpu(name) == name for name in PEAKS)


def test_an_unknown_gpu_is_refused_with_those_that_are_known():
    with pytest.raises(UserError, match=r"The peak of the GPU 'h20O' is not known. Did you mean 'H20'"):
        named_gpu("h20O")


def test_this_machine_s_gpu_is_found_by_its_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_of_this_machine() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, known in (("NVIDIA H200", "H200"), ("Somebody's GPU", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert gpu_of_this_machine() == known


def test_a_cpu_has_no_known_peak():
    assert images_at_peak(Config(), "fp32", 1, torch.device("cpu")) is None


def test_shorter_texts_are_less_work_and_the_length_is_interpolated():
    """Against FLOPs counted at that very length."""
    config = Config(batch_size=8, model=Model(name="ViT-Micro-32"))
    model, speed = build(config), images_at(1e12, config, "fp32", 1)
    for tokens in (model.context_length, model.context_length * 5 // 8):
        setting = Setting.of(config, 1, tokens, half=False, gpu=False)
        assert speed(tokens) == pytest.approx(8e12 / flops(model, setting)["model_per_step"], rel=0.02)
    assert speed(model.context_length) < speed(8)


def test_a_run_logs_its_share_of_a_known_peak(options, tmp_path):
    """On CPUs that are said to have one, as none in the table does."""
    peak = 1e11

    def prepare(rank):
        import pretrain.plan.peak

        def known(config, precision, world_size, device):
            return images_at(world_size * peak, config, precision, world_size)

        pretrain.plan.peak.images_at_peak = known

    short = {**options, "samples": 48, "optimizer.warmup_samples": 32}
    job = Job(short, ranks=2, output=tmp_path / "log", prepare=prepare)
    assert job.wait() == [0, 0], job.text()
    speed = images_at(2 * peak, Config(batch_size=16, model=Model(name="ViT-Micro-32")), "fp32", 2)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    for one in lines:
        assert one["mfu"] == pytest.approx(one["images_per_second"] / speed(one["text_tokens"]))
        assert f" | MFU {100 * one['mfu']:.1f} % | " in job.text()


FORK = """
import os
import torch
from pretrain.config import Config, Model
from pretrain.plan.peak import images_at

images_at(1e12, Config(batch_size=8, model=Model(name="ViT-Micro-32")), "fp32", 1)(8)
if (child := os.fork()) == 0:
    torch.ones(3, requires_grad=True).sum().backward()
    os._exit(7)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_what_is_forked_after_planning_computes_gradients():
    """In a process whose first backward pass is the plan's, on tensors that feign a GPU."""
    root = Path(__file__).resolve().parents[3]
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", FORK], cwd=root, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 7, done.stderr
