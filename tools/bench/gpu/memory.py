"""The peak of a step against `pretrain.plan`."""

from __future__ import annotations

import gc
from dataclasses import replace

import torch

from pretrain.config import BUCKET, Config
from pretrain.plan.memory import FP32, Memory, memory
from pretrain.plan.trace import Setting, build
from pretrain.trainer import Trainer
from tools.bench.gpu.notes import Notes, Place
from tools.bench.gpu.steps import Pool, configured, free, make_trainer, model_of

ON_A_GPU, ON_A_CPU = 0.10, 0.15  # shares by which the plan may be wrong
LARGE = [
    ("ViT-B-32", 256, {"zero_stage": 0}),
    ("ViT-B-32", 256, {"zero_stage": 1}),
    ("ViT-B-16", 128, {"zero_stage": 1}),
    ("ViT-B-16", 128, {"zero_stage": 1, "grad_checkpointing": True}),
    ("ViT-B-16", 128, {"zero_stage": 1, "accumulation": 2}),
    ("ViT-B-16", 64, {"zero_stage": 3}),
]
SMALL = [("ViT-Tiny-64", 64, {"zero_stage": 0}), ("ViT-Tiny-64", 64, {"zero_stage": 1})]


def against_the_plan(place: Place, notes: Notes) -> None:
    """The most bytes of a training step, measured and planned."""
    for name, rows, engine in SMALL if place.small else LARGE:
        config = configured(name, rows, **engine)
        planned, measured = plan(config, place).peak, peak(config, place)
        if not place.gpu and config.engine.zero_stage:  # a constant that would hide the rest
            planned, measured = planned - FP32 * BUCKET, measured - FP32 * BUCKET
        settings = ", ".join(f"{key} {value}" for key, value in engine.items())
        part, bound = f"{name}, {rows} rows, {settings}", ON_A_GPU if place.gpu else ON_A_CPU
        found = {"measured, MiB": measured / 2**20, "planned / measured": planned / measured}
        notes.value(part, found)
        notes.claim(f"{part}: the plan is right to {bound:.0%}", abs(planned / measured - 1) < bound)


def setting(config: Config, place: Place, rows: int | None = None) -> Setting:
    """Options of the plan for a step with texts of the whole context, in one process."""
    found = Setting.of(config, 1, build(config).context_length, half=place.gpu, gpu=place.gpu)
    return replace(found, rows=rows or found.rows)


def plan(config: Config, place: Place) -> Memory:
    """The planned memory of a step."""
    return memory(build(config), setting(config, place))


def peak(config: Config, place: Place) -> int:
    """Most bytes of tensors in a step, on the GPU by its allocator, on a CPU by torch's profiler."""
    gc.collect()
    before = torch.cuda.memory_allocated() if place.gpu else 0
    trainer = make_trainer(config, "bf16" if place.gpu else "fp32", place.device)
    images, tokens = next(Pool.of(model_of(trainer), config.batch_size, place.device).batches(1))
    images, tokens = (images * 50 + 128).clamp(0, 255).to(torch.uint8), tokens.clone()  # as the stream gives them
    trainer.train_step(images, tokens)  # Adam's moments appear
    gc.collect()
    if place.gpu:
        torch.cuda.reset_peak_memory_stats()
        trainer.train_step(images, tokens)
        found = torch.cuda.max_memory_allocated() - before
    else:
        found = held() + min(rise(trainer, images, tokens) for _ in range(3))
    free(trainer)
    return found


def held() -> int:
    """Bytes of all tensors of this process."""
    from torch._subclasses.fake_tensor import FakeTensor

    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor) and type(o) is not FakeTensor]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def rise(trainer: Trainer, images, tokens) -> int:
    """Most bytes that a step on the CPU allocates beyond those before it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        trainer.train_step(images, tokens)
    events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    now = most = 0
    for event in events:
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most
