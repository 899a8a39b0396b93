"""Checks that need a GPU, most important first: the first half of `make gpu-check`.

GPU_CHECK_MINUTES limits the time: what comes later is skipped, and said so. GPU_CHECK_ON_CPU=1 runs everything reduced
on the CPU, to see that the checks themselves work.
"""

import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pretrain.cost import StepCost
from pretrain.engine.checkpoint import EngineState
from pretrain.engine.engine import Towers
from pretrain.objectives import OBJECTIVES
from pretrain.trainer import Trainer, loss_and_terms
from probemb import Gaussian, distributed
from probemb.distances import csd
from probemb.models import create_model, save_model
from probemb.search import build_index, load_index, search
from probemb.search.embeddings import open_embeddings
from tests.steps import take_step
from tools.bench.step import configured, make_trainer, random_batch
from tools.make_scenes.command import Plan, make

ON_CPU = bool(os.environ.get("GPU_CHECK_ON_CPU"))
DEVICE = "cpu" if ON_CPU else "cuda"
NAME, ROWS = ("ViT-Micro-32", 8) if ON_CPU else ("ViT-Small-112", 64)
BEGAN, MINUTES = time.monotonic(), float(os.environ.get("GPU_CHECK_MINUTES", "inf"))
ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (ON_CPU or torch.cuda.is_available()), reason="there is no GPU"),
    pytest.mark.timeout(180),
]


@pytest.fixture(autouse=True)
def _within_the_time():
    if time.monotonic() - BEGAN > 60 * MINUTES:
        pytest.skip(f"not run: {MINUTES:g} minutes are over")
    tf32, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    yield
    torch.backends.cudnn.allow_tf32 = tf32
    gc.collect()  # engines are parts of cycles
    torch.cuda.empty_cache()


def batches(config, steps: int):
    """Pairs that can be told apart: every item has pixels and words of its own, and noise in every batch."""
    images, tokens = random_batch(config.model.name, config.batch_size, DEVICE)
    g = torch.Generator(DEVICE).manual_seed(2)
    for _ in range(steps):
        order = torch.randperm(len(images), generator=g, device=DEVICE)
        yield images[order] + 0.5 * torch.randn(images.shape, generator=g, device=DEVICE), tokens[order]


def train(config, steps: int, precision: str = "fp32") -> tuple[Trainer, list[float], list[float]]:
    """The trainer, and the loss and gradient norm of every step."""
    trainer = make_trainer(config, DEVICE, precision)
    found = [take_step(trainer, *batch) for batch in batches(config, steps)]
    return trainer, [values["loss"] for values in found], [values["gradient_norm"] for values in found]


VARIANTS = {
    "ZeRO 0": {"zero_stage": 0},
    "ZeRO 1": {"zero_stage": 1},
    "ZeRO 2": {"zero_stage": 2},
    "ZeRO 3": {"zero_stage": 3},
    "compiled": {"zero_stage": 0, "compile": "towers"},
    "accumulation, ZeRO 3": {"zero_stage": 3, "accumulation": 2},
    "accumulation and checkpointing": {"zero_stage": 2, "accumulation": 2, "grad_checkpointing": True},
}


