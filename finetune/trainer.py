"""The finetuning loop, from top to bottom; accelerate does the distribution (DDP).

Every rank embeds its own pairs; embeddings and labels of all ranks are gathered with gradient, and every rank computes
the loss of the whole batch. DDP's mean of the gradients is then that of one process on the whole batch, for any loss.

A method with two networks trains the first for an epoch, then the second, with the pairs in another order: only one of
them has gradients and activations in memory. An epoch has the steps of both.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from finetune.config import Config
from finetune.loading.batch_loader import BatchLoader
from finetune.methods import Batch, Method
from finetune.network import Network, embed, of_all_ranks
from finetune.pair_feed import Moment, PairFeed
from finetune.recipe import Schedule, WeightAverage, set_learning_rates
from finetune.tuple_feed import TupleFeed
from probemb import distributed
from probemb.data.randomness import number_of
from probemb.errors import UserError
from probemb.losses.output import LossOutput
from probemb.models import DualEncoder, Encoded
from probemb.runs.watchdog import Progress, Watchdog
from probemb.runs.window import Window

if TYPE_CHECKING:
    from accelerate import Accelerator


class Joint(nn.Module):
    """Everything that is trained: the model, the method's own module, and the second model, if any."""

    def __init__(self, model: DualEncoder, method: Method, second: DualEncoder | None = None):
        super().__init__()
        self.objective = method
        self.model, self.method, self.second, self.aside = model, method.module, second, method.aside

    @property
    def networks(self) -> list[DualEncoder]:
        """The models, one or two."""
        return [self.model] if self.second is None else [self.model, self.second]


@dataclass
class Position:
    """The position of a run, kept in its checkpoints.

    samples     seen; an epoch has those of the first network, then those of the second
    epoch       epochs that have ended, `Hooks.end_epoch` included
    best        best validation RSUM or R-Precision, of the epoch `best_epoch`
    """

    samples: int = 0
    epoch: int = 0
    best: float | None = None
    best_epoch: int | None = None


