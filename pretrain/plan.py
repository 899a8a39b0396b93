"""Plan of a pretraining run: its parameters, memory, data, hours and disk.

    python -m pretrain.plan --config pretrain/configs/vit_b16_cc3m_cc12m_redcaps.yaml --nodes 4 --gpus-per-node 8 \\
        --samples-per-epoch 27000000 --gpu h100 --efficiency 0.35 --gpu-memory-gib 80

Takes every option of `pretrain.run`, reads index.json of local shards, builds the model without weights, and writes
nothing. docs/pretrain.md says how to choose.
"""

import json
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveInt

from pretrain.config import Config, whole_steps
from pretrain.cost import PEAKS, StepCost, find_gpu
from pretrain.stream.stream import make_order
from probemb.cli.command import run_command
from probemb.cli.configuration import parse_config
from probemb.cli.ranges import Share
from probemb.data.shards.index import read_index
from probemb.errors import UserError, count, nearest

RANDOM_STATE = 15_000  # bytes of one rank's random state in a checkpoint
SPARE = 0.1  # share of a GPU's memory for what is not planned: the CUDA context, NCCL, fragmentation


@dataclass(frozen=True)
class Plan(Config):
    """Requirements of a pretraining run. Takes every key of a pretraining configuration, and:

    Args:
        nodes: machines.
        gpus_per_node: GPUs of each, one rank on each.
        gpu_memory_gib: memory of one GPU in GiB; warn when a rank needs more. 0 checks nothing.
        samples_per_epoch: samples in all of data.train, each times its weight; 0 reads index.json in the folders.
        gpu: its name, such as h200, whose peak the table in pretrain/cost.py has; empty for this machine's.
        peak_tflops: of one GPU at the run's precision, in TFLOP/s, from its data sheet; 0 takes that of `gpu`.
        efficiency: share of it that the run reaches, recomputation included.
        images_per_second: measured, over all ranks; replaces gpu, peak_tflops and efficiency.
        json: print JSON for programs.
    """

    COMMON: ClassVar = (
        *("nodes", "gpus_per_node", "gpu", "gpu_memory_gib", "samples_per_epoch", "peak_tflops", "efficiency"),
        *("images_per_second", "json", "batch_size", "epochs", "data.train", "model.name"),
        *("engine.zero_stage", "engine.accumulation", "engine.grad_checkpointing"),
    )

    nodes: PositiveInt = 1
    gpus_per_node: PositiveInt = 1
    gpu_memory_gib: NonNegativeFloat = 0.0
    samples_per_epoch: NonNegativeInt = 0
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
    about = "Plan a pretraining run: parameters, memory, hours, data and disk."
    options = parse_config(Plan, "python -m pretrain.plan", about)
    plan = make_plan(options)
    print(json.dumps(plan, indent=2) if options.json else describe(plan))


def make_plan(o: Plan) -> dict[str, Any]:
    """The whole plan, ready for JSON; bytes, seconds and counts are plain numbers."""
    o.check(o.world_size)
    e, half, data = o.engine, o.engine.precision != "fp32", count_data(o)
    cost = StepCost(o, o.world_size, half)
    by_stage, warnings = {f"ZeRO {stage}": cost.memory(stage) for stage in range(4)}, []
    limit, needed = o.gpu_memory_gib * 2**30, by_stage[f"ZeRO {e.zero_stage}"]["peak"]
    spare = [stage for stage, memory in enumerate(by_stage.values()) if memory["peak"] <= (1 - SPARE) * limit]
    if 0 < limit < needed:
        fits = " or ".join(stage for stage, m in by_stage.items() if m["peak"] <= limit)
        remedy = f"It would fit with {fits}." if fits else "It needs accumulation, grad_checkpointing or more GPUs."
        warnings.append(f"A rank needs {_size(needed)}, more than the {_size(limit)} of a GPU. {remedy}")
    run = {name: getattr(o, name) for name in ("nodes", "gpus_per_node", "world_size", "batch_size")}
    run |= {name: getattr(e, name) for name in ("zero_stage", "accumulation", "grad_checkpointing")}
    run["recommended_zero_stage"] = min(spare, default=None)  # the fastest
    return {
        "parameters": count_parameters(cost.model),
        "run": {**run, "precision": "bf16" if half else "fp32", "rows_per_rank": cost.rows, **data},
        "memory": by_stage,
        "compute": time_needed(o, cost.step_flops, data, half),
        "disk": disk(o, cost.model, data["steps"]),
        "warnings": warnings,
    }


def count_parameters(model) -> dict[str, int]:
    """Parameters by part; the parts are disjoint, and their sum is the total."""
    parts = ("image trunk", "text trunk", "image uncertainty branch", "text uncertainty branch", "heads")
    counts = dict.fromkeys(parts, 0)
    for modality, tower in (("image", model.visual), ("text", model.text)):
        names = {"trunk": f"{modality} trunk", "branch": f"{modality} uncertainty branch", "head": "heads"}
        for name, parameter in tower.named_parameters():
            counts[names[tower.place(name).part]] += parameter.numel()
    total = sum(p.numel() for p in model.parameters())
    return counts | {"scalars": total - sum(counts.values()), "total": total}


