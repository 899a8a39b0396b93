"""A plan as tables for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

MEMORY_ROWS = (
    ("weights", "weights"),
    ("master", "partition of the weights"),
    ("moments", "Adam's moments"),
    ("average", "average of the weights"),
    ("gradients", "gradients"),
    ("buckets", "buckets"),
    ("gathered_weights", "gathered weights"),
    ("activations", "activations"),
    ("loss", "loss"),
    ("batch", "batch"),
    ("peak", "most at one moment"),
)
NETWORK_ROWS = (
    ("gaussians_forward", "Gaussians"),
    ("gaussians_backward", "Gaussians, gradients"),
    ("gradients", "gradients"),
    ("weights", "weights"),
    ("total", "total"),
)


def show(plan: dict[str, Any]) -> None:
    """Print to the terminal; plain text where there is none."""
    console = Console(highlight=False, soft_wrap=True)
    run, compute, load, disk = plan["run"], plan["compute"], plan["loader"], plan["disk"]
    facts = _table("Run", "", "")
    facts.add_row(
        "ranks",
        f"{run['nodes']} x {run['gpus_per_node']} = {run['world_size']} ({run['device']}), {run['precision']}, "
        f"ZeRO {run['zero_stage']}",
    )
    facts.add_row(
        "batch",
        f"{run['batch_size']:,} = {run['world_size']} ranks x {run['accumulation']} parts x {run['rows_per_part']}",
    )
    if run["samples_per_epoch"]:
        facts.add_row("epoch", f"{run['samples_per_epoch']:,} samples, {run['steps_per_epoch']:,} steps")
    epochs = f", {run['epochs']:.4g} epochs" if run["epochs"] else ""
    facts.add_row("length", f"{run['steps']:,} steps, {run['samples']:,} samples{epochs}")
    facts.add_row(
        "arithmetic",
        f"{compute['flops_per_pair'] / 1e9:.1f} GFLOP a pair, {compute['flops_per_step'] / 1e12:,.1f} TFLOP a step"
        + (" with recomputation" if compute["flops_per_step"] > compute["model_flops_per_step"] else ""),
    )
    if compute["hours"]:
        how = compute["images_per_second_is"]
        if how == "computed":
            whose = f", the {compute['gpu']}'s peak" if compute["gpu"] else ""
            how += f" from {compute['efficiency']:.0%} of {compute['peak_tflops']:g} TFLOP/s{whose}"
        facts.add_row(
            "time",
            f"{compute['hours']:,.1f} h = {compute['gpu_hours']:,.0f} GPU hours, {compute['seconds_per_step']:.3g} s a "
            f"step, {compute['images_per_second']:,.0f} images/s ({how})",
        )
        rate = f", {_size(load['bytes_per_second'])}/s" if load["bytes_per_second"] else ""
        facts.add_row(
            "data",
            f"{load['images_per_second']:,.0f} images/s{rate}; {load['images_per_second_per_node']:,.0f} a node, "
            f"{load['images_per_second_per_worker']:,.0f} a worker ({load['workers_per_rank']} a rank)",
        )
    else:
        facts.add_row("time", "pass --gpu, such as h200, or --peak-tflops (and --efficiency), or --images-per-second")
    facts.add_row(
        "disk",
        f"checkpoint {_size(disk['checkpoint'])}, model/ {_size(disk['model_folder'])}; run folder at most "
        f"{_size(disk['run_folder'])} with {disk['kept']} checkpoints kept and one being written",
    )
    console.print(facts)

    parameters = _table(f"Parameters of {plan['model']['name']}, head {plan['model']['head']}", "part", "number")
    for name, number in plan["parameters"].items():
        if name != "total":
            parameters.add_row(name, f"{number:,}")
    parameters.add_section()
    parameters.add_row("all", f"{plan['parameters']['total']:,}")
    console.print(parameters)

    console.print(_stages("Memory of a rank", plan["memory"]["by_zero_stage"], MEMORY_ROWS, run["zero_stage"]))
    variants = _table(f"Memory of a rank at ZeRO {run['zero_stage']}, otherwise", "", "activations", "most")
    for v in plan["memory"]["variants"]:
        name = f"accumulation {v['accumulation']}" + (", grad_checkpointing" if v["grad_checkpointing"] else "")
        variants.add_row(name, _size(v["activations"]), _size(v["peak"]))
    console.print(variants)
    console.print(_stages("Sent by a rank in a step", plan["network"], NETWORK_ROWS, run["zero_stage"]))
    for warning in plan["warnings"]:
        console.print(f"[bold yellow]warning:[/] {warning}", markup=True)


def _stages(title: str, by_stage: dict[str, dict], rows: tuple, chosen: int) -> Table:
    names = [f"ZeRO {stage}" + (" *" if int(stage) == chosen else "") for stage in by_stage]
    table = _table(f"{title} (* as configured)", "", *names)
    for key, name in rows:
        if key in ("peak", "total"):
            table.add_section()
        table.add_row(name, *(_size(values[key]) if values[key] else "-" for values in by_stage.values()))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=any(columns))
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 or not any(columns) else "right", no_wrap=any(columns))
    return table


def _size(n: float) -> str:
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB")):
        if n >= unit:
            return f"{n / unit:.1f} {name}"
    return f"{n / 1024:.1f} KiB"
