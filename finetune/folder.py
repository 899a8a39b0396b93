"""Files of a finetuning run: config.yaml, metrics.jsonl, tensorboard/, checkpoints/, model/ (the best), model-swa/.

A method with two networks also leaves model-second/ and model-swa-second/, of the same epochs.
Random numbers are drawn from the seed and the step, so a checkpoint needs only the training state and its position.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from finetune.adamp import AdamP
from finetune.config import Config
from finetune.trainer import State
from probemb.cli.configuration import to_dict, with_absolute_paths
from probemb.distributed import on_main
from probemb.errors import UserError
from probemb.files import replace_text
from probemb.models import DualEncoder, save_model
from probemb.runs.checkpoints import OPTIMIZER, RANDOM, WEIGHTS, Snapshot, read_content
from probemb.runs.lock import RunLock
from probemb.runs.log import composed_words, rsum_words, step_of
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
    "data.unpaired",
    "data.unpaired_images",
    "data.workers",
    "data.failure_share",
)
DIGEST = ("pairs", "the training pairs", "path")  # see `refuse_another_run`
VALIDATED = {"rsum": rsum_words, "r_precision": composed_words}  # what a validation's values have
MOMENTS = ("exp_avg", "exp_avg_sq")
NEXT, STEP = ".next", "step"  # models that wait for the checkpoint of their step


class RunFolder(RunOutput):
    """Files of a finetuning run: those of `RunOutput`, and the models.

    Args:
        identity: of the training pairs, to compare when resuming.
        lock: of the folder, on rank 0.
    """

    def __init__(self, config: Config, identity: dict, step: int, steps: int, lock: RunLock | None = None):
        self.identity = identity
        super().__init__(config, step, steps, lock)
        on_main(lambda: take_models(self.path, step), self.path, "Choose another --out.")

    def line(self, step: int, values: dict[str, float]) -> str:
        """The printed line of `values`, which are as in metrics.jsonl."""
        words = next((told(values) for key, told in VALIDATED.items() if key in values), None)
        return super().line(step, values) if words is None else f"{step_of(step, self.steps)} | validation {words}"

    def save_models(self, networks: Sequence[DualEncoder], step: int, name: str = "model") -> None:
        """The weights that `load_model` reads: the first network in `name`, a second one in `name`-second.

        They take their places once the checkpoint of `step` is written: models of an epoch that a run does not know,
        because it was killed before, go.
        """
        for network, folder in zip(networks, (name, f"{name}-second")):
            save_model(network, self.path / NEXT / folder, overwrite=True)
        replace_text(self.path / NEXT / STEP, f"{step}\n")

    def write_more(self, snapshot: Snapshot) -> str:
        """The models of this step take their places."""
        take_models(self.path, snapshot.content["step"])
        return ""

    def save(self, state: State, window: dict) -> None:
        """Start writing a checkpoint of this moment; collective.

        Args:
            window: values since the last log line, see `Window.state`.

        Raises:
            UserError: the one before could not be written; on all ranks.
        """
        config = with_absolute_paths(to_dict(self.config), self.config)
        content = {**asdict(state.position), "config": config, "data": self.identity}
        step = state.position.samples // self.config.batch_size
        self.write(lambda: take_snapshot(state, step, content, window) if self.is_main else None)


def take_models(run: Path, step: int) -> None:
    """Put models that wait for the checkpoint of `step` into their places, and drop those of another one."""
    waiting = run / NEXT
    if not waiting.exists():
        return
    try:
        is_ours = (waiting / STEP).read_text(encoding="utf-8").strip() == str(step)
    except (OSError, ValueError):
        is_ours = False
    for file in sorted(waiting.glob("model*/*"), reverse=True) if is_ours else ():  # weights before config.json
        (run / file.parent.name).mkdir(exist_ok=True)
        file.replace(run / file.parent.name / file.name)
    shutil.rmtree(waiting)


def take_snapshot(state: State, step: int, content: dict, window: dict) -> Snapshot:
    """Copy the training state to the CPU's memory: training may continue while it is written."""
    weights = {name: _copy(tensor) for name, tensor in state.joint.state_dict().items()}
    if state.average:
        weights |= {f"average.{name}": _copy(tensor) for name, tensor in state.average.state_dict().items()}
    moments, counts = {}, {}
    for name, held in _states(state):
        moments |= {f"{moment}.{name}": _copy(held[moment]) for moment in MOMENTS}
        counts[name] = int(held["step"])
    sums = {f"window.{name}": value for name, value in window["sums"].items()}
    header = {"step": step, "adam_steps": counts, "state": content, "window": window["counts"]}
    return Snapshot({WEIGHTS: weights, OPTIMIZER: moments, RANDOM: sums}, header)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _states(training: State):
    """(name, Adam's or AdamP's state) of every parameter that has one."""
    names = {parameter: name for name, parameter in training.joint.named_parameters()}
    for optimizer in training.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if optimizer.state.get(parameter):
                    yield names[parameter], optimizer.state[parameter]


def load_checkpoint(path: Path, training: State) -> dict:
    """Restore all of the state but its position, on every process.

    Returns:
        the window's state, see `Window.state`.

    Raises:
        UserError: it belongs to another model or method.
    """
    content = read_content(path)
    weights, moments = load_file(path / WEIGHTS), load_file(path / OPTIMIZER)
    prefix = "average."
    averaged = {name.removeprefix(prefix): t for name, t in weights.items() if name.startswith(prefix)}
    try:
        training.joint.load_state_dict({name: t for name, t in weights.items() if not name.startswith(prefix)})
        if training.average:
            training.average.load_state_dict(averaged)
    except RuntimeError as error:
        raise UserError(
            f"{path} is a checkpoint of another model: {' '.join(str(error).split())[:300].rstrip('.')}.",
            "Resume with the settings in config.yaml of its folder, or start a new run.",
        ) from error
    names, counts = {p: name for name, p in training.joint.named_parameters()}, content["adam_steps"]
    for optimizer in training.optimizers:
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if names[p] in counts):
            name = names[parameter]
            state = {moment: moments[f"{moment}.{name}"].to(parameter.device) for moment in MOMENTS}
            count = counts[name] if isinstance(optimizer, AdamP) else torch.tensor(float(counts[name]))
            optimizer.state[parameter] = {"step": count, **state}
    sums = load_file(path / RANDOM)
    return {"sums": {name: sums[f"window.{name}"] for name in content["window"]}, "counts": content["window"]}
