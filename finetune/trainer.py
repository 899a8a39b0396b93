"""The finetuning loop, from top to bottom.

Every rank embeds its own examples, gathers all ranks' with gradient, and computes the loss of the whole batch: the mean
of the ranks' gradients is then that of one process, for any loss. A method with two networks trains the first for an
epoch, then the second, with the pairs in another order: only one of them has gradients and activations in memory.
"""

import copy
import math
import signal
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import load_file
from timm.optim import AdamP
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from finetune.config import Config
from finetune.data import Loader
from finetune.methods.base import Batch, Method
from finetune.recipe import OPTIMIZERS, Schedule, parameter_groups, set_learning_rates
from finetune.task import Embedded, Task, of_all_ranks
from probemb import distributed
from probemb.data.randomness import number_of
from probemb.errors import UserError, count
from probemb.losses import LossOutput
from probemb.models import DualEncoder, as_one, save_model
from probemb.models.dual_encoder import freeze_backbones
from probemb.options import resolved
from probemb.runs.checkpoints import OPTIMIZER, WEIGHTS, Snapshot
from probemb.runs.folder import RunOutput, take_lock
from probemb.runs.log import METRICS, Window
from probemb.runs.preemption import SIGNALS, Preemption
from probemb.runs.watchdog import Progress

FREE_TO_CHANGE = (  # of a run that is resumed
    *("out", "resume", "stop_after_epochs", "save_every", "keep_checkpoints", "log_every", "wandb"),
    *("engine", "evaluate"),
    # The pairs themselves are compared.
    *("data.path", "data.images", "data.format", "data.train", "data.unpaired", "data.unpaired_images"),
    *("data.workers", "data.failure_share"),
)
REMEDY = "Make room, or make the folder writable, and continue with --resume."


class Joint(nn.Module):
    """Everything that is trained: the model, the method's own module, and the second model, if any; and the average of
    the networks' weights (SWA, PCME++ §B.3), if it is asked for."""

    def __init__(self, model: DualEncoder, method: Method, second: DualEncoder | None = None):
        super().__init__()
        self.objective = method
        self.model, self.method, self.second, self.aside = model, method.module, second, method.aside
        self.average: AveragedModel | None = None

    @property
    def networks(self) -> list[DualEncoder]:
        return [self.model] if self.second is None else [self.model, self.second]


@dataclass
class Position:
    """The position of a run, kept in its checkpoints."""

    samples: int = 0  # seen; an epoch has those of the first network, then those of the second
    epoch: int = 0  # epochs that have ended, validation included
    best: float | None = None  # validation RSUM or R-Precision
    best_epoch: int | None = None


