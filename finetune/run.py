"""Finetune PCME++, and every method it is compared with, on images with captions under one recipe.

    accelerate launch -q --config_file finetune/accelerate.yaml finetune/run.py --method pcmepp \\
        --data.path dataset_coco.json --data.images coco --out runs/coco
    python -m finetune.run --method vse --data.path data/scenes --out runs/vse \\
        --model.name scenes-cnn-gru --model.pretrained runs/scenes   # one process, no GPU needed, synthetic data

The run folder holds config.yaml (resolved), metrics.jsonl, tensorboard/, checkpoints/, model/ (of the epoch with the
best validation RSUM, for `probemb.load_model`) and model-swa/ (the mean of the last epochs' weights); methods with two
networks also leave model-second/ and model-swa-second/.
Add `--resume` to resume. SIGTERM and SIGUSR1 end a run after the step, with a checkpoint and exit code 85.
"""

from __future__ import annotations

import math
import os
import re
import sys
from dataclasses import asdict, fields
from datetime import timedelta
from functools import partial
from pathlib import Path

if __package__ in (None, ""):  # started as a script: make the project importable, not this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from finetune.config import Compose, Config, check, pixel_changes, shortened, with_method_file
from finetune.methods.registry import GROUPS, METHODS
from probemb.cli.command import run_command
from probemb.cli.configuration import parse_config
from probemb.errors import UserError, raise_together
from probemb.runs.preemption import Preemption

PROG = "finetune/run.py"


def main() -> int:
    """Read the configuration and train; returns the exit code."""
    argv = with_method_file(sys.argv[1:])
    groups = [f"  {group}: {', '.join(methods)}" for group, methods in GROUPS.items()]
    description = "\n".join(["Finetune PCME++, or another method, on images with captions. --method takes", *groups])
    config, told = shortened(parse_config(Config, PROG, description, argv), argv)
    if told and os.environ.get("RANK", "0") == "0":
        print(told, flush=True)
    with Preemption() as preemption:
        return train(config, preemption)


def train(config: Config, preemption: Preemption) -> int:
    """Run the configured training; returns 0 when it is done, another code when it was asked to stop."""
    check(config, int(os.environ.get("WORLD_SIZE", "1")))

    from finetune.folder import RunFolder, load_checkpoint, take_models
    from finetune.loading.noise import noisy_captions
    from finetune.recipe import make_schedule
    from finetune.selection import ComposedValidator, Selection, Validator
    from finetune.trainer import Hooks, Trainer
    from probemb.distributed import on_main, same_everywhere
    from probemb.models import as_one
    from probemb.runs.folder import newest_checkpoint, refuse_full_disk
    from probemb.runs.output import take_lock
    from probemb.runs.starts import refuse_endless_starts

    accelerator = start_accelerator(config)

    def say(line: str) -> None:
        if accelerator.is_main_process:
            print(line, flush=True)

    # Everything that can be wrong with the command is found before anything is written.
    earlier = newest_checkpoint(
        config.out, config.resume, Config, lambda line: say(f"resume  {line}"), config.engine.timeout,
        METHODS[config.method].trained,
    )  # fmt: skip
    same_everywhere("The checkpoint to resume from", str(earlier), "Choose an --out that all machines share.")
    clean, validation = find_data(config)
    composes = METHODS[config.method].composes
    if config.augment.hflip and clean is not None:
        texts = clean.texts if composes else clean.flat()
        if n := sum(bool(re.search(r"\b(left|right)\b", text, re.IGNORECASE)) for text in texts):
            say(f"hflip   {n:,} of {len(texts):,} captions say left or right, which is wrong of a mirrored image")
    networks = make_networks(config, earlier, say, texts=clean.texts if composes else None)
    clean, validation, transforms, tokenizer, unpaired = prepare_inputs(
        config, networks, clean, validation, accelerator, find_unpaired(config)
    )
    kind, out = ComposedValidator if composes else Validator, Path(config.out)
    validator = kind(validation, tokenizer, transforms, config, accelerator) if validation is not None else None
    if clean is None:
        return measure_only(config, networks[0], validator, accelerator, say)
    train_data = clean if composes else noisy_captions(clean, config.noise_ratio, config.seed, out, write=False)
    loader = make_loader(config, train_data, transforms.train, tokenizer, accelerator, unpaired)
    identity = {"pairs": loader.identity["tuples" if composes else "pairs"]}
    position = resume_from(config, earlier, identity)
    step, steps = position.samples // config.batch_size, config.epochs * len(networks) * loader.steps
    if position.epoch >= config.epochs:
        loader.close()
        on_main(lambda: take_models(out, step), out, "Choose another --out.")
        end(accelerator)
        say(f"{config.out} is finished: {step} of {steps} steps are done.")
        return 0
    # The average is in the checkpoint too.
    refuse_full_disk(config.out, as_one(networks), models=4 if config.swa_epochs else 2)
    state = make_state(config, networks, train_data, position, accelerator.device)
    window = load_checkpoint(earlier, state) if earlier else None

    lock = take_lock(config.out)
    folder = RunFolder(config, identity, step, steps, lock)
    if not composes:
        on_main(lambda: noisy_captions(clean, config.noise_ratio, config.seed, out), out, "Choose another --out.")
    say(describe(config, state.joint, loader, accelerator, steps, step, earlier))
    selection = Selection(config, state, folder, validator)
    hooks = Hooks(
        folder.report, selection.end_epoch, partial(folder.save, state), lambda: preemption.asked() or folder.failed
    )
    feed = make_feed(config, loader, train_data, state.joint.objective, accelerator.device)
    schedule = make_schedule(config, len(networks), loader.steps)
    trainer = Trainer(accelerator, state, loader, feed, schedule, config, hooks, window)
    try:
        stopped = trainer.fit()
        folder.finish()
        if stopped:
            refuse_endless_starts(folder.path, step, trainer.step)
    finally:
        loader.close()
        folder.close()
        if lock:
            lock.release()
    if stopped:
        say(f"step {trainer.step}/{steps} | stopped by {preemption.description}; continue with --resume")
    report_failures(loader, say)
    if not stopped:
        say(selection.summary())
        cross_entropy, chance = trainer.logged.get("query_to_target", 0.0), math.log(config.batch_size)
        if cross_entropy > chance:
            say(
                f"loss    query_to_target is {cross_entropy:.2f}; choosing among the {config.batch_size} targets of a "
                f"batch at random has {chance:.2f}. Try another loss.temperature or optimizer.lr."
            )
    end(accelerator)
    return preemption.exit_code if stopped else 0


