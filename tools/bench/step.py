"""A pretraining step of PCME++ against a CLIP step of open_clip, with the same size, data and optimizer.

    python -m tools.bench.step --model ViT-B-32 --batch 16
    CUDA_VISIBLE_DEVICES= python -m tools.bench.step --host    # CPU time, of ViT-B/16's depth with almost no arithmetic

Ours is a step of the pretraining's trainer and engine (--zero-stage 0, 1 or 2); the peer's are open_clip's model and
ClipLoss in plain PyTorch. Both clip the gradient; bf16 on a GPU, float32 on a CPU; texts have the whole context. Aim:
at most 1.10 of open_clip's time, also with one duplicated block a tower. With --host the peer is the same model and
loss in plain PyTorch on one process, and in its DDP on two (gloo); aims: 1.08 at ZeRO 0, 1.35 at ZeRO 1 and 2.
"""

import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import open_clip
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.benchmark import Measurement

from pretrain.config import Config, Engine, Model, Optimizer
from pretrain.cost import images_at_peak
from pretrain.engine.engine import Towers, make_engine
from pretrain.objectives import OBJECTIVES
from pretrain.run_folder import RunFolder
from pretrain.trainer import Trainer, loss_and_terms, make_optimizer
from probemb.cli.command import run_command
from probemb.distributed import init_process_group
from probemb.models.architectures import read_architecture
from tools.bench.timing import Variant, in_turn, on_ranks, options, peak_memory, report

PEER = "open_clip CLIP"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NARROW = str(Path(__file__).with_name("narrow.json"))


def main() -> None:
    o = options(__doc__, model="ViT-B-32", batch=16, repeats=7, zero_stage=0, compile=False, host=False)
    if not o.host:
        compare(o.model, o.batch, o.repeats, o.compile, zero_stage=o.zero_stage)
    for ranks in (1, 2) if o.host else ():
        measured = on_ranks(ranks, host_times, o.repeats)[0]
        report(f"CPU time of a rank's training step on {ranks} ranks", measured, next(iter(measured)))


def compare(
    name: str, batch: int, repeats: int, compiled: bool = False, device: str = DEVICE, zero_stage: int = 0
) -> tuple[dict[str, Measurement], dict[str, float]]:
    """Measure and report; the times, and the share of the device's peak (MFU) by variant, where that is known."""
    steps, extra, at_peak, mfu, data = {}, {}, {}, {}, random_batch(name, batch, device)
    for variant, make in ((PEER, open_clip_step), ("CLIP", our_step), ("PCME++", our_step)):
        if compiled and variant == "CLIP":
            continue  # each is compiled for a minute
        objective = "pcmepp" if variant == "PCME++" else "clip"
        config = configured(name, batch, objective, zero_stage=zero_stage, compile="towers" if compiled else None)
        at_peak[variant] = images_at_peak(config, "bf16", 1, torch.device(device))
        steps[variant], peak = peak_memory(partial(begun, make, config, data), device)
        extra[variant] = {"peak": f"{peak / 2**30:.1f} GiB"} if device == "cuda" else {}
    measured = in_turn(steps, repeats)
    for variant, times in measured.items():
        extra[variant]["images/s"] = f"{batch / times.median:,.1f}"
        if at_peak[variant]:
            mfu[variant] = batch / times.median / at_peak[variant](data[1].shape[1])
            extra[variant]["MFU"] = f"{mfu[variant]:.1%}"
    report(f"training step, {name}, batch {batch}, ZeRO {zero_stage}{', compiled' * compiled}", measured, PEER, extra)
    return measured, mfu


def host_times(rank: int, world: int, repeats: int) -> dict[str, Measurement]:
    """CPU seconds of a step of this rank, with all its threads; four pairs each."""
    warnings.simplefilter("ignore")
    data, config = random_batch(NARROW, 4, "cpu"), configured(NARROW, 4 * world, "pcmepp", n_unc_layers=2)
    towers = Towers(config.create_model(), "fp32")
    optimizer = make_optimizer(towers.model, config.optimizer)
    wrapped = DistributedDataParallel(towers, gradient_as_bucket_view=True, static_graph=True) if world > 1 else towers
    plain = plain_step(lambda: loss_and_terms(config.loss, wrapped(*data))[0], optimizer, config)
    steps = {"DDP" if world > 1 else "plain PyTorch": plain}
    for stage in (0, 1, 2):
        steps[f"ZeRO {stage}"] = our_step(replace(config, engine=Engine(zero_stage=stage)), data)
    return in_turn(steps, repeats, clock=time.process_time)