@pytest.fixture(scope="module")
def plain():
    """Losses, gradient norms and final weights of the same steps in plain PyTorch, and how far the weights moved."""
    config = configured(NAME, ROWS, "pcmepp", lr=1e-3)
    torch.manual_seed(0)
    model, o = config.create_model().to(DEVICE), config.optimizer
    start = {n: p.detach().cpu().clone() for n, p in model.named_parameters()}
    towers = Towers(model, "fp32")
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": o.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer, losses, norms = torch.optim.AdamW(groups, lr=o.lr, betas=o.betas, eps=o.eps), [], []
    for batch in batches(config, 6):
        loss, _ = loss_and_terms(config.loss, towers(*batch))
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip_grad_norm)))
        optimizer.step()
        losses.append(float(loss.detach()))
    weights = {n: p.detach().cpu().clone() for n, p in model.named_parameters()}
    return losses, norms, weights, distance(weights, start)


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return float(sum((a[name].double() - b[name].double()).square().sum() for name in b).sqrt())


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_way_to_share_a_step_trains_as_plain_pytorch_does(variant, plain):
    losses, norms, weights, moved = plain
    trainer, *steps = train(configured(NAME, ROWS, "pcmepp", lr=1e-3, **VARIANTS[variant]), 6)
    np.testing.assert_allclose(steps[0], losses, rtol=1e-3)
    np.testing.assert_allclose(steps[1], norms, rtol=2e-2)
    state = EngineState(trainer.engine).weights()
    assert distance({name: state[f"model.{name}"] for name in weights}, weights) < 2e-2 * moved


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_bf16_learns_as_fp32_does(objective):
    config = configured(NAME, ROWS, objective, lr=2e-4, zero_stage=0)  # more, and rounding changes the course
    fp32, bf16 = (torch.tensor(train(config, 30, precision)[1]) for precision in ("fp32", "bf16"))
    off = (bf16 - fp32).abs() / fp32.abs().clamp_min(0.05 * float(fp32[0]))
    assert off.mean() < 0.02
    assert off.max() < 0.10
    assert bf16[-1] < 0.8 * bf16[0]


def run(*words) -> str:
    """A command of the project in a process of its own; what it printed."""
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    done = subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, env=alone, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-1500:]
    return done.stdout


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    make(Plan(train=64, val=16, size=32, classes_images=192, shard_size=64), folder, workers=1)
    return folder


def test_a_resumed_run_ends_with_the_bits_of_an_undisturbed_one(world, tmp_path):
    words = ["-m", "pretrain.run", "--data.train", world / "train", "--model.name", "ViT-Micro-32", "--batch-size", 16]
    words += ["--samples", 96, "--log-every", 1, "--save-every", 0, "--data.workers", 1, "--engine.threads", 1]
    words += ["--optimizer.warmup_samples", 16, "--engine.deterministic", "true"]
    run(*words, "--out", tmp_path / "whole")
    run(*words, "--out", tmp_path / "parts", "--stop-at-step", 3)
    run(*words, "--out", tmp_path / "parts", "--resume")
    for name in ("weights.safetensors", "optimizer.safetensors"):
        whole, parts = ((tmp_path / out / "checkpoints/step-6" / name).read_bytes() for out in ("whole", "parts"))
        assert whole == parts


def test_everything_of_a_step_is_on_the_device_and_its_collectives_work():
    trainer, losses, _ = train(configured(NAME, 8, "pcmepp"), 2, "bf16")
    assert dist.get_backend() == ("gloo" if ON_CPU else "nccl")
    state = [t for one in trainer.engine.optimizer.state.values() for t in one.values() if torch.is_tensor(t)]
    held = [*trainer.engine.module.parameters(), *trainer.engine.module.buffers(), *state]
    assert state
    assert {t.device.type for t in held} == {DEVICE}
    assert {p.dtype for p in trainer.engine.module.parameters()} == {torch.float32}
    x = torch.arange(6.0, device=DEVICE).reshape(2, 3).requires_grad_()
    gathered = distributed._Gather.apply(x)  # what `gather` runs with more than one rank
    assert torch.equal(torch.autograd.grad((gathered * gathered).sum(), x)[0], 2 * x)
    assert distributed.all_of({"loss": losses[0]}) == [{"loss": losses[0]}]


class Attention(TorchDispatchMode):
    """Collects the names of attention operators."""

    def __init__(self):
        super().__init__()
        self.used: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "attention" in (name := func._overloadpacket.__name__):
            self.used.add(name)
        return func(*args, **(kwargs or {}))


