"""A pretraining step of PCME++ against a CLIP step of open_clip, with the same size, data and optimizer.

    python -m tools.bench.step --model ViT-B-32 --batch 16

Ours is a step of the pretraining's trainer and engine at ZeRO 0; the peer's are open_clip's model and ClipLoss in plain
PyTorch. Both clip the gradient; bf16 on a GPU, float32 on a CPU; texts have the whole context. Aim: at most 1.15 of
open_clip's time with one duplicated block a tower.
"""

from __future__ import annotations

import gc
import tempfile
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.utils.benchmark import Measurement

from pretrain.config import Config, Engine, Model, Optimizer
from pretrain.engine.engine import make_engine, start_deepspeed
from pretrain.objectives import OBJECTIVES
from probemb.cli.command import Parser, run_command
from tools.bench.timing import Variant, in_turn, report, timer

PEER = "open_clip CLIP"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    parser = Parser(prog="python -m tools.bench.step", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="ViT-B-32")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--n-unc-layers", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="torch.compile both models")
    options = parser.parse_args()
    compare(options.model, options.batch, options.repeats, options.n_unc_layers, options.compile)


def compare(
    name: str, batch: int, repeats: int, n_unc_layers: int = 1, compiled: bool = False, device: str = DEVICE
) -> tuple[dict[str, Measurement], dict[str, float]]:
    """Measure and report; the times, and the share of the device's peak (MFU) by variant, where that is known."""
    from pretrain.cost import images_at_peak  # models take seconds to import

    steps, extra, at_peak = {}, {}, {}
    for variant in (PEER, "CLIP", "PCME++"):
        objective = "pcmepp" if variant == "PCME++" else "clip"
        config = configured(name, batch, objective, n_unc_layers, zero_stage=0, compile="step" if compiled else None)
        data = random_batch(name, batch, device)
        speed = images_at_peak(config, "bf16", 1, torch.device(device))
        at_peak[variant] = speed and speed(data[1].shape[1])
        before = used(device)
        steps[variant] = step = (open_clip_step if variant == PEER else our_step)(config, data)
        step()  # makes Adam's moments
        step()
        extra[variant] = {"peak": f"{(used(device, most=True) - before) / 2**30:.1f} GiB"} if device == "cuda" else {}
    measured = in_turn({variant: timer(lambda _, step=step: step()) for variant, step in steps.items()}, repeats)
    speeds = {variant: batch / times.median for variant, times in measured.items()}
    mfu = {variant: speeds[variant] / most for variant, most in at_peak.items() if most}
    for variant, speed in speeds.items():
        extra[variant] |= {"images/s": f"{speed:,.1f}"} | ({"MFU": f"{mfu[variant]:.1%}"} if mfu else {})
    report(f"training step, {name}, batch {batch}{', compiled' * compiled}", measured, PEER, extra)
    return measured, mfu


def used(device: str, most: bool = False) -> int:
    """Bytes of the GPU's allocator now, or the most since the last call of it."""
    if device != "cuda":
        return 0
    if most:
        return torch.cuda.max_memory_allocated()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def configured(name: str, batch: int, objective: str, n_unc_layers: int = 1, lr: float = 1e-4, **engine) -> Config:
    """A configuration of `batch` pairs on one rank; `engine` has settings of `pretrain.config.Engine`."""
    kind = OBJECTIVES[objective]
    return Config(
        batch_size=batch,
        objective=objective,
        loss=kind(),
        model=Model(name=name, n_unc_layers=n_unc_layers if kind.probabilistic else 0),
        optimizer=Optimizer(lr=lr, warmup_samples=0),
        engine=Engine(**engine),
    )


def random_batch(name: str, batch: int, device: str) -> tuple[Tensor, Tensor]:
    """Pixels and tokens in the sizes that the model takes."""
    from probemb.models.architectures import read_architecture

    shape = read_architecture(name)
    size, length = shape["vision_cfg"]["image_size"], shape["text_cfg"].get("context_length", 77)
    g = torch.Generator().manual_seed(0)
    images, tokens = (
        torch.randn(batch, 3, size, size, generator=g),
        torch.randint(1, 40_000, (batch, length), generator=g),
    )
    tokens[:, -1] = 49407
    return images.to(device), tokens.to(device)


def make_trainer(config: Config, device: str, precision: str | None = None):
    """The pretraining's trainer in a process group of one; bf16 on a GPU and float32 on a CPU unless told."""
    from pretrain.run_folder import RunFolder
    from pretrain.trainer import Trainer, make_optimizer

    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    start_deepspeed(device=place)
    torch.manual_seed(0)
    model = config.create_model().to(place)
    model.set_grad_checkpointing(config.engine.grad_checkpointing)
    precision = precision or ("bf16" if device == "cuda" else "fp32")
    optimizer = make_optimizer(model, config.optimizer)
    engine = make_engine(model, optimizer, config.engine, config.batch_size, precision, place)
    config = replace(config, out=tempfile.mkdtemp(), log_every=10**9)
    folder = RunFolder(config, model.config, {}, step=0, steps=10**6)
    return Trainer(config, engine, SimpleNamespace(wait_seconds=0.0), folder, steps=10**6)


def our_step(config: Config, data: tuple[Tensor, Tensor]) -> Variant:
    """The trainer's step."""
    trainer = make_trainer(config, data[0].device.type)
    trainer.load = lambda: SimpleNamespace(images=data[0], tokens=data[1], keys=[])
    return trainer.train_step


def open_clip_step(config: Config, data: tuple[Tensor, Tensor]) -> Variant:
    """open_clip's model and ClipLoss, called as in its trainer."""
    import open_clip

    from probemb.models.architectures import OWN

    device, o, loss_of = data[0].device.type, config.optimizer, open_clip.ClipLoss()
    if config.model.name in OWN:
        open_clip.add_model_config(OWN[config.model.name])
    model = open_clip.create_model(config.model.name, output_dict=True).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), o.lr, betas=o.betas, eps=o.eps, fused=True)
    forward = torch.compile(model) if config.engine.compile else model

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            out = forward(*data)
            loss = loss_of(out["image_features"], out["text_features"], out["logit_scale"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip_grad_norm)
        optimizer.step()

    return step


if __name__ == "__main__":
    run_command(main)
