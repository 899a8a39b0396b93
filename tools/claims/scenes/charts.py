"""Plots of the claims on scenes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from probemb.reports.figures import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, Chart
from tools.claims.scenes.findings import MAP, NAMES, PARTS, retrieval
from tools.claims.verdicts import Found

COLOURS = dict(zip(NAMES, (GREY, ORANGE, GREEN, BLUE)))
PART_COLOURS = dict(zip(PARTS, (BLUE, ORANGE, GREEN, PURPLE, GREY, INK)))
DISTANCES, DISTANCE_COLOURS = {"csd": "CSD", "wasserstein2": "W2"}, {"csd": BLUE, "wasserstein2": ORANGE}
CERTAIN = "bins of captions, from certain to uncertain"


def charts(found: Found) -> list[list[Chart]]:
    """The plots of each of the six claims."""
    return [_methods(found), _noise(found), _distance(found), _uncertainty(found), _parts(found), _prompts(found)]


def _seeds(name: str, found: Found, variants: dict[str, str], colours: dict[str, str], metric: str) -> Chart:
    """Every seed as a point: image to text across, text to image upwards."""
    label = {"map_at_r": "mAP@R", "r@1": "R@1"}[metric]
    across, up = retrieval("i2t", metric), retrieval("t2i", metric)
    chart = Chart(name, x_label=f"{label} image to text, % (a point is a seed)", y_label=f"{label} text to image, %")
    for (key, title), marker in zip(variants.items(), "osD^"):
        points = [(100 * across(o), 100 * up(o), 4, f"{title}, seed {i}") for i, o in enumerate(found.all(key))]
        chart.cloud(points, title, colours[key], marker)
    return chart


def _means(found: Found, variant: str, get: Callable[[dict], Sequence[float]]) -> tuple[range, list[float]]:
    """1, 2, ... and the means over the seeds, in percent, of what `get` finds at each."""
    columns = list(zip(*(get(one) for one in found.all(variant))))
    return range(1, len(columns) + 1), [100 * sum(column) / len(column) for column in columns]


def _methods(found: Found) -> list[Chart]:
    metrics = {"methods-map": "map_at_r", "methods-r1": "r@1"}
    return [_seeds(name, found, NAMES, COLOURS, metric) for name, metric in metrics.items()]


def _noise(found: Found) -> list[Chart]:
    chart = Chart("noise", x_label="captions at wrong images, %", y_label="mAP@R, %")
    for i, (name, title) in enumerate(NAMES.items()):
        values = [found.of(form.format(name), MAP) for form in ("{}", "{} noise 20%", "{} noise 50%")]
        spread = None if values[0].spread is None else [100 * one.spread for one in values]
        xs = [x + 0.6 * (i - 1.5) for x in (0, 20, 50)]  # error bars side by side
        notes = [f"{title}, {x} %: {one.text()}" for x, one in zip((0, 20, 50), values)]
        chart.line(xs, [100 * one.mean for one in values], title, COLOURS[name], spread=spread, notes=notes)
    return [chart]


def _distance(found: Found) -> list[Chart]:
    return [
        _seeds("distance", found, DISTANCES, DISTANCE_COLOURS, "map_at_r"),
        _ambiguity("distance-ambiguity", found, DISTANCES, DISTANCE_COLOURS),
    ]


def _ambiguity(name: str, found: Found, variants: dict[str, str], colours: dict[str, str]) -> Chart:
    chart = Chart(name, x_label=CERTAIN, y_label="true ambiguity, %")
    for key, title in variants.items():
        chart.line(*_means(found, key, lambda one: one["uncertainty"]["ambiguity"]["accuracy"]), title, colours[key])
    return chart


def _uncertainty(found: Found) -> list[Chart]:
    names = {"captions r@1 own": "own image", "captions r@1 exact": "all true", "captions map_at_r exact": "mAP@R, all"}
    chart = Chart("uncertainty-recall", x_label=CERTAIN, y_label="R@1 or mAP@R, %")
    for (key, title), colour in zip(names.items(), (ORANGE, BLUE, GREEN)):
        chart.line(*_means(found, "pcmepp", lambda one: one["uncertainty"][key]["accuracy"]), title, colour)  # noqa: B023
    return [_ambiguity("uncertainty-ambiguity", found, {"pcmepp": "PCME++", "pcme": "PCME"}, COLOURS), chart]


def _parts(found: Found) -> list[Chart]:
    short = {"pcmepp": "full", "without PP": "no PP", "without MSDA": "no MSDA", "without VIB": "no VIB"}
    return [_seeds("parts", found, short, PART_COLOURS, "map_at_r")]


def _prompts(found: Found) -> list[Chart]:
    chart = Chart("prompts", x_label="K most certain prompts of every class", y_label="top-1, %")
    ks, ys = _means(found, "pcmepp", lambda one: one["prompts"]["curve"])
    return [chart.line(ks, ys).level(ys[-1], f"all: {ys[-1]:.1f}")]
