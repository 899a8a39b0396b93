"""A pretraining run from start to end. Faults are found before the ranks meet and before anything is written."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from pretrain.config import Config, whole_steps
from pretrain.cost import images_at_peak
from pretrain.engine.checkpoint import Average, load_checkpoint
from pretrain.engine.engine import Towers, make_engine
from pretrain.evaluate import Evaluator, make_evaluators
from pretrain.run_folder import RunFolder
from pretrain.schedules import check_schedule
from pretrain.stream.stream import Stream
from pretrain.trainer import Position, Trainer, make_optimizer
from probemb.data.failures import describe_failures
from probemb.data.shards.index import read_index
from probemb.distributed import all_of, init_process_group, leave_process_group, same_everywhere, sum_host
from probemb.errors import count
from probemb.machine import gpu_capability, training_device, training_precision
from probemb.models.create import fill_word_vectors
from probemb.models.dual_encoder import DualEncoder
from probemb.models.inputs import create_tokenizer, create_transforms
from probemb.options import to_dict
from probemb.runs import folder as runs
from probemb.runs.checkpoints import read_state
from probemb.runs.copy import Copy, check_copy, fetch_newest
from probemb.runs.log import headline, step_of
from probemb.runs.preemption import Preemption
from probemb.runs.watchdog import Progress, Watchdog

FREE_TO_CHANGE = (  # keys and groups of keys, when a run resumes
    "engine",
    "loss.exchange",  # the same loss
    "data",  # the resulting samples and their order are compared
    *("out", "resume", "allow_changes", "stop_at_step", "log_every", "save_every", "keep_checkpoints", "keep_every"),
    *("on_nonfinite", "log_samples", "profile", "remote_copy", "wandb", "evaluate"),
)


class Prepared(NamedTuple):
    """A run of `steps` from a position; `identity` of the data and its reading, `earlier`: the checkpoint, if any."""

    device: torch.device
    precision: str
    model: DualEncoder
    stream: Stream
    evaluators: list[Evaluator]
    identity: dict
    position: Position
    steps: int
    earlier: Path | None


def train(config: Config, preemption: Preemption) -> int:
    """Run the configured training; returns 0 when it is done, another code when it was asked to stop."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

    def say(line: str) -> None:
        if rank == 0 and line:
            print(line, flush=True)

    run = prepare(config, rank, world, say)
    stream, start, summary = run.stream, run.position.step, describe(config, run, world)
    stream.start()  # workers are forked before DeepSpeed and the GPU hold threads and handles
    init_process_group(config.engine.timeout)
    progress = Progress(start)
    with Watchdog(progress, Path(config.out), config.engine.timeout, clean_up=stream.close):
        same_everywhere("The checkpoint to resume from", str(run.earlier), "Choose an --out that all machines share.")
        lock = runs.take_lock(config.out)
        progress.doing("making the engine")
        optimizer = make_optimizer(run.model.to(run.device), config.optimizer)
        towers = Towers(run.model, run.precision)
        engine = make_engine(towers, optimizer, config.engine, config.batch_size, run.device)
        average = Average(engine) if config.ema.half_life_samples else None
        if run.earlier:
            progress.doing("loading the checkpoint")
            load_checkpoint(engine, run.earlier, average)
        folder = RunFolder(config, run.model.config, run.identity, start, run.steps, lock)
        say(summary)
        peak = images_at_peak(config, run.precision, world, run.device)
        given = run.steps, run.position, average, run.evaluators, preemption.asked, progress, peak
        trainer = Trainer(config, engine, stream, folder, *given)
        try:
            stopped = trainer.fit()
            folder.finish()
            say(folder.best_words())
            if stopped:
                runs.refuse_endless_starts(folder.path, start, trainer.step)
        finally:
            stream.close()
            folder.close()
        for line in describe_failures(all_of(stream.failures), "unreadable samples", "shards"):
            say(line)
    if stopped:
        say(f"{step_of(trainer.step, run.steps)} | stopped by {preemption.description}; continue with --resume")
    elif start >= run.steps:
        say(f"{config.out} is finished: {start} of {run.steps} steps were done.")
    if folder.copier:
        folder.copier.close(seconds=30 * config.engine.timeout)  # half of what a collective may take
    sum_host([0])  # all ranks wait: a launcher may end the others when one ends
    leave_process_group()
    if lock:
        lock.close()
    return preemption.exit_code if stopped else 0


