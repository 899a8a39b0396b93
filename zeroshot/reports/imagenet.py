"""The page of `zeroshot.imagenet`: accuracy, curves over K, uncertainty, and prompts of some classes with images."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import TYPE_CHECKING

from probemb.data.failures import BadSample
from probemb.data.labelled.prompts import count_prompts, prompt_texts
from probemb.reports.figures import BLUE, GREEN, GREY, ORANGE, Chart
from probemb.reports.pages import thumbnail, write_page
from probemb.reports.text import percent
from zeroshot.config import GENERATOR
from zeroshot.filtering.rows import SIGNIFICANT

if TYPE_CHECKING:
    from torch import Tensor

    from probemb.data.labelled.classes import Classes
    from probemb.data.labelled.images import LabelledImages
    from probemb.data.labelled.prompts import Templates
    from zeroshot.filtering.outcome import Outcome
    from zeroshot.filtering.rows import Evaluation

IMAGES_A_CLASS = 6
CLASSES_A_GROUP = 3
TILES = {  # (filter, what K was chosen on) -> title; the first four that were evaluated
    ("single", ""): "single prompt",
    ("all", ""): "all prompts",
    ("best-topk", "few-shot"): "best-topk, few-shot",
    ("topk", "few-shot"): "topk, few-shot",
    ("best-topk", "oracle"): "best-topk, oracle",
    ("topk", "oracle"): "topk, oracle",
}


def write_report(
    file: Path,
    results: dict,
    outcome: Outcome,
    images: LabelledImages,
    classes: Classes,
    templates: Templates,
) -> None:
    """Write the page; `results` is what results.json holds."""
    e = outcome.evaluation
    groups = [
        (title, [_card(c, outcome, images, classes, templates) for c in group]) for title, group in pick_classes(e)
    ]
    write_page(
        file, Path(__file__).with_name("imagenet.html"), GENERATOR, results=results, config=results["config"],
        n_classes=len(classes), n_prompts=count_prompts(templates), n_bad=len(outcome.bad), rows=e.rows, kind=_kind,
        significant=SIGNIFICANT, tiles=_tiles(e, len(classes)), curves=_curves(e), chosen=_chosen(e),
        bins=_bins(results["uncertainty"]), groups=groups, has_kept=e.kept is not None, kept_by=e.kept_by,
        reliability=_reliability(results["calibration"]), selective=_selective(results["selective"]),
    )  # fmt: skip


def _kind(note: str) -> str:
    return next((kind for kind in ("oracle", "few-shot") if note.startswith(kind)), "")


def _tiles(e: Evaluation, n_classes: int) -> list[tuple[str, str, str]]:
    rows = {(row.filter, _kind(row.note)): row for row in reversed(e.rows) if "bound" not in row.note}
    tiles = [(percent(rows[key].top1), title, "top-1 %") for key, title in TILES.items() if key in rows][:4]
    return [*tiles, (percent(1 / n_classes), "chance", "top-1 %")]


def _curves(e: Evaluation) -> list[Chart]:
    """Accuracy against a common K, with the best K marked: an oracle."""
    if e.curve1 is None:
        return []
    single = next((row for row in e.rows if row.filter == "single"), None)
    charts = []
    for metric, curve, attribute in (("top-1", e.curve1, "top1"), ("top-5", e.curve5, "top5")):
        ys = [100 * float(y) for y in curve]
        best = max(i for i, y in enumerate(ys) if y >= max(ys) - 1e-9)
        chart = Chart(f"{metric}-over-k", x_label="K, prompts kept in each class", y_label=f"{metric} accuracy, %")
        chart.line(range(1, len(ys) + 1), ys).level(ys[-1], f"all {ys[-1]:.2f}", GREEN)
        if single is not None:
            chart.level(100 * getattr(single, attribute), f"single {percent(getattr(single, attribute))}")
        charts.append(chart.mark(best + 1, ys[best], f"K = {best + 1}: {ys[best]:.2f}, oracle"))
    return charts


def _chosen(e: Evaluation) -> dict | None:
    """Number of classes that are classified best at each K: an oracle."""
    if e.oracle_k is None:
        return None
    hopeless = (e.oracle_max_over_k == 0) | (e.counts == 0)
    chosen, n_prompts = e.oracle_k[~hopeless], e.uncertainty.shape[1]
    counts = [int((chosen == k).sum()) for k in range(1, n_prompts + 1)]
    return {
        "chart": Chart("oracle-k-of-classes", x_label="oracle K, prompts kept", y_label="classes").bars(
            counts, "classes"
        ),
        "classes": len(chosen),
        "hopeless": int(hopeless.sum()),
        "all": counts[-1],
        "half": sum(counts[: n_prompts // 2]),
    }


def _bins(uncertainty: dict) -> list[tuple[str, Chart, dict]]:
    found = []
    for things, title, x_label in (
        ("classes", "Classes, by the mean uncertainty of their prompts", "mean uncertainty of the prompts"),
        ("images", "Images, by their own uncertainty", "uncertainty of the image"),
    ):
        if bins := uncertainty[things]:
            chart = Chart(f"accuracy-of-{things}", x_label=x_label, y_label="top-1 accuracy, %")
            found.append((title, chart.bins(bins, things), bins))
    return found


def _reliability(calibration: dict | None) -> Chart | None:
    """Accuracy against confidence; calibrated where it lies on the diagonal."""
    if calibration is None:
        return None
    xs, ys = ([100 * x for x in calibration[key]] for key in ("predicted", "observed"))
    chart = Chart("reliability", x_label="confidence, %", y_label="top-1 accuracy, %")
    errors = [100 * math.sqrt(y * (1 - y) / n) for y, n in zip(calibration["observed"], calibration["counts"])]
    notes = [
        f"{n:,} images, confidence {x:.1f} %: accuracy {y:.1f} ± {se:.1f} %"
        for x, y, se, n in zip(xs, ys, errors, calibration["counts"])
    ]
    chart.line([0, 100], [0, 100], "calibrated", GREY, dashed=True)
    return chart.line(xs, ys, points=True, spread=errors, notes=notes)


def _selective(selective: dict) -> Chart | None:
    """Accuracy of the images that are answered when the most doubtful ones are refused; None without any score."""
    if not selective:
        return None
    chart = Chart("selective", x_label="most doubtful images refused, %", y_label="top-1 of the others, %")
    for (name, curve), colour in zip(selective.items(), (BLUE, ORANGE)):
        chart.line([100 * x for x in curve["refused"]], [100 * y for y in curve["score"]], name, colour)
    return chart.level(100 * curve["random"], "at random")


def pick_classes(e: Evaluation, size: int = CLASSES_A_GROUP) -> list[tuple[str, list[int]]]:
    """Disjoint groups of classes to show: by gain if K was chosen per class, else by uncertainty; and at random."""
    with_images = [c for c in range(len(e.counts)) if e.counts[c] > 0]
    if e.oracle_best_topk is not None:
        score = (e.oracle_best_topk - e.class_all).tolist()
        titles = ("Gained most from their own oracle K", "Gained least from it, or lost", "At random")
    else:
        score = e.uncertainty.mean(dim=1).tolist()
        titles = ("Most uncertain", "Most certain", "At random")
    down = sorted(with_images, key=lambda c: (-score[c], c))
    most = down[:size]
    least = [c for c in reversed(down) if c not in most][:size]
    rest = [c for c in with_images if c not in most and c not in least]
    some = sorted(random.Random(0).sample(rest, min(size, len(rest))))
    return [(title, group) for title, group in zip(titles, (most, least, some)) if group]


def _card(c: int, outcome: Outcome, images: LabelledImages, classes: Classes, templates: Templates) -> dict:
    """A class with its images and its prompts, from certain to uncertain."""
    e, name = outcome.evaluation, classes.names[c]
    u, kept = e.uncertainty[c], None if e.kept is None else int(e.kept[c])
    low, high = float(u.min()), float(u.max())
    texts = prompt_texts([name], templates)
    prompts = [
        {"text": texts[p], "u": u_p, "share": 8 + 92 * (u_p - low) / ((high - low) or 1)}
        for p, u_p in zip(e.order[c].tolist(), u[e.order[c]].tolist())
    ]
    return {
        "name": name,
        "images": int(e.counts[c]),
        "all": float(e.class_all[c]),
        "oracle": None if e.oracle_best_topk is None else float(e.oracle_best_topk[c]),
        "pictures": _pictures((outcome.labels == c).nonzero().flatten(), outcome, images),
        "kept": prompts[:kept],
        "dropped": [] if kept is None else prompts[kept:],
    }


def _pictures(mine: Tensor, outcome: Outcome, images: LabelledImages) -> list[dict]:
    shown = []
    for i in mine.tolist()[:: max(1, len(mine) // IMAGES_A_CLASS)][:IMAGES_A_CLASS]:
        try:
            source = thumbnail(images.open(outcome.places[i]))
        except BadSample:  # the file has changed
            continue
        verdict = "right" if bool(outcome.evaluation.correct[i]) else "wrong"
        shown.append({"src": source, "note": f"{images.places[outcome.places[i]].name}: {verdict}", "kind": verdict})
    return shown
