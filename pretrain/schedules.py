"""Schedules: pure functions of the samples seen, so that a run resumes on any number of ranks.

The learning rate,

w samples of warm-up, n samples of the run, c samples of cooldown at its end, s samples seen, e = end_lr:

    all                     lr s / w                                              s < w
    cosine                  e + (lr - e) (1 + cos(pi (s - w) / (n - w))) / 2
    constant                lr
    constant-cooldown       lr;  e + (lr - e) (1 - (s - n + c) / c)^power         in the cooldown
    inverse-sqrt            lr sqrt(w / s);  in a cooldown linearly to e from where it starts
    wsd                     lr;  e + (lr - e) (1 - sqrt((s - n + c) / c))         in the cooldown

and the weight of a step in the average of the weights (`step_weight`).

Sources: open_clip's const-cooldown and cosine; inverse-sqrt with a linear cooldown is Zhai et al., "Scaling Vision
Transformers" (CVPR 2022, §3.5); wsd (warm-up, stable, decay) falls as Hägele et al., "Scaling Laws and Compute-Optimal
Training Beyond Fixed Training Durations" (NeurIPS 2024), found best.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from probemb.errors import UserError

if TYPE_CHECKING:
    from pretrain.config import Ema, Optimizer


def learning_rate(o: Optimizer, samples: int, total: int) -> float:
    """The rate of the step that ends at `samples` samples seen, of a run of `total`."""
    if samples < o.warmup_samples:
        return o.lr * samples / o.warmup_samples
    cooling, top = total - o.cooldown_samples, o.lr  # samples seen when the cooldown begins, and the rate there
    cooled = min(1.0, max(0, samples - cooling) / o.cooldown_samples) if o.cooldown_samples else 0.0  # the share done
    if o.schedule == "cosine":
        progress = (samples - o.warmup_samples) / max(1, total - o.warmup_samples)
        left = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    elif o.schedule == "inverse-sqrt":
        top *= math.sqrt(o.warmup_samples / (min(samples, cooling) if o.cooldown_samples else samples))
        left = 1 - cooled
    else:
        falls = {"constant": 1.0, "constant-cooldown": (1 - cooled) ** o.cooldown_power, "wsd": 1 - math.sqrt(cooled)}
        left = falls[o.schedule]
    return o.end_lr + (top - o.end_lr) * left


def step_weight(o: Ema, before: int, after: int) -> float:
    """The weight of the weights after a step in their average, 1 - decay; before and after are samples seen.

    Of the average before the step a share exp(-integral of ln 2 / h(s) ds from before to after) stays, where the
    half-life h(s) = min(half_life_samples, rampup s). So two steps of half a batch forget as much as one of a whole.
    While the half-life grows, it is the power function average of Karras et al., "Analyzing and Improving the Training
    Dynamics of Diffusion Models" (CVPR 2024, §3.1) with gamma + 1 = ln 2 / rampup.
    """
    if not o.rampup:
        return -math.expm1(-math.log(2) * (after - before) / o.half_life_samples)
    full = min(max(o.half_life_samples / o.rampup, before), after)  # samples seen when the half-life stops growing
    if not before and full:
        return 1.0  # nothing of the first weights is left
    growing = math.log(full / before) / o.rampup if full > before else 0.0
    return -math.expm1(-math.log(2) * (growing + (after - full) / o.half_life_samples))


NEEDS = {"constant-cooldown": "cooldown_samples", "wsd": "cooldown_samples", "inverse-sqrt": "warmup_samples"}


def check_schedule(o: Optimizer, total: int | None = None) -> None:
    """Raise UserError for options that contradict each other, or do not fit into a run of `total` samples."""
    if (needed := NEEDS.get(o.schedule)) and not getattr(o, needed):
        what = f"The schedule {o.schedule} needs optimizer.{needed}."
        raise UserError(what, "Set it to a number of samples, or choose another optimizer.schedule.")
    for name, unused in (
        ("cooldown_samples", o.cooldown_samples and o.schedule not in NEEDS),
        ("cooldown_power", o.cooldown_power != 1 and o.schedule != "constant-cooldown"),
        ("end_lr", o.end_lr and o.schedule == "constant"),
    ):
        if unused:
            what = f"The schedule {o.schedule} does not use optimizer.{name}."
            raise UserError(what, "Leave it out, or choose another optimizer.schedule.")
    up, down = o.warmup_samples, o.cooldown_samples
    if total is not None and up + down > total:
        what = f"A warm-up of {up:,} and a cooldown of {down:,} samples do not fit into a run of {total:,}."
        raise UserError(what, "Shorten optimizer.warmup_samples or cooldown_samples, or raise epochs or samples.")
