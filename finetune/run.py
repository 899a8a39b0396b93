"""Finetune on images with captions: PCME++, and every method that it is compared with, under one recipe.

    accelerate launch finetune/run.py --method pcmepp --data.path dataset_coco.json --data.images coco --out runs/coco
    python -m finetune.run --method vse --data.path data/scenes --out runs/vse \\
        --model.name scenes-cnn-gru --model.pretrained runs/scenes   # one process, no GPU needed, embedded data

The run folder holds config.yaml (resolved), metrics.jsonl, tensorboard/, checkpoints/, model/ (of the epoch with the
best validation RSUM, for `probemb.load_model`) and model-swa/ (the mean of the last epochs' weights). A method with two
networks leaves its second one in model-second/ and model-swa-second/.
Add `--resume` to resume. SIGTERM and SIGUSR1 end a run after the step, with a checkpoint and exit code 85.
Losses are those of the batch of all processes; mixed images get their partner within a process (docs/finetune.md).
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

if __package__ in (None, ""):  # started as a script: make the project importable, not this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from finetune.config import Config, check, with_method_file
from finetune.methods.registry import METHODS
from probemb.cli.command import run_command
from probemb.cli.configuration import parse_config
from probemb.runs.preemption import REQUEUE, SIGNALS, Preemption

PROG = "finetune/run.py"


def main() -> int:
    """Read the configuration, put the parts together, train; returns the exit code."""
    argv = with_method_file(sys.argv[1:])
    config = parse_config(Config, PROG, "Finetune PCME++ or one of its rivals on images with captions.", argv)
    with Preemption() as preemption:
        return train(config, preemption)


def train(config: Config, preemption: Preemption) -> int:
    """The run that the configuration describes; 0 when it is done, REQUEUE when it was asked to stop."""
    check(config, int(os.environ.get("WORLD_SIZE", "1")))

    import torch

    from finetune.folder import DIGEST, FREE_TO_CHANGE, RunFolder, load_checkpoint
    from finetune.loading.noise import noisy_captions
    from finetune.loading.pair_loader import PairLoader, refuse_unusable
    from finetune.recipe import WeightAverage, make_optimizer, make_schedule
    from finetune.trainer import Joint, Trainer
    from probemb.cli.device import share_cores, training_precision
    from probemb.data.captions.find import find_captions
    from probemb.data.failures import describe_failures
    from probemb.distributed import all_of, on_main, same_everywhere, settle
    from probemb.models import as_one, create_tokenizer, create_transforms, fill_word_vectors
    from probemb.runs.checkpoints import read_state
    from probemb.runs.folder import newest_checkpoint, refuse_another_run, refuse_full_disk
    from probemb.runs.output import take_lock

    precision = training_precision(config.engine.precision)
    accelerator = start_accelerator(config, precision)
    rank, world, main_process = accelerator.process_index, accelerator.num_processes, accelerator.is_main_process
    check(config, world)
    share_cores(config.engine.threads, world)

    def say(line: str) -> None:
        if main_process:
            print(line, flush=True)

    # Everything that can be wrong with the command is found before anything is written.
    earlier = newest_checkpoint(config.out, config.resume, Config, tell=lambda line: say(f"resume  {line}"))
    same_everywhere("The checkpoint to resume from", str(earlier), "Choose an --out that all machines share.")
    data = config.data
    where = {"images": data.images, "format": data.format}
    validation = find_captions(data.path, data.validation, **where) if data.validation else None
    if validation is not None:
        refuse_unusable(validation, data.failure_share)
    clean = None if not METHODS[config.method].trained else find_captions(data.path, data.train, **where)
    torch.manual_seed(config.seed)
    networks = [make_model(config) for _ in range(METHODS[config.method].networks)]
    model, evaluated = networks[0], as_one(networks)
    for network in networks if config.model.word_vectors and not earlier else ():
        say(f"words   {fill_word_vectors(network, config.model.word_vectors)}")
    transforms, tokenizer = create_transforms(model), create_tokenizer(model)
    if clean is None:
        return measure_only(config, model, tokenizer, transforms, validation, accelerator, say)
    if data.cache_features is not None:
        clean, validation, transforms = read_features(config, networks, transforms, clean, validation, accelerator)
    out = Path(config.out)
    train_data = noisy_captions(clean, config.noise_ratio, config.seed, out, write=False)
    loader = PairLoader(
        train_data, transforms.train, tokenizer, config.batch_size, config.seed, rank, world, data.workers,
        pin_memory=accelerator.device.type == "cuda", failure_share=data.failure_share,
    )  # fmt: skip
    identity = {"pairs": loader.identity["pairs"]}
    position = {"samples": 0, "epoch": 0, "best": None, "best_epoch": None}
    if earlier:
        state = read_state(earlier)
        refuse_another_run(config, state, identity, earlier, FREE_TO_CHANGE, DIGEST)
        position = {name: state[name] for name in position}
    step, epoch_steps = position["samples"] // config.batch_size, len(networks) * loader.steps
    steps = config.epochs * epoch_steps
    if position["epoch"] >= config.epochs:
        loader.close()
        settle()
        accelerator.end_training()
        say(f"{config.out} is finished: {step} of {steps} steps are done.")
        return 0
    refuse_full_disk(config.out, evaluated, models=3 if config.swa_epochs else 1)  # the average: in the checkpoint too

    method = METHODS[config.method](config, model, train_data)
    optimizer = make_optimizer(config, networks, method)
    joint = Joint(model, method, *networks[1:]).to(accelerator.device)
    average = WeightAverage(model, method.module, joint.second) if config.swa_epochs else None
    window = load_checkpoint(earlier, joint, optimizer, average) if earlier else None

    lock = take_lock(out)
    folder = RunFolder(config, identity, step, steps)
    on_main(lambda: noisy_captions(clean, config.noise_ratio, config.seed, out), out, "Choose another --out.")
    say(describe(config, joint, loader, accelerator, precision, steps, step, earlier))

    def save() -> None:
        position.update(samples=trainer.samples, epoch=trainer.epoch)
        folder.save(joint, optimizer, average, trainer.step, position, trainer.window.state())

    def end_epoch(epoch: int) -> None:
        folder.finish()  # validation forks workers, which no thread should be writing beside
        remedy = "Make room, or make the folder writable, and go on with --resume."
        on_main(lambda: select(epoch), out, remedy)  # on the first process; the others wait
        save()  # last, so that a run that is killed before does all of this again

    def select(epoch: int) -> None:
        best = True
        if validation is not None:
            values = validate(evaluated, tokenizer, transforms, validation, config, accelerator)
            best = position["best"] is None or values["rsum"] > position["best"]
            folder.report(trainer.step, {"samples": trainer.samples, **values, "is_best": best})
            if best:
                position.update(best=values["rsum"], best_epoch=epoch)
        if best:
            folder.save_models(networks)
        if average and epoch == config.epochs:
            finish_average(folder, average, tokenizer, transforms, validation, config, accelerator)

    trainer = Trainer(
        accelerator, joint, optimizer, loader, make_schedule(config, len(networks), loader.steps), config,
        samples=position["samples"], epoch=position["epoch"], average=average, report=folder.report,
        end_epoch=end_epoch, save=save, stop=lambda: preemption.asked() or folder.failed, window=window,
    )  # fmt: skip
    try:
        stopped = trainer.fit()
        if stopped:
            save()
        folder.finish()
    finally:
        loader.close()
        folder.close()
        if lock:
            lock.release()
    if stopped:
        say(f"step {trainer.step}/{steps} | stopped by {preemption.description}; go on with --resume")
    for line in describe_failures(all_of(loader.failures), "unreadable images, their pairs", "images"):
        say(line)
    if not stopped:
        of = f"epoch {trainer.epoch}"
        if position["best"] is not None:
            of = f"epoch {position['best_epoch']}, validation RSUM {position['best']:.1f}"
        say(f"model   {out / 'model'} is of {of}" + (", and so is model-second" if joint.second else ""))
    settle()
    accelerator.end_training()
    return REQUEUE if stopped else 0


def start_accelerator(config: Config, precision: str):
    """accelerate's process group, on the GPUs or the CPU. Raises UserError where it would train something else."""
    import torch
    from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
    from accelerate.utils import GradientAccumulationPlugin

    from finetune.recipe import check_engine

    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="bf16" if precision == "bf16" else "no",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),  # whatever accelerate's launcher says
        kwargs_handlers=[
            DistributedDataParallelKwargs(broadcast_buffers=False),
            InitProcessGroupKwargs(timeout=timedelta(minutes=config.engine.timeout)),
        ],
    )
    check_engine(accelerator)
    return accelerator