# --------------------------------------------------------------------------------------------------------------- steps


def configured(name: str, batch: int, objective: str, n_unc_layers: int = 1, lr: float = 1e-4, **engine) -> Config:
    """A configuration of `batch` pairs on one rank; `engine` has settings of `pretrain.config.Engine`."""
    model, optimizer = Model(name=name, n_unc_layers=n_unc_layers), Optimizer(lr=lr, warmup_samples=0)
    return Config(
        batch_size=batch, objective=objective, loss=OBJECTIVES[objective](), model=model, optimizer=optimizer,
        engine=Engine(**engine),
    )  # fmt: skip


def random_batch(name: str, batch: int, device: str) -> tuple[Tensor, Tensor]:
    """Pixels and tokens in the sizes that the model takes."""
    shape, g = read_architecture(name), torch.Generator().manual_seed(0)
    size, text = shape["vision_cfg"]["image_size"], {"context_length": 77, "vocab_size": 49408} | shape["text_cfg"]
    images = torch.randn(batch, 3, size, size, generator=g)
    tokens = torch.randint(1, text["vocab_size"] - 1, (batch, text["context_length"]), generator=g)
    tokens[:, -1] = text["vocab_size"] - 1
    return images.to(device), tokens.to(device)


def make_trainer(config: Config, device: str, precision: str | None = None) -> Trainer:
    """The pretraining's trainer in a process group of one; bf16 on a GPU and float32 on a CPU unless told."""
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    init_process_group()
    torch.manual_seed(0)
    model = config.create_model(grad_checkpointing=config.engine.grad_checkpointing).to(place)
    towers = Towers(model, precision or ("bf16" if device == "cuda" else "fp32"))
    engine = make_engine(towers, make_optimizer(model, config.optimizer), config.engine, config.batch_size, place)
    config = replace(config, out=tempfile.mkdtemp(), log_every=10**9)
    folder = RunFolder(config, model.config, {}, step=0, steps=10**6)
    return Trainer(config, engine, SimpleNamespace(wait_seconds=0.0), folder, steps=10**6)


def begun(make: Callable[..., Variant], config: Config, data: tuple[Tensor, Tensor]) -> Variant:
    """A step that was taken twice: it has made Adam's moments."""
    step = make(config, data)
    step()
    step()
    return step


def our_step(config: Config, data: tuple[Tensor, Tensor]) -> Variant:
    """The trainer's step."""
    trainer, tokens = make_trainer(config, data[0].device.type), data[1].cpu()
    if data[0].is_cuda:
        tokens = tokens.pin_memory()  # as the stream gives them
    trainer.load = lambda: SimpleNamespace(images=data[0], tokens=tokens, keys=[])
    return trainer.train_step


def open_clip_step(config: Config, data: tuple[Tensor, Tensor]) -> Variant:
    """open_clip's model and ClipLoss, called as in its trainer."""
    device, loss_of, o = data[0].device.type, open_clip.ClipLoss(), config.optimizer
    model = open_clip.create_model(config.model.name, output_dict=True).to(device).train()
    forward = torch.compile(model) if config.engine.compile else model

    def loss() -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            out = forward(*data)
            return loss_of(out["image_features"], out["text_features"], out["logit_scale"])

    return plain_step(loss, torch.optim.AdamW(model.parameters(), o.lr, betas=o.betas, eps=o.eps, fused=True), config)


def plain_step(loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer, config: Config) -> Variant:
    """A step in plain PyTorch."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        torch.nn.utils.clip_grad_norm_(parameters, config.optimizer.clip_grad_norm)
        optimizer.step()

    return step


if __name__ == "__main__":
    run_command(main)
