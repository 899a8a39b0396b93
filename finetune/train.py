"""A finetuning run from its configuration to its summary.

Everything that can be wrong with the command is found before anything is written. Until the first step Ctrl-C ends the
run at once, and a request to stop ends a validation at once: nothing of it would be saved.
"""

from __future__ import annotations

import os
from dataclasses import fields
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import GradientAccumulationPlugin
from torch.nn.modules.batchnorm import _BatchNorm

from finetune.config import PIXELS, Config, check, unused
from finetune.data import Loader
from finetune.folder import FREE_TO_CHANGE, RunFolder, load_checkpoint
from finetune.methods import METHODS
from finetune.recipe import make_schedule
from finetune.task import ComposedTask, PairTask, Task
from finetune.trainer import REMEDY, Joint, Position, State, Trainer
from probemb.data.failures import describe_failures
from probemb.distributed import all_of, control_group, on_main, same_everywhere, settle
from probemb.errors import UserError, count, raise_together
from probemb.machine import gpu_capability, share_cores, training_precision
from probemb.models import as_one, fill_word_vectors, save_model
from probemb.models.architectures import reads_regions
from probemb.models.towers.words import WordMean
from probemb.runs.checkpoints import read_state
from probemb.runs.folder import newest_checkpoint, refuse_another_run, refuse_endless_starts, refuse_full_disk
from probemb.runs.log import METRICS, headline, step_of
from probemb.runs.preemption import Preemption


def train(config: Config, preemption: Preemption) -> int:
    """Run the configured training; returns 0 when it is done, another code when it was asked to stop."""
    accelerator = start_accelerator(config)
    method = METHODS[config.method]
    say = partial(print, flush=True) if accelerator.is_main_process else lambda line: None
    earlier = newest_checkpoint(
        config.out, config.resume, lambda line: say(f"resume  {line}"), config.engine.timeout, method.trained
    )
    same_everywhere("The checkpoint to resume from", str(earlier), "Choose an --out that all machines share.")
    saved = read_state(earlier) if earlier else {}
    if earlier:  # its weights may fit no model of this configuration
        refuse_another_run(config, saved, saved["data"], earlier, FREE_TO_CHANGE)
    task = (ComposedTask if method.composes else PairTask)(config)
    networks = make_networks(config, earlier, say, texts=task.texts if method.composes else None)
    objective = method(config.loss, networks[0], task.train, config.epochs)  # before features may draw random numbers
    task.prepare(networks, accelerator.device, accelerator.mixed_precision == "bf16")
    if not method.trained:
        return measure_only(config, networks[0], task, accelerator, say)

    rows, pin_memory = task.rows(), accelerator.device.type == "cuda"
    loader = Loader(rows, config.data.workers, pin_memory=pin_memory, failure_share=config.data.failure_share)
    identity, position = {"pairs": rows.digest}, Position()
    if earlier:
        refuse_another_run(config, saved, identity, earlier, FREE_TO_CHANGE)
        position = Position(**{field.name: saved[field.name] for field in fields(Position)})
    step, steps = position.samples // config.batch_size, config.epochs * len(networks) * loader.steps
    if position.epoch >= config.epochs:
        settle()
        accelerator.end_training()
        say(f"{config.out} is finished: {step} of {steps} steps are done.")
        return 0
    refuse_full_disk(config.out, as_one(networks), models=4 if config.swa_epochs else 2)
    state = State.of(config, Joint(networks[0], objective, *networks[1:]).to(accelerator.device), position)
    if earlier:
        load_checkpoint(earlier, state)
    folder = RunFolder(config, identity, step, steps)
    say(describe(config, state.joint, rows, accelerator, steps, step, earlier))
    schedule = make_schedule(config, len(networks), loader.steps)
    trainer = Trainer(accelerator, state, task, loader, schedule, config, folder, preemption)
    preemption.interrupting = ()
    try:
        stopped = trainer.fit()
        folder.finish()
        # Only a scheduler starts a run again by itself.
        if stopped and not any(all_of(preemption.name == "SIGINT")):
            refuse_endless_starts(folder.path, step, trainer.step)
    finally:
        loader.close()
        folder.close()
    if stopped:
        say(f"{step_of(trainer.step, steps)} | stopped by {preemption.description}; continue with --resume")
    for line in describe_failures(all_of(loader.failures), "unreadable images, their pairs", "images"):
        say(line)
    if not stopped:
        of = f"epoch {position.epoch}"
        if position.best is not None:
            of = f"epoch {position.best_epoch}, validation {METRICS[task.metric]} {position.best:.1f}"
        say(f"model   {folder.path / 'model'} is of {of}{', and so is model-second' if state.joint.second else ''}")
    settle()
    accelerator.end_training()
    return preemption.exit_code if stopped else 0


def start_accelerator(config: Config) -> Accelerator:
    """accelerate's process group, on the GPUs or the CPU. Raises UserError, see `check_engine` and `check`."""
    timeout = timedelta(minutes=config.engine.timeout)
    precision = training_precision(config.engine.precision, gpu_capability())
    handlers = [DistributedDataParallelKwargs(broadcast_buffers=False), InitProcessGroupKwargs(timeout=timeout)]
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="bf16" if precision == "bf16" else "no",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),  # not accelerate's launcher
        kwargs_handlers=handlers,
    )
    if accelerator.num_processes > 1:
        control_group(timeout)
    check_engine(accelerator)
    check(config, accelerator.num_processes)
    share_cores(config.engine.threads, accelerator.num_processes)
    return accelerator


def check_engine(accelerator: Accelerator) -> None:
    """Refuse sharded weights, which AdamP cannot project, and another number of processes than was asked for."""
    kind = getattr(accelerator.distributed_type, "value", str(accelerator.distributed_type))
    asked, found = int(os.environ.get("WORLD_SIZE", accelerator.num_processes)), accelerator.num_processes
    if kind in ("DEEPSPEED", "FSDP", "MEGATRON_LM"):
        what = f"AdamP needs whole weights, and {kind} cuts them into pieces."
    elif asked != found:
        what = f"The launcher started {asked} processes, but each of them takes part in a run of {found}."
    else:
        return
    raise UserError(what, "Start with torchrun or `accelerate launch --multi_gpu`, also on CPUs.")


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


def measure_only(config: Config, model, task: Task, accelerator: Accelerator, say) -> int:
    """Validate and save the model as pretrained (clip-zs)."""
    refuse_full_disk(config.out, model)
    model.to(accelerator.device).eval()
    found = [task.validate(model), *task.classify(model)] if accelerator.is_main_process else []
    folder = RunFolder(config, {})
    for values in filter(None, found):
        folder.report(0, values)
    place = folder.path / "model"
    on_main(lambda: save_model(model, place), place, REMEDY)
    folder.close()
    say(f"model   {place}: as pretrained")
    return 0


def describe(config: Config, joint: Joint, rows, accelerator: Accelerator, steps: int, step: int, earlier) -> str:
    """The summary printed before the first step."""
    gpu, world, two = gpu_capability(), accelerator.num_processes, joint.second is not None
    precision, noise = training_precision(config.engine.precision, gpu), config.noise_ratio
    distance = getattr(config.loss, "distance", None)
    split = config.data.train or "all"
    if getattr(rows.data, "drawn", False) and config.data.validation:
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
        engine=f"{world} x {accelerator.device.type}, {precision}, batch {config.batch_size} = "
        f"{count(world, 'rank')} x {len(rows.share)}",
    )
