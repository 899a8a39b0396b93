"""The tables and the page of `zeroshot.set_algebra`."""

from __future__ import annotations

from pathlib import Path

from probemb.reports.figures import BLUE, GREEN, ORANGE, PURPLE, Chart
from probemb.reports.pages import write_page
from probemb.reports.text import number

MIXED = {
    "covers": "covers its own",
    "covers_other": "covers another's",
    "between": "lies between",
    "own_is_closest": "own is closest",
    "wider": "wider",
}
ERASED = {
    "sigma": "σ",
    "wider": "wider",
    "lies_in": "whole lies in it",
    "covers": "covers the whole",
    "covered": "is covered by it",
    "covers_other": "covers another",
}
WHAT = {
    "pixels": "Images, a grey square over them",
    "regions": "Images, regions left out",
    "words": "Captions, words left out",
}
SHAPES = {"first": BLUE, "second": ORANGE, "mixed": GREEN, "erased": PURPLE}


def print_tables(results: dict) -> None:
    """Mixing, erasing and nested captions, in percent but for σ."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    table = Table(title=f"mixed images against the intersection of both, {results['inputs']} pairs, percent")
    for heading in ("mixed by", *MIXED.values()):
        table.add_column(heading, justify="left" if heading == "mixed by" else "right")
    for name, row in results["mixing"].items():
        table.add_row(name, *(cell(row, key) for key in MIXED))
    console.print(table)
    for what, rows in results["erasing"].items():
        table = Table(title=f"erased {what}, percent; σ of the whole: {number(results['whole'][what])}")
        for heading in ("erased", *ERASED.values()):
            table.add_column(heading, justify="right")
        for row in rows:
            table.add_row(f"{row['share']:.0%}", *(cell(row, key) for key in ERASED))
        console.print(table)
    if one := results["nested"]:
        print(
            f"{one['pairs']:,} pairs of nested captions: the smaller set lies in the larger for {one['lies_in']:.1%}, "
            f"the larger has the larger σ for {one['wider']:.1%} (50 % by chance)"
        )


def cell(row: dict, key: str) -> str:
    """A mean with its standard error, in percent; of σ its value."""
    if key == "sigma":
        return number(row[key])
    se = row[f"{key}_se"]
    return f"{100 * row[key]:.1f}" + ("" if se is None else f" ± {100 * se:.1f}")


def write_report(file: Path, results: dict, generator: str) -> None:
    """Write the page."""
    charts = [
        (WHAT[what], draw_sigma(what, results), draw_coverage(what, rows)) for what, rows in results["erasing"].items()
    ]
    write_page(
        file, Path(__file__).with_name("set_algebra.html"), generator, results=results, config=results["config"],
        mixed=MIXED, erased=ERASED, what=WHAT, cell=cell, charts=charts,
        examples=[(one, draw_example(i, one)) for i, one in enumerate(results["examples"])],
    )  # fmt: skip


def draw_sigma(what: str, results: dict) -> Chart:
    """σ against the share that is erased (PCME Fig. 7)."""
    rows = results["erasing"][what]
    chart = Chart(f"sigma-{what}", x_label=f"erased {what}, %", y_label="geometric mean of σ")
    xs = [0.0, *(100 * row["share"] for row in rows)]
    return chart.line(xs, [results["whole"][what], *(row["sigma"] for row in rows)], points=True)


def draw_coverage(what: str, rows: list[dict]) -> Chart:
    """Coverage of the whole by the erased, the reverse, and of another item."""
    chart = Chart(f"coverage-{what}", x_label=f"erased {what}, %", y_label="mass that is covered, %")
    xs = [100 * row["share"] for row in rows]
    for key, name, colour in (
        ("covers", "whole, by the erased", BLUE), ("covered", "erased, by the whole", ORANGE),
        ("covers_other", "another, by the erased", GREEN),
    ):  # fmt: skip
        chart.line(xs, [100 * row[key] for row in rows], name, colour, points=True)
    return chart


def draw_example(i: int, one: dict) -> Chart:
    """Two images, their mix, and the first one with a part erased, as ellipses of 50 %."""
    chart = Chart(f"example-{i + 1}", x_label="first direction", y_label="second direction")
    for name, colour in SHAPES.items():
        shape = one[name]
        row = (*shape["centre"], *shape["radii"], shape["angle"], name)
        chart.ellipses([row], name, colour, dashed=name in ("mixed", "erased"))
    return chart
