"""The page of `tools.claims`: a table, plots and verdicts for every claim."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from probemb.files import replace_text
from probemb.reports.charts import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    Cloud,
    Curve,
    Level,
    curves_chart,
    escape,
    line_chart,
    scatter_chart,
)
from probemb.reports.page import html_page
from tools.claims.findings import FAILS, HOLDS, MAP, NAMES, PARTS, Found, retrieval

COLOURS = dict(zip(NAMES, (GREY, ORANGE, GREEN, BLUE)))
PART_COLOURS = dict(zip(PARTS, (BLUE, ORANGE, GREEN, "#7a4fa3", GREY, "#1f2733")))
STYLE = (
    "ul.verdicts{list-style:none;padding:0;margin:12px 0}ul.verdicts li{padding:3px 0;font-size:.92rem}"
    ".pair>div{max-width:520px}.numbers th:last-child,.numbers td:last-child{text-align:right}"
)


def report(path: Path, claims: Sequence[dict], found: Found, told: str, generator: str) -> None:
    """Write the page; `told` says what was trained."""
    charts = (_methods(found), _noise(found), _distance(found), _uncertainty(found), _parts(found), _prompts(found))
    body = f'<h1>The main claims in miniature</h1><p class="lead">{escape(told)}</p>{_summary(claims)}'
    body += "".join(_section(claim, drawn) for claim, drawn in zip(claims, charts))
    body += (
        "<section><h2>How to read this</h2><p>Numbers are means over the seeds ± their standard deviation. A "
        "comparison holds if the difference of two means is larger than the spread, the standard deviation over the "
        "seeds of the difference within a seed; it does not hold if the difference is as large the other way round; "
        "else it is within the spread. All methods of a seed start from the same pretraining and see the same scenes "
        "in the same order. Nothing was chosen on the test scenes but what is called oracle.</p></section>"
    )
    replace_text(path, html_page("The main claims in miniature", body, generator, STYLE))


def _badge(word: str) -> str:
    kind = {HOLDS: " honest", FAILS: " oracle"}.get(word, "")
    return f'<span class="badge{kind}">{escape(word)}</span>'


def _summary(claims: Sequence[dict]) -> str:
    rows = ""
    for claim in claims:
        words = [one["verdict"] for one in claim["comparisons"]]
        counts = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
        rows += f"<tr><td>{escape(claim['title'])}</td><td>{len(words)}</td><td>{escape(counts)}</td></tr>"
    head = "<tr><th>claim</th><th>comparisons</th><th>what came out</th></tr>"
    return f'<section><div class="scroll"><table>{head}{rows}</table></div></section>'


def _section(claim: dict, charts: list[str]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in claim["head"])
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in claim["rows"])
    verdicts = "".join(
        f"<li>{_badge(one['verdict'])} {escape(one['what'])}: {escape(one['text'])}</li>"
        for one in claim["comparisons"]
    )
    notes = "".join(f'<p class="fine">{escape(note)}</p>' for note in claim["notes"])
    kind = "" if claim["head"][-1] == "K chosen" else "numbers"
    drawn = "".join(f'<div class="scroll">{chart}</div>' for chart in charts)
    return (
        f"<section><h2>{escape(claim['title'])}</h2><p>Claim: {escape(claim['claim'])}</p>"
        f'<div class="scroll"><table class="{kind}"><tr>{head}</tr>{rows}</table></div>'
        f'<ul class="verdicts">{verdicts}</ul>'
        f'<div class="pair">{drawn}</div>{notes}</section>'
    )


def _clouds(found: Found, variants: dict[str, str], colours: dict[str, str], metric: str) -> str:
    """Every seed as a point: image to text across, text to image upwards."""
    across, up = retrieval("i2t", metric), retrieval("t2i", metric)
    clouds = [
        Cloud(
            title,
            [(100 * across(one), 100 * up(one), 6, f"{title}, seed {i}") for i, one in enumerate(found.all(name))],
            colours[name],
        )
        for name, title in variants.items()
    ]
    label = {"map_at_r": "mAP@R", "r@1": "R@1"}[metric]
    return scatter_chart(clouds, x_label=f"{label} image to text, % (a point is a seed)", y_label="text to image")


def _methods(found: Found) -> list[str]:
    return [_clouds(found, NAMES, COLOURS, metric) for metric in ("map_at_r", "r@1")]


def _noise(found: Found) -> list[str]:
    forms = ("{}", "{} noise 20%", "{} noise 50%")
    curves = [
        Curve(title, (0, 20, 50), [100 * found.of(form.format(name), MAP).mean for form in forms], COLOURS[name])
        for name, title in NAMES.items()
    ]
    return [curves_chart(curves, x_label="captions at wrong images, %", y_label="mAP@R, %")]


def _distance(found: Found) -> list[str]:
    variants = {"csd": "CSD", "wasserstein2": "W2"}
    charts = [_clouds(found, variants, {"csd": BLUE, "wasserstein2": ORANGE}, "map_at_r")]
    return [*charts, _ambiguity(found, variants, {"csd": BLUE, "wasserstein2": ORANGE})]


def _ambiguity(found: Found, variants: dict[str, str], colours: dict[str, str]) -> str:
    """True ambiguity of the captions in every bin, mean over the seeds."""
    curves = []
    for name, title in variants.items():
        bins = [one["uncertainty"]["ambiguity"] for one in found.all(name)]
        ys = [_mean(column) for column in zip(*(one["accuracy"] for one in bins))]
        curves.append(Curve(title, list(range(1, len(ys) + 1)), [100 * y for y in ys], colours[name]))
    return curves_chart(curves, x_label="captions in bins, from certain to uncertain", y_label="true ambiguity, %")


def _uncertainty(found: Found) -> list[str]:
    names = {"captions r@1 own": "own image", "captions r@1 exact": "all true", "captions map_at_r exact": "mAP@R, all"}
    curves = []
    for (key, title), colour in zip(names.items(), (ORANGE, BLUE, GREEN)):
        bins = [one["uncertainty"][key]["accuracy"] for one in found.all("pcmepp")]
        ys = [100 * _mean(column) for column in zip(*bins)]
        curves.append(Curve(title, list(range(1, len(ys) + 1)), ys, colour))
    recall = curves_chart(curves, x_label="captions in bins, from certain to uncertain", y_label="R@1 or mAP@R, %")
    variants = {"pcmepp": "PCME++", "pcme": "PCME"}
    return [_ambiguity(found, variants, COLOURS), recall]


def _parts(found: Found) -> list[str]:
    short = {"pcmepp": "full", "without PP": "no PP", "without MSDA": "no MSDA", "without VIB": "no VIB"}
    return [_clouds(found, short, PART_COLOURS, "map_at_r")]


def _prompts(found: Found) -> list[str]:
    curves = [one["prompts"]["curve"] for one in found.all("pcmepp")]
    ys = [100 * _mean(column) for column in zip(*curves)]
    levels = [Level(ys[-1], f"all: {ys[-1]:.1f}")]
    ks = list(range(1, len(ys) + 1))
    return [line_chart(ks, ys, x_label="K most certain prompts of every class", y_label="top-1, %", levels=levels)]


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)