def make_networks(config: Config, earlier: Path | None, say, texts=None) -> list:
    """The method's networks as they start, or as a run that resumes fills them.

    Args:
        texts: whose words are the vocabulary, where no file is named; None to look beside the data.
    """
    import torch

    from probemb.models import fill_word_vectors
    from probemb.models.architectures import reads_vectors

    torch.manual_seed(config.seed)
    method, networks = METHODS[config.method], []
    for _ in range(method.networks):
        networks.append(
            config.model.create(
                [config.data.path],
                config.loss,
                texts,
                grad_checkpointing=config.engine.grad_checkpointing,
                objective=config.method,
                **method.model_options(config),
            )
        )
        if networks[-1].batch_statistics and config.swa_epochs:
            raise UserError(
                f"The batch norms of {config.model.name} normalise by the batch in training, and averaged weights "
                f"(swa_epochs is {config.swa_epochs}) would need other statistics.",
                "Set swa_epochs to 0, or model.batch_norm to frozen.",
            )
        if config.model.word_vectors and not earlier:
            say(f"words   {fill_word_vectors(networks[-1], config.model.word_vectors)}")
        elif not (earlier or config.model.pretrained) and reads_vectors(networks[-1].config["architecture"]):
            say("words   have random vectors, which do not train: name word vectors with --model.word-vectors")
    return networks


def find_data(config: Config):
    """Captions of the training split (None for a method that trains nothing) and the validation split (None without).

    `Compositions` for a method that composes queries.

    Raises:
        UserError: a split is missing, or too much of the validation split is unusable.
    """
    from finetune.loading.pair_loader import refuse_unusable
    from probemb.data.captions.find import find_captions

    data = config.data
    if METHODS[config.method].composes:
        return find_composed_data(config)
    where = {"images": data.images, "format": data.format, "exif": data.exif}
    validation = find_captions(data.path, data.validation, **where) if data.validation else None
    if validation is not None:
        refuse_unusable(validation, data.failure_share)
    train = find_captions(data.path, data.train, **where) if METHODS[config.method].trained else None
    if data.positives == "class":
        for captions in (train, validation):
            if captions is not None:
                captions.class_numbers()  # refuses data without classes
    return train, validation


def find_unpaired(config: Config):
    """Images and texts that the autoencoders train on too; None without."""
    from probemb.data.captions.find import find_captions

    data = config.data
    if data.unpaired is None:
        return None
    return find_captions(data.unpaired, "train", images=data.unpaired_images, exif=data.exif)


def find_composed_data(config: Config):
    """The training and the validation split of composed retrieval (None without)."""
    from finetune.loading.pair_loader import refuse_unusable
    from probemb.data.compositions.find import find_compositions

    def find(split: str):
        o = config.compose
        return find_compositions(
            config.data.path, split, o.parts, setup=o.setup, images=config.data.images, lists=o.lists, seed=o.seed,
        )  # fmt: skip

    validation = find(config.data.validation) if config.data.validation else None
    if validation is not None:
        refuse_unusable(validation, config.data.failure_share)
    return find(config.data.train), validation


