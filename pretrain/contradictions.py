"""Contradictions in a pretraining configuration."""

from __future__ import annotations

from pretrain.config import Config, Ema
from pretrain.evaluation_sets import check_evaluation
from pretrain.objectives import MASKED_EVERY, OBJECTIVES
from pretrain.schedules import check_schedule
from probemb.errors import UserError

MOST_PROFILED = 20  # steps: a trace of one may have tens of MB


def check(config: Config, world_size: int) -> None:
    """Refuse what cannot run, before anything is read or written.

    Raises:
        UserError: names the key and a valid value.
    """
    if config.keep_every and (not config.save_every or config.keep_every % config.save_every):
        raise UserError(
            f"keep_every {config.keep_every} is not a multiple of save_every {config.save_every}.",
            "Only a step that is saved can be kept: choose a multiple.",
        )
    if config.samples == 0 and config.epochs <= 0:
        raise UserError(f"epochs is {config.epochs}.", "Set epochs or samples to more than zero.")
    if not config.train_paths:
        raise UserError(
            "There is no training data.",
            "Pass --data.train FOLDER with a folder of webdataset shards, or a configuration that names one.",
        )
    if config.data.weights and len(config.data.weights) != len(config.train_paths):
        raise UserError(
            f"There are {len(config.train_paths)} training paths and {len(config.data.weights)} weights.",
            "Give data.weights one number for each path.",
        )
    check_schedule(config.optimizer)
    _check_average(config.ema)
    config.data.augmentation.check()
    _check_profile(config)
    check_evaluation(config.evaluate)
    OBJECTIVES[config.objective].check(config.loss)
    _check_images(config.model.name)
    _check_locks(config)
    parts = world_size * config.engine.accumulation
    if getattr(config.loss, "masked_inclusion", 0) and config.batch_size % (parts * MASKED_EVERY):
        raise UserError(
            f"loss.masked_inclusion masks every {MASKED_EVERY}th item of a part, and {parts} parts of batch_size "
            f"{config.batch_size} are no multiple of that.",
            f"Set batch_size to a multiple of {parts * MASKED_EVERY}, or loss.masked_inclusion to 0.",
        )
    if config.batch_size % parts:
        lower = config.batch_size // parts * parts
        remedy = f"Set batch_size to {f'{lower} or ' if lower else ''}{lower + parts}, or change the ranks or parts."
        raise UserError(
            f"batch_size {config.batch_size} cannot be shared evenly by {world_size} ranks x "
            f"{config.engine.accumulation} accumulation parts.",
            remedy,
        )


def _check_average(ema: Ema) -> None:
    if not ema.half_life_samples and ema.rampup != Ema.rampup:
        raise UserError(
            f"ema.rampup is {ema.rampup:g}, and there is no average of the weights.",
            "Set ema.half_life_samples to the samples of its half-life, or leave ema.rampup out.",
        )


def _check_images(name: str) -> None:
    """Refuse an architecture whose images are not pixels; an unknown name is refused where the model is made."""
    from probemb.models.architectures import read_architecture, reads_regions

    if reads_regions(read_architecture(name)):
        raise UserError(
            f"{name} reads precomputed regions, and pretraining gives a model the pixels of images.",
            "Name an architecture that reads pixels, such as scenes-cnn-gru or ViT-B-16, or train this one with "
            "`python -m finetune.run`.",
        )


def _check_locks(config: Config) -> None:
    """Refuse locks of random weights, and unlocked groups without a lock."""
    m = config.model
    found = {"image": m.pretrained or m.image_weights, "text": m.pretrained or m.word_vectors}
    for tower, weights in found.items():
        locked, groups = getattr(m, f"lock_{tower}"), getattr(m, f"unlocked_{tower}_groups")
        if locked and not weights:
            raise UserError(
                f"model.lock_{tower} would freeze random weights.",
                "Name weights in model.pretrained (an open_clip tag, a file or a run), or leave the lock out.",
            )
        if groups and not locked:
            raise UserError(
                f"model.unlocked_{tower}_groups is {groups}, and the {tower} tower is not locked.",
                f"Set model.lock_{tower}, or leave unlocked_{tower}_groups out.",
            )


def _check_profile(config: Config) -> None:
    steps = config.profile
    if not steps:
        return
    if len(steps) != 2 or steps[0] > steps[1]:
        raise UserError(f"profile is {steps}.", "Name a first and a last step: --profile 10 12.")
    if (n := steps[1] - steps[0] + 1) > MOST_PROFILED:
        raise UserError(
            f"profile {steps[0]} {steps[1]} are {n} steps.",
            f"Profile at most {MOST_PROFILED}: the profiler holds every operation of them in memory.",
        )
    last = min(config.samples // config.batch_size or steps[1], config.stop_at_step or steps[1])
    if steps[1] > last:
        raise UserError(f"profile {steps[0]} {steps[1]} is beyond the run's last step, {last}.", "Name earlier steps.")
