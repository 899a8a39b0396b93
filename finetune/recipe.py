"""Finetuning recipe: AdamP's parameter groups, and learning rates, freezing and averaging as a schedule.

Source: PCME++ §B.2, §B.3, Table B.1, and its public code where the paper leaves a number open. The defaults are those
of COCO. Epochs count from 0.
"""

import math
from dataclasses import dataclass, field

import torch
from timm.optim import AdamP
from torch import nn

from finetune.config import Config, Optimizer
from probemb.models import DualEncoder
from probemb.models.dual_encoder import layer_rates

OPTIMIZERS = {"adamp": AdamP, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def parameter_groups(model: DualEncoder, loss_module: nn.Module | None, o: Optimizer) -> list[dict]:
    """Parameters with their learning rates, for an optimizer. Source: PCME++ §B.2.

    With L blocks in a tower, u blocks in its uncertainty branch and f the tower's multiplier:

        heads                                   lr
        block k (0 … L−1)                       lr · f · layer_decay^(L−k)
        block k of the uncertainty branch       lr · f · layer_decay^(u−k)
        all else in a tower                     lr · f      (embeddings too: more than the last block)
        the loss' decoders, the composer        lr
        the model's scalars, the loss' own      lr · scalars, without weight decay (logit_scale, a logarithm: lr)

    Everything in a tower decays, biases and norms too, as in the public code; L is the tower's own number (there 12 for
    every model). The projections of head "clip" are pretrained, so they count as backbone. Without
    `decay_uncertainty` the branches' blocks are trained at lr. Scalars that do not require a gradient are left out.

    Returns groups with "params", "lr", "initial_lr", "weight_decay", "name", and "image_backbone" (frozen in the first
    epochs).
    """
    groups: dict[str, dict] = {}

    def add(name: str, parameter: nn.Parameter, multiplier: float, decay: float, frozen_first: bool = False) -> None:
        group = {"name": name, "params": [], "weight_decay": decay, "image_backbone": frozen_first}
        rates = dict.fromkeys(("lr", "initial_lr"), o.lr * multiplier)
        groups.setdefault(name, group | rates)["params"].append(parameter)

    layers = layer_rates(model, o.layer_decay, stem=False)
    for name, parameter in model.named_parameters():
        part, depth, tower, *_ = model.place(name)
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


@dataclass(frozen=True)
class Schedule:
    """Learning rate, freezing and averaging as functions of the samples seen. Source: PCME++ §B.2, §B.3.

    The public code scales the loss in the warm-up, which Adam and AdamP largely undo, and averages nine of 25 epochs;
    these are the paper's.
    """

    optimizer: Optimizer = field(default_factory=Optimizer)
    epochs: int = 25
    epoch_samples: int = 1  # over all networks
    networks: int = 1  # trained one after the other within an epoch, with the same learning rates
    average_epochs: int = 10  # last epochs, the weights at whose ends are averaged

    def factor(self, samples: int, image_backbone: bool = False) -> float:
        """Multiplier of a group's initial learning rate in the step that ends at `samples` samples seen, from 1 on."""
        o, epoch, turn = self.optimizer, self.epoch(samples - 1), self.epoch_samples // self.networks
        if o.schedule == "cosine":
            share = (epoch + (samples - 1) % turn / turn) / self.epochs  # of the network's own steps
            factor = 0.5 * (1 + math.cos(math.pi * share))
        else:
            factor = 0.1 ** sum(epoch >= self.epochs - last for last in o.decays)
        if epoch < o.freeze_epochs:
            return 0.0 if image_backbone else factor
        if o.warmup_epochs:
            done = ((samples - 1) % turn + 1) / turn  # share of the network's epoch
            factor *= min(1.0, (epoch - o.freeze_epochs + done) / o.warmup_epochs)
        return factor

    def epoch(self, samples: int) -> int:
        """The epoch, from 0, of the sample that follows `samples` samples seen."""
        return samples // self.epoch_samples

    def frozen(self, samples: int) -> bool:
        """Of the image backbone, after `samples` samples."""
        return self.epoch(samples) < self.optimizer.freeze_epochs

    def averages(self, samples: int) -> bool:
        """True if the weights at the end of an epoch, after `samples` samples, go into the average."""
        return self.epoch(samples - 1) >= self.epochs - self.average_epochs


def make_schedule(config: Config, networks: int, steps: int) -> Schedule:
    """The configured schedule, for epochs of `steps` batches of each network."""
    samples = networks * steps * config.batch_size
    return Schedule(config.optimizer, config.epochs, samples, networks, config.swa_epochs)


def set_learning_rates(optimizer: torch.optim.Optimizer, schedule: Schedule, samples: int) -> None:
    """Set every group's "lr" for the step that ends at `samples` samples seen."""
    for group in optimizer.param_groups:
        factor = schedule.factor(samples, group.get("image_backbone", False))
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
