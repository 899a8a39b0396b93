"""Zero-shot classification with uncertainty-based prompt filtering.

    python -m zeroshot.imagenet --filter best-topk --model runs/x --data data/imagenet/val
    python -m zeroshot.imagenet --filter every --model runs/scenes --data data/scenes/classes     # embedded data

Every class gets 80 prompts; a filter chooses among them. Source: PCME++ §3.5, Table 5 and §C.6.
A number with anything chosen on the scored images is labelled "oracle".
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from probemb.cli.command import run_command
from probemb.cli.configuration import parse_config, to_dict
from probemb.errors import UserError
from zeroshot.config import DEFAULT_DATA, DEFAULT_MODEL, GENERATOR, ImagenetConfig

if TYPE_CHECKING:
    from probemb.cli.device import Device
    from probemb.models import LoadedModel
    from zeroshot.filtering.filters import FilterOptions, Selection
    from zeroshot.filtering.outcome import Outcome, Task

PROG = "python -m zeroshot.imagenet"
DESCRIPTION = (
    "Zero-shot classification with uncertainty-based prompt filtering. Takes class folders, webdataset shards with "
    "KEY.cls, or a tar of either; prints a table and writes results.json and report.html."
)
OUTPUTS = ("results.json", "report.html")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; wrong options are refused before the model is loaded."""
    from probemb.cli.results import claim_files, results_folder

    config = parse_config(ImagenetConfig, PROG, DESCRIPTION, argv)
    if config.data == DEFAULT_DATA and not Path(config.data).exists():
        raise UserError(
            f"There is no ImageNet in {DEFAULT_DATA}, the default of --data.",
            "Pass --data PATH, or try the embedded data: `python -m tools.make_scenes data/scenes`, then "
            f"`{PROG} --model RUN --data data/scenes/classes`.",
        )
    from probemb.data.labelled.images import assign_labels, find_images, resolve_classes
    from zeroshot.filtering.filters import filter_names, parse_selection, stratified_folds
    from zeroshot.filtering.outcome import Task
    from zeroshot.filtering.prompts import read_templates

    filters = filter_names(config.filter)
    selection = parse_selection(config.select_on)
    options = filter_options(config)
    _check_selection(config, filters, options, selection)
    templates = read_templates(config.templates)
    if config.k is not None and config.k > len(templates):
        raise UserError(f"--k {config.k} is more than the {len(templates)} templates.", "Give a smaller --k.")
    images = find_images(config.data, config.labels, config.exif)
    classes, labels = resolve_classes(images, config.classes)
    if selection.folds:
        stratified_folds(labels, [place.name for place in images.places], selection.folds)
    other = None
    if selection.on == "train":
        found = find_images(config.select_data, exif=config.exif)
        other = (found, assign_labels(found, classes))
    out = results_folder(config.out, config.model, "zeroshot", "zeroshot-results")
    claim_files(out, OUTPUTS, GENERATOR)

    evaluate_and_write(config, filters, selection, Task(images, labels, classes, templates), other, out)
    return 0


def evaluate_and_write(
    config: ImagenetConfig, filters: list[str], selection: Selection, task: Task, other, out: Path
) -> None:
    """Load the model, evaluate it, and write the results into `out`; `other`: images and labels to choose on."""
    from dataclasses import replace

    from probemb.cli.device import choose_device
    from probemb.cli.progress import progress
    from probemb.cli.results import write_json
    from probemb.data.image_loader import describe_bad
    from probemb.data.labelled.images import remarks
    from probemb.evaluation.embedding import Embedder
    from probemb.models import check_single_embeddings, create_transforms
    from zeroshot.filtering.outcome import evaluate
    from zeroshot.filtering.prompts import single_index
    from zeroshot.reports.imagenet import write_report

    device = choose_device(config.device, config.precision)
    model, tokenizer, _ = load(config.model, device.name)
    check_single_embeddings(model, config.model)
    transform = create_transforms(model, resize=config.resize).evaluate
    classes, templates = task.classes, task.templates
    print(
        f"{len(task.images):,} images, {len(classes):,} classes (names: {classes.source}), {len(templates)} prompts a "
        f"class, on {device.name} in {device.precision}",
        flush=True,
    )
    for line in (notes := remarks(task.labels, classes)):
        print(line, flush=True)
    embedder = Embedder(
        model, tokenizer, transform, device, config.batch_size, config.text_batch_size, config.workers,
        config.max_bad, progress,
    )  # fmt: skip
    outcome = evaluate(
        embedder, task, filters, options=replace(filter_options(config), single=single_index(templates)),
        selection=selection, select_images=other, cache=config.cache,
    )  # fmt: skip
    for message in (outcome.cache[1], describe_bad(outcome.bad), *outcome.notices):
        if message:
            print(message, flush=True)
    print_table(outcome, len(classes))
    results = describe(config, outcome, task, device) | {"notes": notes}
    write_json(out / OUTPUTS[0], results, GENERATOR)
    write_report(out / OUTPUTS[1], results, outcome, task.images, classes, templates)
    print(f"\nwritten: {out / OUTPUTS[0]}, {out / OUTPUTS[1]}", flush=True)


