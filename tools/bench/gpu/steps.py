"""Training steps on data that can be learned, by the pretraining's own trainer and engine."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pretrain.config import Config, Model, Optimizer
from pretrain.config import Engine as EngineConfig
from pretrain.engine.engine import make_engine, start_deepspeed
from pretrain.objectives import OBJECTIVES
from pretrain.trainer import Trainer
from probemb.models import DualEncoder

TINY = "ViT-Micro-32"
END = 49407  # the end token, the highest id


def configured(name: str, rows: int, objective: str = "pcmepp", own: int = 1, lr: float = 1e-3, **engine) -> Config:
    """A configuration of `rows` pairs on one rank.

    Args:
        own: duplicated blocks of each tower, of objectives with an uncertainty.
        engine: settings of `pretrain.config.Engine`.
    """
    return Config(
        batch_size=rows,
        objective=objective,
        loss=OBJECTIVES[objective].Options(),
        model=Model(name=name, n_unc_layers=own if OBJECTIVES[objective].probabilistic else 0),
        optimizer=Optimizer(lr=lr, warmup_samples=0),
        engine=EngineConfig(**engine),
    )


def make_model(config: Config, device: torch.device, seed: int = 0) -> DualEncoder:
    """The configuration's model, made on the device."""
    torch.manual_seed(seed)
    with device:
        model = config.create_model()
    model.set_grad_checkpointing(config.engine.grad_checkpointing)
    return model.to(device)  # what was made from numpy


def make_trainer(config: Config, precision: str, device: torch.device) -> Trainer:
    """The trainer of a configuration, in the process group of one that this process is in."""
    start_deepspeed(device=device)
    engine = make_engine(make_model(config, device), config, precision, device)
    return Trainer(engine, None, config, device, steps=10**6)


def model_of(trainer: Trainer) -> DualEncoder:
    """The trained model."""
    return trainer.engine.module.model


@dataclass
class Pool:
    """Pairs that can be told apart: every item has pixels and words of its own, and noise in every batch.

    rows            items of a batch, all different
    side, length    of the images, in pixels, and of the texts, in tokens
    """

    rows: int
    side: int
    length: int
    device: torch.device
    noise: float = 0.5

    def __post_init__(self):
        draws = torch.Generator().manual_seed(1)
        self.images = torch.randn(self.rows, 3, self.side, self.side, generator=draws).to(self.device)
        tokens = torch.randint(1, 40_000, (self.rows, self.length), generator=draws)
        tokens[:, -1] = END
        self.tokens = tokens.to(self.device)

    @classmethod
    def of(cls, model: DualEncoder, rows: int, device: torch.device) -> Pool:
        """For a model's inputs, texts of the whole context."""
        return cls(rows, model.image_size, model.context_length, device)

    def batches(self, steps: int, seed: int = 2) -> Iterator[tuple[Tensor, Tensor]]:
        """(rows, 3, side, side) and (rows, length), on the device; the same for every call."""
        draws = torch.Generator(self.device).manual_seed(seed)
        for _ in range(steps):
            order = torch.randperm(self.rows, generator=draws, device=self.device)
            noise = torch.randn(self.images.shape, generator=draws, device=self.device)
            yield self.images[order] + self.noise * noise, self.tokens[order]


def train(trainer: Trainer, pool: Pool, steps: int, seed: int = 2) -> dict[str, list[float]]:
    """Loss and gradient norm of every step."""
    found: dict[str, list[float]] = {"loss": [], "gradient_norm": []}
    for images, tokens in pool.batches(steps, seed):
        terms = trainer.train_step(images, tokens)
        if terms is None:
            raise RuntimeError("a step was skipped: its loss or gradient is NaN or Inf")
        for name, values in found.items():
            values.append(float(terms[name]))
    return found


def without_tf32() -> None:
    """Whole float32 in convolutions too, as in matrix products by default."""
    torch.backends.cudnn.allow_tf32 = False


def free(trainer: Trainer) -> None:
    """Give an engine's memory back."""
    trainer.engine.destroy()
    trainer.engine = None
    give_back()


def give_back() -> None:
    """Free what nothing refers to, on the GPU too."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
