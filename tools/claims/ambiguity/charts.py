"""Plots of the study of the variance."""

from __future__ import annotations

from probemb.reports.figures import BLUE, GREY, ORANGE, Chart
from tools.claims.ambiguity.findings import CLOSELY, NAMES, WAYS
from tools.claims.verdicts import Found, value

COLOURS = dict(zip(CLOSELY, (GREY, BLUE, ORANGE)))


def charts(found: Found, claims: list[dict]) -> list[list[Chart]]:
    """The plots of every claim; the third alone has some."""
    return [[_curve(found, way) for way in WAYS] if i == 2 else [] for i in range(len(claims))]


def _curve(found: Found, way: str) -> Chart:
    """mAP@R of one direction against the weight of the gallery's u."""
    chart = Chart(f"tolerance-{way}", x_label="λ, weight of the gallery's u", y_label=f"mAP@R {WAYS[way]}, %")
    for name in CLOSELY:
        curves = [one["curve"] for one in found.all(name)]
        values = [value(column) for column in zip(*(curve[way] for curve in curves))]
        spread = None if values[0].spread is None else [100 * one.spread for one in values]
        chart.line(
            curves[0]["lambda"], [100 * one.mean for one in values], NAMES[name], COLOURS[name], spread=spread
        )  # fmt: skip
    return chart