def make_model(config: Config):
    """The towers, on the CPU; the same on every rank."""
    from probemb.models import create_model, vocabulary_for

    probabilistic, model = METHODS[config.method].probabilistic, config.model
    unc = {"n_unc_layers": model.n_unc_layers or 0} if not probabilistic else {}
    if probabilistic and model.n_unc_layers is not None:
        unc = {"n_unc_layers": model.n_unc_layers}
    return create_model(
        model.name,
        embed_dim=model.embed_dim,
        head=model.head,
        pretrained=model.pretrained,
        image_weights=model.image_weights,
        grad_checkpointing=config.engine.grad_checkpointing,
        init_scale=getattr(config.loss, "scale", 1.0),
        init_shift=getattr(config.loss, "shift", 1.0),
        probabilistic=probabilistic,
        vocabulary=vocabulary_for(model.name, model.vocabulary, model.pretrained, [config.data.path]),
        **unc,
    )


def read_features(config: Config, networks, transforms, train, validation, accelerator):
    """Both data sets and the transforms, with features of the locked image towers in place of pixels."""
    from finetune.loading.feature_cache import cache_features, unchanged
    from probemb.models import Transforms

    found = [
        captions
        and cache_features(
            networks, transforms.evaluate, captions, config.data.cache_features, device=accelerator.device,
            batch_size=config.engine.eval_batch_size, workers=config.data.workers,
            failure_share=config.data.failure_share,
        )
        for captions in (train, validation)
    ]  # fmt: skip
    return *found, Transforms(unchanged, unchanged)


