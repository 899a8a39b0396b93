"""Plots of the claims on photographs."""

from __future__ import annotations

from probemb.reports.figures import BLUE, GOLD, GREEN, GREY, INK, ORANGE, PURPLE, Chart
from tools.claims.flickr8k.findings import LEVELS, NAMES, PARTS, PROBABILISTIC, SHORT, own, own_rsum
from tools.claims.verdicts import Found

COLOURS = dict(zip(NAMES, (GREY, ORANGE, GREEN, BLUE, GOLD, PURPLE, INK), strict=True))
MARKERS = "osD^vPX"


def charts(found: Found, claims: list[dict]) -> list[list[Chart]]:
    """The plots of every claim; some have none."""
    first = [_methods(found), _parts(found), _noise(found), _refusal(found)]
    return first + [[] for _ in claims[len(first) :]]


def _points(found: Found, name: str, variants: dict[str, str], colours: dict[str, str]) -> Chart:
    """Every seed as a point: R@1 image to text across, text to image upwards."""
    chart = Chart(name, x_label="R@1 image to text, % (a point is a seed)", y_label="R@1 text to image, %")
    for (key, title), marker in zip(variants.items(), MARKERS):
        scores = [one["retrieval"][own(key)] for one in found.all(key)]
        points = [
            (100 * one["i2t"]["r@1"], 100 * one["t2i"]["r@1"], 4, f"{title}, seed {i}") for i, one in enumerate(scores)
        ]
        chart.cloud(points, title, colours[key], marker)
    return chart


def _methods(found: Found) -> list[Chart]:
    return [_points(found, "methods", NAMES, COLOURS), _curves(found)]


def _curves(found: Found) -> Chart:
    chart = Chart("validation", x_label="epoch", y_label="validation RSUM, mean of the seeds")
    for name, title in NAMES.items():
        columns = list(zip(*(one["validation"] for one in found.all(name))))
        means = [sum(column) / len(column) for column in columns]
        chart.line(list(range(1, len(means) + 1)), means, title, COLOURS[name])
    return chart


def _parts(found: Found) -> list[Chart]:
    colours = dict(zip(PARTS, (BLUE, ORANGE, GREEN, PURPLE, INK)))
    return [_points(found, "parts", PARTS, colours)]


def _noise(found: Found) -> list[Chart]:
    chart = Chart("noise", x_label="captions at wrong images, %", y_label="RSUM")
    for i, (name, title) in enumerate(SHORT.items()):
        shares = [(x, form.format(name)) for x, (_, form) in zip((0, 20, 50), LEVELS) if found.has(form.format(name))]
        values = [own_rsum(found, variant) for _, variant in shares]
        spread = None if values[0].spread is None else [one.spread for one in values]
        xs = [x + 0.6 * (i - 2) for x, _ in shares]  # error bars side by side
        notes = [f"{title}, {x} %: {one.text(1)}" for (x, _), one in zip(shares, values)]
        colour = (GREY, BLUE, INK, ORANGE, GREEN)[i]
        chart.line(xs, [one.mean for one in values], title, colour, spread=spread, notes=notes)
    return [chart]


def _refusal(found: Found) -> list[Chart]:
    chart = Chart("refusal", x_label="R@1 text to image of all captions, %", y_label="of the certain half, %")
    for (name, title), marker in zip(PROBABILISTIC.items(), MARKERS):
        halves = [one["refusal"]["csd"]["captions"] for one in found.all(name)]
        points = [(100 * one["all"], 100 * one["certain"], 4, f"{title}, seed {i}") for i, one in enumerate(halves)]
        chart.cloud(points, title, COLOURS[name], marker)
    return [chart]