def test_attention_is_fused_forward_and_backward():
    config = configured("ViT-Micro-32" if ON_CPU else "ViT-B-16", 8, "pcmepp")
    towers = Towers(config.create_model().to(DEVICE), "bf16")
    ((images, tokens),) = batches(config, 1)
    for given, kernels in (({"images": images}, ("flash", "cudnn")), ({"tokens": tokens}, ("flash", "cudnn", "effic"))):
        with Attention() as attention:
            sum(one.float().square().sum() for one in towers(**given)).backward()
        assert attention.used
        assert all(any(kernel in name for kernel in kernels) for name in attention.used)


def test_a_step_takes_the_memory_of_the_plan():
    if ON_CPU:
        pytest.skip("the allocator of a GPU is measured")
    config = configured("ViT-B-16", 128, "pcmepp", zero_stage=1)
    planned = StepCost(config, 1, half=True).memory(stage=1)["peak"]
    before = torch.cuda.memory_allocated()
    trainer = make_trainer(config, DEVICE)
    images, tokens = random_batch("ViT-B-16", 128, DEVICE)
    images = images.mul(50).add(128).clamp(0, 255).to(torch.uint8)  # as the stream gives them
    take_step(trainer, images, tokens)  # makes Adam's moments
    torch.cuda.reset_peak_memory_stats()
    take_step(trainer, images, tokens)
    assert torch.cuda.max_memory_allocated() - before == pytest.approx(planned, rel=0.15)


def test_search_gives_exact_csd(world, tmp_path):
    torch.manual_seed(0)
    save_model(create_model("ViT-Micro-32"), tmp_path / "model")
    words = ["--model", tmp_path / "model", "--data", world / "train", "--items", "image", "--device", DEVICE]
    run("-m", "tools.embed", *words, "--out", tmp_path / "embeddings")
    embeddings = open_embeddings(tmp_path / "embeddings")
    mean, u = map(np.concatenate, zip(*(embeddings.read(one) for one in embeddings.partitions("image"))))
    mean, u = torch.from_numpy(mean.astype(np.float32)), torch.from_numpy(u)
    gallery = Gaussian(mean, (u / embeddings.dim).log()[:, None].expand_as(mean))
    expected = csd(gallery[:16], gallery).topk(10, largest=False).values
    run("-m", "tools.build_index", "--embeddings", tmp_path / "embeddings", "--out", tmp_path / "index")
    for index in (load_index(tmp_path / "index"), build_index(gallery)):
        assert (search(index, gallery[:16], 10)[0] - expected).abs().max() < 1e-3 * expected.max()


def test_finetuning_runs_on_the_device_and_learns(world, tmp_path):
    words = ["-m", "accelerate.commands.launch", "--config_file", ROOT / "finetune/accelerate.yaml"]
    words += [ROOT / "finetune/run.py", "--method", "pcmepp", "--no-model.pretrained", "--model.name", "ViT-Micro-32"]
    words += ["--model.embed_dim", 32, "--data.path", world, "--data.workers", 0, "--augment.cutout", 0.1]
    words += ["--batch-size", 16, "--epochs", 3, "--swa-epochs", 0, "--log-every", 1, "--optimizer.freeze-epochs", 0]
    words += ["--optimizer.decay-epochs", 0, "--optimizer.warmup-epochs", 0, "--out", tmp_path / "run"]
    assert f" x {DEVICE}" in run(*words)
    lines = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if "loss" in line]
    assert np.mean(losses[-4:]) < np.mean(losses[:4])


def test_prompt_filters_run_on_the_device(world, tmp_path):
    save_model(create_model("ViT-Micro-32"), tmp_path / "model")
    words = ["--model", tmp_path / "model", "--data", world / "classes", "--filter", "every", "--select-on", "folds:2"]
    assert "best-topk" in run("-m", "zeroshot.imagenet", *words, "--device", DEVICE, "--out", tmp_path / "out")
