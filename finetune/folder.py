"""Files of a finetuning run: config.yaml, metrics.jsonl, tensorboard/, checkpoints/, model/ (the best), model-swa/.

A method with two networks also leaves model-second/ and model-swa-second/, of the same epochs.
Random numbers are drawn from the seed and the step, so a checkpoint needs only the training state and its position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file
from timm.optim import AdamP
from torch import Tensor

from finetune.config import Config
from finetune.trainer import State
from probemb.errors import UserError
from probemb.models import DualEncoder, save_model
from probemb.options import resolved
from probemb.runs.checkpoints import OPTIMIZER, WEIGHTS, Snapshot
from probemb.runs.folder import RunOutput, take_lock

FREE_TO_CHANGE = (
    *("out", "resume", "stop_after_epochs", "save_every", "keep_checkpoints", "log_every", "wandb"),
    *("engine", "evaluate"),
    # The pairs themselves are compared.
    *("data.path", "data.images", "data.format", "data.train", "data.unpaired", "data.unpaired_images"),
    *("data.workers", "data.failure_share"),
)


class RunFolder(RunOutput):
    """Files of a finetuning run: those of `RunOutput`, its lock, and the models. `identity`: of the training pairs."""

    def __init__(self, config: Config, identity: dict, step: int = 0, steps: int = 0):
        self.identity = identity
        super().__init__(config, step, steps, take_lock(config.out))

    def close(self) -> None:
        super().close()
        if self.lock:
            self.lock.close()

    def save_models(self, networks: Sequence[DualEncoder], name: str = "model") -> None:
        """The weights that `load_model` reads: the first network in `name`, a second one in `name`-second."""
        for network, folder in zip(networks, (name, f"{name}-second")):
            save_model(network, self.path / folder)

    def save(self, state: State) -> None:
        """Start writing a checkpoint of this moment; collective.

        Raises UserError, on all ranks: the one before could not be written.
        """
        content = {**asdict(state.position), "config": resolved(self.config), "data": self.identity}
        step = state.position.samples // self.config.batch_size
        self.write(lambda: take_snapshot(state, step, content) if self.is_main else None)


def take_snapshot(state: State, step: int, content: dict) -> Snapshot:
    """Copy the training state to the CPU's memory: training may continue while it is written."""
    weights = {name: _copy(tensor) for name, tensor in state.joint.state_dict().items()}
    moments = {
        f"{key}.{name}": _copy(torch.as_tensor(value))
        for name, optimizer, parameter in _parameters(state)
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    return Snapshot({WEIGHTS: weights, OPTIMIZER: moments}, {"step": step, "state": content})


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _parameters(state: State) -> Iterator[tuple[str, torch.optim.Optimizer, Tensor]]:
    names = {parameter: name for name, parameter in state.joint.named_parameters()}
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            yield from ((names[parameter], optimizer, parameter) for parameter in group["params"])


def load_checkpoint(path: Path, state: State) -> None:
    """Restore all of the state but its position, on every process.

    Raises UserError: it belongs to another model or method.
    """
    weights, moments = load_file(path / WEIGHTS), load_file(path / OPTIMIZER)
    try:
        state.joint.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(
            f"{path} is a checkpoint of another model: {' '.join(str(error).split())[:300].rstrip('.')}.",
            "Resume with the settings in config.yaml of its folder, or start a new run.",
        ) from error
    for name, optimizer, parameter in _parameters(state):
        if f"step.{name}" in moments:
            step, counts_in_python = moments[f"step.{name}"], isinstance(optimizer, AdamP)  # its steps are Python's
            held = {key: moments[f"{key}.{name}"].to(parameter.device) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": int(step) if counts_in_python else step, **held}