def prepare_inputs(config: Config, networks, train, validation, accelerator, unpaired=None):
    """Both splits, the transforms, the tokenizer and the unpaired data; with `data.cache_features`, of features.

    Raises:
        UserError: the models cannot read these images, or the configuration changes pixels and there are none.
    """
    from probemb.models import Augmentation, check_images, check_words, create_tokenizer, create_transforms
    from probemb.models.architectures import reads_regions

    for captions in (train, validation, unpaired):
        if captions is not None:
            check_images(networks[0], captions.images)
            if not METHODS[config.method].composes:
                check_words(networks[0], captions)
    if reads_regions(networks[0].config["architecture"]):
        raise_together(pixel_changes(config, "A region"))
    elif METHODS[config.method].over_regions:
        raise UserError(
            f"{config.method} reasons over an image's regions, and {config.model.name} reads none.",
            "Choose a model that reads regions, such as vsrn-regions-gru, or the method vsepp or prob-vsepp.",
        )
    augmentation = Augmentation(config.augment.scale, config.augment.hflip)
    transforms = create_transforms(networks[0], augmentation, config.data.resize)
    if train is not None and config.data.cache_features is not None:
        *splits, transforms = read_features(config, networks, (train, validation, unpaired), accelerator)
        train, validation, unpaired = splits
    return train, validation, transforms, create_tokenizer(networks[0]), unpaired


def make_loader(config: Config, data, transform, tokenizer, accelerator, unpaired=None):
    """This rank's training pairs, with unpaired images and texts, or its composed queries with their targets."""
    from finetune.loading.pair_loader import PairLoader
    from finetune.loading.tuple_loader import TupleLoader

    inputs = transform, tokenizer
    place = accelerator.process_index, accelerator.num_processes, config.data.workers
    settings = data, *inputs, config.batch_size, config.seed, *place
    more = {"pin_memory": accelerator.device.type == "cuda", "failure_share": config.data.failure_share}
    if METHODS[config.method].composes:
        repeats = max(config.compose.repeats, math.ceil(config.batch_size / data.n_examples))
        return TupleLoader(*settings, repeats=repeats, **more)
    if unpaired is not None:  # another seed: in another order, even where the data are the same
        unpaired = PairLoader(unpaired, *inputs, config.data.unpaired_batch, config.seed + 1, *place, **more)
    return PairLoader(*settings, positives=config.data.positives, unpaired=unpaired, **more)


def make_feed(config: Config, loader, data, method, device):
    """The trainer's handling of the loader's batches."""
    from finetune.pair_feed import PairFeed
    from finetune.tuple_feed import TupleFeed

    if method.composes:
        return TupleFeed(config, data, device)
    return PairFeed(config, loader.groups, device, method.wants_words)


def resume_from(config: Config, earlier: Path | None, identity: dict):
    """The position of the checkpoint `earlier`, or of a new run. Raises UserError: it is of another run."""
    from finetune.folder import DIGEST, FREE_TO_CHANGE
    from finetune.trainer import Position
    from probemb.runs.checkpoints import read_state
    from probemb.runs.folder import refuse_another_run

    if not earlier:
        return Position()
    state = read_state(earlier)
    add_new_settings(state["config"])
    refuse_another_run(config, state, identity, earlier, FREE_TO_CHANGE, DIGEST)
    return Position(**{field.name: state[field.name] for field in fields(Position)})


def add_new_settings(saved: dict) -> None:
    """Give a run's configuration the settings that came after it, with the values that it was trained with."""
    saved["data"].setdefault("exif", False)
    saved["data"].setdefault("resize", "pil")
    saved["data"].setdefault("positives", "image")
    saved["data"] = {"unpaired": None, "unpaired_images": None, "unpaired_batch": 128} | saved["data"]
    saved["optimizer"].setdefault("name", "adamp")
    saved["optimizer"].setdefault("freeze_text", False)
    saved.setdefault("augment", {"cutout": 0.0, "word_dropping": 0.0})
    by_density = METHODS[saved["method"]].composes and METHODS[saved["method"]].composed_ranking == "density"
    saved.setdefault("compose", asdict(Compose())).setdefault("ranking", "cosine" if by_density else None)
    if saved["method"] == "vsrn":
        saved["loss"].setdefault("caption_weight", 0.0)
    for option in fields(METHODS[saved["method"]].Options):
        saved["loss"].setdefault(option.name, option.default)
    if saved["ranking"] == METHODS[saved["method"]].ranking:
        saved["ranking"] = None  # once the default


