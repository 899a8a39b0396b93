"""Pretrain PCME++, ProLIP, CLIP or SigLIP on webdataset shards.

    torchrun --nproc-per-node 8 -m pretrain.run --config pretrain/configs/vit_b16_cc3m_cc12m_redcaps.yaml
    python -m pretrain.run --config pretrain/configs/scenes.yaml --out runs/scenes  # one process, no GPU needed

Add `--resume` to resume from the newest checkpoint in --out. The run folder holds config.yaml (resolved),
metrics.jsonl, tensorboard/, checkpoints/step-N/ and model/, which `probemb.load_model` reads.
SIGTERM and SIGUSR1 end a run after the step, or while it waits for data, with a checkpoint and exit code 85.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
from functools import partial
from pathlib import Path

if __package__ in (None, ""):  # started as a script: make the project importable, not this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from pretrain.config import Config, Model
from pretrain.contradictions import check
from pretrain.schedules import check_schedule
from probemb.cli.command import run_command
from probemb.cli.configuration import parse_config
from probemb.cli.streams import make_output_unfailing
from probemb.errors import UserError
from probemb.runs.preemption import REQUEUE, Preemption


def main() -> int:
    """Read the configuration and train; returns the exit code."""
    config = parse_config(Config, "python -m pretrain.run", "Pretrain PCME++, ProLIP, CLIP or SigLIP on shards.")
    make_output_unfailing()
    with Preemption() as preemption:
        return train(config, preemption)


def train(config: Config, preemption: Preemption) -> int:
    """Run the configured training; returns 0 when it is done, REQUEUE when it was asked to stop."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    check(config, world_size)

    from pretrain.engine.engine import import_deepspeed, make_engine, start_deepspeed

    import_deepspeed()  # first: another import of it would print its log lines

    from pretrain.engine.checkpoint import load_checkpoint
    from pretrain.engine.randomness import make_deterministic
    from pretrain.evaluation_sets import make_evaluators
    from pretrain.folder import RunFolder, complete_copy
    from pretrain.plan.peak import images_at_peak
    from pretrain.profile import make_profiler
    from pretrain.trainer import Start, Trainer
    from probemb.cli.device import training_precision
    from probemb.distributed import any_host, same_everywhere
    from probemb.models import Augmentation, create_tokenizer, create_transforms, fill_word_vectors
    from probemb.runs.checkpoints import read_state
    from probemb.runs.copies.start import fetch_newest, refuse_another_copy
    from probemb.runs.copies.store import Store
    from probemb.runs.folder import newest_checkpoint, refuse_full_disk
    from probemb.runs.output import take_lock
    from probemb.runs.starts import refuse_endless_starts
    from probemb.runs.watchdog import Progress, Watchdog

    def say(line: str) -> None:
        if rank == 0:
            print(line, flush=True)

    # Everything that can be wrong with the command is found before the ranks meet and before anything is written.
    tell = lambda line: say(f"resume  {line}")  # noqa: E731
    copy = Store(config.remote_copy) if config.remote_copy else None
    if copy and config.resume:
        # Any rank may be the one that fetches, and says so.
        fetch_newest(copy, Path(config.out), lambda line: print(f"resume  {line}", flush=True))
    earlier = newest_checkpoint(config.out, config.resume, Config, tell)
    if config.engine.deterministic:
        make_deterministic()
    device, precision = pick_device(config), training_precision(config.engine.precision)
    seed_everything(config.seed)
    model = config.create_model(grad_checkpointing=config.engine.grad_checkpointing)
    if config.model.word_vectors and not earlier:
        say(f"words   {fill_word_vectors(model, config.model.word_vectors)}")
    augmentation = Augmentation(**vars(config.data.augmentation))
    transforms, tokenizer = create_transforms(model, augmentation, config.data.resize), create_tokenizer(model)
    state = read_state(earlier) if earlier else {"step": 0, "samples": 0}
    if copy and rank == 0:
        refuse_another_copy(copy, state["step"] if earlier else None, tell)
    # Samples seen are the position; if the batch size has changed, a batch seen in part is repeated.
    step, samples = state["step"], state["samples"] // config.batch_size * config.batch_size
    stream = make_stream(config, transforms.train, tokenizer, rank, world_size, samples, device.type == "cuda")
    steps = step + max(0, whole_steps(config, stream) - samples // config.batch_size)
    check_schedule(config.optimizer, samples + (steps - step) * config.batch_size)
    identity = {**stream.identity, **words_identity(model), **pixels_identity(config)}
    if earlier and (changed := changes_since(config, state, identity, earlier)):
        then = f"the data resumes after {samples:,} samples seen, in its present order"
        say(f"resume  changed {'; '.join(changed)}; {then}")
    if step >= steps:
        say(f"{config.out} is finished: {step} of {steps} steps are done.")
        if rank == 0:
            complete_copy(config, step)
        return 0
    refuse_full_disk(config.out, model)
    evaluators = make_evaluators(config, transforms.evaluate, tokenizer, device, rank, world_size)

    stream.start()  # workers are forked before DeepSpeed and the GPU hold threads and handles
    start_deepspeed(config.engine.timeout, device)
    progress = Progress(step)
    with Watchdog(progress, Path(config.out), config.engine.timeout, clean_up=stream.close):
        same_everywhere("The checkpoint to resume from", str(earlier), "Choose an --out that all machines share.")
        lock = take_lock(config.out)
        progress.doing("making the engine")
        engine = make_engine(model.to(device), config, precision, device)
        if earlier:
            progress.doing("loading the checkpoint")
            load_checkpoint(engine, earlier, verified=True)
        folder = RunFolder(config, model, identity, steps, step, lock)
        say(describe(config, engine, stream, device, precision, steps, step, earlier))
        profiler = make_profiler(config, device)
        trainer = Trainer(
            engine, stream, config, device, steps, Start(step, samples, state.get("skipped", 0)), recorder=folder,
            stop=preemption.asked, progress=progress,
            images_at_peak=images_at_peak(config, precision, world_size, device), profiler=profiler,
        )  # fmt: skip
        try:
            stopped = trainer.fit([partial(evaluator, engine) for evaluator in evaluators])
            folder.finish()
            if words := folder.best_words():
                say(words)
            if stopped:
                refuse_endless_starts(folder.path, step, trainer.step)
        finally:
            stream.close()
            if profiler:
                profiler.close()
            folder.close()
        report_failures(stream, say)
    if stopped:
        say(f"step {trainer.step}/{steps} | stopped by {preemption.description}; continue with --resume")
    if copy:  # all ranks wait: a launcher may end the others when one ends
        folder.finish_copy(seconds=30 * config.engine.timeout)  # half of what a collective may take
        any_host([False])
    finish(lock)
    return REQUEUE if stopped else 0


def report_failures(stream, say) -> None:
    """Print the shards of all ranks whose samples could not be used; collective."""
    from probemb.data.failures import describe_failures
    from probemb.distributed import all_of

    for line in describe_failures(all_of(stream.failures), "unreadable samples", "shards"):
        say(line)


def finish(lock) -> None:
    """End the process group and the lock."""
    import torch

    from probemb.distributed import settle

    settle()
    torch.distributed.destroy_process_group()
    if lock:
        lock.release()


def changes_since(config: Config, state: dict, identity: dict, earlier: Path) -> list[str]:
    """Allowed changes since the checkpoint `earlier`. Raises UserError: another run, see `refuse_another_run`."""
    from pretrain.folder import DIGEST, FREE_TO_CHANGE
    from probemb.cli.configuration import to_dict
    from probemb.runs.folder import refuse_another_run

    state["config"].setdefault("objective", "pcmepp")  # the only one of runs that do not name it
    if config.model.n_unc_layers is None and state["config"]["model"]["n_unc_layers"] == Model.DEFAULT_LAYERS:
        state["config"]["model"]["n_unc_layers"] = None  # once the default was written out
    for group in ("model", "optimizer"):  # options that the run's version did not have
        state["config"][group] = to_dict(Config())[group] | state["config"][group]
    return refuse_another_run(config, state, identity, earlier, FREE_TO_CHANGE, DIGEST)


def whole_steps(config: Config, stream) -> int:
    """Steps of the whole run. Raises UserError if there are none."""
    whole = config.samples // config.batch_size if config.samples else int(config.epochs * stream.order.steps)
    if whole < 1:
        raise UserError(
            f"The run would have no step: an epoch has {stream.order.steps}, each of {config.batch_size} samples.",
            "Lower batch_size, or raise epochs or samples.",
        )
    return whole


def words_identity(model) -> dict[str, str]:
    """A digest of the model's vocabulary, if it reads words: embeddings belong to a vocabulary."""
    words = model.config["architecture"]["text_cfg"].get("vocabulary")
    return {"vocabulary": hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]} if words else {}


