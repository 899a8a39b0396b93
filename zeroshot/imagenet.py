"""Zero-shot classification with uncertainty-based prompt filtering.

    python -m zeroshot.imagenet --filter best-topk --model runs/x --data data/imagenet/val
    python -m zeroshot.imagenet --filter every --model runs/scenes --data data/scenes/classes     # synthetic data
    python -m zeroshot.imagenet --model runs/x --data imagenet=imagenet/val imagenet-r cifar-10-batches-bin  # one table

Every class gets 80 prompts; a filter chooses among them. Source: PCME++ §3.5, Table 5 and §C.6.
A number with anything chosen on the scored images is labelled "oracle", on other labelled images "few-shot".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from probemb.cli.command import run_command
from probemb.cli.configuration import parse_config
from probemb.cli.named_paths import split_name
from probemb.errors import UserError
from zeroshot.config import DEFAULT_DATA, DEFAULT_MODEL, GENERATOR, ImagenetConfig

if TYPE_CHECKING:
    from probemb.data.labelled.labelled_images import LabelledImages
    from probemb.evaluation.embedding import Embedder
    from probemb.models import LoadedModel
    from zeroshot.filtering.filters import FilterOptions, Selection
    from zeroshot.filtering.outcome import Outcome, Task

PROG = "python -m zeroshot.imagenet"
DESCRIPTION = (
    "Zero-shot classification with uncertainty-based prompt filtering. Takes class folders, webdataset shards with "
    "KEY.cls, or a tar of either; prints a table and writes results.json and report.html."
)
OUTPUTS = ("results.json", "report.html")


class Prepared(NamedTuple):
    """One data set: its configuration, its images and classes, and images with labels to choose on, or None."""

    config: ImagenetConfig
    task: Task
    other: tuple[LabelledImages, list[int]] | None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; wrong options are refused before the model is loaded."""
    from probemb.cli.results import claim_files, results_folder

    config = parse_config(ImagenetConfig, PROG, DESCRIPTION, argv)
    if config.data == DEFAULT_DATA and not Path(config.data).exists():
        raise UserError(
            f"There is no ImageNet in {DEFAULT_DATA}, the default of --data.",
            "Pass --data PATH, or try the synthetic data: `python -m tools.make_scenes data/scenes`, then "
            f"`{PROG} --model RUN --data data/scenes/classes`.",
        )
    from zeroshot.filtering.filters import filter_names, fitting_filters, parse_selection

    filters, selection = filter_names(config.filter), parse_selection(config.select_on)
    _check_selection(config, filters, filter_options(config), selection)
    out = results_folder(config.out, config.model, "zeroshot", "zeroshot-results")
    prepared = [prepare(one, selection) for one in one_by_one(config, out)]
    for folder in dict.fromkeys([out, *(Path(one.config.out) for one in prepared)]):
        claim_files(folder, OUTPUTS, GENERATOR)

    embedder = open_model(config)
    filters = fitting_filters(filters, embedder.model, config.model, config.filter)
    if not embedder.model.probabilistic:
        print("The model predicts no uncertainty: no filter by it, and nothing about it in the results.", flush=True)
    found = [evaluate_and_write(one, filters, selection, embedder) for one in prepared]
    if len(found) > 1:
        from zeroshot.several import write_summary

        write_summary(config, [(Path(one.config.out).name, results) for one, results in zip(prepared, found)], out)
    return 0


def one_by_one(config: ImagenetConfig, out: Path) -> list[ImagenetConfig]:
    """The configuration of each data set of --data, with a folder in `out` where they are several."""
    named = [split_name(one) for one in ([config.data] if isinstance(config.data, str) else config.data)]
    data = [one.path for one in named]
    select = config.select_data if isinstance(config.select_data, list) else [config.select_data]
    if len(data) == 1 and len(select) == 1:
        return [replace(config, data=data[0], select_data=select[0], out=str(out))]
    from zeroshot.several import folder_names

    if len(set(data)) < len(data):
        raise UserError("--data names the same path twice.", "Name each data set once.")
    if config.labels is not None:
        raise UserError("--labels belongs to one data set, and --data names several.", "Evaluate that one alone.")
    if config.select_data is not None and len(select) != len(data):
        raise UserError(
            f"--select-data has {len(select)} paths, and --data {len(data)}.", "Give one for each, in the same order."
        )
    select = select if config.select_data is not None else [None] * len(data)
    places = [str(out / name) for name in folder_names(named)]
    return [replace(config, data=d, select_data=s, out=place) for d, s, place in zip(data, select, places)]


def prepare(config: ImagenetConfig, selection: Selection) -> Prepared:
    """Find the images and classes of one data set. Raises UserError."""
    from probemb.data.labelled.images import assign_labels, find_images, resolve_classes
    from probemb.data.labelled.prompts import count_prompts
    from zeroshot.filtering.filters import stratified_folds
    from zeroshot.filtering.outcome import Task
    from zeroshot.filtering.prompts import read_templates

    images = find_images(config.data, config.labels, config.exif)
    classes, labels = resolve_classes(images, config.classes)
    templates = read_templates(config.templates, classes.names)
    if config.templates is None and images.templates:
        templates = list(images.templates)
    if config.k is not None and config.k > (count := count_prompts(templates)):
        raise UserError(f"--k {config.k} is more than the {count} templates.", "Give a smaller --k.")
    if selection.folds:
        stratified_folds(labels, [place.name for place in images.places], selection.folds)
    other = None
    if selection.on == "train":
        found = find_images(config.select_data, exif=config.exif)
        other = (found, assign_labels(found, classes))
    return Prepared(config, Task(images, labels, classes, templates), other)


