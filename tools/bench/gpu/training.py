"""Checks of training: bf16 against fp32, and every way to share a step's work against plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from pretrain.config import Config
from pretrain.engine.engine import Towers
from pretrain.engine.state import full_state_dict
from pretrain.objectives import OBJECTIVES
from pretrain.trainer import Forward, Trainer
from probemb.models import no_weight_decay
from tools.bench.gpu.notes import Notes, Place
from tools.bench.gpu.steps import TINY, Pool, configured, free, make_model, make_trainer, train, without_tf32

MEAN_DIFFERENCE, LARGEST_DIFFERENCE = 0.02, 0.10  # of bf16's losses, as shares of fp32's
SMALLEST_LOSS = 0.05  # of the first one: differences of losses below it are shares of it
LOSS, NORM, WEIGHTS = 1e-3, 2e-2, 2e-2  # of a shared step's, relative to plain PyTorch's


def precision(place: Place, notes: Notes) -> None:
    """The loss curves of bf16 and fp32 from the same weights on the same batches, for every objective."""
    # AdamW's first steps are the signs of gradients: with a larger rate those that rounding turns part the curves.
    name, rows, steps, lr = (TINY, 16, 20, 5e-4) if place.small else ("ViT-B-32", 64, 40, 1e-4)
    for objective in OBJECTIVES:
        curves = {}
        for kind in ("fp32", "bf16"):
            config = configured(name, rows, objective, lr=lr, zero_stage=0)
            trainer = make_trainer(config, kind, place.device)
            pool = Pool.of(trainer.engine.module.model, rows, place.device)
            curves[kind] = torch.tensor(train(trainer, pool, steps)["loss"])
            free(trainer)
        whole, half = curves["fp32"], curves["bf16"]
        difference = (half - whole).abs() / whole.abs().clamp_min(SMALLEST_LOSS * float(whole[0]))
        notes.value(f"{objective}: loss", {k: [float(c[0]), float(c[-1])] for k, c in curves.items()})
        notes.value(
            f"{objective}: bf16 differs by", {"mean": float(difference.mean()), "most": float(difference.max())}
        )
        bounds = f"{MEAN_DIFFERENCE:.0%} in the mean and {LARGEST_DIFFERENCE:.0%} in any step"
        held = difference.mean() < MEAN_DIFFERENCE and difference.max() < LARGEST_DIFFERENCE
        notes.claim(f"{objective}: bf16's losses differ from fp32's by less than {bounds}", held)
        notes.claim(f"{objective}: the loss falls by a fifth", max(c[-1] / c[0] for c in (whole, half)) < 0.8)


VARIANTS = {
    "ZeRO 0": {"zero_stage": 0},
    "ZeRO 1": {"zero_stage": 1},
    "ZeRO 2": {"zero_stage": 2},
    "ZeRO 3": {"zero_stage": 3},
    "accumulation": {"zero_stage": 1, "accumulation": 4},
    "accumulation, ZeRO 3": {"zero_stage": 3, "accumulation": 2},
    "checkpointing": {"zero_stage": 1, "grad_checkpointing": True},
    "all of it": {"zero_stage": 2, "accumulation": 2, "grad_checkpointing": True},
}


def engine(place: Place, notes: Notes) -> None:
    """Every ZeRO stage, accumulation and checkpointing give the losses and weights of plain PyTorch, in fp32."""
    without_tf32()
    name, rows, steps = (TINY, 8, 3) if place.small else ("ViT-Small-112", 64, 6)
    config = configured(name, rows)
    start = {n: p.detach().cpu().clone() for n, p in make_model(config, place.device).named_parameters()}
    losses, norms, weights = plain_steps(config, place, steps)
    moved = distance(weights, start)
    for variant, settings in VARIANTS.items():
        trainer = make_trainer(configured(name, rows, **settings), "fp32", place.device)
        found = train(trainer, Pool.of(trainer.engine.module.model, rows, place.device), steps)
        whole = full_state_dict(trainer.engine)
        mine = {name: whole[f"model.{name}"] for name in weights}
        free(trainer)
        off = {
            "loss": relative(found["loss"], losses),
            "norm": relative(found["gradient_norm"], norms),
            "weights": distance(mine, weights) / moved,
        }
        notes.value(variant, off)
        held = off["loss"] < LOSS and off["norm"] < NORM and off["weights"] < WEIGHTS
        notes.claim(f"{variant}: losses, gradient norms and weights are those of plain PyTorch", held)


def plain_steps(config: Config, place: Place, steps: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, gradient norms and final weights without DeepSpeed."""
    model, o = make_model(config, place.device), config.optimizer
    towers, trainer = Towers(model, "fp32"), Trainer(None, None, config, place.device, steps)
    groups = [
        {"params": [p for n, p in model.named_parameters() if no_weight_decay(n, p) is skip], "weight_decay": decay}
        for skip, decay in ((False, o.weight_decay), (True, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=o.betas, eps=o.eps)
    losses, norms = [], []
    for images, tokens in Pool.of(model, config.batch_size, place.device).batches(steps):
        loss, _ = trainer.loss(Forward.of(towers(images, tokens)))
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip_grad_norm)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms, {n: p.detach().cpu().clone() for n, p in model.named_parameters()}


def relative(found: list[float], expected: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected))


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Euclidean, over all tensors."""
    return float(sum((a[name].double() - b[name].double()).square().sum() for name in b).sqrt())