def pixels_identity(config: Config) -> dict:
    """Who resizes, and the augmentation, as far as they are not those of runs before there was a choice."""
    from probemb.models.dual_encoder import plain

    chosen = {"resize": config.data.resize, "augmentation": plain(vars(config.data.augmentation))}
    before = {"resize": "pil", "augmentation": plain(vars(type(config.data.augmentation)()))}
    return {key: value for key, value in chosen.items() if value != before[key]}


def make_stream(config: Config, transform, tokenizer, rank: int, world_size: int, samples: int, pin_memory: bool):
    """This rank's batches from position `samples` on."""
    from pretrain.stream.settings import Settings
    from pretrain.stream.stream import Corpus, Stream
    from probemb.data.shards.index import read_index

    data = config.data
    weights = data.weights or [1.0] * len(config.train_paths)
    corpora = [Corpus(read_index(path), weight) for path, weight in zip(config.train_paths, weights)]
    settings = Settings(
        batch_size=config.batch_size,
        seed=config.seed,
        lanes=data.lanes,
        window=data.window,
        caption=data.captions,
        workers=data.workers,
        pin_memory=pin_memory,
        draft=True,
        failure_share=data.failure_share,
        exif=data.exif,
        verify_hash=data.verify_hash,
        cache=data.cache,
        cache_gib=data.cache_gib,
        filter=data.filter,
    )
    return Stream(corpora, settings, transform, tokenizer, rank=rank, world_size=world_size, start_samples=samples)


