"""Pretrain PCME++ on webdataset shards.

    torchrun --nproc-per-node 8 -m pretrain.run --config pretrain/configs/vit_b16_cc3m_cc12m_redcaps.yaml
    python -m pretrain.run --config pretrain/configs/scenes.yaml --out runs/scenes  # one process, no GPU needed

Add `--resume` to go on from the newest checkpoint in --out. The run folder holds config.yaml (resolved),
metrics.jsonl, tensorboard/, checkpoints/step-N/ and model/, which `probemb.load_model` reads.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

if __package__ in (None, ""):  # started as a script: make the project importable, not this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from pretrain.config import Config, changed_keys, check
from probemb.command import parse_config, run_command, to_dict, to_yaml
from probemb.errors import UserError

FREE_TO_CHANGE = ("out", "resume", "stop_at_step", "log_every", "save_every", "keep_checkpoints", "wandb", "evaluate")


def main() -> None:
    """Read the configuration, put the parts together, train."""
    config = parse_config(Config, "python -m pretrain.run", "Pretrain PCME++ on webdataset shards with DeepSpeed.")
    check(config, int(os.environ.get("WORLD_SIZE", "1")))
    run = Path(config.out)
    earlier = find_checkpoint(run, config)
    pretrain(config, run, earlier)


def find_checkpoint(run: Path, config: Config) -> Path | None:
    """The checkpoint to go on from, or None for a new run.

    Raises:
        UserError: the folder holds something that a new run would overwrite.
    """
    from pretrain.checkpoint import latest_checkpoint

    earlier = latest_checkpoint(run)
    if config.resume:
        return earlier
    if earlier or (run / "config.yaml").exists():
        raise UserError(f"{run} already holds a run.", "Add --resume to go on with it, or choose another --out.")
    if run.exists() and (not run.is_dir() or any(run.iterdir())):
        raise UserError(f"{run} already holds something else.", "Choose another --out.")
    return None


def pretrain(config: Config, run: Path, earlier: Path | None) -> None:
    """The whole run, on every rank."""
    import torch

    from pretrain import checkpoint, trainer
    from pretrain.progress import RunLog, train_line
    from pretrain.stream import Corpus, Stream
    from probemb import distributed
    from probemb.data.shards import read_index
    from probemb.distances import get_distance
    from probemb.models import create_model, create_tokenizer, create_transforms, save_model

    # Everything that can be wrong with the command is found before the ranks meet and before anything is written.
    get_distance(config.loss.distance)
    corpora = [
        Corpus(read_index(path), weight)
        for path, weight in zip(config.train_paths, config.data.weights or [1] * len(config.train_paths))
    ]
    device = pick_device(config)
    precision = config.engine.precision
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" else "fp32"
    seed_everything(config.seed)
    model = create_model(
        config.model.name,
        embed_dim=config.model.embed_dim,
        n_unc_layers=config.model.n_unc_layers,
        head=config.model.head,
        pretrained=config.model.pretrained,
        grad_checkpointing=config.engine.grad_checkpointing,
        init_scale=config.loss.scale,
        init_shift=config.loss.shift,
    )
    transforms, tokenizer = create_transforms(model), create_tokenizer(model)
    state = checkpoint.read_state(earlier) if earlier else {"step": 0}
    step = state["step"]
    stream = Stream(
        corpora,
        batch_size=config.batch_size,
        transform=transforms.train,
        tokenizer=tokenizer,
        seed=config.seed,
        lanes=config.data.lanes,
        window=config.data.window,
        rank=int(os.environ.get("RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        workers=config.data.workers,
        start_samples=step * config.batch_size,
        caption=config.data.captions,
        failure_share=config.data.failure_share,
        pin_memory=device.type == "cuda",
    )
    steps = config.samples // config.batch_size if config.samples else int(config.epochs * stream.order.steps)
    if steps < 1:
        raise UserError(
            f"The run would have no step: {config.epochs} epochs of {stream.order.steps} steps.",
            "Lower batch_size, raise epochs, or set samples.",
        )
    if earlier:
        refuse_another_run(config, state, stream.identity, earlier)
    if step >= steps:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"{run} is finished: {step} of {steps} steps are done.")
        return

    stream.start()  # workers are forked before DeepSpeed and the GPU hold threads and handles
    evaluator = None
    if config.evaluate.classes:
        from pretrain.evaluation import Evaluator

        evaluator = Evaluator
    trainer.start_deepspeed()
    if evaluator:
        evaluator = evaluator(config.evaluate, transforms.evaluate, tokenizer, device)
    engine = trainer.make_engine(model.to(device), config, precision, device)
    if earlier:
        checkpoint.load_checkpoint(engine, earlier)
    main_rank = distributed.is_main()
    log = None
    if main_rank:
        run.mkdir(parents=True, exist_ok=True)
        (run / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
        log = RunLog(run, step, config.wandb, to_dict(config))
        print(headline(config, engine, stream, device, precision, steps, step, earlier), flush=True)

    fit = trainer.Trainer(engine, stream, config, device, steps, step)

    def report(at: int, values: dict[str, float]) -> None:
        if not main_rank:
            return
        log.write(at, values)
        if "zeroshot_top1" in values:
            print(
                f"step {at}/{steps} | zero-shot top-1 {100 * values['zeroshot_top1']:.2f} %, "
                f"top-5 {100 * values['zeroshot_top5']:.2f} %",
                flush=True,
            )
        else:
            print(train_line(at, steps, values), flush=True)

    def save() -> None:
        now = {
            "samples": fit.samples,
            "config": to_dict(config),
            "data": stream.identity,
            "model": model.config,
        }
        where = checkpoint.save_checkpoint(engine, run, fit.step, now)
        checkpoint.prune_checkpoints(run, config.keep_checkpoints)
        weights = checkpoint.full_state_dict(engine, prefix="model.")
        if main_rank:
            export = create_export(model.config)
            export.load_state_dict(weights)
            save_model(export, run / "model", overwrite=True)
            print(f"step {fit.step}/{steps} | saved {where} and {run / 'model'}", flush=True)

    try:
        fit.fit(report, (lambda: evaluator(engine)) if evaluator else None, save)
    finally:
        stream.close()
        if log:
            log.close()
    if main_rank and stream.failures:
        worst = sorted(stream.failures.items(), key=lambda item: -item[1].count)[:5]
        print("unreadable samples: " + "; ".join(f"{name}: {f.count} ({f.reason})" for name, f in worst), flush=True)
    torch.distributed.destroy_process_group()


def pick_device(config: Config):
    """This rank's device; also shares the machine's cores among its ranks."""
    import torch

    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(config.engine.threads or max(1, (os.cpu_count() or 1) // local_world))
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def seed_everything(seed: int) -> None:
    """The same weights on every rank; what differs between ranks is the data."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def create_export(model_config: dict):
    """An empty model of the same architecture, to be filled and saved; made without touching the random state."""
    import torch

    from probemb.models import ProbabilisticCLIP

    with torch.random.fork_rng():
        return ProbabilisticCLIP(model_config)


