"""`python -m zeroshot.imagenet`: embed every prompt and image once, score all filters, write one page a data set.

C classes, P prompts of a class, N images, D dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import torch
from torch import Tensor

from probemb.cli.configuration import to_dict
from probemb.cli.device import loader_workers
from probemb.cli.named_paths import named_paths
from probemb.cli.results import claim_files
from probemb.data.labelled.classes import (
    SINGLE_TEMPLATE,
    Classes,
    Templates,
    count_prompts,
    imagenet_templates,
    prompt_texts,
)
from probemb.data.labelled.images import LabelledImages, assign_labels, find_images, remarks, resolve_classes
from probemb.data.look_alikes import same_picture
from probemb.data.reading import checked, read_json, read_lines
from probemb.errors import UserError
from probemb.evaluation.embedding import Embedder
from probemb.gaussian import Gaussian
from probemb.metrics import rejection_curve, reliability, uncertainty_bins
from probemb.models import DualEncoder, check_single_embeddings
from probemb.models.inputs import check_variances
from probemb.reports.figures import BLUE, GREEN, GREY, ORANGE, Chart
from probemb.reports.pages import Card, Cell, Figure, Page, Table, picture_of, verdict
from probemb.reports.text import correlations, number, percent
from zeroshot.evaluations.filters import (
    FILTERS,
    Evaluation,
    LabelledMeans,
    Split,
    chooses,
    filter_names,
    fold_count,
    fold_splits,
    stratified_folds,
)
from zeroshot.evaluations.runner import (
    ABOUT_U,
    OUTPUTS,
    claim,
    finish,
    left_out,
    open_model,
    settings,
    unknown_notice,
    unseen_rows,
)
from zeroshot.imagenet import ImagenetConfig

SIGNIFICANT = 2  # standard errors of a coloured gain: about 95 % confidence
IMAGES_A_CLASS, CLASSES_A_GROUP = 6, 4
KINDS = ("few-shot", "zero-shot", "unlabelled", "transductive", "oracle")  # of a row's note, the best to show first
NOTES = (
    "In percent; per class is the mean over classes of each one's top-1. Gain over all prompts in points, coloured "
    f"beyond {SIGNIFICANT} standard errors. Oracle: chosen on the images that are scored, with their labels; few-shot: "
    "on others with labels. Only a row called zero-shot is zero-shot."
)


@dataclass
class Task:
    """One data set: its configuration, its images and classes, and images with labels to choose on, or None."""

    config: ImagenetConfig
    images: LabelledImages
    labels: Sequence[int]
    classes: Classes
    templates: Templates
    other: tuple[LabelledImages, list[int]] | None = None
    notices: list[str] = field(default_factory=list)  # on pictures that occur twice, and classes with few images


# ------------------------------------------------------------------------------------------------------- the command


def evaluate(config: ImagenetConfig) -> None:
    """Evaluate every data set, and write their results. Raises UserError."""
    filters, folds = filter_names(config.filter), fold_count(config.select_on)
    check_options(config, filters)
    out = claim(config, "zeroshot")
    tasks = [prepare(one, folds) for one in one_by_one(config, out)]
    for task in tasks:
        claim_files(Path(task.config.out), OUTPUTS, "probemb zeroshot")
    embedder = open_model(config)
    check_single_embeddings(embedder.model, config.model)
    if not embedder.model.probabilistic:
        if config.filter != "every" and any(FILTERS[name].reads_u for name in filters):
            why = f"--filter {config.filter} reads it"
            check_variances(embedder.model, config.model, why, "Say --filter all, single, or every.")
        filters = [name for name in filters if not FILTERS[name].reads_u]
        print("The model predicts no uncertainty: no filter by it, and nothing about it in the results.", flush=True)
    found = [evaluate_task(task, filters, folds, embedder) for task in tasks]
    if len(found) > 1:
        summary = summarise([(Path(one.config.out).name, results) for one, results in zip(tasks, found)])
        table = summary_table(summary)
        about = f"{config.model}; the mean counts each data set once."
        page = Page(f"Zero-shot classification on {len(found)} data sets", about, [("Accuracy", [NOTES, table])])
        finish(out, "zeroshot", {"config": to_dict(config), **summary}, page, [table])


def check_options(config: ImagenetConfig, filters: Sequence[str]) -> None:
    """Refuse options without effect. Raises UserError."""
    if (config.select_on == "train") != (config.select_data is not None):
        if config.select_data is not None:
            raise UserError("--select-data is given, but nothing is chosen on it.", "Add --select-on train.")
        raise UserError("--select-on train needs the images to choose on.", "Name them with --select-data PATH.")
    used = {option for name in filters for option in (FILTERS[name].setting, *FILTERS[name].options)}
    owners = {o: name for name, one in reversed(FILTERS.items()) for o in (one.setting, *one.options)}
    for one in fields(config):
        if one.name in owners and one.name not in used and getattr(config, one.name) != one.default:
            raise UserError(
                f"--{one.name} has no effect with --filter {config.filter}.",
                f"Say --filter {owners[one.name]}, or leave it out.",
            )
    if config.select_on != "oracle" and not any(chooses(name, vars(config)) for name in filters):
        what = f"--select-on {config.select_on} has no effect: --filter {config.filter} chooses nothing."
        raise UserError(what, "Say --filter topk or best-topk, or leave --select-on out.")


def one_by_one(config: ImagenetConfig, out: Path) -> list[ImagenetConfig]:
    """The configuration of each data set of --data, with a folder in `out` where they are several."""
    named = named_paths(config.data, "data")
    data = [one.path for one in named]
    select = config.select_data if isinstance(config.select_data, list) else [config.select_data]
    if len(data) == 1 and len(select) == 1:
        return [replace(config, data=data[0], select_data=select[0], out=str(out))]
    if config.labels is not None:
        raise UserError("--labels belongs to one data set, and --data names several.", "Evaluate that one alone.")
    if config.select_data is not None and len(select) != len(data):
        raise UserError(
            f"--select-data has {len(select)} paths, and --data {len(data)}.", "Give one for each, in the same order."
        )
    select = select if config.select_data is not None else [None] * len(data)
    places = [str(out / one.name) for one in named]
    return [replace(config, data=d, select_data=s, out=place) for d, s, place in zip(data, select, places)]


def prepare(config: ImagenetConfig, folds: int) -> Task:
    """Find the images and classes of one data set. Raises UserError."""
    images = find_images(config.data, config.labels, config.exif)
    classes, labels = resolve_classes(images, config.classes)
    templates = read_templates(config.templates, classes.names)
    if config.templates is None and images.templates:
        templates = list(images.templates)
    if config.k is not None and config.k > (count := count_prompts(templates)):
        raise UserError(f"--k {config.k} is more than the {count} templates.", "Give a smaller --k.")
    if folds:
        stratified_folds(labels, [place.name for place in images.places], folds)
    task = Task(config, images, labels, classes, templates)
    if config.select_on == "train":
        found = find_images(config.select_data, exif=config.exif)
        chosen, remedy = assign_labels(found, classes), "Choose K on other images, or with --select-on folds:5."
        rows, task.notices = unseen_rows(found, images, config.workers, remedy)
        places, marks = [found.places[i] for i in rows], [found.marks[i] for i in rows]
        task.other = replace(found, places=places, marks=marks), [chosen[i] for i in rows]
    return task


def read_templates(path: str | Path | None, class_names: Sequence[str] = ()) -> Templates:
    """CLIP's 80 templates, or those of a file: one a line, each with `{}` where the class name goes, or a JSON object
    {class name: [prompts]} with the same number of prompts for every class.

    Raises UserError: a missing or empty file, a template without `{}` or that occurs twice, a class without prompts.
    """
    if path is None:
        return imagenet_templates()
    path = Path(path)
    if path.suffix.lower() == ".json":
        found = read_json(path)
        with checked(path, "a JSON object of prompts", 'Write {"class name": ["prompt", …], …} with all classes.'):
            prompts = {name: found[name] for name in class_names}
        texts = all(isinstance(row, list) and row and all(isinstance(t, str) for t in row) for row in prompts.values())
        if not texts or len({len(row) for row in prompts.values()}) > 1:
            raise UserError(f"The prompts of {path} are not lists of one length.", "Give every class the same number.")
        return prompts
    templates = read_lines(path)
    if not templates or any(one.count("{}") != 1 for one in templates) or len(set(templates)) < len(templates):
        what = f"The template file {path} does not hold different templates, each with `{{}}` exactly once."
        raise UserError(what, 'Write one a line, {} for the class name: "a photo of a {}."')
    return templates


# --------------------------------------------------------------------------------------------------- one data set


def evaluate_task(task: Task, filters: Sequence[str], folds: int, embedder: Embedder) -> dict:
    """Embed, score all filters, and write the results; returns what results.json holds. Raises UserError."""
    config, classes, device = task.config, task.classes, embedder.device
    print(
        f"{config.data}: {len(task.images):,} images, {len(classes):,} classes (names: {classes.source}), "
        f"{count_prompts(task.templates)} prompts a class, on {device.name} in {device.precision}",
        flush=True,
    )
    texts = prompt_texts(classes.names, task.templates)
    task.notices += unknown_notice(embedder.tokenizer, texts, "prompts")
    prompts = embedder.texts(texts, "prompts").to(device.name)
    shape = (len(classes), -1, prompts.shape[-1])
    prompts = Gaussian(prompts.mean.reshape(shape), prompts.log_var.reshape(shape))
    gaussian, kept, bad = embedder.images(task.images)
    images = labelled_means(gaussian, task.images, task.labels, kept, device.name)
    splits = fold_splits(images, folds, same_pictures(embedder, task, kept)) if folds else []
    if task.other is not None:
        found, rows, _ = embedder.images(task.other[0], "choosing")
        others = labelled_means(found, *task.other, rows, device.name)
        splits = [Split(others, torch.ones(len(kept), dtype=torch.bool))]
    single = list(task.templates).index(SINGLE_TEMPLATE) if SINGLE_TEMPLATE in task.templates else 0
    label = f"folds:{folds}" if folds else config.select_on
    e = Evaluation(images, prompts, filters, vars(config) | {"single": single}, splits, label)
    results = describe(task, e, gaussian, embedder, left_out(bad))
    notes = results["notes"] + results["notices"]
    table = filter_table(results)
    page, calibration = make_page(task, e, results, table, kept), []
    if found := results["calibration"]:
        calibration = [f"all: expected calibration error {100 * found['ece']:.2f} %, Brier score {found['brier']:.4f}"]
    finish(Path(config.out), "zeroshot", results, page, [*notes, table, *calibration])
    return results


def labelled_means(
    found: Gaussian, images: LabelledImages, labels: Sequence[int], kept: Sequence[int], device: str
) -> LabelledMeans:
    """Means, labels and names of the images that could be read."""
    mine = torch.tensor([int(labels[i]) for i in kept])
    return LabelledMeans(found.mean.to(device), mine, [images.places[i].name for i in kept])


def softmax_scale(model: DualEncoder) -> tuple[float | None, str]:
    """The factor of the cosines in the softmax over the classes, and what it is in words: the trained temperature, or
    2 a of a trained match probability sigmoid(-a d + b): -a d is 2 a cosine + what the classes share, if their
    variances are left out, as they are in the class vectors.
    """
    if model.trained_temperature is not None:
        return model.trained_temperature, "logit_scale"
    if model.config["match"] == "distance":
        return 2 * model.match_numbers()[0], "2 a of the match probability (the loss trained no temperature)"
    return None, "none: the loss trained no temperature"


def same_pictures(embedder: Embedder, task: Task, kept: list[int]) -> list[int]:
    """For each embedded image the first one that shows the same picture, for folds."""
    workers = loader_workers(embedder.workers, len(task.images), embedder.device.name)
    leaders = same_picture(task.images, workers, embedder.show)
    if repeated := [i for i in kept if leaders[i] != i]:
        pair = (task.images.places[i].name for i in (leaders[repeated[0]], repeated[0]))
        task.notices.append(
            f"{len(repeated):,} of {len(kept):,} images ({len(repeated) / len(kept):.1%}) show the same picture as "
            f"another one (such as {' and '.join(pair)}), and are in its fold"
        )
    return [leaders[i] for i in kept]


def describe(task: Task, e: Evaluation, images: Gaussian, embedder: Embedder, bad: list[dict]) -> dict:
    """The content of results.json. Of a point model nothing is told of uncertainties."""
    classes, probabilistic, right = task.classes, embedder.model.probabilistic, (e.all.ranks < 1).double()
    scale, source = softmax_scale(embedder.model)
    confidence, curve = None if scale is None else e.confidence(scale), e.curve(1)
    per_class = {"images": e.counts, "uncertainty": e.u.mean(dim=1).cpu(), "top1_all": e.by_class(e.all.ranks)}
    bins, scores = {"classes": None, "images": None}, {}
    if probabilistic:
        bins["classes"] = uncertainty_bins(per_class["uncertainty"], per_class["top1_all"])
        bins["images"] = uncertainty_bins(images.uncertainty(), right)
        scores["uncertainty"] = images.uncertainty()
    if scale is not None:
        scores["confidence"] = 1 - confidence
    if not probabilistic:
        per_class["uncertainty"] = None
    per_class |= {
        "oracle_k": e.oracle and e.oracle.kept,
        "oracle_top1_best_topk": e.oracle and e.by_class(e.oracle.ranks),
        "oracle_top1_max_over_k": e.oracle and e.by_class(e.prefixes.ranks).max(dim=1).values,
    }
    per_class = {key: [None] * len(classes) if x is None else x.tolist() for key, x in per_class.items()}
    return {
        **settings(task.config, embedder),
        "images": len(right),
        "images_left_out": bad,
        "classes": len(classes),
        "class_names_from": classes.source,
        "templates": task.templates,
        "notices": task.notices,
        "rows": e.rows,
        "reweighted": {
            name: {
                "steps": len(found.objective) - 1,
                "objective": [found.objective[0], found.objective[-1]],
                "images_of_class": found.counts,
            }
            for name, found in e.reweighted.items()
        },
        "curve": None if curve is None else {"top1": curve.tolist(), "top5": e.curve(5).tolist()},
        "uncertainty": {name: found and asdict(found) for name, found in bins.items()},
        "calibration": None
        if scale is None
        else asdict(reliability(confidence.clamp(0, 1), right)) | {"value": scale, "source": source},
        "selective": {name: asdict(rejection_curve(score, right)) for name, score in scores.items()},
        "per_class": [
            {"name": name, "key": classes.keys[c] if classes.keys else None, **{k: x[c] for k, x in per_class.items()}}
            for c, name in enumerate(classes.names)
        ],
        "notes": remarks(task.labels, classes),
    }


# ------------------------------------------------------------------------------------------------------- the page


def filter_table(results: dict) -> Table:
    """Accuracy under every filter."""

    def spread(value: float, se: float | None, form: str) -> str:
        return f"{100 * value:{form}}" + ("" if se is None else f" ± {100 * se:.2f}")

    rows = []
    for row in results["rows"]:
        k = "soft" if row["k"] is None else f"mean {row['k']:.1f}" if row["k_varies"] else str(int(row["k"]))
        gain = "" if row["filter"] == "all" else spread(row["gain"], row["gain_se"], "+.2f")
        rows.append([
            row["title"], k, spread(row["top1"], row["top1_se"], ".2f"), interval_text(row, "top1"),
            percent(row["mean_per_class_recall"]), percent(row["top5"]), Cell(gain, direction(row)),
            Cell(row["note"], next(kind for kind in KINDS if row["note"].startswith(kind))),
        ])  # fmt: skip
    title = f"zero-shot accuracy, {results['images']:,} images, {results['classes']:,} classes"
    return Table(("filter", "K", "top-1 %", "95 %", "per class", "top-5 %", "gain ± SE", "chosen on"), rows, title)


def interval_text(row: dict, metric: str) -> str:
    """The interval of a metric in percent; "" for a single image."""
    return "–".join(f"{100 * end:.1f}" for end in row["intervals"].get(metric, ()))


def direction(row: dict) -> str:
    """ "up" or "down" for a gain beyond SIGNIFICANT standard errors, "" for one that may be chance."""
    if row["gain_se"] is None or abs(row["gain"]) <= SIGNIFICANT * row["gain_se"]:
        return ""
    return "up" if row["gain"] > 0 else "down"


def make_page(task: Task, e: Evaluation, results: dict, table: Table, kept: list[int]) -> Page:
    """The report of one data set."""
    n_classes, n_prompts = e.u.shape
    number_kept, by = e.kept.get("best-topk") or next(iter(e.kept.values()), (None, ""))
    chosen_by = "How many are kept was chosen on these images: an oracle. " if by else ""
    groups = [
        block
        for title, group in pick_classes(e)
        for block in (f"{title}:", [class_card(c, task, e, results, kept, number_kept, by) for c in group])
    ]
    return Page(
        "Zero-shot classification and prompt filtering",
        f"{task.config.model} on {task.config.data}: {results['images']:,} images, {n_classes:,} classes, "
        f"{n_prompts} prompts a class",
        [
            ("Accuracy", [NOTES, *results["notices"], table]),
            ("Accuracy against K", [k_figures(results)]),
            ("Uncertainty against accuracy", [bin_figures(results["uncertainty"])]),
            ("Calibration, and refusing uncertain images", [calibration_figures(results)]),
            (
                "Prompts and their uncertainty",
                [
                    f"{chosen_by}Prompts from certain to uncertain; those in red are dropped. A green frame: all "
                    "prompts together classify the image correctly.",
                    ABOUT_U if results["uncertainty"]["images"] else "", *groups,
                ],
            ),
        ],
    )  # fmt: skip


def k_figures(results: dict) -> list[Figure]:
    """Accuracy against a common K, with the best K marked: an oracle; and the oracle K of each class."""
    if results["curve"] is None:
        return []
    figures = []
    for key, curve in results["curve"].items():
        metric, ys = key.replace("top", "top-"), [100 * y for y in curve]
        best = max(i for i, y in enumerate(ys) if y >= max(ys) - 1e-9)
        chart = Chart(f"{metric}-over-k", x_label="K, prompts kept in each class", y_label=f"{metric} accuracy, %")
        chart.line(range(1, len(ys) + 1), ys).level(ys[-1], f"all {ys[-1]:.2f}", GREEN)
        figures.append(Figure(chart.mark(best + 1, ys[best], f"K = {best + 1}: {ys[best]:.2f}, oracle")))
    classes = results["per_class"]
    if classes[0]["oracle_k"] is None:
        return figures
    chosen = [row["oracle_k"] for row in classes if row["images"] and row["oracle_top1_max_over_k"]]
    counts = [chosen.count(k) for k in range(1, len(ys) + 1)]
    chart = Chart("oracle-k-of-classes", x_label="oracle K, prompts kept", y_label="classes").bars(counts, "classes")
    note = (
        "The K with the best accuracy on a class's own images, while all classes keep the same K: an oracle; ties go "
        f"to more prompts. Left out: {len(classes) - len(chosen):,} classes that are never right."
    )
    return [*figures, Figure(chart, "Oracle K of each class", note)]


def bin_figures(uncertainty: dict) -> list[Figure]:
    """Accuracy in bins of uncertainty, of classes and of images."""
    figures = []
    for things, title in {"classes": "mean uncertainty of the prompts", "images": "uncertainty of the image"}.items():
        if bins := uncertainty[things]:
            chart = Chart(f"accuracy-of-{things}", x_label=title, y_label="top-1 accuracy, %").bins(bins, things)
            figures.append(Figure(chart, things.capitalize(), correlations(bins)))
    return figures


def calibration_figures(results: dict) -> list[Figure]:
    """Accuracy against confidence, calibrated where it lies on the diagonal; and when uncertain images are refused."""
    found, curves, figures = results["calibration"], results["selective"], []
    if not curves:
        return []
    if found is not None:
        chart = Chart("reliability", x_label="confidence, %", y_label="top-1 accuracy, %")
        chart.line([0, 100], [0, 100], "calibrated", GREY, dashed=True)
        chart.line(*([100 * value for value in found[key]] for key in ("predicted", "observed")), points=True)
        note = (
            f"ECE {percent(found['ece'])} %, Brier score {number(found['brier'])}; softmax of {number(found['value'])} "
            f"times the cosine: {found['source']}."
        )
        figures.append(Figure(chart, "Right answers against confidence", note))
    chart = Chart("selective", x_label="least certain images refused, %", y_label="top-1 of the others, %")
    for (name, curve), colour in zip(curves.items(), (BLUE, ORANGE)):
        chart.line([100 * x for x in curve["refused"]], [100 * y for y in curve["score"]], name, colour)
    chart.level(100 * next(iter(curves.values()))["random"], "at random")
    areas = ", ".join(f"{name} {percent(curve['area'])}" for name, curve in curves.items())
    return [*figures, Figure(chart, "Refusing the least certain images", f"Mean over all shares: {areas}.")]


def pick_classes(e: Evaluation) -> list[tuple[str, list[int]]]:
    """The classes with the most and with the least uncertain prompts."""
    down = [c for c in e.u.mean(dim=1).argsort(descending=True, stable=True).tolist() if e.counts[c]]
    groups = down[:CLASSES_A_GROUP], down[CLASSES_A_GROUP:][::-1][:CLASSES_A_GROUP]
    return [(title, group) for title, group in zip(("Most uncertain", "Most certain"), groups) if group]


def class_card(
    c: int, task: Task, e: Evaluation, results: dict, kept: list[int], number_kept: Tensor | None, by: str
) -> Card:
    """A class with its images and its prompts."""
    row, u = results["per_class"][c], e.u[c].cpu()
    n_kept = len(u) if number_kept is None else int(number_kept[c])
    texts = prompt_texts([row["name"]], task.templates)
    lines = [
        Cell(f"{texts[p]} (u = {number(float(u[p]))})", "right" if place < n_kept else "wrong")
        for place, p in enumerate(u.argsort(stable=True).tolist())
    ]
    places, pictures = (e.images.labels == c).nonzero().flatten().tolist(), []
    for place in places[:: max(1, len(places) // IMAGES_A_CLASS)][:IMAGES_A_CLASS]:
        right = verdict(e.all.ranks[place] < 1)
        pictures += picture_of(task.images, kept[place], f"{e.images.names[place]}: {right}", right)
    many = "" if number_kept is None else f", {n_kept} of {len(lines)} prompts kept{' (oracle)' if by else ''}"
    about = f"{row['images']:,} images, all prompts {percent(row['top1_all'])} %{many}"
    return Card(row["name"], pictures, [Cell(about)], lines)


# ------------------------------------------------------------------------------------------------ several data sets


def summarise(found: Sequence[tuple[str, dict]]) -> dict:
    """{"data": one entry for each data set, "mean": over data sets, each counting once}."""
    data = [
        {
            "name": name,
            "data": results["config"]["data"],
            **{key: results[key] for key in ("images", "classes", "rows")},
        }
        for name, results in found
    ]
    rows = []
    for several in zip(*(one["rows"] for one in data)):
        keys = ("top1", "mean_per_class_recall", "top5", "gain")
        means = {key: sum(row[key] for row in several) / len(data) for key in keys}
        rows.append({"filter": several[0]["filter"], "note": several[0]["note"], **means})
    return {"data": data, "mean": {"rows": rows}}


def summary_table(summary: dict) -> Table:
    """Top-1 of every filter on every data set, and the means."""
    data, means = summary["data"], summary["mean"]["rows"]
    rows = [
        [one["name"], f"{one['images']:,}", f"{one['classes']:,}",
         *(Cell(percent(row["top1"]), direction(row)) for row in one["rows"])]
        for one in data
    ]  # fmt: skip
    totals = [
        ["mean", *(percent(row["top1"]) for row in means)],
        ["gain over all prompts", *("" if row["filter"] == "all" else f"{100 * row['gain']:+.2f}" for row in means)],
        ["mean top-5", *(percent(row["top5"]) for row in means)],
        ["mean per class", *(percent(row["mean_per_class_recall"]) for row in means)],
    ]
    headings = ("data", "images", "classes", *(f"{row['filter']}, {row['note']}" for row in means))
    return Table(headings, [*rows, (), *([name, "", "", *cells] for name, *cells in totals)], "top-1 in percent")
