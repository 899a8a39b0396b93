"""A finetuning run from its configuration to its summary.

Everything that can be wrong with the command is found before anything is written. Until the first step Ctrl-C ends the
run at once, and a request to stop ends a validation at once: nothing of it would be saved.
"""

import os
from dataclasses import fields
from functools import partial
from pathlib import Path

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from finetune.config import PIXELS, Config, unused
from finetune.data import Loader
from finetune.methods import METHODS
from finetune.recipe import make_schedule
from finetune.task import ComposedTask, PairTask
from finetune.trainer import FREE_TO_CHANGE, Joint, Position, RunFolder, State, Trainer
from probemb import distributed
from probemb.data.failures import describe_failures
from probemb.data.labelled import remarks
from probemb.errors import UserError, count, raise_together
from probemb.machine import Device, gpu_capability, training_device, training_precision
from probemb.models import as_one, fill_word_vectors
from probemb.models.architectures import reads_regions
from probemb.models.towers.words import WordMean
from probemb.runs.checkpoints import read_state
from probemb.runs.folder import newest_checkpoint, refuse_another_run, refuse_endless_starts, refuse_full_disk
from probemb.runs.log import METRICS, headline, step_of
from probemb.runs.preemption import Preemption
from probemb.runs.watchdog import Watchdog


def train(config: Config, preemption: Preemption) -> int:
    """Run the configured training; returns 0 when it is done, another code when it was asked to stop."""
    for engine in ("DEEPSPEED", "FSDP", "MEGATRON_LM"):
        if os.environ.get(f"ACCELERATE_USE_{engine}") == "true":
            raise UserError(
                f"accelerate is configured for {engine}, and finetuning keeps all weights on every process.",
                "Add --config_file finetune/accelerate.yaml --multi_gpu, or start with torchrun.",
            )
    precision = training_precision(config.engine.precision, gpu_capability())
    device, method = Device(training_device(config.engine.threads), precision), METHODS[config.method]
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        distributed.init_process_group(config.engine.timeout)
    say = partial(print, flush=True) if distributed.is_main() else lambda line: None
    earlier = newest_checkpoint(config.out, config.resume, lambda line: say(f"resume  {line}"), config.engine.timeout)
    remedy = "Choose an --out that all machines share."
    distributed.same_everywhere("The checkpoint to resume from", str(earlier), remedy)
    task = (ComposedTask if method.composes else PairTask)(config)
    identity, position = {"pairs": task.digest()}, Position()
    if earlier:  # its weights may fit no model of this configuration
        refuse_another_run(config, saved := read_state(earlier), identity, earlier, FREE_TO_CHANGE)
        position = Position(**{field.name: saved[field.name] for field in fields(Position)})
    for line in (line for _, one in task.labelled for line in remarks(one.labels, one.classes)):
        say(f"classes {line}")
    networks = make_networks(config, earlier, say, texts=task.train.texts if method.composes else None)
    objective = method(config.loss, networks[0], task.train, config.epochs)  # before features may draw random numbers
    task.prepare(networks, device)
    rows, pin_memory = task.rows(), task.device.type == "cuda"
    loader = Loader(rows, config.data.workers, pin_memory=pin_memory, failure_share=config.data.failure_share)
    step, steps = position.samples // config.batch_size, config.epochs * len(networks) * loader.steps
    if position.epoch >= config.epochs:
        distributed.leave_process_group()
        say(f"{config.out} is finished: {step} of {steps} steps are done.")
        return 0
    refuse_full_disk(config.out, as_one(networks), models=4 if config.swa_epochs else 2)
    joint = Joint(networks[0], objective, *networks[1:]).to(task.device)
    distributed.broadcast(joint.parameters())
    summary = describe(config, joint, rows, device, steps, step, earlier)
    state = State.of(config, joint, position)
    if earlier:
        state.load(earlier)
    folder = RunFolder(config, identity, step, steps)
    say(summary)
    schedule = make_schedule(config, len(networks), loader.steps)
    trainer = Trainer(state, task, loader, schedule, config, folder, preemption)
    preemption.interrupting = ()
    try:
        with Watchdog(trainer.progress, folder.path, config.engine.timeout):
            stopped = trainer.fit()
        folder.finish()
        # Only a scheduler starts a run again by itself.
        if stopped and not any(distributed.all_of(preemption.name == "SIGINT")):
            refuse_endless_starts(folder.path, step, trainer.step)
    finally:
        loader.close()
        folder.close()
    if stopped:
        say(f"{step_of(trainer.step, steps)} | stopped by {preemption.description}; continue with --resume")
    for line in describe_failures(distributed.all_of(loader.failures), "unreadable images, their pairs", "images"):
        say(line)
    if not stopped:
        of = f"epoch {position.epoch}"
        if position.best is not None:
            of = f"epoch {position.best_epoch}, validation {METRICS[task.metric]} {position.best:.1f}"
        say(f"model   {folder.path / 'model'} is of {of}{', and so is model-second' if joint.second else ''}")
    distributed.leave_process_group()
    return preemption.exit_code if stopped else 0