def make_state(config: Config, networks, captions, position, device):
    """All that is trained, on the device, with its optimizer and average."""
    from finetune.recipe import WeightAverage, make_optimizer
    from finetune.trainer import Joint, State

    method = METHODS[config.method](config, networks[0], captions)
    optimizer = make_optimizer(config, networks, method)
    joint = Joint(networks[0], method, *networks[1:]).to(device)
    average = WeightAverage(joint.model, method.module, joint.second) if config.swa_epochs else None
    return State(joint, optimizer, average, position)


def report_failures(loader, say) -> None:
    """Print the images of all ranks that could not be used; collective."""
    from probemb.data.failures import describe_failures
    from probemb.distributed import all_of

    for line in describe_failures(all_of(loader.failures), "unreadable images, their pairs", "images"):
        say(line)


def end(accelerator) -> None:
    """Wait for all ranks and end the process group."""
    from probemb.distributed import settle

    settle()
    accelerator.end_training()


def start_accelerator(config: Config):
    """accelerate's process group, on the GPUs or the CPU. Raises UserError, see `check_engine` and `check`."""
    import torch
    from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
    from accelerate.utils import GradientAccumulationPlugin

    from finetune.recipe import check_engine
    from probemb.cli.device import gpu_capability, share_cores, training_precision
    from probemb.distributed import control_group

    timeout = timedelta(minutes=config.engine.timeout)
    precision = training_precision(config.engine.precision, gpu_capability())
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="bf16" if precision == "bf16" else "no",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),  # not accelerate's launcher
        kwargs_handlers=[
            DistributedDataParallelKwargs(broadcast_buffers=False),
            InitProcessGroupKwargs(timeout=timeout),
        ],
    )
    if accelerator.num_processes > 1:
        control_group(timeout)
    check_engine(accelerator)
    check(config, accelerator.num_processes)
    share_cores(config.engine.threads, config.data.workers, accelerator.num_processes)
    return accelerator


def read_features(config: Config, networks, splits, accelerator):
    """The splits and the transforms, with features of the locked image towers instead of pixels."""
    from finetune.loading.feature_cache import cache_features, unchanged
    from probemb.models import Transforms

    found = [
        captions
        and cache_features(
            networks, captions, config.data.cache_features, config.data.resize, device=accelerator.device,
            batch_size=config.engine.eval_batch_size, workers=config.data.workers,
            failure_share=config.data.failure_share,
        )
        for captions in splits
    ]  # fmt: skip
    return *found, Transforms(unchanged, unchanged)


def measure_only(config: Config, model, validator, accelerator, say) -> int:
    """Validate and save the model as pretrained (clip-zs)."""
    from finetune.folder import RunFolder
    from probemb.distributed import on_main
    from probemb.models import save_model
    from probemb.runs.folder import refuse_full_disk
    from probemb.runs.output import take_lock

    refuse_full_disk(config.out, model)
    model.to(accelerator.device)
    values = validator.measure(model) if validator and accelerator.is_main_process else None
    lock = take_lock(config.out)
    folder = RunFolder(config, {}, 0, 0, lock)
    if values:
        folder.report(0, values)
    remedy = "Make room, or choose another --out."
    on_main(lambda: save_model(model, folder.path / "model", overwrite=True), folder.path, remedy)
    folder.close()
    if lock:
        lock.release()
    say(f"model   {folder.path / 'model'}: as pretrained")
    return 0


def describe(config: Config, joint, loader, accelerator, steps: int, step: int, earlier) -> str:
    """The summary printed before the first step."""
    from probemb.cli.device import gpu_capability, precision_words, training_precision
    from probemb.runs.log import count, headline

    gpu = gpu_capability()
    precision = precision_words(training_precision(config.engine.precision, gpu), gpu)
    world = accelerator.num_processes
    n = sum(p.numel() for p in joint.parameters())
    two = joint.second is not None
    return headline(
        config.out,
        f"{count(config.epochs, 'epoch')}, {count(steps, 'step')}",
        step,
        earlier,
        method=config.method + "".join(f" ({x})" for x in (config.distance, METHODS[config.method].note) if x),
        model=f"{config.model.name}, {'2 networks of together ' if two else ''}{n / 1e6:.1f} M parameters, "
        f"head {config.model.head}, from {config.model.origin}",
        data=f"{loader.n_rows:,} {'queries' if METHODS[config.method].composes else 'pairs'} of {config.data.path} "
        f"({config.data.train or 'all'}), {loader.steps} steps an epoch"
        + (" of each network" if two else "")
        + (f", {config.noise_ratio:.0%} of the captions at wrong images" if config.noise_ratio else ""),
        engine=f"{world} x {accelerator.device.type}, {precision}, batch {config.batch_size} = {world} ranks x "
        f"{loader.rows}",
    )


if __name__ == "__main__":
    run_command(main)
