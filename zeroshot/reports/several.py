"""The page of `zeroshot.imagenet` over several data sets: a row each, and their mean."""

from __future__ import annotations

from pathlib import Path

from probemb.reports.figures import BLUE, GREY, Chart
from probemb.reports.pages import write_page
from zeroshot.config import GENERATOR
from zeroshot.filtering.rows import Row


def write_report(file: Path, summary: dict) -> None:
    """Write the page; `summary` is what results.json holds."""
    data = [one | {"rows": [Row(**row) for row in one["rows"]]} for one in summary["data"]]
    base = next(q for q, row in enumerate(data[0]["rows"]) if row.filter == "all")
    write_page(
        file, Path(__file__).with_name("several.html"), GENERATOR, config=summary["config"], data=data,
        mean=summary["mean"], base=base, chart=_gains(data, summary["mean"], base),
    )  # fmt: skip


def _gains(data: list[dict], mean: dict, base: int) -> Chart | None:
    """Mean gain of every filter over `all`, one data set beside the other as points; None for fewer than two."""
    filters = [q for q in range(len(mean["rows"])) if q != base]
    if len(filters) < 2:
        return None
    chart = Chart("gains", x_label="filter, as numbered in the table", y_label="gain over all, points")
    points = [
        (n, 100 * one["rows"][q].gain, 3.0, f"{one['name']}, {mean['rows'][q]['filter']}: {one['rows'][q].gain_text}")
        for n, q in enumerate(filters, 1)
        for one in data
    ]
    chart.cloud(points, "data sets", GREY)
    means = [(n, 100 * mean["rows"][q]["gain"], mean["rows"][q]["filter"]) for n, q in enumerate(filters, 1)]
    diamonds = [(n, gain, 4.0, f"mean, {name}: {gain:+.2f}") for n, gain, name in means]
    return chart.cloud(diamonds, "mean", BLUE, "D").level(0, "all")
