"""`python -m zeroshot.imagenet`: embed every prompt and image once, score all filters, write one page a data set.

C classes, P prompts of a class, N images, D dimensions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from probemb.data.labelled import (
    SINGLE_TEMPLATE,
    ZeroShotSet,
    assign_labels,
    count_prompts,
    find_classes,
    find_images,
    prompt_texts,
    remarks,
)
from probemb.data.look_alikes import same_picture
from probemb.errors import UserError
from probemb.evaluation.classification import confidences
from probemb.evaluation.embedding import Embedder, embed_classes
from probemb.gaussian import Gaussian
from probemb.machine import loader_workers
from probemb.metrics.uncertainty import rejection_curve, reliability, uncertainty_bins
from probemb.models import DualEncoder, check_single_embeddings
from probemb.models.inputs import check_variances
from probemb.options import named_paths
from probemb.reports import pages
from probemb.reports.figures import GREEN, Chart
from probemb.reports.pages import Card, Cell, Figure, Page, Table, picture_of, verdict
from probemb.reports.results import claim_files
from probemb.reports.text import number, percent, plus_minus
from zeroshot.evaluations import filters, runner
from zeroshot.evaluations.filters import LabelledMeans
from zeroshot.evaluations.runner import Run
from zeroshot.imagenet import ImagenetConfig

SIGNIFICANT = 2  # standard errors of a coloured gain: about 95 % confidence
IMAGES_A_CLASS, CLASSES_A_GROUP = 6, 4
NOTES = (
    "In percent; per class is the mean over classes of each one's top-1. Gain over all prompts in points, coloured "
    f"beyond {SIGNIFICANT} standard errors. Oracle: chosen on the images that are scored, with their labels; few-shot: "
    "on others with labels. Only a row called zero-shot is zero-shot."
)


@dataclass
class Task:
    """One data set: its configuration, and other images to choose on, or None."""

    config: ImagenetConfig
    data: ZeroShotSet
    other: ZeroShotSet | None = None
    notices: list[str] = field(default_factory=list)  # on pictures that occur twice, and classes with few images


def evaluate(config: ImagenetConfig) -> None:
    """Evaluate every data set, and write their results. Raises UserError."""
    names, folds = filters.filter_names(config.filter), filters.fold_count(config.select_on)
    out = runner.claim(config, "zeroshot")
    tasks = [prepare(part, folds) for part in config_of_each(config, out)]
    embedder = runner.open_model(config)
    check_single_embeddings(embedder.model, config.model)
    if not embedder.model.probabilistic:
        if config.filter != "every" and any(filters.FILTERS[name].reads_u for name in names):
            why = f"--filter {config.filter} reads it"
            check_variances(embedder.model, config.model, why, "Say --filter all, single, or every.")
        names = [name for name in names if not filters.FILTERS[name].reads_u]
    found = [evaluate_task(task, names, folds, embedder) for task in tasks]
    if len(found) > 1:
        summary, table = summarise([(Path(task.config.out).name, results) for task, results in zip(tasks, found)])
        about = f"{config.model}; the mean counts each data set once."
        page = Page(f"Zero-shot classification on {len(found)} data sets", about, [("Accuracy", [NOTES, table])])
        Run(config, "zeroshot", out, embedder).finish(summary, page)


def config_of_each(config: ImagenetConfig, out: Path) -> list[ImagenetConfig]:
    """The configuration of each data set of --data, with a folder in `out` where they are several."""
    named, select = named_paths(config.data, "data"), config.select_data or []
    select = [select] if isinstance(select, str) else select
    if len(select) != (len(named) if config.select_on == "train" else 0):
        what = f"--select-on is {config.select_on}, --select-data has {len(select)} paths, and --data {len(named)}."
        raise UserError(what, "Name other images with --select-on train, a path for each data set; or leave both out.")
    places = [out / data.name for data in named] if len(named) > 1 else [out]
    return [
        replace(config, data=data.path, select_data=other, out=str(place))
        for data, other, place in zip(named, select or [None] * len(named), places)
    ]


def prepare(config: ImagenetConfig, folds: int) -> Task:
    """Find the images and classes of one data set. Raises UserError."""
    claim_files(Path(config.out), runner.OUTPUTS, "probemb zeroshot")
    data = find_classes(config.data, config.classes, config.templates, config.exif, config.labels)
    if config.k is not None and config.k > (count := count_prompts(data.templates)):
        raise UserError(f"--k {config.k} is more than the {count} templates.", "Give a smaller --k.")
    if folds:
        filters.stratified_folds(data.labels, [place.name for place in data.images.places], folds)
    task = Task(config, data)
    if config.select_data is not None:
        found = find_images(config.select_data, exif=config.exif)
        other = data._replace(images=found, labels=assign_labels(found, data.classes))
        rows, task.notices = runner.unseen_rows(found, data.images, config.workers)
        task.other = other.only(rows)
    return task


def evaluate_task(task: Task, names: Sequence[str], folds: int, embedder: Embedder) -> dict:
    """Embed, score all filters, and write the results; returns what results.json holds. Raises UserError."""
    config, device = task.config, embedder.device.name

    def labelled_means(g: Gaussian, data: ZeroShotSet) -> LabelledMeans:
        names = [place.name for place in data.images.places]
        return LabelledMeans(g.mean.to(device), torch.tensor(data.labels), names)

    texts = task.data.prompts
    task.notices += runner.unknown_notice(embedder.tokenizer, texts, "prompts")
    found = embed_classes(embedder, task.data)
    data = task.data = found.data
    images = labelled_means(found.images, data)
    splits = filters.fold_splits(images, folds, same_pictures(embedder, task)) if folds else []
    if task.other is not None:
        gaussian, rows, _ = embedder.images(task.other.images, "choosing")
        others = labelled_means(gaussian, task.other.only(rows))
        splits = [(others, torch.ones(len(data.labels), dtype=torch.bool))]
    single = list(data.templates).index(SINGLE_TEMPLATE) if SINGLE_TEMPLATE in data.templates else 0
    options = vars(config) | {"single": single}
    e = filters.Evaluation(images, found.prompts.to(device), names, options, splits, config.select_on)
    results = describe(task, e, found.images, embedder)
    page = make_page(task, e, results)
    return Run(config, "zeroshot", Path(config.out), embedder).finish(results, page, found.bad)


def softmax_scale(model: DualEncoder) -> tuple[float | None, str]:
    """The factor of the cosines in the softmax over the classes, and what it is in words: the trained temperature, or
    2 a of a trained match probability sigmoid(-a d + b): -a d is 2 a cosine + what the classes share, if their
    variances are left out, as they are in the class vectors.
    """
    if model.match_model.temperature is not None:
        return model.match_model.temperature, "logit_scale"
    if model.config["match"] == "distance":
        return 2 * model.match_model.scale, "2 a of the match probability (the loss trained no temperature)"
    return None, "none: the loss trained no temperature"


def same_pictures(embedder: Embedder, task: Task) -> list[int]:
    """For each image the first one that shows the same picture, for folds."""
    images = task.data.images
    leaders = same_picture(images, loader_workers(embedder.workers, len(images), embedder.device.name), embedder.show)
    if repeated := [i for i, leader in enumerate(leaders) if leader != i]:
        pair = (images.places[i].name for i in (leaders[repeated[0]], repeated[0]))
        task.notices.append(
            f"{len(repeated):,} of {len(images):,} images ({len(repeated) / len(images):.1%}) show the same picture as "
            f"another one (such as {' and '.join(pair)}), and are in its fold"
        )
    return leaders


def describe(task: Task, e: filters.Evaluation, images: Gaussian, embedder: Embedder) -> dict:
    """The content of results.json. Of a point model nothing is told of uncertainties."""
    classes, probabilistic, right = task.data.classes, embedder.model.probabilistic, (e.all.ranks < 1).double()
    per_class = {"images": e.counts, "uncertainty": None, "top1_all": e.by_class(e.all.ranks)}
    bins, scores, calibration = {"classes": None, "images": None}, {}, None
    if probabilistic:
        per_class["uncertainty"] = e.u.mean(dim=1).cpu()
        bins["classes"] = uncertainty_bins(per_class["uncertainty"], per_class["top1_all"])
        bins["images"] = uncertainty_bins(images.uncertainty(), right)
        scores["uncertainty"] = images.uncertainty()
    scale, source = softmax_scale(embedder.model)
    if scale is not None:
        confidence = confidences(e.images.mean, e.all.vectors, scale)
        scores["confidence"] = 1 - confidence
        calibration = reliability(confidence.clamp(0, 1), right) | {"value": scale, "source": source}
    per_class |= {
        "oracle_k": e.oracle and e.oracle.kept,
        "oracle_top1_best_topk": e.oracle and e.by_class(e.oracle.ranks),
        "oracle_top1_max_over_k": e.oracle and e.by_class(e.candidates("topk").ranks).max(dim=1).values,
    }
    per_class = {key: [None] * len(classes) if x is None else x.tolist() for key, x in per_class.items()}
    return {
        "images": len(right),
        "classes": len(classes),
        "class_names_from": classes.source,
        "templates": task.data.templates,
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
        "curve": None if e.curve(1) is None else {"top1": e.curve(1).tolist(), "top5": e.curve(5).tolist()},
        "uncertainty": bins,
        "calibration": calibration,
        "selective": {name: rejection_curve(score, right) for name, score in scores.items()},
        "per_class": [
            {"name": name, "key": classes.keys[c] if classes.keys else None, **{k: x[c] for k, x in per_class.items()}}
            for c, name in enumerate(classes.names)
        ],
        "notes": remarks(task.data.labels, classes),
    }


def make_page(task: Task, e: filters.Evaluation, results: dict) -> Page:
    """The report of one data set."""
    n_classes, n_prompts = e.u.shape
    bins, found = results["uncertainty"], results["calibration"]
    figures, calibration, text = [], [], ""
    for things, label in {"classes": "mean uncertainty of the prompts", "images": "uncertainty of the image"}.items():
        figures += pages.bin_figure(f"accuracy-of-{things}", bins[things], things, label, "top-1 accuracy, %", things)
    if found is not None:
        labels = "confidence, %", "top-1 accuracy, %"
        calibration = pages.reliability_figure("reliability", {"": found}, *labels, "Accuracy against confidence")
        text = (
            f"all: expected calibration error {percent(found['ece'])} %, Brier score {found['brier']:.4f}; softmax of "
            f"{number(found['value'])} times the cosine: {found['source']}"
        )
    calibration += pages.rejection_figure("selective", results["selective"], "top-1 of the others, %", "Refusing")
    down = [c for c in e.u.mean(dim=1).argsort(descending=True, stable=True).tolist() if e.counts[c]]
    groups = {"Most uncertain": down[:CLASSES_A_GROUP], "Most certain": down[CLASSES_A_GROUP:][::-1][:CLASSES_A_GROUP]}
    return Page(
        "Zero-shot classification and prompt filtering",
        f"{task.config.model} on {task.config.data}: {results['images']:,} images, {n_classes:,} classes (names: "
        f"{results['class_names_from']}), {n_prompts} prompts a class",
        [
            ("Accuracy", [NOTES, *results["notes"], *results["notices"], filter_table(results)]),
            ("Accuracy against K", [k_figures(results)]),
            ("Uncertainty against accuracy", [figures, runner.ABOUT_U if figures else ""]),
            ("Calibration, and refusing uncertain images", [calibration, text]),
            *(
                (f"{title} prompts", [[class_card(c, task, e, results) for c in group]])
                for title, group in groups.items()
            ),
        ],
    )


def filter_table(results: dict) -> Table:
    """Accuracy under every filter."""
    rows = []
    for row in results["rows"]:
        k = "soft" if row["k"] is None else f"mean {row['k']:.1f}" if row["k_varies"] else str(int(row["k"]))
        gain = plus_minus({"value": row["gain"], "se": row["gain_se"]}, signed=True) if row["filter"] != "all" else ""
        rows.append([
            row["title"], k, plus_minus({"value": row["top1"], "se": row["top1_se"]}),
            "–".join(f"{100 * end:.1f}" for end in row["intervals"].get("top1", ())),
            percent(row["mean_per_class_recall"]), percent(row["top5"]), Cell(gain, direction(row)),
            Cell(row["note"], next(kind for kind in filters.KINDS if row["note"].startswith(kind))),
        ])  # fmt: skip
    title = f"zero-shot accuracy, {results['images']:,} images, {results['classes']:,} classes"
    return Table(("filter", "K", "top-1 %", "95 %", "per class", "top-5 %", "gain ± SE", "chosen on"), rows, title)


def direction(row: dict) -> str:
    """ "up" or "down" for a gain beyond SIGNIFICANT standard errors, "" for one that may be chance."""
    if row["gain_se"] is None or abs(row["gain"]) <= SIGNIFICANT * row["gain_se"]:
        return ""
    return "up" if row["gain"] > 0 else "down"


def k_figures(results: dict) -> list[Figure]:
    """Accuracy against a common K, with the best K marked: an oracle; and the oracle K of each class."""
    if results["curve"] is None:
        return []
    ys = [100 * y for y in results["curve"]["top1"]]
    best = max(i for i, y in enumerate(ys) if y >= max(ys) - 1e-9)
    chart = Chart("top-1-over-k", x_label="K, prompts kept in each class", y_label="top-1 accuracy, %")
    chart.line(range(1, len(ys) + 1), ys).level(ys[-1], f"all {ys[-1]:.2f}", GREEN)
    figures = [Figure(chart.mark(best + 1, ys[best], f"K = {best + 1}: {ys[best]:.2f}, oracle"))]
    classes = results["per_class"]
    if classes[0]["oracle_k"] is not None:
        chosen = [row["oracle_k"] for row in classes if row["images"] and row["oracle_top1_max_over_k"]]
        counts = [chosen.count(k) for k in range(1, len(ys) + 1)]
        chart = Chart("oracle-k-of-classes", x_label="oracle K, prompts kept", y_label="classes")
        note = f"The best K on a class's own images; {len(classes) - len(chosen):,} classes are never right."
        figures.append(Figure(chart.bars(counts, "classes"), "Oracle K of each class", note))
    return figures


def class_card(c: int, task: Task, e: filters.Evaluation, results: dict) -> Card:
    """A class with its images, green where all prompts classify them right, and its prompts, red if dropped."""
    row, u = results["per_class"][c], e.u[c].cpu()
    of = "best-topk" if "best-topk" in e.kept else next(iter(e.kept), None)
    n_kept = int(e.kept[of][0][c]) if of else len(u)
    texts = prompt_texts([row["name"]], task.data.templates)
    lines = [
        Cell(f"{texts[p]} (u = {number(float(u[p]))})", "right" if place < n_kept else "wrong")
        for place, p in enumerate(u.argsort(stable=True).tolist())
    ]
    places, pictures = (e.images.labels == c).nonzero().flatten().tolist(), []
    for place in places[:: max(1, len(places) // IMAGES_A_CLASS)][:IMAGES_A_CLASS]:
        right = verdict(e.all.ranks[place] < 1)
        pictures += picture_of(task.data.images, place, f"{e.images.names[place]}: {right}", right)
    many = f"; {of} keeps {n_kept} of {len(lines)} prompts ({e.kept[of][1]})" if of else ""
    about = f"{row['images']:,} images, all prompts {percent(row['top1_all'])} %{many}"
    return Card(row["name"], pictures, [Cell(about)], lines)


def summarise(found: Sequence[tuple[str, dict]]) -> tuple[dict, Table]:
    """{"data": one entry for each data set, "mean": over data sets, each counting once}, and the table of both."""
    data = [
        {"name": name, "data": one["config"]["data"], **{key: one[key] for key in ("images", "classes", "rows")}}
        for name, one in found
    ]
    titles = {"top1": "mean", "mean_per_class_recall": "per class", "top5": "mean top-5", "gain": "gain over all"}
    means = [
        {"filter": several[0]["filter"], "note": several[0]["note"]}
        | {key: sum(row[key] for row in several) / len(data) for key in titles}
        for several in zip(*(one["rows"] for one in data))
    ]
    rows: list = [
        [one["name"], f"{one['images']:,}", f"{one['classes']:,}",
         *(Cell(percent(row["top1"]), direction(row)) for row in one["rows"])]
        for one in data
    ]  # fmt: skip
    rows += [(), *([title, "", "", *(percent(row[key]) for row in means)] for key, title in titles.items())]
    headings = ("data", "images", "classes", *(f"{row['filter']}, {row['note']}" for row in means))
    return {"data": data, "mean": {"rows": means}}, Table(headings, rows, "top-1 in percent")
