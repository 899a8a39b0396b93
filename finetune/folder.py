"""What a finetuning run leaves: config.yaml, metrics.jsonl, tensorboard/, checkpoints/, model/ (the best), model-swa/.

A method that trains two networks leaves model-second/ and model-swa-second/ besides, of the same epochs.
Only the first process writes. A checkpoint holds whatever a process needs to go on as if it had never stopped; what is
random is drawn from the seed and the step, so that the position is all there is to remember.
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
from probemb.cli.configuration import to_dict, to_yaml
from probemb.errors import UserError
from probemb.files import replace_text
from probemb.models import DualEncoder, save_model
from probemb.runs.checkpoints import (
    FORMAT,
    OPTIMIZER,
    RANDOM,
    VERSION,
    WEIGHTS,
    prune,
    read_content,
    write_checkpoint,
)
from probemb.runs.folder import changes, remove_leftovers
from probemb.runs.log import RunLog, duration

FREE_TO_CHANGE = (
    "out",
    "resume",
    "stop_after_epochs",
    "save_every",
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
KEPT = 2  # checkpoints
MOMENTS = ("exp_avg", "exp_avg_sq")


class RunFolder:
    """The files of a run, on the first process.

    Args:
        config: resolved.
        identity: what the batches depend on.
        step: that the run goes on from.
        steps: of the whole run.
    """

    def __init__(self, config: Config, identity: dict, step: int, steps: int):
        self.path, self.config, self.identity, self.steps = Path(config.out), config, identity, steps
        self.path.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.path)
        replace_text(self.path / "config.yaml", to_yaml(config))
        self.log = RunLog(self.path, step, config.wandb, to_dict(config))

    def tell(self, step: int, values: dict[str, float]) -> None:
        """One line for people and one for programs. Raises UserError: it cannot be written."""
        self.record(step, values)
        print(_line(step, self.steps, values), flush=True)

    def record(self, step: int, values: dict[str, float]) -> None:
        """One line for programs. Raises UserError: it cannot be written."""
        try:
            self.log.write(step, values)
        except OSError as error:
            raise UserError(
                f"{self.log.path} cannot be written ({error.strerror}).",
                "Make room, or make the folder writable, and go on with --resume.",
            ) from error

    def save_models(self, networks: Sequence[DualEncoder], name: str = "model") -> None:
        """The weights that `load_model` reads: the first network in `name`, a second one in `name`-second."""
        for network, folder in zip(networks, (name, f"{name}-second")):
            save_model(network, self.path / folder, overwrite=True)

    def save(
        self,
        joint: Joint,
        optimizer: torch.optim.Optimizer,
        average: WeightAverage | None,
        position: dict,
        window: dict | None = None,
    ) -> None:
        """A checkpoint of this moment.

        Args:
            position: {"step", "epoch", "step_in_epoch", "best", "best_epoch"}.
            window: what was measured since the last log line, see `trainer.Window.state`.

        Raises:
            UserError: it cannot be written; earlier ones are as they were.
        """
        weights = {name: tensor.detach().cpu() for name, tensor in joint.state_dict().items()}
        if average:
            weights |= {f"average.{name}": tensor.cpu() for name, tensor in average.state_dict().items()}
        moments, counts = {}, {}
        for name, state in _states(joint, optimizer):
            moments |= {f"{moment}.{name}": state[moment].detach().cpu() for moment in MOMENTS}
            counts[name] = int(state["step"])
        content = {
            "format": FORMAT,
            "version": VERSION,
            "step": position["step"],
            "adam_steps": counts,
            "state": {**position, "config": to_dict(self.config), "data": self.identity},
            "window": window["counts"] if window else {},
        }
        sums = {f"window.{name}": value for name, value in window["sums"].items()} if window else {}
        target = self.path / "checkpoints" / f"step-{position['step']}"
        tensors = {WEIGHTS: weights, OPTIMIZER: moments, RANDOM: {"cpu": torch.get_rng_state(), **sums}}
        try:
            write_checkpoint(target, tensors, content)
        except OSError as error:
            raise UserError(
                f"The checkpoint {target} could not be written: {error}.",
                "Make room, or make the folder writable, and go on with --resume; checkpoints before are whole.",
            ) from error
        prune(self.path, KEPT)

    def close(self) -> None:
        """Flush everything."""
        self.log.close()


def _states(joint: Joint, optimizer: torch.optim.Optimizer):
    """(name, AdamP's state) of every parameter that has one."""
    names = {parameter: name for name, parameter in joint.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if optimizer.state.get(parameter):
                yield names[parameter], optimizer.state[parameter]


def read_position(path: Path) -> dict:
    """The state of a checkpoint, see `RunFolder.save`. Raises UserError."""
    return read_content(path)["state"]


def load_checkpoint(path: Path, joint: Joint, optimizer: torch.optim.Optimizer, average: WeightAverage | None) -> dict:
    """Put everything back to where `RunFolder.save` found it; every process reads it.

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
            "Resume with the settings in config.yaml of its folder, or begin a new run.",
        ) from error
    parameters, counts = dict(joint.named_parameters()), content["adam_steps"]
    for name, count in counts.items():
        parameter = parameters[name]
        state: dict[str, Tensor | int] = {m: moments[f"{m}.{name}"].to(parameter.device) for m in MOMENTS}
        optimizer.state[parameter] = {"step": count, **state}
    extra = load_file(path / RANDOM)
    return {"sums": {name: extra[f"window.{name}"] for name in content["window"]}, "counts": content["window"]}


def refuse_another_run(config: Config, position: dict, identity: dict, earlier: Path) -> None:
    """Resuming goes on with the same pairs, model and recipe.

    Raises:
        UserError: names what has changed.
    """
    told = changes(position["config"], to_dict(config), ignore=FREE_TO_CHANGE)
    paths = [one["data"]["path"] for one in (position["config"], to_dict(config))]
    for key, old, new in changes(position["data"], identity):  # sums, which say little: name the paths too
        told.append((f"the training {key}", *(f"{value} ({path})" for value, path in zip((old, new), paths))))
    if told:
        raise UserError(
            f"The run is not the one that {earlier} belongs to: "
            f"{'; '.join(f'{key}: {old} -> {new}' for key, old, new in told)}.",
            "Resume with the settings in the run folder's config.yaml (--config), or begin a new run with another "
            "--out.",
        )


def _line(step: int, steps: int, v: dict[str, float]) -> str:
    at = f"step {step:>{len(str(steps))}}/{steps}"
    if "rsum" in v:
        recalls = " ".join(f"{v[f'{way}_r{k}']:.1f}" for way in ("i2t", "t2i") for k in (1, 5, 10))
        marked = " (best)" if v.get("is_best") else ""
        return f"{at} | validation{v.get('of', '')} RSUM {v['rsum']:.1f}{marked} (R@1, 5, 10 i→t, t→i: {recalls})"
    known = (
        "network",
        "loss",
        "lr",
        "epoch",
        "n_pseudo",
        "data_wait",
        "pairs_per_second",
        "eta",
        "gradient_norm",
        "scale",
        "shift",
        "temperature",
    )
    terms = ", ".join(f"{name} {value:.3f}" for name, value in v.items() if name not in (*known, "u_image", "u_text"))
    at += f" | network {v['network']}" if "network" in v else ""
    parts = [at, f"epoch {v['epoch']:.2f}", f"loss {v['loss']:.3f}" + (f" ({terms})" if terms else "")]
    if "scale" in v:
        parts.append(f"a {v['scale']:.2f} b {v['shift']:.2f}")
    if "temperature" in v:
        parts.append(f"temperature {v['temperature']:.2f}")
    if "u_image" in v:
        parts.append(f"u image {v['u_image']:.3f} text {v['u_text']:.3f}")
    speed = f"{v['pairs_per_second']:.0f} pairs/s, data {100 * v['data_wait']:.0f} %"
    return " | ".join([*parts, speed, f"lr {v['lr']:.1e}", f"ETA {duration(v['eta'])}"])