def refuse_another_run(config: Config, state: dict, identity: dict, earlier: Path) -> None:
    """Resuming must go on with the same data order, model and recipe.

    Raises:
        UserError: names what changed.
    """
    if state.get("data") != identity:
        changed = changed_keys(state.get("data") or {}, identity)
        raise UserError(
            f"The data is not what {earlier} was trained on: {', '.join(changed)} changed.",
            "Resume with the same shards, batch_size, lanes, window and seed, or start a new run with another --out.",
        )
    changed = changed_keys(state.get("config") or {}, to_dict(config), ignore=(*FREE_TO_CHANGE, "engine", "data"))
    if changed:
        raise UserError(
            f"{earlier} belongs to a run with other settings: {', '.join(changed)} changed.",
            "Resume with the settings in the run folder's config.yaml (--config), or start a new run.",
        )


def headline(config: Config, engine, stream, device, precision: str, steps: int, step: int, earlier) -> str:
    """What a person wants to see before the first step."""
    from probemb import distributed

    world = distributed.world_size()
    n_parameters = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
    order = stream.order
    where = f"{world} x {device.type}" + ("" if world == 1 else f" ({os.environ.get('LOCAL_WORLD_SIZE', '?')} a node)")
    lines = [
        f"model   {config.model.name}, {n_parameters / 1e6:.1f} M parameters, head {config.model.head}",
        f"data    {sum(s.samples for s in stream.shards):,} samples in {len(stream.shards)} shards, "
        f"{order.lanes} lanes, {order.steps} steps an epoch",
        f"engine  {where}, DeepSpeed ZeRO-{config.engine.zero_stage}, {precision}, "
        f"batch {config.batch_size} = {world} ranks x {config.engine.accumulation} parts x "
        f"{config.batch_size // world // config.engine.accumulation}",
        f"run     {config.out}, {steps} steps" + (f", resumed at step {step} from {earlier}" if earlier else ""),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