def validate(model, tokenizer, transforms, captioned, config: Config, accelerator) -> dict[str, float]:
    """RSUM and recalls in percent on the validation split, ranked by CSD (a point model by the cosine)."""
    from probemb.cli.device import Device
    from probemb.evaluation.embedding import Embedder
    from probemb.evaluation.rankings import KS, evaluate_retrieval

    device = Device(str(accelerator.device), "bf16" if accelerator.mixed_precision == "bf16" else "fp32")
    embedder = Embedder(
        model, tokenizer, transforms.evaluate, device, config.engine.eval_batch_size, workers=config.data.workers,
        max_bad=config.data.failure_share,
    )  # fmt: skip
    training = model.training
    model.eval()
    # A scheduler's warning goes to the workers too, and would end them: they inherit that it waits.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        found = evaluate_retrieval(embedder, captioned)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        model.train(training)
    return {"rsum": found["rsum"]} | {f"{way}_r{k}": 100 * found[way][f"r@{k}"] for way in ("i2t", "t2i") for k in KS}


def finish_average(folder, average, tokenizer, transforms, validation, config: Config, accelerator) -> None:
    """Validate and save the mean of the last epochs' weights, of both towers and all networks."""
    from probemb.models import as_one
    from probemb.runs.log import count

    if validation is not None:
        values = validate(as_one(average.networks), tokenizer, transforms, validation, config, accelerator)
        print(
            f"model-swa: mean of {count(average.n_averaged, 'epoch')}, validation RSUM {values['rsum']:.1f}",
            flush=True,
        )
        folder.log.write(folder.steps, {f"swa_{name}": value for name, value in values.items()})
    folder.save_models(average.networks, "model-swa")


def measure_only(config: Config, model, tokenizer, transforms, validation, accelerator, say) -> int:
    """clip-zs: the model as it comes, saved so that every evaluation can read it."""
    from finetune.folder import RunFolder
    from probemb.distributed import on_main
    from probemb.runs.folder import refuse_full_disk
    from probemb.runs.output import take_lock

    refuse_full_disk(config.out, model)
    model.to(accelerator.device)
    values = None
    if validation is not None and accelerator.is_main_process:
        values = validate(model, tokenizer, transforms, validation, config, accelerator)
    lock = take_lock(config.out)
    folder = RunFolder(config, {}, 0, 0)
    if values:
        folder.report(0, values)
    on_main(lambda: folder.save_models([model]), folder.path, "Make room, or choose another --out.")
    folder.close()
    if lock:
        lock.release()
    say(f"model   {folder.path / 'model'}: as pretrained")
    return 0


def describe(config: Config, joint, loader, accelerator, precision: str, steps: int, step: int, earlier) -> str:
    """The lines that people see before the first step."""
    from probemb.runs.log import count, headline

    world = accelerator.num_processes
    n = sum(p.numel() for p in joint.parameters())
    two = joint.second is not None
    return headline(
        config.out,
        f"{count(config.epochs, 'epoch')}, {count(steps, 'step')}",
        step,
        earlier,
        method=config.method + (f" ({config.distance})" if config.distance else ""),
        model=f"{config.model.name}, {'2 networks of together ' if two else ''}{n / 1e6:.1f} M parameters, "
        f"head {config.model.head}, from {config.model.pretrained or 'random weights'}",
        data=f"{loader.n_pairs:,} pairs of {config.data.path} ({config.data.train}), {loader.steps} steps an epoch"
        + (" of each network" if two else "")
        + (f", {config.noise_ratio:.0%} of the captions at wrong images" if config.noise_ratio else ""),
        engine=f"{world} x {accelerator.device.type}, {precision}, batch {config.batch_size} = {world} ranks x "
        f"{loader.rows}",
    )


if __name__ == "__main__":
    run_command(main)