def count_data(o: Plan) -> dict[str, Any]:
    """Samples, steps and, for local shards, bytes; rounded as in the stream and the trainer."""
    size, per_sample = o.samples_per_epoch, None
    remedy = "If the shards are not on this machine, pass --samples-per-epoch with the number of samples."
    if not size and not o.samples:
        try:
            corpora = [read_index(path) for path in o.train_paths]
        except UserError as error:
            raise UserError(error.what, remedy) from None
        if not corpora:
            raise UserError("There is no training data.", remedy)
        order, _ = make_order(corpora, o.data, o.batch_size, o.seed)
        size = order.slots_per_epoch
        per_sample = sum(w * sum(s.bytes for s in shards) for w, shards in zip(order.weights, corpora)) / size
    steps = whole_steps(o, size // o.batch_size)
    sizes = {"samples_per_epoch": size or None, "bytes_per_sample": per_sample or None}
    return {"steps": steps, "samples": steps * o.batch_size, **sizes}


def time_needed(o: Plan, flops: float, data: dict[str, Any], half: bool) -> dict[str, Any]:
    """Time of a run whose steps have so many FLOPs over all ranks, and the data rates at which no step waits."""
    gpu, peak, speed, how = o.gpu, o.peak_tflops, o.images_per_second, "measured"
    if not gpu and torch.cuda.is_available():
        gpu = find_gpu(torch.cuda.get_device_name(0))
    if gpu and not peak:
        if (known := find_gpu(gpu)) is None:
            what = f"The peak of the GPU '{gpu}' is not known.{nearest(gpu, PEAKS)}"
            raise UserError(what, f"Name one of {', '.join(PEAKS)}, or pass --peak-tflops from its data sheet.")
        peak = PEAKS[known][0 if half else 1]
    if peak and not speed:
        speed = o.world_size * 1e12 * peak * o.efficiency / (flops / o.batch_size)
        how = f"computed, {o.efficiency:.0%} of {peak:g} TFLOP/s"
    if not speed:
        return {"flops_per_step": flops}
    seconds, size = o.batch_size / speed, data["bytes_per_sample"]
    hours = seconds * data["steps"] / 3600
    return {
        "flops_per_step": flops,
        "images_per_second": speed,
        "images_per_second_is": how,
        "images_per_second_per_worker": speed / (o.world_size * max(1, o.data.workers)),
        "bytes_per_second": speed * size if size else None,
        "seconds_per_step": seconds,
        "hours": hours,
        "gpu_hours": hours * o.world_size,
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


def describe(plan: dict[str, Any]) -> str:
    """The plan as text."""
    run, c, sizes = plan["run"], plan["compute"], {name: _size(n) for name, n in plan["disk"].items()}
    time, data = "pass --gpu, such as h200, or --peak-tflops (and --efficiency), or --images-per-second", ""
    if "hours" in c:
        time = f"{c['hours']:,.1f} h = {c['gpu_hours']:,.0f} GPU hours, {c['seconds_per_step']:.3g} s a step "
        time += f"({c['images_per_second_is']})"
        data = f", {c['images_per_second']:,.0f} images/s, {c['images_per_second_per_worker']:,.0f} a worker"
        data += f", {_size(c['bytes_per_second'])}/s" if c["bytes_per_second"] else ""
    stage = run["recommended_zero_stage"]
    rows = {
        "ranks": f"{run['nodes']} x {run['gpus_per_node']}, {run['precision']}, ZeRO {run['zero_stage']}"
        + (f"; recommended is ZeRO {stage}, the lowest that fits" if stage is not None else ""),
        "batch": f"{run['batch_size']:,}, {run['rows_per_rank']:,} a rank in {count(run['accumulation'], 'part')}, "
        f"{c['flops_per_step'] / 1e12:,.1f} TFLOP a step",
        "data": f"{run['steps']:,} steps, {run['samples']:,} samples{data}",
        "time": time,
        "disk": "checkpoint {checkpoint}, model/ {model_folder}, run folder {run_folder}".format(**sizes),
        "parameters": ", ".join(f"{name} {n:,}" for name, n in plan["parameters"].items()),
    }
    stages = plan["memory"]
    lines = [f"{name:<12}{text}" for name, text in rows.items()]
    lines += ["", "memory of a rank".ljust(20) + "".join(f"{stage:>12}" for stage in stages)]
    for part in stages["ZeRO 0"]:
        lines.append(f"  {part:<18}" + "".join(f"{_size(m[part]):>12}" for m in stages.values()))
    return "\n".join([*lines, *(f"warning: {one}" for one in plan["warnings"])])


def _size(n: float) -> str:
    unit, name = next((pair for pair in ((2**40, "TiB"), (2**30, "GiB")) if n >= pair[0]), (2**20, "MiB"))
    return f"{n / unit:.1f} {name}"


if __name__ == "__main__":
    run_command(main)