@dataclass
class State:
    """The training state, as checkpoints hold it; `average` is SWA's."""

    joint: Joint
    optimizer: torch.optim.Optimizer
    average: WeightAverage | None = None
    position: Position = field(default_factory=Position)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The model's, and that of the method's `aside`, if it has one."""
        aside = self.joint.objective.aside_optimizer
        return [self.optimizer] if aside is None else [self.optimizer, aside]


@dataclass
class Hooks:
    """Callbacks of a `Trainer`.

    report      gets (step, values) at every log step
    end_epoch   called after every epoch with the number of epochs that are done
    save        gets the window's state, after `end_epoch`, every `config.save_every` steps, and when stopped
    stop        whether this process was asked to stop
    """

    report: Callable[[int, dict], object] = lambda step, values: None
    end_epoch: Callable[[int], object] = lambda epoch: None
    save: Callable[[dict], object] = lambda window: None
    stop: Callable[[], bool] = lambda: False


class Trainer:
    """Trains a `State`, on the accelerator's device, epoch by epoch.

    Args:
        loader, feed: of pairs, or of composed queries with their targets.
        window: of a checkpoint, see `Window.state`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        state: State,
        loader: BatchLoader,
        feed: PairFeed | TupleFeed,
        schedule: Schedule,
        config: Config,
        hooks: Hooks | None = None,
        window: dict | None = None,
    ):
        self.accelerator, self.device = accelerator, accelerator.device
        self.joint, self.optimizer, self.average, self.position = (
            state.joint, state.optimizer, state.average, state.position,
        )  # fmt: skip
        self.loader, self.schedule, self.config, self.hooks = loader, schedule, config, hooks or Hooks()
        self.window = Window("pairs", lambda: loader.waited, self.device, window)
        self.networks, self.network = self.joint.networks, 0  # the one that is being trained
        self.epoch_steps = len(self.networks) * loader.steps
        self.wrapped: nn.Module | None = None
        self.feed = feed
        aside = set(self.joint.aside.parameters())
        self.trained = [parameter for parameter in self.joint.parameters() if parameter not in aside]
        self.stopping = False  # agreed by all ranks
        self.progress = Progress(self.step)
        self.logged: dict = {}  # the newest values

    @property
    def step(self) -> int:
        """Steps done since the start of the run."""
        return self.position.samples // self.config.batch_size

    @property
    def step_in_epoch(self) -> int:
        """Steps done of this epoch: all of them until `end_epoch` is called."""
        return self.step - self.position.epoch * self.epoch_steps

    @property
    def model(self) -> DualEncoder:
        """The network that is being trained."""
        return self.networks[self.network]

    def fit(self) -> bool:
        """Train to the end; returns whether it was asked to stop before, having finished its step and saved.

        Raises:
            UserError: the loss or its gradient is NaN or Inf, or data cannot be read; nothing is stepped. Nothing moved
                for `engine.timeout` minutes, or a rank is gone: a `Watchdog` ends the process if it cannot raise.
        """
        with Watchdog(self.progress, Path(self.config.out), self.config.engine.timeout):
            return self._fit()

    def _fit(self) -> bool:
        last = min(self.config.epochs, self.config.stop_after_epochs or self.config.epochs)
        position = self.position
        while position.epoch < last:
            if self.step_in_epoch == 0:
                self.joint.objective.begin_epoch(position.epoch)
            for network in range(self.step_in_epoch // self.loader.steps, len(self.networks)):
                first_phase = self.schedule.frozen(position.samples)
                changed = self.joint.objective.freeze(self.networks[network], position.epoch, first_phase)
                if changed or self.wrapped is None or network != self.network:
                    self.network = network
                    self.wrapped = self._wrap()  # DDP looks at requires_grad once, when it wraps
                self._train_epoch()
                if self.stopping:  # also after the last step: the end of an epoch may take long
                    self.hooks.save(self.window.state())
                    return True
            if self.average and self.schedule.averages(position.samples):
                self.average.update(self.joint.model, self.joint.method, self.joint.second)
            position.epoch += 1
            self.progress.doing("validating")
            self.hooks.end_epoch(position.epoch)
            self.hooks.save(self.window.state())  # last: a run killed before repeats the end of the epoch
        return False

    def _wrap(self) -> nn.Module:
        if self.wrapped is not None and distributed.world_size() > 1:
            self.wrapped = None
            self.accelerator.free_memory()  # it keeps the earlier wrapper, with buffers for all gradients
        with warnings.catch_warnings():  # accelerate passes a deprecated argument
            warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
            return self.accelerator.prepare_model(Network(self.model, self.joint.objective))

    def _train_epoch(self) -> None:
        """Train the rest of one network's epoch; each network has its own order."""
        config, steps, window = self.config, self.loader.steps, self.window
        before, order = self.network * steps, self.position.epoch * len(self.networks) + self.network
        window.restart_clock()
        for pairs in self._noted(self.loader.epoch(order, self.step_in_epoch - before)):
            # ------------------------------------------------------------------------------------------- load, augment
            inputs, drawn = self.feed.inputs(pairs, self.model, self.step)
            torch.manual_seed(number_of("dropout", config.seed, self.step, distributed.rank()))  # where a tower has any
            # ----------------------------------------------------------------------------------------------- forward
            now = Moment(self.position.epoch, self.step, self.network)
            batch = self.feed.gather(self.wrapped(*inputs), pairs, drawn, now)
            if len(self.networks) > 1:
                batch.by_other = partial(self._embed_by_other, inputs)
            # -------------------------------------------------------------------------------------------------- loss
            out: LossOutput = self.joint.objective.loss(batch, self.model)
            # ---------------------------------------------------------------------------------------------- backward
            self.optimizer.zero_grad(set_to_none=True)
            self.accelerator.backward(out.loss)
            longest = config.optimizer.clip_grad_norm or math.inf
            norm = self.accelerator.clip_grad_norm_(self.trained, longest).detach()
            finite = out.loss.isfinite().all() & norm.isfinite()
            nonfinite, self.stopping = distributed.any_rank([~finite, self.hooks.stop()], self.device)
            if nonfinite:
                raise self._nonfinite(out, norm)
            # -------------------------------------------------------------------------------------------------- step
            set_learning_rates(self.optimizer, self.schedule, self.position.samples + config.batch_size)
            self.optimizer.step()  # only this network has gradients
            more = self._step_aside(batch)
            scalars = self._scalars(batch)
            self.position.samples += config.batch_size
            # --------------------------------------------------------------------------------------------- log, save
            window.add({"loss": out.loss.detach(), **out.terms, **more, "gradient_norm": norm, **scalars})
            if self.step % config.log_every == 0 or self.step % steps == 0:
                left = config.epochs * self.epoch_steps - self.step
                values = self.logged = window.close(config.batch_size, left)
                which = {"network": self.network + 1} if len(self.networks) > 1 else {}
                at = {"samples": self.position.samples, "epoch": self.step / self.epoch_steps}
                self.hooks.report(self.step, {**which, **at, **values, "lr": self._head_lr()})
            if self.stopping:
                return
            if config.save_every and self.step % config.save_every == 0 and self.step_in_epoch < self.epoch_steps:
                self.hooks.save(window.state())
                window.skip_time()

    def _step_aside(self, batch: Batch) -> dict[str, Tensor]:
        method = self.joint.objective
        if method.aside_optimizer is None:
            return {}
        set_learning_rates(method.aside_optimizer, self.schedule, self.position.samples + self.config.batch_size)
        return method.after_step(batch, self.model)

    def _noted(self, batches: Iterator) -> Iterator:
        """The batches, with what this rank does noted for the watchdog."""
        waiting = "waiting for data", getattr(self.loader, "waiting_for", None)
        self.progress.doing(*waiting)
        for pairs in batches:
            self.progress.doing("computing")
            yield pairs
            self.progress.made(self.step)
            self.progress.doing(*waiting)

    @torch.no_grad()
    def _embed_by_other(self, inputs: tuple[Tensor | None, ...]) -> tuple[Encoded, Encoded]:
        """The pairs of all ranks, embedded by the network that is not being trained."""
        with self.accelerator.autocast():
            wants = self.joint.objective.wants_tokens, self.joint.objective.wants_features
            return of_all_ranks(embed(self.networks[1 - self.network], *inputs, wants))

    def _nonfinite(self, out: LossOutput, norm: Tensor) -> UserError:
        terms = {"loss": out.loss, **out.terms, "gradient norm": norm}
        listed = ", ".join(f"{name} {float(torch.as_tensor(value).detach()):.4g}" for name, value in terms.items())
        return UserError(
            f"At step {self.step + 1} the loss or its gradient is NaN or Inf ({listed}); nothing was stepped.",
            "Start a new run with a lower optimizer.lr: --resume would repeat this step.",
        )

    @torch.no_grad()
    def _scalars(self, batch: Batch) -> dict[str, Tensor]:
        method = self.joint.objective
        values = {name: x.detach().reshape(()).clone() for name, x in method.scalars(self.model).items()}
        if method.probabilistic:
            other = {"u_text": batch.text} if batch.parts is None else {"u_part": batch.parts}
            values |= {key: g.uncertainty().mean() for key, g in {"u_image": batch.image, **other}.items()}
        return values

    def _head_lr(self) -> float:
        return max(group["lr"] for group in self.optimizer.param_groups if group["name"] != "scalars")