def make_networks(config: Config, earlier: Path | None, say, texts: list[str] | None = None) -> list:
    """The method's networks as they start. `texts`: whose words are the vocabulary, where no file is named; None to
    look beside the data. Raises UserError: a model that cannot be trained so."""
    torch.manual_seed(config.seed)
    method, networks, name = METHODS[config.method], [], config.model.name
    for _ in range(method.networks):
        more = method.model_options(config.loss) | {"grad_checkpointing": config.engine.grad_checkpointing}
        networks.append(config.model.create([config.data.path], config.loss, texts, objective=config.method, **more))
        if config.model.word_vectors and not earlier:
            say(f"words   {fill_word_vectors(networks[-1], config.model.word_vectors)}")
        elif not (earlier or config.model.pretrained) and isinstance(networks[-1].text_tower, WordMean):
            say("words   have random vectors, which do not train: name word vectors with --model.word-vectors")
    model, architecture = networks[0], networks[0].config["architecture"]
    composer = () if model.composer is None else model.composer.modules()
    if config.swa_epochs and (model.batch_statistics or any(isinstance(module, _BatchNorm) for module in composer)):
        raise UserError(
            f"The batch norms of {name}, or of its composer, normalise by the batch in training, and averaged weights "
            f"(swa_epochs is {config.swa_epochs}) would need other statistics.",
            "Set swa_epochs to 0, or, of towers, model.batch_norm to frozen.",
        )
    if reads_regions(architecture):
        raise_together(unused(config, f"{name} reads regions, which have no pixels", PIXELS))
    elif method.over_regions:
        raise UserError(
            f"{config.method} reasons over an image's regions, and {name} reads none.",
            "Choose a model that reads regions, such as vsrn-regions-gru, or the method vsepp or prob-vsepp.",
        )
    if architecture["text_cfg"].get("tokens") == "words" and config.model.head in ("gpo", "average"):
        raise UserError(
            f"Head {config.model.head} pools the word vectors of {name}, behind which its GRU would not be trained.",
            "Set model.head to pie, clip or mlp.",
        )
    return networks


def describe(config: Config, joint: Joint, rows, device: Device, steps: int, step: int, earlier) -> str:
    """The summary printed before the first step."""
    world, two, noise = distributed.world_size(), joint.second is not None, config.noise_ratio
    distance = getattr(config.loss, "distance", None)  # that some methods have
    split = config.data.train or "all"
    if not METHODS[config.method].composes and rows.data.drawn and config.data.validation:
        split += ", but for a tenth of the images, drawn as val"
    millions = sum(parameter.numel() for parameter in joint.parameters()) / 1e6
    return headline(
        config.out,
        f"{count(config.epochs, 'epoch')}, {count(steps, 'step')}",
        step,
        earlier,
        method=config.method + (f" ({distance})" if distance else ""),
        model=f"{config.model.name}, {'2 networks of together ' if two else ''}{millions:.1f} M parameters, "
        f"head {config.model.head}, from {config.model.image_weights or config.model.pretrained or 'random weights'}",
        data=f"{rows.number:,} {rows.what} of {config.data.path} ({split}), {rows.steps} steps an "
        f"epoch{' of each network' if two else ''}{f', {noise:.0%} of the captions at wrong images' if noise else ''}",
        engine=f"{world} x {device.name.partition(':')[0]}, {device.precision}, batch {config.batch_size} = "
        f"{count(world, 'rank')} x {len(rows.share)}",
    )