@dataclass
class State:
    """The training state, as checkpoints hold it. Random numbers are drawn from the seed and the step."""

    joint: Joint
    optimizer: torch.optim.Optimizer
    position: Position

    @classmethod
    def of(cls, config: Config, joint: Joint, position: Position) -> Self:
        """With the configured optimizer and average; also sets which of the models' scalars are trained."""
        groups = []
        for network in joint.networks:
            for name, scalar in network.scalars().items():
                scalar.requires_grad_(name in joint.objective.trains)
            groups += parameter_groups(network, joint.method if network is joint.model else None, config.optimizer)
        if config.swa_epochs:
            joint.average = AveragedModel(nn.ModuleList(joint.networks)).requires_grad_(False).eval()
        return cls(joint, OPTIMIZERS[config.optimizer.name](groups), position)

    def parameters(self) -> Iterator[tuple[str, torch.optim.Optimizer, Tensor]]:
        """Names and parameters of the model's optimizer, and of that of the method's `aside`, if it has one."""
        names = {parameter: name for name, parameter in self.joint.named_parameters()}
        for optimizer in filter(None, (self.optimizer, self.joint.objective.aside_optimizer)):
            for group in optimizer.param_groups:
                yield from ((names[parameter], optimizer, parameter) for parameter in group["params"])

    def snapshot(self, content: dict) -> Snapshot:
        """A copy in the CPU's memory: training may continue while it is written."""
        weights = {name: _copy(tensor) for name, tensor in self.joint.state_dict().items()}
        moments = {
            f"{key}.{name}": _copy(torch.as_tensor(value))
            for name, optimizer, parameter in self.parameters()
            for key, value in optimizer.state.get(parameter, {}).items()
        }
        return Snapshot({WEIGHTS: weights, OPTIMIZER: moments}, content)

    def load(self, path: Path) -> None:
        """Restore all but the position from a checkpoint, on every process.

        Raises UserError: it belongs to another model or method.
        """
        weights, moments = load_file(path / WEIGHTS), load_file(path / OPTIMIZER)
        try:
            self.joint.load_state_dict(weights)
        except RuntimeError as error:
            raise UserError(
                f"{path} is a checkpoint of another model: {' '.join(str(error).split())[:300].rstrip('.')}.",
                "Resume with the settings in config.yaml of its folder, or start a new run.",
            ) from error
        for name, optimizer, parameter in self.parameters():
            if f"step.{name}" in moments:
                step, counts_in_python = moments[f"step.{name}"], isinstance(optimizer, AdamP)  # its steps are Python's
                held = {key: moments[f"{key}.{name}"].to(parameter.device) for key in ("exp_avg", "exp_avg_sq")}
                optimizer.state[parameter] = {"step": int(step) if counts_in_python else step, **held}


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


