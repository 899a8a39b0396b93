"""Files of a finetuning run: config.yaml, metrics.jsonl, tensorboard/, checkpoints/, model/ (the best), model-swa/.

A method that trains two networks leaves model-second/ and model-swa-second/ besides, of the same epochs.
A checkpoint holds what a process needs to resume as if it had never stopped; what is random is drawn from the seed and
the step, so that the position, the samples seen, is all there is to remember.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from finetune.config import Config
from finetune.recipe import WeightAverage
from finetune.trainer import Joint
from probemb.cli.configuration import to_dict, with_absolute_paths
from probemb.errors import UserError
from probemb.models import DualEncoder, save_model
from probemb.runs.checkpoints import OPTIMIZER, RANDOM, WEIGHTS, Snapshot, read_content
from probemb.runs.log import step_of
from probemb.runs.output import RunOutput

FREE_TO_CHANGE = (
    "out",
    "resume",
    "stop_after_epochs",
    "save_every",
    "keep_checkpoints",
    "log_every",
    "wandb",
    "engine",
    "data.path",
    "data.images",
    "data.format",
    "data.train",  # the pairs themselves are compared
    "data.workers",
    "data.failure_share",
)
DIGEST = ("pairs", "the training pairs", "path")  # see `refuse_another_run`
MOMENTS = ("exp_avg", "exp_avg_sq")


class RunFolder(RunOutput):
    """Files of a finetuning run: those of `RunOutput`, and the models.

    Args:
        config: resolved.
        identity: what the batches depend on.
        step: the step that the run resumes from.
        steps: of the whole run.
    """

    def __init__(self, config: Config, identity: dict, step: int, steps: int):
        self.identity = identity
        super().__init__(config, step, steps)

    def line(self, step: int, values: dict[str, float]) -> str:
        """The line that people read; `values` as in metrics.jsonl."""
        if "rsum" not in values:
            return super().line(step, values)
        recalls = " ".join(f"{values[f'{way}_r{k}']:.1f}" for way in ("i2t", "t2i") for k in (1, 5, 10))
        marked = " (best)" if values.get("is_best") else ""
        rsum = f"RSUM {values['rsum']:.1f}{marked} (R@1, 5, 10 i→t, t→i: {recalls})"
        return f"{step_of(step, self.steps)} | validation {rsum}"

    def save_models(self, networks: Sequence[DualEncoder], name: str = "model") -> None:
        """The weights that `load_model` reads: the first network in `name`, a second one in `name`-second."""
        for network, folder in zip(networks, (name, f"{name}-second")):
            save_model(network, self.path / folder, overwrite=True)

    def save(
        self,
        joint: Joint,
        optimizer: torch.optim.Optimizer,
        average: WeightAverage | None,
        step: int,
        position: dict,
        window: dict,
    ) -> None:
        """Begin to write a checkpoint of this moment; collective.

        Args:
            position: {"samples", "epoch", "best", "best_epoch"}; of an epoch that has ended, `epoch` is the next one.
            window: what was measured since the last log line, see `Window.state`.

        Raises:
            UserError: the one before could not be written; on all ranks.
        """
        state = {**position, "config": with_absolute_paths(to_dict(self.config), self.config), "data": self.identity}
        self.write(lambda: take_snapshot(joint, optimizer, average, step, state, window) if self.is_main else None)


def take_snapshot(joint, optimizer, average, step: int, state: dict, window: dict) -> Snapshot:
    """Copy the training state to the CPU's memory: training may go on while it is written."""
    weights = {name: _copy(tensor) for name, tensor in joint.state_dict().items()}
    if average:
        weights |= {f"average.{name}": _copy(tensor) for name, tensor in average.state_dict().items()}
    moments, counts = {}, {}
    for name, held in _states(joint, optimizer):
        moments |= {f"{moment}.{name}": _copy(held[moment]) for moment in MOMENTS}
        counts[name] = int(held["step"])
    extra = {"cpu": torch.get_rng_state()} | {f"window.{name}": value for name, value in window["sums"].items()}
    content = {"step": step, "adam_steps": counts, "state": state, "window": window["counts"]}
    return Snapshot({WEIGHTS: weights, OPTIMIZER: moments, RANDOM: extra}, content)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _states(joint: Joint, optimizer: torch.optim.Optimizer):
    """(name, AdamP's state) of every parameter that has one."""
    names = {parameter: name for name, parameter in joint.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if optimizer.state.get(parameter):
                yield names[parameter], optimizer.state[parameter]


def load_checkpoint(path: Path, joint: Joint, optimizer: torch.optim.Optimizer, average: WeightAverage | None) -> dict:
    """Put everything back to where `take_snapshot` found it; every process reads it.

    Returns:
        the window that was saved with it.

    Raises:
        UserError: it belongs to another model or method.
    """
    content = read_content(path)
    weights, moments = load_file(path / WEIGHTS), load_file(path / OPTIMIZER)
    prefix = "average."
    averaged = {name.removeprefix(prefix): t for name, t in weights.items() if name.startswith(prefix)}
    try:
        joint.load_state_dict({name: t for name, t in weights.items() if not name.startswith(prefix)})
        if average:
            average.load_state_dict(averaged)
    except RuntimeError as error:
        raise UserError(
            f"{path} is a checkpoint of another model: {' '.join(str(error).split())[:300].rstrip('.')}.",
            "Resume with the settings in config.yaml of its folder, or start a new run.",
        ) from error
    parameters, counts = dict(joint.named_parameters()), content["adam_steps"]
    for name, count in counts.items():
        parameter = parameters[name]
        state: dict[str, Tensor | int] = {m: moments[f"{m}.{name}"].to(parameter.device) for m in MOMENTS}
        optimizer.state[parameter] = {"step": count, **state}
    extra = load_file(path / RANDOM)
    return {"sums": {name: extra[f"window.{name}"] for name in content["window"]}, "counts": content["window"]}