def load(name: str, device: str) -> LoadedModel:
    """The model of --model, or the published one. Raises UserError."""
    from probemb.models import load_model

    try:
        return load_model(name, device=device)
    except UserError as error:
        if name != DEFAULT_MODEL:
            raise
        raise UserError(
            f"No --model was given, and the published one, {DEFAULT_MODEL}, could not be fetched.",
            "Pass --model RUN, after `python -m pretrain.run --config pretrain/configs/scenes.yaml` for instance.",
        ) from error


def filter_options(config: ImagenetConfig) -> FilterOptions:
    """The filters' options as given."""
    from zeroshot.filtering.filters import FilterOptions

    return FilterOptions(
        k=config.k, temperature=config.temperature, deviations=config.deviations, threshold=config.threshold,
        quantile=config.quantile, shots=config.shots, unlabelled=config.unlabelled, prior=config.prior,
    )  # fmt: skip


def _check_selection(
    config: ImagenetConfig, filters: Sequence[str], options: FilterOptions, selection: Selection
) -> None:
    from zeroshot.filtering.filters import choosing
    from zeroshot.filtering.thresholds import SETTINGS

    if (selection.on == "train") != (config.select_data is not None):
        if config.select_data is not None:
            raise UserError("--select-data is given, but nothing is chosen on it.", "Add --select-on train.")
        raise UserError("--select-on train needs the images to choose on.", "Name them with --select-data PATH.")
    for name, option in {"topk": "k", **SETTINGS}.items():
        if getattr(config, option) is not None and name not in filters:
            raise UserError(
                f"--{option} has no effect with --filter {config.filter}.", f"Say --filter {name}, or leave it out."
            )
    if selection.on != "oracle" and not choosing(filters, options):
        raise UserError(
            f"--select-on {config.select_on} has no effect: --filter {config.filter} chooses nothing.",
            "Say --filter topk, best-topk, reweighted or every, or leave --select-on out.",
        )


# ------------------------------------------------------------------------------------------------------- output


def print_table(outcome: Outcome, n_classes: int) -> None:
    """Print the table; 120 columns wide without a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    table = Table(title=f"zero-shot accuracy, {len(outcome.labels):,} images, {n_classes:,} classes")
    table.add_column("filter")
    for heading in ("K", "top-1 %", "per class", "top-5 %", "gain ± SE"):
        table.add_column(heading, justify="right")
    table.add_column("chosen on")
    colours = {"up": "green", "down": "red", "": ""}
    for row in outcome.evaluation.rows:
        style = "dim" if row.note.startswith("oracle") else None
        gain = Text(row.gain_text, colours[row.verdict])
        shares = (f"{100 * share:.2f}" for share in (row.top1, row.mean_per_class_recall, row.top5))
        table.add_row(row.title, row.k_text, *shares, gain, row.note, style=style)
    console.print(table)


def describe(config: ImagenetConfig, outcome: Outcome, task: Task, device: Device) -> dict:
    """The content of results.json. Accuracies are shares in [0, 1]; K counts prompts."""
    from dataclasses import asdict

    from probemb.metrics import uncertainty_bins

    e, classes = outcome.evaluation, task.classes
    class_u = e.uncertainty.mean(dim=1)
    class_bins = uncertainty_bins(class_u, e.class_all)
    image_bins = uncertainty_bins(outcome.images.uncertainty(), e.correct.double())
    return {
        "config": to_dict(config),
        "device": device.name,
        "precision": device.precision,
        "images": len(outcome.labels),
        "images_left_out": [{"name": name, "reason": reason} for name, reason in outcome.bad],
        "classes": len(classes),
        "class_names_from": classes.source,
        "templates": list(task.templates),
        "notices": outcome.notices,
        "prompt_cache": outcome.cache[0],
        "seconds": outcome.seconds,
        "rows": [asdict(row) for row in e.rows],
        "reweighted": {
            name: {"steps": len(found.objective) - 1, "objective": [found.objective[0], found.objective[-1]]}
            for name, found in e.reweighted.items()
        },
        "curve": None if e.curve1 is None else {"top1": e.curve1, "top5": e.curve5},
        "uncertainty": {
            "classes": asdict(class_bins) if class_bins else None,
            "images": asdict(image_bins) if image_bins else None,
        },
        "per_class": [
            {
                "name": name,
                "key": classes.keys[c] if classes.keys else None,
                "images": e.counts[c],
                "uncertainty": class_u[c],
                "top1_all": e.class_all[c],
                "oracle_k": None if e.oracle_k is None else e.oracle_k[c],
                "oracle_top1_best_topk": None if e.oracle_best_topk is None else e.oracle_best_topk[c],
                "oracle_top1_max_over_k": None if e.oracle_max_over_k is None else e.oracle_max_over_k[c],
            }
            for c, name in enumerate(classes.names)
        ],
    }


if __name__ == "__main__":
    run_command(main)