class RunFolder(RunOutput):
    """Files of a finetuning run: config.yaml, metrics.jsonl, tensorboard/, checkpoints/, model/ (the best), model-swa/;
    of a method with two networks also model-second/ and model-swa-second/, of the same epochs.

    `identity`: of the training pairs.
    """

    def __init__(self, config: Config, identity: dict, step: int, steps: int):
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
        content = {"step": state.position.samples // self.config.batch_size, "state": content}
        self.write(lambda: state.snapshot(content) if self.is_main else None)


class Trainer:
    """Trains a `State`, epoch by epoch."""

    def __init__(
        self, state: State, task: Task, loader: Loader, schedule: Schedule, config: Config, folder: RunFolder,
        preemption: Preemption,
    ):  # fmt: skip
        self.state, self.config, self.folder, self.preemption = state, config, folder, preemption
        self.task, self.loader, self.schedule, self.device = task, loader, schedule, task.device
        self.joint, self.position, self.objective = state.joint, state.position, state.joint.objective
        self.networks, self.network = state.joint.networks, 0  # the one that is being trained
        self.window = Window("pairs", lambda: loader.waited, self.device)
        self.epoch_steps = len(self.networks) * loader.steps
        self.progress = Progress(self.step)

    @property
    def step(self) -> int:
        """Steps done since the start of the run."""
        return self.position.samples // self.config.batch_size

    @property
    def step_in_epoch(self) -> int:
        """Steps done of this epoch, which has those of all networks: all of them until its validation has ended."""
        return self.step - self.position.epoch * self.epoch_steps

    @property
    def model(self) -> DualEncoder:
        return self.networks[self.network]

    def fit(self) -> bool:
        """Train to the end; returns whether it was asked to stop before, having finished its step and saved.

        Raises UserError: the loss or its gradient is NaN or Inf (the step is skipped), or data cannot be read.
        """
        config, position, window, state = self.config, self.position, self.window, self.state
        batch_size, steps, optimizer = config.batch_size, self.loader.steps, state.optimizer
        while position.epoch < min(config.epochs, config.stop_after_epochs or config.epochs):
            if self.step_in_epoch == 0:
                self.objective.begin_epoch(position.epoch)
            for network in range(self.step_in_epoch // steps, len(self.networks)):
                self.network, frozen = network, self.schedule.frozen(position.samples)
                image, text = config.model.lock_image, config.model.lock_text
                freeze_backbones(self.model, image or frozen, text or (config.optimizer.freeze_text and frozen))
                for examples in self._examples():
                    # ------------------------------------------------------------------------------------------- load
                    now = {"epoch": position.epoch, "step": self.step, "network": network}
                    inputs, mix = self.task.inputs(examples, self.model, self.step)
                    torch.manual_seed(number_of("dropout", config.seed, self.step, distributed.rank()))
                    # ---------------------------------------------------------------------------------------- forward
                    batch = self.task.gather(self._embed(self.model, *inputs), examples, mix, **now)
                    batch.by_other = partial(self._embed_by_other, inputs) if len(self.networks) > 1 else None
                    # ------------------------------------------------------------------------------------------- loss
                    out: LossOutput = self.objective.loss(batch, self.model)
                    # --------------------------------------------------------------------------------------- backward
                    optimizer.zero_grad(set_to_none=True)
                    out.loss.backward()
                    trained = [*self.model.parameters(), *self.joint.method.parameters()]
                    distributed.average_gradients(trained)
                    norm = nn.utils.clip_grad_norm_(trained, config.optimizer.clip_grad_norm or math.inf)
                    finite = out.loss.isfinite().all() & norm.isfinite()
                    nonfinite, stopping = distributed.sum_over_ranks([~finite, self.stop()], self.device).tolist()
                    if nonfinite:
                        raise self._nonfinite(out, norm)
                    # ------------------------------------------------------------------------------------------- step
                    set_learning_rates(optimizer, self.schedule, position.samples + batch_size)
                    optimizer.step()  # only this network has gradients
                    more = {}
                    if aside := self.objective.aside_optimizer:
                        set_learning_rates(aside, self.schedule, position.samples + batch_size)
                        more = self.objective.after_step(batch, self.model)
                    scalars = self._scalars(batch)
                    position.samples += batch_size
                    # -------------------------------------------------------------------------------------------- log
                    window.add({"loss": out.loss.detach(), **out.terms, **more, "gradient_norm": norm, **scalars})
                    if self.step % config.log_every == 0 or self.step % steps == 0:
                        self._log()
                    # ------------------------------------------------------------------------------------- maybe save
                    if stopping:  # also after the last step: the end of an epoch may take long
                        self.folder.save(state)
                        return True
                    due = config.save_every and self.step % config.save_every == 0
                    if due and self.step_in_epoch < self.epoch_steps:
                        self.folder.save(state)
                        window.restart()
            # ----------------------------------------------------------------------------- average, evaluate, and save
            average = self.joint.average
            if average is not None and self.schedule.averages(position.samples):
                average = copy.deepcopy(average)  # an epoch whose evaluation is interrupted has not ended
                average.update_parameters(nn.ModuleList(self.networks))
            self.progress.doing("validating")
            if self.end_epoch(position.epoch + 1, average):
                self.folder.save(state)
                return True
            position.epoch, self.joint.average = position.epoch + 1, average
            self.folder.save(state)  # last: a run killed before repeats the end of the epoch
        return False

    def stop(self) -> bool:
        return self.preemption.asked() or self.folder.failed

    def end_epoch(self, epoch: int, average: AveragedModel | None) -> bool:
        """Validate and classify on the first process while the others wait; save the model of the best epoch, without
        validation the newest one, and at the end the averaged one. Collective. Returns whether a signal has ended the
        validation, and nothing is saved."""
        config, folder, position, task = self.config, self.folder, self.position, self.task
        folder.finish()  # validation forks workers: no thread may be writing
        averaged = list(average.module) if average is not None and epoch == config.epochs else None

        def measure() -> tuple[dict, dict, list] | None:
            if self.preemption.asked():  # since the last step
                return None
            self.preemption.interrupting = (*SIGNALS, signal.SIGINT)
            evaluated = as_one(self.networks).eval()
            try:
                of_average = task.validate(as_one(averaged)) if averaged else {}
                return task.validate(evaluated), of_average, task.classify(self.networks[0])
            except KeyboardInterrupt:
                return None
            finally:
                evaluated.train()
                self.preemption.interrupting = ()

        def save(values: dict, of_average: dict, classified: list[dict]) -> None:
            for accuracies in classified:
                folder.report(self.step, {"samples": position.samples, **accuracies})
            best = not values or position.best is None or values[task.metric] > position.best
            if values:
                folder.report(self.step, {"samples": position.samples, **values, "is_best": best})
                if best:
                    position.best, position.best_epoch = values[task.metric], epoch
            if best:
                folder.save_models(self.networks)
            if of_average:
                mean, score = f"mean of {count(int(average.n_averaged), 'epoch')}", of_average[task.metric]
                print(f"model-swa: {mean}, validation {METRICS[task.metric]} {score:.1f}", flush=True)
                folder.log.write(folder.steps, {f"swa_{name}": value for name, value in of_average.items()})
            if averaged:
                folder.save_models(averaged, "model-swa")

        measured = distributed.on_main(measure, folder.path, REMEDY)
        if distributed.all_of(measured is None)[0]:
            return True
        distributed.on_main(lambda: save(*measured), folder.path, REMEDY)
        return False

    def _examples(self) -> Iterator:
        """The batches of the rest of this network's epoch, in an order of its own; notes what this rank does."""
        self.window.restart()
        waiting = "waiting for data", self.loader.waiting_for
        self.progress.doing(*waiting)
        order = self.position.epoch * len(self.networks) + self.network
        for examples in self.loader.epoch(order, self.step_in_epoch - self.network * self.loader.steps):
            self.progress.doing("computing")
            yield examples
            self.progress.made(self.step)
            self.progress.doing(*waiting)

    def _embed(self, model: DualEncoder, images: Tensor, tokens: Tensor, image_mask: Tensor | None) -> Embedded:
        """This rank's examples."""
        wants = self.objective.wants_tokens, self.objective.wants_features
        with self.task.runs_on.autocast():
            return model.image_tower(images, image_mask, *wants), model.text_tower(tokens, None, *wants)

    @torch.no_grad()
    def _embed_by_other(self, inputs: tuple[Tensor | None, ...]) -> Embedded:
        """The pairs of all ranks, embedded by the network that is not being trained, in evaluation mode."""
        other = self.networks[1 - self.network]
        training = other.training
        other.eval()  # else its batch norms would learn from batches that it is not trained on
        embedded = of_all_ranks(self._embed(other, *inputs))
        other.train(training)
        return embedded

    def _log(self) -> None:
        left = self.config.epochs * self.epoch_steps - self.step
        values = self.window.read(self.config.batch_size, left)
        self.window.restart()
        at = {"network": self.network + 1} if len(self.networks) > 1 else {}
        at |= {"samples": self.position.samples, "epoch": self.step / self.epoch_steps}
        lr = max(group["lr"] for group in self.state.optimizer.param_groups if group["name"] != "scalars")  # of heads
        self.folder.report(self.step, {**at, **values, "lr": lr})
        chance = math.log(self.config.batch_size)
        if left == 0 and distributed.is_main() and values.get("query_to_target", 0) > chance:
            told = f"query_to_target is above {chance:.2f}, a random choice's: try another loss.temperature or lr"
            print(f"warning: {told}", flush=True)

    def _nonfinite(self, out: LossOutput, norm: Tensor) -> UserError:
        terms = {"loss": out.loss.detach(), **out.terms, "gradient norm": norm}
        listed = ", ".join(f"{name} {float(value):.4g}" for name, value in terms.items())
        return UserError(
            f"At step {self.step + 1} the loss or its gradient is NaN or Inf ({listed}); the step was skipped.",
            "Start a new run with a lower optimizer.lr: --resume would repeat this step.",
        )

    @torch.no_grad()
    def _scalars(self, batch: Batch) -> dict[str, Tensor]:
        values = {name: x.detach().reshape(()).clone() for name, x in self.objective.scalars(self.model).items()}
        if self.objective.probabilistic:
            other, g = ("u_text", batch.text) if batch.parts is None else ("u_part", batch.parts)
            values |= {"u_image": batch.image.uncertainty().mean(), other: g.uncertainty().mean()}
        return values
