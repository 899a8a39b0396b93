"""The report: one HTML page that needs nothing beside it. Charts are inline SVG, images small JPEGs inside the page.

Names of classes, files and models are text of unknown origin: everything goes through `escape`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from probemb.data.failures import BadSample
from probemb.files import replace_text
from probemb.reports.charts import GREEN, GREY, Level, bar_chart, escape, line_chart, number
from probemb.reports.page import correlation, html_page, percent, thumbnail
from zeroshot.config import GENERATOR
from zeroshot.evaluation import SIGNIFICANT

if TYPE_CHECKING:
    from probemb.data.labelled.classes import Classes
    from probemb.data.labelled.images import LabelledImages
    from zeroshot.evaluation import Evaluation
    from zeroshot.outcome import Outcome

IMAGES_A_CLASS = 6
CLASSES_A_GROUP = 3
PROMPTS_SHOWN = 6

STYLE = """
.group{margin-top:18px}.group h2{font-size:1rem;background:#f0f3f6;border-radius:6px;padding:6px 12px}
.card{border-top:1px solid #e0e4e9;padding:16px 0 6px}.group h2+.card{border-top:0}
.head{display:flex;flex-wrap:wrap;gap:4px 14px;align-items:baseline}
.prompts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,330px),1fr));gap:2px 30px}
.prompts ul{list-style:none;margin:0;padding:0}
.prompts li{display:grid;grid-template-columns:1fr 64px 52px;gap:8px;align-items:center;font-size:.9rem;padding:1px 0}
.prompts li span{overflow-wrap:anywhere}.prompts li code{font:inherit;font-size:.84rem;color:#5d6875;text-align:right}
.meter{height:7px;border-radius:4px;background:#eceff3;overflow:hidden}.meter i{display:block;height:100%}
"""


def write_report(
    file: Path,
    results: dict,
    outcome: Outcome,
    images: LabelledImages,
    classes: Classes,
    templates: Sequence[str],
) -> None:
    """Write the page; `results` is what results.json holds."""
    replace_text(file, page(results, outcome, images, classes, templates))


def page(results: dict, outcome: Outcome, images: LabelledImages, classes: Classes, templates: Sequence[str]) -> str:
    """The whole page as HTML text."""
    e = outcome.evaluation
    config = results["config"]
    body = [
        "<h1>Zero-shot classification and prompt filtering</h1>",
        f'<p class="lead">{escape(config["model"])} on {escape(config["data"])}: {results["images"]:,} images, '
        f"{len(classes):,} classes, {len(templates)} prompts a class</p>",
        _tiles(e, len(classes)),
        _table(e, len(outcome.bad)),
        _curve(e),
        _histogram(e),
        _bins(results["uncertainty"]),
        _classes(outcome, images, classes, templates),
        _method(config),
    ]
    title = f"Zero-shot: {Path(str(config['model'])).name}"
    return html_page(title, "".join(body), GENERATOR, STYLE)


def _kind(note: str) -> str:
    return next((kind for kind in ("oracle", "honest") if note.startswith(kind)), "")


def _tiles(e: Evaluation, n_classes: int) -> str:
    rows = {(row.filter, _kind(row.note), "bound" in row.note): row for row in reversed(e.rows)}
    wanted = [
        (("single", "", False), "single prompt"),
        (("all", "", False), "all prompts"),
        (("best-topk", "honest", False), "best-topk, honest"),
        (("topk", "honest", False), "topk, honest"),
        (("best-topk", "oracle", False), "best-topk, oracle"),
        (("topk", "oracle", False), "topk, oracle"),
    ]
    tiles = [(percent(rows[key].top1), title) for key, title in wanted if key in rows][:4]
    tiles.append((percent(1 / n_classes), "chance"))
    return (
        '<div class="tiles">'
        + "".join(
            f'<div class="tile"><span>{title}</span><b>{value}</b><span>top-1 %</span></div>' for value, title in tiles
        )
        + "</div>"
    )


def _table(e: Evaluation, n_bad: int) -> str:
    body = "".join(
        f'<tr><td>{escape(row.title)}<span class="badge narrow {_kind(row.note)}">{escape(row.note)}</span></td>'
        f"<td>{row.k_text}</td><td>{percent(row.top1)}</td>"
        f"<td>{percent(row.top5)}</td>"
        f'<td><span class="{row.verdict}">{row.gain_text}</span></td>'
        f'<td><span class="badge {_kind(row.note)}">{escape(row.note)}</span></td></tr>'
        for row in e.rows
    )
    bad = f" {n_bad} images could not be read and are left out." if n_bad else ""
    return (
        '<section><h2>Accuracy</h2><p class="fine">In percent; gain over all prompts in points, with its '
        f"standard error (paired over images), coloured beyond {SIGNIFICANT} standard errors. <b>Oracle</b>: chosen "
        "on the very images that are scored, so not a zero-shot result. <b>Honest</b>: chosen on other images."
        f'{bad}</p><div class="scroll"><table><thead><tr><th>filter</th><th>K</th><th>top-1</th><th>top-5</th>'
        f"<th>gain</th><th>chosen on</th></tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def _curve(e: Evaluation) -> str:
    if e.curve1 is None:
        return ""
    single = next((row for row in e.rows if row.filter == "single"), None)
    charts = []
    for name, curve, attribute in (("top-1", e.curve1, "top1"), ("top-5", e.curve5, "top5")):
        ys = [100 * float(y) for y in curve]
        top = max(ys)
        best = max(i for i, y in enumerate(ys) if y >= top - 1e-9)
        levels = [Level(ys[-1], f"all {ys[-1]:.2f}", GREEN)]
        if single is not None:
            levels.append(
                Level(100 * getattr(single, attribute), f"single {percent(getattr(single, attribute))}", GREY)
            )
        chart = line_chart(
            list(range(1, len(ys) + 1)), ys, x_label="K, prompts kept in each class", y_label=f"{name} accuracy, %",
            levels=levels, mark=best, mark_label=f"K = {best + 1}: {ys[best]:.2f}",
        )  # fmt: skip
        charts.append(f'<div class="scroll">{chart}</div>')
    return (
        "<section><h2>Accuracy against K</h2><p>Every class keeps its K most certain prompts, with the same K. The "
        f'marked K is the best on these images, an oracle.</p><div class="pair">{"".join(charts)}</div></section>'
    )


def _histogram(e: Evaluation) -> str:
    if e.class_k is None:
        return ""
    hopeless = (e.class_max == 0) | (e.counts == 0)
    chosen = e.class_k[~hopeless]
    n_prompts = e.uncertainty.shape[1]
    counts = [int((chosen == k).sum()) for k in range(1, n_prompts + 1)]
    chart = bar_chart(counts, x_label="K, prompts kept", y_label="classes", what="classes")
    left_out = int(hopeless.sum())
    omitted = f" Left out: {left_out:,} never right, whatever K." if left_out else ""
    every, half = counts[-1] if counts else 0, sum(counts[: n_prompts // 2])
    return (
        '<section><h2>K chosen for each class</h2><div class="pair"><div class="scroll">'
        f"{chart}</div><div><p>For each class the K with the best accuracy on its own images, while all classes keep "
        f"K. An oracle; ties go to more prompts.</p><p><b>{every:,}</b> of {len(chosen):,} classes keep all "
        f"{n_prompts} prompts, <b>{half:,}</b> keep at most half.{omitted}</p></div></div></section>"
    )


def _bins(uncertainty: dict) -> str:
    charts = []
    for what, title, x_label in (
        ("classes", "Classes, by the mean uncertainty of their prompts", "mean uncertainty of the prompts"),
        ("images", "Images, by their own uncertainty", "uncertainty of the image"),
    ):
        bins = uncertainty[what]
        if not bins:
            continue
        ys = [100 * y for y in bins["accuracy"]]
        notes = [
            f"{count} {what}, mean uncertainty {number(x)}: {y:.2f} %"
            for count, x, y in zip(bins["counts"], bins["uncertainty"], ys)
        ]
        chart = line_chart(
            bins["uncertainty"], ys, x_label=x_label, y_label="top-1 accuracy, %", points=True, notes=notes
        )
        charts.append(
            f'<div><h4>{title}</h4><div class="scroll">{chart}</div><p class="fine">{correlation(bins)}</p></div>'
        )
    if not charts:
        return ""
    return (
        "<section><h2>Uncertainty against accuracy</h2><p>Bins of equal count, from certain to uncertain; accuracy "
        "with all prompts. Where uncertainty is informative, accuracy falls to the right.</p>"
        f'<div class="pair">{"".join(charts)}</div></section>'
    )


# ---------------------------------------------------------------------------------------------- single classes


def pick_classes(e: Evaluation, size: int = CLASSES_A_GROUP) -> list[tuple[str, list[int]]]:
    """Groups of classes to show, none twice: by gain where K was chosen per class, else by uncertainty; and some at
    random, always the same."""
    with_images = [c for c in range(len(e.counts)) if e.counts[c] > 0]
    if e.class_best is not None:
        score = (e.class_best - e.class_all).tolist()
        titles = ("Gained most from their own K", "Gained least, or lost", "At random")
    else:
        score = e.uncertainty.mean(dim=1).tolist()
        titles = ("Most uncertain", "Most certain", "At random")
    down = sorted(with_images, key=lambda c: (-score[c], c))
    most = down[:size]
    least = [c for c in reversed(down) if c not in most][:size]
    rest = [c for c in with_images if c not in most and c not in least]
    some = sorted(random.Random(0).sample(rest, min(size, len(rest))))
    return [(title, group) for title, group in zip(titles, (most, least, some)) if group]


def _classes(outcome: Outcome, images: LabelledImages, classes: Classes, templates: Sequence[str]) -> str:
    groups = "".join(
        f'<div class="group"><h2>{escape(title)}</h2>'
        + "".join(_card(c, outcome, images, classes, templates) for c in group)
        + "</div>"
        for title, group in pick_classes(outcome.evaluation)
    )
    return (
        "<section><h2>Kept and dropped prompts</h2><p>Prompts from certain to uncertain, with their uncertainty u (the "
        "sum of the variances). A green frame marks an image that all prompts together classify correctly, a red one "
        f"an image that they do not.</p>{groups}</section>"
    )


def _card(c: int, outcome: Outcome, images: LabelledImages, classes: Classes, templates: Sequence[str]) -> str:
    e = outcome.evaluation
    kept = int(e.kept[c])
    order, u = e.order[c].tolist(), e.uncertainty[c].tolist()
    low, high = min(u), max(u)

    def prompt(p: int, colour: str) -> str:
        share = 8 + 92 * (u[p] - low) / ((high - low) or 1)
        return (
            f"<li><span>{escape(templates[p].replace('{}', classes.names[c]))}</span>"
            f'<div class="meter"><i style="width:{share:.0f}%;background:{colour}"></i></div>'
            f"<code>{u[p]:#.4g}</code></li>"
        )

    keep = [prompt(p, "#4b9a6b") for p in order[:kept]]
    drop = [prompt(p, "#cf7a5f") for p in order[kept:]]
    n = int(e.counts[c])
    facts = [f"{n:,} image{'s' if n > 1 else ''}", f"all prompts {percent(float(e.class_all[c]))} %"]
    if e.class_best is not None:
        facts.append(f"with every class at its own K {percent(float(e.class_best[c]))} %")
    dropped_list = "".join(drop[-PROMPTS_SHOWN:]) if drop else '<li class="fine">none</li>'
    keep_title = f"Kept: {len(keep)} of {len(templates)}" + (" · the most certain" if len(keep) > PROMPTS_SHOWN else "")
    drop_title = f"Dropped: {len(drop)}" + (" · the most uncertain" if len(drop) > PROMPTS_SHOWN else "")
    everything = "".join([*keep, *drop])
    return (
        f'<div class="card"><div class="head"><h3>{escape(classes.names[c])}</h3><span class="fine">'
        f"{escape(', '.join(facts))}</span></div>{_thumbnails(c, outcome, images)}"
        f'<div class="prompts"><div><h4>{keep_title}</h4>'
        f"<ul>{''.join(keep[:PROMPTS_SHOWN])}</ul></div>"
        f"<div><h4>{drop_title}</h4><ul>{dropped_list}</ul></div></div>"
        f'<details><summary>All {len(templates)} prompts</summary><div class="prompts"><ul>{everything}</ul></div>'
        "</details></div>"
    )


def _thumbnails(c: int, outcome: Outcome, images: LabelledImages) -> str:
    mine = (outcome.labels == c).nonzero().flatten().tolist()
    step = max(1, len(mine) // IMAGES_A_CLASS)
    parts = []
    for i in mine[::step][:IMAGES_A_CLASS]:
        try:
            picture = images.open(outcome.places[i])
        except BadSample:  # readable a moment ago: the file has changed since
            continue
        verdict = "right" if bool(outcome.evaluation.correct[i]) else "wrong"
        told = f"{images.places[outcome.places[i]].name}: {verdict}"
        parts.append(thumbnail(picture, told, verdict))
    return f'<div class="thumbs">{"".join(parts)}</div>' if parts else ""


def _method(config: dict) -> str:
    return (
        "<section><h2>How this was computed</h2><p>A class vector is the mean of its kept prompts' means, at unit "
        "length; an image goes to the class with the largest cosine. u is the sum of a prompt's variances. "
        "<b>topk</b> keeps the K most certain prompts, one K for all classes. <b>best-topk</b> keeps for each class "
        "the K at which the images of that class were classified best while all classes kept K; its first row is the "
        "classifier in which each class has its own K, the row named upper bound scores each class while its rivals "
        "keep the same K, which no single classifier need reach. <b>weighted</b> is a softmax of the standardised "
        f"negative uncertainty (temperature {number(config['temperature'])}), <b>inverse-variance</b> weights by "
        "1/u.</p></section>"
    )
