"""Finetuning recipe: AdamP's parameter groups, learning rate schedule, freezing, and weight averaging.

Source: PCME++ §B.2, §B.3, Table B.1, and its public code where the paper leaves a number open. The defaults are those
of COCO. Epochs count from 0.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from finetune.adamp import AdamP
from finetune.config import Config, Optimizer
from probemb.errors import UserError
from probemb.models import DualEncoder
from probemb.models.layers import layer_rates

if TYPE_CHECKING:
    from accelerate import Accelerator

    from finetune.methods.base import Method

SHARDING = ("DEEPSPEED", "FSDP", "MEGATRON_LM")


def parameter_groups(model: DualEncoder, loss_module: nn.Module | None, o: Optimizer) -> list[dict]:
    """Parameters with their learning rates, for an optimizer. Source: PCME++ §B.2.

    With L blocks in a tower, u blocks in its uncertainty branch and f the tower's multiplier:

        heads                                   lr
        block k (0 … L−1)                       lr · f · layer_decay^(L−k)
        block k of the uncertainty branch       lr · f · layer_decay^(u−k)
        all else in a tower                     lr · f      (embeddings too: more than the last block)
        the loss' decoders, the composer        lr
        the model's scalars, the loss' own      lr · scalars, without weight decay (logit_scale, a logarithm: lr)

    Everything in a tower decays, biases and norms too, as in the public code. There L is 12 for every model, which
    raises the rates of a tower with 24 blocks above lr · f; here it is the tower's own number.

    The projections of head "clip" are pretrained, so they count as backbone. Scalars (logit_scale, scale, ...) that
    do not require a gradient are left out; a frozen backbone is not, as it is trained later.

    Args:
        model: without DDP's wrapper.
        loss_module: the method's own parameters; None for none.
        o: has the rates; f is its `image_backbone` or `text_backbone`. Without `decay_uncertainty` the uncertainty
            branches' blocks are trained at lr, as the heads.

    Returns:
        groups with "params", "lr", "initial_lr" (for `set_learning_rates`), "weight_decay", "name", and
        "image_backbone" (frozen in the first epochs).
    """
    groups: dict[str, dict] = {}

    def add(name: str, parameter: nn.Parameter, multiplier: float, decay: float, frozen_first: bool = False) -> None:
        rate = o.lr * multiplier
        group = {"name": name, "params": [], "lr": rate, "initial_lr": rate, "weight_decay": decay}
        groups.setdefault(name, {**group, "image_backbone": frozen_first})["params"].append(parameter)

    layers = layer_rates(model, o.layer_decay, stem=False)
    for name, parameter in model.named_parameters():
        tower, part, depth = model.place(name)
        if tower == "neither":
            if parameter.requires_grad and name == "logit_scale":
                add("logit_scale", parameter, 1.0, 0.0)
            elif part == "composer":
                add("composer", parameter, 1.0, o.weight_decay)
            elif parameter.requires_grad:
                add("scalars", parameter, o.scalars, 0.0)
            continue
        factor = o.image_backbone if tower == "image" else o.text_backbone
        full_rate = part == "head" or (part == "branch" and not o.decay_uncertainty)
        multiplier = 1.0 if full_rate else factor * layers[name]
        add(f"{tower}.{part}.{depth}", parameter, multiplier, o.weight_decay, (tower, part) == ("image", "trunk"))
    for name, parameter in loss_module.named_parameters() if loss_module is not None else ():
        if name.startswith("decoders."):
            add("decoders", parameter, 1.0, o.weight_decay)
        else:
            add("scalars", parameter, o.scalars, 0.0)
    return list(groups.values())


def create_optimizer(groups: list[dict], name: str = "adamp") -> torch.optim.Optimizer:
    """AdamP with its paper's settings (betas 0.9, 0.999, eps 1e-8, delta 0.1, wd_ratio 0.1), or torch's Adam or AdamW.

    AdamP removes the part of a step along the weights, so that norms of scale-invariant weights do not grow. It needs
    whole weight tensors, see `check_engine`.
    Source: Heo et al., "AdamP: Slowing Down the Slowdown for Momentum Optimizers on Scale-invariant
    Weights".
    """
    return {"adamp": AdamP, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name](groups)


def make_optimizer(config: Config, networks: Sequence[DualEncoder], method: Method) -> torch.optim.Optimizer:
    """The method's optimizer over all networks; also sets which of the models' scalars are trained."""
    groups = []
    for i, network in enumerate(networks):
        for name, scalar in network.scalars().items():
            scalar.requires_grad_(name in method.trains)
        groups += parameter_groups(network, None if i else method.module, config.optimizer)
    return method.optimizer(groups)


def check_engine(accelerator: Accelerator) -> None:
    """Refuse an engine that would silently train something else.

    Raises:
        UserError: the engine shards the optimizer or the weights (AdamP would lose its projection), or the number of
            processes is not the requested one (two runs of one process instead of one of two).
    """
    kind = getattr(accelerator.distributed_type, "value", str(accelerator.distributed_type))
    if kind in SHARDING:
        raise UserError(
            f"AdamP needs whole weights, and {kind} cuts them into pieces.",
            "Start with accelerate's plain data parallelism (--multi_gpu, also on CPUs) or with torchrun.",
        )
    asked, found = os.environ.get("WORLD_SIZE"), accelerator.num_processes
    if asked is not None and int(asked) != found:
        raise UserError(
            f"The launcher started {asked} processes, but each of them takes part in a run of {found}.",
            "Start with torchrun or `accelerate launch --multi_gpu`; without a GPU, your own program needs "
            "Accelerator(cpu=True).",
        )
    # `accelerate launch --cpu --num_processes 2` prepares an address for several processes and starts one.
    if asked is None and "MASTER_PORT" in os.environ and "ACCELERATE_MIXED_PRECISION" in os.environ:
        raise UserError(
            "accelerate was asked for several processes, but it has started one.",
            "Add --multi_gpu (also on CPUs), use torchrun, or unset MASTER_ADDR and MASTER_PORT for a single process.",
        )


@dataclass(frozen=True)
class Schedule:
    """Learning rate, freezing and averaging as functions of the samples seen. Source: PCME++ §B.2, §B.3.

    Attributes:
        epochs: of the training.
        epoch_samples: samples of an epoch, over all networks.
        networks: trained one after the other within an epoch, with the same learning rates.
        lr_drop_epochs: from each of these epochs on all learning rates are multiplied by lr_drop (the last 10 of 25).
        cosine: instead, all learning rates follow half a cosine from 1 to 0 over the training.
        freeze_epochs: the image backbone is frozen in these first epochs.
        locked: it is frozen in all epochs.
        warmup_epochs: after freeze_epochs, learning rates rise linearly from 0 for that long. The public code scales
            the loss instead, which Adam and AdamP largely undo; this is the paper's warm-up.
        average_epochs: the weights at the ends of that many last epochs are averaged (the public code, with its
            swa_start_epoch of 16, averages nine of 25; the paper says ten).
    """

    epochs: int = 25
    epoch_samples: int = 1
    networks: int = 1
    lr_drop_epochs: tuple[int, ...] = (15,)
    lr_drop: float = 0.1
    cosine: bool = False
    freeze_epochs: int = 2
    locked: bool = False
    warmup_epochs: float = 1
    average_epochs: int = 10

    def factor(self, samples: int, image_backbone: bool = False) -> float:
        """Multiplier of a group's initial learning rate in the step that ends at `samples` samples seen, from 1 on."""
        epoch, turn = self.epoch(samples - 1), self.epoch_samples // self.networks
        if self.cosine:
            share = (epoch + (samples - 1) % turn / turn) / self.epochs  # of the network's own steps
            factor = 0.5 * (1 + math.cos(math.pi * share))
        else:
            factor = self.lr_drop ** sum(epoch >= drop for drop in self.lr_drop_epochs)
        if epoch < self.freeze_epochs:
            return 0.0 if image_backbone else factor
        if self.warmup_epochs:
            done = ((samples - 1) % turn + 1) / turn  # share of the network's epoch
            factor *= min(1.0, (epoch - self.freeze_epochs + done) / self.warmup_epochs)
        return factor

    def epoch(self, samples: int) -> int:
        """The epoch, from 0, of the sample that follows `samples` samples seen."""
        return samples // self.epoch_samples

    def frozen(self, samples: int) -> bool:
        """True if the image backbone is frozen after `samples` samples."""
        return self.locked or self.epoch(samples) < self.freeze_epochs

    def averages(self, samples: int) -> bool:
        """True if the weights go into the average at the end of an epoch, after `samples` samples."""
        return self.epoch(samples - 1) >= self.epochs - self.average_epochs