def open_model(config: ImagenetConfig) -> Embedder:
    """The model, ready to embed. Raises UserError."""
    from probemb.cli.device import choose_device
    from probemb.cli.progress import progress
    from probemb.evaluation.embedding import Embedder
    from probemb.models import check_single_embeddings

    device = choose_device(config.device, config.precision)
    model, tokenizer, transforms = load(config.model, device.name, config.resize)
    check_single_embeddings(model, config.model)
    return Embedder(
        model, tokenizer, transforms.evaluate, device, config.batch_size, config.text_batch_size, config.workers,
        config.max_bad, progress,
    )  # fmt: skip


def evaluate_and_write(prepared: Prepared, filters: list[str], selection: Selection, embedder: Embedder) -> dict:
    """Evaluate one data set, and write its results; returns what results.json holds."""
    from probemb.cli.results import write_json
    from probemb.data.image_loader import describe_bad
    from probemb.data.labelled.images import remarks
    from probemb.data.labelled.prompts import count_prompts
    from zeroshot.filtering.outcome import evaluate
    from zeroshot.filtering.prompts import single_index
    from zeroshot.filtering.results import describe
    from zeroshot.reports.imagenet import write_report

    config, task, device = prepared.config, prepared.task, embedder.device
    classes, templates, out = task.classes, task.templates, Path(config.out)
    print(
        f"{config.data}: {len(task.images):,} images, {len(classes):,} classes (names: {classes.source}), "
        f"{count_prompts(templates)} prompts a class, on {device.name} in {device.precision}",
        flush=True,
    )
    for line in (notes := remarks(task.labels, classes)):
        print(line, flush=True)
    outcome = evaluate(
        embedder, task, filters, options=replace(filter_options(config), single=single_index(templates)),
        selection=selection, select_images=prepared.other, cache=config.cache,
    )  # fmt: skip
    for message in (outcome.cache[1], describe_bad(outcome.bad), *outcome.notices):
        if message:
            print(message, flush=True)
    results = describe(config, outcome, task, device, embedder.model.probabilistic) | {"notes": notes}
    print_table(outcome, len(classes), results["calibration"])
    write_json(out / OUTPUTS[0], results, GENERATOR)
    write_report(out / OUTPUTS[1], results, outcome, task.images, classes, templates)
    print(f"\nwritten: {out / OUTPUTS[0]}, {out / OUTPUTS[1]}", flush=True)
    return results


def load(name: str, device: str, resize: str = "pil") -> LoadedModel:
    """The model of --model, or the published one. Raises UserError."""
    from probemb.models import load_model

    try:
        return load_model(name, device, resize)
    except UserError as error:
        if name != DEFAULT_MODEL:
            raise
        raise UserError(
            f"No --model was given, and the published one, {DEFAULT_MODEL}, could not be fetched.",
            "Check the network, or pass --model RUN, after `python -m pretrain.run --config "
            "pretrain/configs/scenes.yaml` for instance.",
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
    from zeroshot.filtering.filters import SOFT, choosing
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
    defaults = {field.name: field.default for field in fields(config)}
    for option, names in SOFT.items():
        if getattr(config, option) != defaults[option] and not set(names) & set(filters):
            raise UserError(
                f"--{option} has no effect with --filter {config.filter}.", f"Say --filter {names[0]}, or leave it out."
            )
    if selection.on != "oracle" and not choosing(filters, options):
        raise UserError(
            f"--select-on {config.select_on} has no effect: --filter {config.filter} chooses nothing.",
            "Say --filter topk, best-topk, class-deviation, threshold or quantile without a value, reweighted or "
            "every, or leave --select-on out.",
        )


# ------------------------------------------------------------------------------------------------------- output


def print_table(outcome: Outcome, n_classes: int, calibration: dict | None) -> None:
    """Print the table; 132 columns wide without a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=132)
    table = Table(title=f"zero-shot accuracy, {len(outcome.labels):,} images, {n_classes:,} classes")
    table.add_column("filter")
    for heading in ("K", "top-1 %", "95 %", "per class", "top-5 %", "gain ± SE"):
        table.add_column(heading, justify="right")
    table.add_column("chosen on")
    colours = {"up": "green", "down": "red", "": ""}
    for row in outcome.evaluation.rows:
        style = "dim" if row.note.startswith("oracle") else None
        gain = Text(row.gain_text, colours[row.verdict])
        top1, recall, top5 = (f"{100 * share:.2f}" for share in (row.top1, row.mean_per_class_recall, row.top5))
        table.add_row(row.title, row.k_text, top1, row.interval_text, recall, top5, gain, row.note, style=style)
    console.print(table)
    if calibration is not None:
        ece, brier = calibration["ece"], calibration["brier"]
        console.print(f"all: expected calibration error {100 * ece:.2f} %, Brier score {brier:.4f}")


if __name__ == "__main__":
    run_command(main)
