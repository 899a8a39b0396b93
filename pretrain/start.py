"""A pretraining run from start to end. Faults are found before the ranks meet and before anything is written."""

import hashlib
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from pretrain.config import Config, whole_steps
from pretrain.cost import images_at_peak
from pretrain.engine.checkpoint import Average, load_checkpoint
from pretrain.engine.engine import Towers, make_engine
from pretrain.evaluate import make_evaluators
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


def train(config: Config, preemption: Preemption) -> int:
    """Run the configured training; returns 0 when it is done, another code when it was asked to stop."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    out = Path(config.out)

    def say(line: str) -> None:
        if rank == 0 and line:
            print(line, flush=True)

    def tell(line: str) -> None:
        say(f"resume  {line}")

    # ---- the newest checkpoint, the model and the data
    earlier, state = find_earlier(config, rank, tell)
    corpora = [read_index(path) for path in config.train_paths]  # a wrong path is told before the model needs its words
    if config.engine.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
        torch.use_deterministic_algorithms(True)
    device = torch.device(training_device(config.engine.threads))
    precision = training_precision(config.engine.precision, gpu_capability())
    model = make_model(config, earlier, say)
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
    identity = identify(config, stream, model)
    if earlier and (changed := runs.refuse_another_run(config, state, identity, earlier, FREE_TO_CHANGE)):
        tell(f"changed {'; '.join(changed)}; the data resumes after {position.samples:,} samples, in its present order")
    runs.refuse_full_disk(out, model, 1 + bool(config.evaluate.best), bool(config.ema.half_life_samples))
    evaluators = make_evaluators(config, transforms.evaluate, tokenizer, rank, world)
    start, on = position.step, f"{device.type}, ZeRO-{config.engine.zero_stage}, {precision}"
    lines = describe(config, model, stream, world, on)  # before ZeRO 3 cuts the parameters
    # ---- the ranks meet
    stream.start()  # workers are forked before DeepSpeed and the GPU hold threads and handles
    init_process_group(config.engine.timeout)
    progress = Progress(start)
    with Watchdog(progress, out, config.engine.timeout, clean_up=stream.close):
        same_everywhere("The checkpoint to resume from", str(earlier), "Choose an --out that all machines share.")
        lock = runs.take_lock(out)
        progress.doing("making the engine")
        optimizer = make_optimizer(model.to(device), config.optimizer)
        engine = make_engine(Towers(model, precision), optimizer, config.engine, config.batch_size, device)
        average = Average(engine) if config.ema.half_life_samples else None
        if earlier:
            progress.doing("loading the checkpoint")
            load_checkpoint(engine, earlier, average)
        folder = RunFolder(config, model.config, identity, start, steps, lock)
        say(headline(config.out, f"{steps} steps", start, earlier, **lines))
        peak = images_at_peak(config, precision, world, device)
        given = steps, position, average, evaluators, preemption.asked, progress, peak
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
    # ---- the end
    if stopped:
        say(f"{step_of(trainer.step, steps)} | stopped by {preemption.description}; continue with --resume")
    elif start >= steps:
        say(f"{config.out} is finished: {start} of {steps} steps were done.")
    if folder.copier:
        folder.copier.close(seconds=30 * config.engine.timeout)  # half of what a collective may take
    sum_host([0])  # all ranks wait: a launcher may end the others when one ends
    leave_process_group()
    if lock:
        lock.close()
    return preemption.exit_code if stopped else 0


def find_earlier(config: Config, rank: int, tell: Callable[[str], None]) -> tuple[Path | None, dict]:
    """The newest checkpoint of `out`, perhaps fetched from the remote copy, and its state; None and that of a start.
    Raises UserError: it is of another run."""
    out, copy = Path(config.out), Copy(config.remote_copy) if config.remote_copy else None

    def fetch() -> None:
        if copy:  # any rank may be the one that fetches, and says so
            fetch_newest(copy, out, lambda line: print(f"resume  {line}", flush=True))

    earlier = runs.newest_checkpoint(out, config.resume, tell, config.engine.timeout, fetch=fetch)
    state = read_state(earlier) if earlier else {"step": 0, "samples": 0, "skipped": 0}
    if copy and rank == 0:
        check_copy(copy, out, state["step"] if earlier else None, tell)
    if earlier:  # of another model, none could be made
        runs.refuse_another_run(config, state, state["data"], earlier, FREE_TO_CHANGE)
    return earlier, state


def make_model(config: Config, earlier: Path | None, say: Callable[[str], None]) -> DualEncoder:
    """The model as it starts, the same on every rank."""
    random.seed(config.seed)  # ranks differ in their data
    np.random.seed(config.seed % 2**32)
    torch.manual_seed(config.seed)
    model = config.create_model(grad_checkpointing=config.engine.grad_checkpointing)
    if not model.probabilistic and (config.model.n_unc_layers or config.model.uncertainty != "branch"):
        say(f"model   {config.objective} trains points: model.n_unc_layers and model.uncertainty are not used")
    if config.model.word_vectors and not earlier:
        say(f"words   {fill_word_vectors(model, config.model.word_vectors)}")
    return model


def identify(config: Config, stream: Stream, model: DualEncoder) -> dict:
    """All that the batches depend on, to compare when a run resumes."""
    identity = {**stream.identity, "resize": config.data.resize, "augmentation": to_dict(config.data.augmentation)}
    if words := model.config["architecture"]["text_cfg"].get("vocabulary"):  # embeddings belong to a vocabulary
        identity["vocabulary"] = hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]
    return identity


def describe(config: Config, model: DualEncoder, stream: Stream, world: int, engine: str) -> dict[str, str]:
    """Lines of the summary that is printed before the first step."""
    order, parts, batch = stream.order, config.engine.accumulation, config.batch_size
    every = sum(p.numel() for p in model.parameters()) / 1e6
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad) / 1e6
    shards = f"{sum(shard.samples for shard in stream.shards):,} samples in {count(len(stream.shards), 'shard')}"
    lines = {
        "model": f"{config.model.name}, {model.image_size} pixels, {every:.1f} M parameters, {trained:.1f} M trained, "
        f"head {config.model.head}",
        "data": f"{shards}, {order.lanes} lanes, {order.steps} steps an epoch",
        "filter": stream.selection.describe() if stream.selection else "",
        "engine": f"{world} x {engine}, batch {batch} = {count(world, 'rank')} x {count(parts, 'part')} x "
        f"{batch // world // parts}",
    }
    if half_life := config.ema.half_life_samples:
        lines["average"] = f"of the weights, half-life {half_life:,} samples; it is evaluated and exported to model/"
    return {name: text for name, text in lines.items() if text}