def prepare(config: Config, rank: int, world: int, say: Callable[[str], object]) -> Prepared:
    """Make the model and open the data, of a new run or from its newest checkpoint."""
    out, copy = Path(config.out), Copy(config.remote_copy) if config.remote_copy else None

    def tell(line: str) -> None:
        say(f"resume  {line}")

    def fetch() -> None:
        if copy:  # any rank may be the one that fetches, and says so
            fetch_newest(copy, out, lambda line: print(f"resume  {line}", flush=True))

    earlier = runs.newest_checkpoint(out, config.resume, tell, config.engine.timeout, fetch=fetch)
    state = read_state(earlier) if earlier else {"step": 0, "samples": 0, "skipped": 0}
    if copy and rank == 0:
        check_copy(copy, out, state["step"] if earlier else None, tell)
    if earlier:  # of another model, none could be made
        runs.refuse_another_run(config, state, state["data"], earlier, FREE_TO_CHANGE)
    corpora = [read_index(path) for path in config.train_paths]  # a wrong path is told before the model needs its words
    if config.engine.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
        torch.use_deterministic_algorithms(True)
    device = torch.device(training_device(config.engine.threads))
    precision = training_precision(config.engine.precision, gpu_capability())
    random.seed(config.seed)  # the same weights on every rank; ranks differ in their data
    np.random.seed(config.seed % 2**32)
    torch.manual_seed(config.seed)
    model = config.create_model(grad_checkpointing=config.engine.grad_checkpointing)
    if not model.probabilistic and (config.model.n_unc_layers or config.model.uncertainty != "branch"):
        say(f"model   {config.objective} trains points: model.n_unc_layers and model.uncertainty are not used")
    if config.model.word_vectors and not earlier:
        say(f"words   {fill_word_vectors(model, config.model.word_vectors)}")
    transforms = create_transforms(model, config.data.augmentation, config.data.resize)
    tokenizer = create_tokenizer(model)
    # Samples seen are the position; if the batch size has changed, a batch seen in part is repeated.
    batches = state["samples"] // config.batch_size
    position = Position(state["step"], batches * config.batch_size, state["skipped"])
    place = {"rank": rank, "world_size": world, "start_samples": position.samples, "pin_memory": device.type == "cuda"}
    given = corpora, config.data, transforms.train, tokenizer
    stream = Stream(*given, batch_size=config.batch_size, seed=config.seed, **place)
    steps = position.step + max(0, whole_steps(config, stream.order.steps) - batches)
    check_schedule(config.optimizer, position.samples + (steps - position.step) * config.batch_size)
    identity = {**stream.identity, "resize": config.data.resize, "augmentation": to_dict(config.data.augmentation)}
    if words := model.config["architecture"]["text_cfg"].get("vocabulary"):  # embeddings belong to a vocabulary
        identity["vocabulary"] = hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]
    if earlier and (changed := runs.refuse_another_run(config, state, identity, earlier, FREE_TO_CHANGE)):
        tell(f"changed {'; '.join(changed)}; the data resumes after {position.samples:,} samples, in its present order")
    runs.refuse_full_disk(out, model, 1 + bool(config.evaluate.best), bool(config.ema.half_life_samples))
    evaluators = make_evaluators(config, transforms.evaluate, tokenizer, rank, world)
    return Prepared(device, precision, model, stream, evaluators, identity, position, steps, earlier)


def describe(config: Config, run: Prepared, world: int) -> str:
    """The summary printed before the first step."""
    order, e, batch, selection = run.stream.order, config.engine, config.batch_size, run.stream.selection
    sizes = [(p.numel() / 1e6, p.requires_grad) for p in run.model.parameters()]
    every, trained = (f"{sum(n for n, is_trained in sizes if is_trained or all_):.1f} M" for all_ in (True, False))
    shards = f"{sum(shard.samples for shard in run.stream.shards):,} samples in {len(run.stream.shards)} shards"
    lines = {
        "model": f"{config.model.name}, {run.model.image_size} pixels, {every} parameters, {trained} trained, "
        f"head {config.model.head}",
        "data": f"{shards}, {order.lanes} lanes, {order.steps} steps an epoch",
        **({"filter": selection.describe()} if selection else {}),
        "engine": f"{world} x {run.device.type}, ZeRO-{e.zero_stage}, {run.precision}, batch {batch} = "
        f"{count(world, 'rank')} x {count(e.accumulation, 'part')} x {batch // world // e.accumulation}",
    }
    if half_life := config.ema.half_life_samples:
        lines["average"] = f"of the weights, half-life {half_life:,} samples; it is evaluated and exported to model/"
    return headline(config.out, f"{run.steps} steps", run.position.step, run.earlier, **lines)
