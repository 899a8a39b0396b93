"""A pretraining step of PCME++ against a CLIP step of open_clip, with the same size, data and optimizer.

    python -m tools.bench.step --model ViT-B-32 --batch 16
    python -m tools.bench.step --host    # CPU time, of a model as deep as ViT-B/16 with almost no arithmetic

Ours is a step of the pretraining's trainer and engine at ZeRO 0; the peer's are open_clip's model and ClipLoss in plain
PyTorch. Both clip the gradient; bf16 on a GPU, float32 on a CPU; texts have the whole context. Aim: at most 1.15 of
open_clip's time with one duplicated block a tower. With --host the peer is the same model and loss in plain PyTorch on
one process, and in its DDP on two (gloo); aims: 1.08 at ZeRO 0, 1.35 at ZeRO 1 and 2.
"""

from __future__ import annotations

import json
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
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
from probemb.cli.command import Parser, run_command
from probemb.distributed import init_process_group
from probemb.models.architectures import OWN, read_architecture
from tools.bench.loss import on_ranks
from tools.bench.timing import Variant, in_turn, peak_memory, report, timer

PEER = "open_clip CLIP"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    parser = Parser(prog="python -m tools.bench.step", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="ViT-B-32")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--n-unc-layers", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="torch.compile both models")
    parser.add_argument("--host", action="store_true", help="CPU time at ZeRO 0, 1, 2, and of plain PyTorch")
    options = parser.parse_args()
    if options.host:
        for ranks in (1, 2):
            measured = on_ranks(ranks, host_times, options.repeats)[0]
            report(f"CPU time of a rank's training step on {ranks} ranks", measured, next(iter(measured)))
        return
    compare(options.model, options.batch, options.repeats, options.n_unc_layers, options.compile)


def compare(
    name: str, batch: int, repeats: int, n_unc_layers: int = 1, compiled: bool = False, device: str = DEVICE
) -> tuple[dict[str, Measurement], dict[str, float]]:
    """Measure and report; the times, and the share of the device's peak (MFU) by variant, where that is known."""
    steps, extra, at_peak = {}, {}, {}
    for variant in (PEER, "CLIP", "PCME++"):
        objective = "pcmepp" if variant == "PCME++" else "clip"
        config = configured(name, batch, objective, n_unc_layers, zero_stage=0, compile="step" if compiled else None)
        data = random_batch(name, batch, device)
        speed = images_at_peak(config, "bf16", 1, torch.device(device))
        at_peak[variant] = speed and speed(data[1].shape[1])

        def start(variant=variant, config=config, data=data) -> None:
            steps[variant] = step = open_clip_step(config, data) if variant == PEER else our_step(config, data)
            step()  # makes Adam's moments
            step()

        peak = peak_memory(start, device) / 2**30
        extra[variant] = {"peak": f"{peak:.1f} GiB"} if device == "cuda" else {}
    measured = in_turn({variant: timer(lambda _, step=step: step()) for variant, step in steps.items()}, repeats)
    speeds = {variant: batch / times.median for variant, times in measured.items()}
    mfu = {variant: speeds[variant] / most for variant, most in at_peak.items() if most}
    for variant, speed in speeds.items():
        extra[variant] |= {"images/s": f"{speed:,.1f}"} | ({"MFU": f"{mfu[variant]:.1%}"} if mfu else {})
    report(f"training step, {name}, batch {batch}{', compiled' * compiled}", measured, PEER, extra)
    return measured, mfu


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
    shape = read_architecture(name)
    size, length = shape["vision_cfg"]["image_size"], shape["text_cfg"].get("context_length", 77)
    g, words = torch.Generator().manual_seed(0), shape["text_cfg"].get("vocab_size", 49408)
    images = torch.randn(batch, 3, size, size, generator=g)
    tokens = torch.randint(1, words - 1, (batch, length), generator=g)
    tokens[:, -1] = words - 1
    return images.to(device), tokens.to(device)


def make_trainer(config: Config, device: str, precision: str | None = None):
    """The pretraining's trainer in a process group of one; bf16 on a GPU and float32 on a CPU unless told."""
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    init_process_group()
    torch.manual_seed(0)
    model = config.create_model().to(place)
    model.set_grad_checkpointing(config.engine.grad_checkpointing)
    precision = precision or ("bf16" if device == "cuda" else "fp32")
    optimizer = make_optimizer(model, config.optimizer)
    engine = make_engine(Towers(model, precision), optimizer, config.engine, config.batch_size, place)
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
    device, loss_of = data[0].device.type, open_clip.ClipLoss()
    if config.model.name in OWN:
        open_clip.add_model_config(OWN[config.model.name])
    model = open_clip.create_model(config.model.name, output_dict=True).to(device).train()
    forward = torch.compile(model) if config.engine.compile else model

    def loss() -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            out = forward(*data)
            return loss_of(out["image_features"], out["text_features"], out["logit_scale"])

    o = config.optimizer
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


def host_times(rank: int, world: int, repeats: int) -> dict[str, Measurement]:
    """CPU seconds of a step of this rank, with all its threads; four pairs each."""
    warnings.simplefilter("ignore")
    narrow = {"vision_cfg": {"image_size": 32, "patch_size": 16, "width": 16, "head_width": 16, "layers": 12}}
    narrow["text_cfg"] = {"context_length": 8, "vocab_size": 100, "width": 16, "heads": 1, "layers": 12}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ViT-B-16-narrow.json")
        path.write_text(json.dumps({"embed_dim": 16, **narrow}))
        open_clip.add_model_config(path)
    data = random_batch(path.stem, 4, "cpu")
    config = configured(path.stem, 4 * world, "pcmepp", n_unc_layers=2)
    towers = Towers(config.create_model(), "fp32")
    optimizer = make_optimizer(towers.model, config.optimizer)
    wrapped = DistributedDataParallel(towers, gradient_as_bucket_view=True, static_graph=True) if world > 1 else towers
    plain = plain_step(lambda: loss_and_terms(config.loss, wrapped(*data))[0], optimizer, config)
    steps = {"DDP" if world > 1 else "plain PyTorch": plain}
    for stage in (0, 1, 2):
        steps[f"ZeRO {stage}"] = our_step(replace(config, engine=Engine(zero_stage=stage)), data)
    for step in 3 * list(steps.values()):
        step()
    return in_turn({n: timer(lambda _, s=s: s(), clock=time.process_time) for n, s in steps.items()}, repeats)


if __name__ == "__main__":
    run_command(main)
