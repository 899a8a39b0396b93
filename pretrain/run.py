"""Pretrain PCME++, ProLIP, CLIP or SigLIP on webdataset shards.

    torchrun --nproc-per-node 8 -m pretrain.run --config pretrain/configs/vit_b16_cc3m_cc12m_redcaps.yaml
    python -m pretrain.run --config pretrain/configs/scenes.yaml --out runs/scenes  # one process, no GPU needed

Add `--resume` to resume from the newest checkpoint in --out. The run folder holds config.yaml (resolved),
metrics.jsonl, tensorboard/, checkpoints/step-N/ and model/, which `probemb.load_model` reads.
SIGTERM, SIGUSR1, SIGHUP and Ctrl-C end a run after the step, or while it waits for data, with a checkpoint.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):  # started as a script: make the project importable, not this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from pretrain.config import Config
from pretrain.contradictions import check
from probemb.cli.command import run_command
from probemb.cli.configuration import parse_config
from probemb.runs.preemption import Preemption

if TYPE_CHECKING:
    from pretrain.preparation import Prepared


def main() -> int:
    """Read the configuration and train; returns the exit code."""
    config = parse_config(Config, "python -m pretrain.run", "Pretrain PCME++, ProLIP, CLIP or SigLIP on shards.")
    with Preemption() as preemption:
        return train(config, preemption)


def train(config: Config, preemption: Preemption) -> int:
    """Run the configured training; returns 0 when it is done, another code when it was asked to stop."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    check(config, world_size)

    from pretrain.engine.engine import import_deepspeed, make_engine, start_deepspeed

    import_deepspeed()  # first: another import of it would print its log lines

    from pretrain.cost import images_at_peak
    from pretrain.engine.average import Average
    from pretrain.engine.checkpoint import load_checkpoint
    from pretrain.folder import RunFolder
    from pretrain.preparation import prepare
    from pretrain.profile import make_profiler
    from pretrain.trainer import Measured, Start, Trainer
    from probemb.distributed import any_host, same_everywhere
    from probemb.runs.output import take_lock
    from probemb.runs.starts import refuse_endless_starts
    from probemb.runs.watchdog import Progress, Watchdog

    def say(line: str) -> None:
        if rank == 0:
            print(line, flush=True)

    run = prepare(config, rank, world_size, say)
    if run is None:
        return 0
    stream = run.stream
    stream.start()  # workers are forked before DeepSpeed and the GPU hold threads and handles
    start_deepspeed(config.engine.timeout, run.device)
    progress = Progress(run.step)
    with Watchdog(progress, Path(config.out), config.engine.timeout, clean_up=stream.close):
        same_everywhere("The checkpoint to resume from", str(run.earlier), "Choose an --out that all machines share.")
        lock = take_lock(config.out)
        progress.doing("making the engine")
        engine = make_engine(run.model.to(run.device), config, run.precision, run.device)
        average = Average(engine) if config.ema.half_life_samples else None
        if run.earlier:
            progress.doing("loading the checkpoint")
            load_checkpoint(engine, run.earlier, verified=True, average=average)
        folder = RunFolder(config, run.model, run.identity, run.steps, run.step, lock, average)
        say(describe(config, engine, run))
        profiler = make_profiler(config, run.device)
        trainer = Trainer(
            engine, stream, config, run.device, run.steps, Start(run.step, run.samples, run.skipped),
            recorder=folder, stop=preemption.asked, progress=progress,
            measured=Measured(images_at_peak(config, run.precision, world_size, run.device), profiler),
            average=average,
        )  # fmt: skip
        try:
            stopped = trainer.fit([partial(evaluator, engine) for evaluator in run.evaluators])
            folder.finish()
            if words := folder.best_words():
                say(words)
            if stopped:
                refuse_endless_starts(folder.path, run.step, trainer.step)
        finally:
            stream.close()
            if profiler:
                profiler.close()
            folder.close()
        report_failures(stream, say)
    if stopped:
        say(f"step {trainer.step}/{run.steps} | stopped by {preemption.description}; continue with --resume")
    if run.copy:  # all ranks wait: a launcher may end the others when one ends
        folder.finish_copy(seconds=30 * config.engine.timeout)  # half of what a collective may take
        any_host([False])
    finish(lock)
    return preemption.exit_code if stopped else 0


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


def describe(config: Config, engine, run: Prepared) -> str:
    """The summary printed before the first step."""
    from probemb.cli.device import gpu_capability, precision_words
    from probemb.runs.log import headline

    stream, order = run.stream, run.stream.order
    world = order.batch_size // stream.rows
    sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in engine.module.parameters()]
    n_parameters, n_trained = sum(n for n, _ in sizes), sum(n for n, trained in sizes if trained)
    trained = "" if n_trained == n_parameters else f" ({n_trained / 1e6:.1f} M trained)"
    parts = config.engine.accumulation
    average = {}
    if half_life := config.ema.half_life_samples:
        average["average"] = f"of the weights, half-life {half_life:,} samples; it is evaluated and exported to model/"
    return headline(
        config.out,
        f"{run.steps} steps",
        run.step,
        run.earlier,
        model=f"{config.model.name}, {n_parameters / 1e6:.1f} M parameters{trained}, head {config.model.head}",
        data=f"{sum(s.samples for s in stream.shards):,} samples in {len(stream.shards)} shards, "
        f"{order.lanes} lanes, {order.steps} steps an epoch"
        + (f"; filter: {stream.selection.describe()}" if stream.selection else ""),
        **(stream.selection.describe_lists() if stream.selection else {}),
        engine=f"{world} x {run.device.type}, DeepSpeed ZeRO-{config.engine.zero_stage}, "
        f"{precision_words(run.precision, gpu_capability())}, "
        f"batch {order.batch_size} = {world} ranks x {parts} parts x {order.batch_size // world // parts}",
        **average,
    )


if __name__ == "__main__":
    run_command(main)
