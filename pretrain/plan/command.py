"""Plan of a pretraining run: its parameters, memory, network, data, hours and disk.

    python -m pretrain.plan --config pretrain/configs/vit_b16_cc3m_cc12m_redcaps.yaml --nodes 4 --gpus-per-node 8 \\
        --samples-per-epoch 27000000 --gpu h100 --efficiency 0.35 --gpu-memory-gib 80

Takes every option of `pretrain.run`, reads index.json of local shards, builds the model without weights, and writes
nothing. docs/pretrain.md says how to choose.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal

from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveInt

from pretrain.config import Config
from pretrain.contradictions import check
from probemb.cli.configuration import parse_config
from probemb.cli.ranges import Share
from probemb.errors import UserError

GIB = 2**30
RANDOM_STATE = 15_000  # bytes of one rank's random state in a checkpoint


@dataclass(frozen=True)
class Plan(Config):
    """Requirements of a pretraining run. Takes every key of a pretraining configuration, and:

    Args:
        nodes: machines.
        gpus_per_node: GPUs of each, one rank on each.
        device: of the ranks, cuda or cpu; decides precision auto and the number of buckets.
        gpu_memory_gib: memory of one GPU in GiB; warn when a rank needs more. 0 checks nothing.
        samples_per_epoch: samples in all of data.train, each times its weight; 0 reads index.json in the folders.
        text_tokens: tokens of the longest text in a batch, to which batches are cut; 0 takes the whole context.
        gpu: its name, such as h200, whose peak the table in pretrain/plan/peak.py has; empty for this machine's.
        peak_tflops: of one GPU at the run's precision, in TFLOP/s, from its data sheet; 0 takes that of `gpu`.
        efficiency: share of it that the run reaches, recomputation included.
        images_per_second: measured, over all ranks; replaces gpu, peak_tflops and efficiency.
        json: print JSON for programs.
    """

    COMMON: ClassVar = (
        *("nodes", "gpus_per_node", "device", "gpu", "gpu_memory_gib", "samples_per_epoch", "text_tokens"),
        *("peak_tflops", "efficiency", "images_per_second", "json", "batch_size", "epochs", "data.train"),
        *("model.name", "engine.zero_stage", "engine.accumulation", "engine.grad_checkpointing"),
    )

    nodes: PositiveInt = 1
    gpus_per_node: PositiveInt = 1
    device: Literal["cuda", "cpu"] = "cuda"
    gpu_memory_gib: NonNegativeFloat = 0.0
    samples_per_epoch: NonNegativeInt = 0
    text_tokens: NonNegativeInt = 0
    gpu: str | None = None
    peak_tflops: NonNegativeFloat = 0.0
    efficiency: Share = 0.35
    images_per_second: NonNegativeFloat = 0.0
    json: bool = False

    @property
    def world_size(self) -> int:
        """W, ranks."""
        return self.nodes * self.gpus_per_node


def main() -> None:
    """Read the configuration, count, print."""
    options = parse_config(Plan, "python -m pretrain.plan", "What a pretraining run will need, before it is started.")
    plan = make_plan(options)
    if options.json:
        print(json.dumps(plan, indent=2))
        return
    from pretrain.plan.report import show

    show(plan)


def make_plan(o: Plan) -> dict[str, Any]:
    """The whole plan, ready for JSON; bytes, seconds and counts are plain numbers.

    Raises:
        UserError: an invalid value, or neither the data nor `samples_per_epoch`.
    """
    warnings = check_options(o)
    gpu = find_gpu(o)
    from pretrain.plan.cost import flops, network
    from pretrain.plan.memory import count_parameters, memory
    from pretrain.plan.peak import peak_flops
    from pretrain.plan.trace import Setting, build

    model, data, e = build(o), count_data(o), o.engine
    half = e.precision == "bf16" or (e.precision == "auto" and o.device == "cuda")
    text_tokens = min(o.text_tokens or model.context_length, model.context_length)
    setting = Setting.of(o, o.world_size, text_tokens, half, gpu=o.device == "cuda")
    stages = [replace(setting, zero_stage=stage) for stage in range(4)]
    by_stage = [memory(model, s) for s in stages]
    variants = {
        s: memory(model, s, exact=False)
        for checkpointing in (False, True)
        for parts in sorted({1, 2, 4, 8, e.accumulation})
        if (s := replace(setting, checkpointing=checkpointing, parts=parts)).can_have(parts)
    }
    warnings += memory_warnings(o, by_stage, variants)
    work = flops(model, setting)
    if gpu:
        o = replace(o, gpu=gpu, peak_tflops=peak_flops(gpu, "bf16" if setting.half else "fp32") / 1e12)
    return {
        "model": {"name": o.model.name, "head": o.model.head, "embed_dim": model.embed_dim},
        "parameters": {"total": sum(p.numel() for p in model.parameters()), **count_parameters(model)},
        "run": {
            "nodes": o.nodes,
            "gpus_per_node": o.gpus_per_node,
            "world_size": o.world_size,
            "device": o.device,
            "precision": "bf16" if setting.half else "fp32",
            "zero_stage": e.zero_stage,
            "accumulation": e.accumulation,
            "grad_checkpointing": e.grad_checkpointing,
            "batch_size": o.batch_size,
            "rows_per_rank": setting.rows,
            "rows_per_part": setting.rows // e.accumulation,
            **data,
        },
        "memory": {
            "by_zero_stage": {str(stage): asdict(m) for stage, m in enumerate(by_stage)},
            "variants": [
                {"grad_checkpointing": s.checkpointing, "accumulation": s.parts, **asdict(m)}
                for s, m in variants.items()
            ],
            "gpu_memory": int(o.gpu_memory_gib * GIB),
        },
        "network": {str(s.zero_stage): network(model, s) for s in stages},
        "compute": time_needed(o, work, data["steps"]),
        "loader": loader(o, work, data),
        "disk": disk(o, model, data["steps"]),
        "warnings": warnings,
    }


def memory_warnings(o: Plan, by_stage: list, variants: dict) -> list[str]:
    """A warning if a rank needs more than its GPU has, with up to three settings that would fit."""
    limit, peak = o.gpu_memory_gib * GIB, by_stage[o.engine.zero_stage].peak
    if not limit or peak <= limit:
        return []
    fits = [f"ZeRO {stage}" for stage, m in enumerate(by_stage) if m.peak <= limit]
    fits += [
        f"accumulation {s.parts}{' with grad_checkpointing' * s.checkpointing}"
        for s, m in variants.items()
        if m.peak <= limit
    ]
    remedy = f"It would fit with {' or '.join(fits[:3])}." if fits else "Use more GPUs or a smaller batch."
    return [f"A rank needs {peak / GIB:.1f} GiB, more than the {o.gpu_memory_gib:g} GiB of a GPU. {remedy}"]


def check_options(o: Plan) -> list[str]:
    """Warnings for settings that `pretrain.run` would refuse on so many ranks.

    Raises:
        UserError: settings that cannot be planned.
    """
    check(replace(o, engine=replace(o.engine, accumulation=1)), 1)  # everything but the division into ranks and parts
    warnings = []
    try:
        check(o, o.world_size)
    except UserError as error:
        warnings.append(f"{error.what} {error.remedy}")
    from pretrain.stream.order import default_lanes

    lanes = o.data.lanes or default_lanes(o.batch_size)
    if o.batch_size % lanes:
        warnings.append(f"{lanes} lanes do not divide the global batch of {o.batch_size}. Change data.lanes.")
    elif lanes % o.world_size:
        fits = [n for n in range(1, lanes + 1) if lanes % n == 0]
        warnings.append(
            f"{o.world_size} ranks cannot share the data's {lanes} lanes evenly. "
            f"Take one of {', '.join(map(str, fits))} ranks, or data.lanes that {o.world_size} divides."
        )
    return warnings


def find_gpu(o: Plan) -> str | None:
    """The GPU whose peak gives the hours: --gpu, or this machine's; None where neither is needed or known.

    Raises:
        UserError: an unknown name, or one beside another source of the speed.
    """
    from pretrain.plan.peak import gpu_of_this_machine, named_gpu

    if o.gpu is not None:
        for other in ("peak_tflops", "images_per_second"):
            if getattr(o, other):
                raise UserError(f"--gpu and --{other.replace('_', '-')} exclude each other.", "Leave one of them out.")
        if o.device != "cuda":
            raise UserError(f"--gpu {o.gpu} is given for a run on {o.device}.", "Leave --gpu or --device out.")
        return named_gpu(o.gpu)
    measured = o.peak_tflops or o.images_per_second or o.device != "cuda"
    return None if measured else gpu_of_this_machine()


def count_data(o: Plan) -> dict[str, Any]:
    """Samples, steps and, for local shards, bytes; rounded as in the stream and the trainer."""
    size, per_sample = o.samples_per_epoch, None
    if not size:
        from probemb.data.shards.index import read_index

        try:
            corpora = [read_index(path) for path in o.train_paths]
        except UserError as error:
            if o.samples:
                corpora = []  # the length of the run is given
            else:
                raise UserError(
                    error.what,
                    "If the shards are not on this machine, pass --samples-per-epoch with the number of samples.",
                ) from None
        weights = o.data.weights or [1.0] * len(corpora)
        counts = kept_samples(corpora, o.data.filter)
        size = sum(int(weight * count + 0.5) for weight, count in zip(weights, counts))
        if size:
            read = [weight * sum(s.bytes for s in shards) for weight, shards in zip(weights, corpora)]
            per_sample = sum(read) / size
    steps_per_epoch = size // o.batch_size
    steps = o.samples // o.batch_size if o.samples else int(o.epochs * steps_per_epoch)
    if steps < 1:
        raise UserError(
            f"The run would have no step: an epoch has {steps_per_epoch}, each of {o.batch_size} samples.",
            "Lower batch_size, or raise epochs or samples.",
        )
    return {
        "samples_per_epoch": size or None,
        "steps_per_epoch": steps_per_epoch or None,
        "epochs": steps / steps_per_epoch if steps_per_epoch else None,
        "steps": steps,
        "samples": steps * o.batch_size,
        "bytes_per_sample": per_sample,
    }


def kept_samples(corpora: list, filter) -> list[int]:
    """Samples of each corpus that the filter keeps."""
    from pretrain.stream.selection import select

    selection = select(corpora, filter) if corpora else None
    if selection is None:
        return [sum(shard.samples for shard in shards) for shards in corpora]
    sizes = iter(selection.sizes.tolist())
    return [sum(next(sizes) for _ in shards) for shards in corpora]


def images_per_second(o: Plan, work: dict[str, float]) -> float | None:
    """Speed over all ranks, measured or computed; None if unknown."""
    if o.images_per_second:
        return o.images_per_second
    if o.peak_tflops:
        return o.world_size * o.peak_tflops * 1e12 * o.efficiency / (work["executed_per_step"] / o.batch_size)
    return None


def time_needed(o: Plan, work: dict[str, float], steps: int) -> dict[str, Any]:
    """FLOPs of a step over all ranks, and time."""
    speed = images_per_second(o, work)
    seconds = o.batch_size / speed if speed else None
    return {
        "flops_per_step": work["executed_per_step"],
        "model_flops_per_step": work["model_per_step"],
        "flops_per_pair": work["model_per_step"] / o.batch_size,
        "images_per_second": speed,
        "images_per_second_is": ("measured" if o.images_per_second else "computed") if speed else None,
        "gpu": o.gpu,
        "peak_tflops": o.peak_tflops or None,
        "efficiency": o.efficiency if o.peak_tflops and not o.images_per_second else None,
        "seconds_per_step": seconds,
        "hours": seconds * steps / 3600 if seconds else None,
        "gpu_hours": seconds * steps / 3600 * o.world_size if seconds else None,
    }


def loader(o: Plan, work: dict[str, float], data: dict[str, Any]) -> dict[str, Any]:
    """Data rates at which no step waits."""
    speed = images_per_second(o, work)
    workers = max(1, o.data.workers)
    return {
        "images_per_second": speed,
        "images_per_second_per_node": speed / o.nodes if speed else None,
        "images_per_second_per_worker": speed / (o.world_size * workers) if speed else None,
        "workers_per_rank": o.data.workers,
        "bytes_per_second": speed * data["bytes_per_sample"] if speed and data["bytes_per_sample"] else None,
        "bytes_of_all_shards_per_epoch": int(data["bytes_per_sample"] * data["samples_per_epoch"])
        if data["bytes_per_sample"]
        else None,
    }


def disk(o: Plan, model, steps: int) -> dict[str, int]:
    """Bytes of a checkpoint (weights, two moments, the average if there is one, random states), of model/, and of the
    run folder at most, without logs."""
    weights = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    trained = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    checkpoint = weights + (2 + (o.ema.half_life_samples > 0)) * trained + RANDOM_STATE * o.world_size
    best, copied = int(o.evaluate.best is not None), int(o.remote_copy is not None)
    kept = o.keep_checkpoints + (steps // o.keep_every if o.keep_every else 0) + best + copied
    # The most is there while the next checkpoint is written; a second model/ is, when an older one has been deleted.
    run_folder = (kept + 1) * checkpoint + (1 + best) * weights
    return {"checkpoint": checkpoint, "model_folder": weights, "kept": kept, "run_folder": run_folder}
