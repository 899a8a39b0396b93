"""The finetuning command on a few small scenes, in this process or in forked ones."""

import json
import sys
from pathlib import Path

import torch

# What the command imports late: here, and not in every forked process again.
from torch.utils.tensorboard import SummaryWriter  # noqa: F401

import tests.jobs
from finetune.run import main

OPTIONS = {
    "model.name": "ViT-Micro-32",
    "model.embed_dim": 16,
    "model.image_weights": "null",
    "batch-size": 16,
    "epochs": 2,
    "swa-epochs": 1,
    "log-every": 1,
    "optimizer.decay-epochs": 1,
    "optimizer.freeze-epochs": 1,
    "data.workers": 0,
    "engine.threads": 1,  # what is forked from this process hangs once OpenMP has had several here
}
ONE_EPOCH = {"epochs": 1, "optimizer.decay-epochs": 0, "optimizer.freeze-epochs": 0, "swa-epochs": 0}


def words(options: dict, *more: str) -> list[str]:
    """The command line, without the program."""
    return ["--no-model.pretrained", *(f"--{k}={v}" for k, v in {**OPTIONS, **options}.items()), *more]


def run_here(options: dict, *more: str) -> int:
    """The command in this process; returns the exit code. Raises UserError."""
    return run_argv(words(options, *more))


def run_argv(argv: list[str]) -> int:
    """The same with the whole command line."""
    before, sys.argv = sys.argv, ["finetune/run.py", *argv]
    try:
        return main()
    finally:
        sys.argv = before


class Job(tests.jobs.Job):
    """The command on `ranks` forked ranks."""

    def __init__(self, options: dict, *more: str, ranks: int, output: Path, prepare=lambda rank: None):
        super().__init__(
            main, {**OPTIONS, **options}, "--no-model.pretrained", *more, ranks=ranks, output=output, prepare=prepare
        )


def metrics(run: Path) -> list[dict]:
    """The lines of metrics.jsonl without what depends on the clock and the machine."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    outside = ("time", "data_wait", "pairs_per_second", "eta", "memory")
    return [{key: value for key, value in line.items() if key not in outside} for line in lines]


def checkpoint(run: Path, step: int) -> dict:
    """All that a checkpoint holds but for the configuration."""
    folder = run / "checkpoints" / f"step-{step}"
    state = json.loads((folder / "state.json").read_text())
    state["state"].pop("config")
    return {
        **{name: (folder / name).read_bytes() for name in ("weights.safetensors", "optimizer.safetensors")},
        "state": state["state"],
    }


def saved(run: Path, name: str = "model") -> dict[str, torch.Tensor]:
    """The weights of a saved model."""
    from safetensors.torch import load_file

    return load_file(run / name / "model.safetensors")