def make_schedule(config: Config, networks: int, steps: int) -> Schedule:
    """The configured schedule, for epochs of `steps` batches of each network."""
    return Schedule(
        epochs=config.epochs,
        epoch_samples=networks * steps * config.batch_size,
        networks=networks,
        lr_drop_epochs=tuple(max(0, config.epochs - last) for last in config.optimizer.decays),
        cosine=config.optimizer.schedule == "cosine",
        freeze_epochs=config.optimizer.freeze_epochs,
        locked=config.model.lock_image,
        warmup_epochs=config.optimizer.warmup_epochs,
        average_epochs=config.swa_epochs,
    )


def set_learning_rates(optimizer: torch.optim.Optimizer, schedule: Schedule, samples: int) -> None:
    """Set every group's "lr" for the step that ends at `samples` samples seen.

    A group without an "initial_lr" starts from the "lr" that its optimizer was made with.
    """
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * schedule.factor(
            samples, group.get("image_backbone", False)
        )


class WeightAverage:
    """The mean of the weights of all networks and the loss over the updates (SWA). Source: PCME++ §B.3.

    A copy in evaluation mode. Models whose batch norms have statistics to recompute are refused.
    """

    def __init__(self, model: DualEncoder, loss_module: nn.Module | None = None, second: DualEncoder | None = None):
        self._average = AveragedModel(_together(model, loss_module, second)).requires_grad_(False).eval()

    def update(self, model: DualEncoder, loss_module: nn.Module | None, second: DualEncoder | None = None) -> None:
        """Add the present weights."""
        self._average.update_parameters(_together(model, loss_module, second))

    @property
    def n_averaged(self) -> int:
        """Number of updates; with 0 the average is the initial weights."""
        return int(self._average.n_averaged)

    @property
    def model(self) -> DualEncoder:
        """The averaged model: to evaluate and to save, not to train."""
        return self._average.module["model"]

    @property
    def networks(self) -> list[DualEncoder]:
        """The averaged models, one or two."""
        return [self._average.module[name] for name in ("model", "second") if name in self._average.module]

    @property
    def loss_module(self) -> nn.Module | None:
        """The averaged loss, if it has parameters."""
        return dict(self._average.module.items()).get("loss")

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The averages and their number, as named tensors."""
        return self._average.state_dict()

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Resume from a `state_dict` of the same modules."""
        self._average.load_state_dict(state)


def _together(model: nn.Module, loss_module: nn.Module | None, second: nn.Module | None) -> nn.ModuleDict:
    parts = {"model": model, "loss": loss_module, "second": second}
    return nn.ModuleDict({name: part for name, part in parts.items() if part is not None})