def pick_device(config: Config):
    """This rank's device; also shares the machine's cores among its ranks."""
    import torch

    from probemb.cli.device import share_cores

    here = share_cores(config.engine.threads, config.data.workers)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if here > torch.cuda.device_count():
        raise UserError(
            f"The launcher starts {here} processes on a machine with {torch.cuda.device_count()} GPUs.",
            "Start at most one process per GPU (--nproc-per-node), or hide the GPUs with CUDA_VISIBLE_DEVICES= .",
        )
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def seed_everything(seed: int) -> None:
    """The same weights on every rank; ranks differ in their data."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def describe(config: Config, engine, stream, device, precision: str, steps: int, step: int, earlier) -> str:
    """The summary printed before the first step."""
    from probemb.runs.log import headline

    order = stream.order
    world = order.batch_size // stream.rows
    sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in engine.module.parameters()]
    n_parameters, n_trained = sum(n for n, _ in sizes), sum(n for n, trained in sizes if trained)
    trained = "" if n_trained == n_parameters else f" ({n_trained / 1e6:.1f} M trained)"
    parts = config.engine.accumulation
    return headline(
        config.out,
        f"{steps} steps",
        step,
        earlier,
        model=f"{config.model.name}, {n_parameters / 1e6:.1f} M parameters{trained}, head {config.model.head}",
        data=f"{sum(s.samples for s in stream.shards):,} samples in {len(stream.shards)} shards, "
        f"{order.lanes} lanes, {order.steps} steps an epoch"
        + (f"; filter: {stream.selection.describe()}" if stream.selection else ""),
        engine=f"{world} x {device.type}, DeepSpeed ZeRO-{config.engine.zero_stage}, {precision}, "
        f"batch {order.batch_size} = {world} ranks x {parts} parts x {order.batch_size // world // parts}",
    )


if __name__ == "__main__":
    run_command(main)
