"""Single steps of the pretraining's trainer on given batches, with a real engine and run folder."""

from dataclasses import replace
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import torch

from pretrain.engine import zero
from pretrain.engine.checkpoint import Average, EngineState
from pretrain.engine.engine import Towers, make_engine
from pretrain.run_folder import RunFolder
from pretrain.trainer import Trainer, make_optimizer
from probemb.distributed import init_process_group

CPU = torch.device("cpu")


def random_pairs(rows, seed=1):
    """Images and tokens for ViT-Micro-32."""
    g = torch.Generator().manual_seed(seed)
    images, tokens = torch.randn(rows, 3, 32, 32, generator=g), torch.randint(1, 1000, (rows, 16), generator=g)
    tokens[:, -1] = 49407  # end of text
    return images, tokens


def engine_of(config, model, persistent=0):
    """An engine in float32 on the CPU; at ZeRO 3 it shares out even the smallest parameters."""
    init_process_group()
    zero.PERSISTENT = persistent
    optimizer = make_optimizer(model, config.optimizer)
    return make_engine(Towers(model, "fp32"), optimizer, config.engine, config.batch_size, CPU)


def trainer_of(config, model, steps=100, persistent=0) -> Trainer:
    """A trainer of the model, with the average that the configuration asks for."""
    engine, folder = engine_of(config, model, persistent), TemporaryDirectory()
    config = replace(config, out=folder.name)
    average = Average(engine) if config.ema.half_life_samples else None
    files = RunFolder(config, model.config, {}, 0, steps)
    trainer = Trainer(config, engine, SimpleNamespace(wait_seconds=0.0), files, steps, average=average)
    trainer.last = steps + 10**6  # nothing is saved by itself
    trainer.folder_ends = folder.cleanup  # with the trainer
    return trainer


def take_step(trainer: Trainer, images, tokens, keys=()) -> dict[str, float]:
    """The logged values of a step on this rank's items; without a "loss" if it was skipped."""
    keys = list(keys) or [str(row) for row in range(len(images))]
    trainer.load = lambda: SimpleNamespace(images=images, tokens=tokens, keys=keys)
    trainer.window.restart()
    trainer.train_step()
    return trainer.window.read(trainer.config.batch_size, 1)


def snapshot(engine) -> dict:
    """Weights, buffers, moments and counts: arrays on rank 0."""
    held = EngineState(engine)
    tensors = {**held.weights(), **held.moments()}
    return {n: t.numpy() for n, t in tensors.items()} | {f"step.{n}": s for n, s in held.steps().items()}
