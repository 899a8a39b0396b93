"""The table and the page of `zeroshot.ellipses`."""

from __future__ import annotations

from pathlib import Path

from probemb.reports.figures import PALETTE, RED, Chart
from probemb.reports.pages import write_page
from probemb.reports.text import number, printable

SIDES = {"images": "Images", "captions": "Captions"}


def print_table(results: dict) -> None:
    """One line a group."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    share = 100 * results["variance_in_plane"]
    table = Table(title=f"geometric mean of σ; {share:.0f} % of the means' variance lies in the plane")
    for heading in ("group", "images", "σ of images", "captions", "σ of captions"):
        table.add_column(heading, justify="left" if heading == "group" else "right")
    for row in groups(results):
        table.add_row(
            Text(printable(row["group"])[:40]),
            *(cell for side in SIDES for cell in (str(row[side]["n"]), row[side]["sigma"])),
        )
    Console().print(table)
    if one := results["generic"]:
        print(
            f"generic caption: σ {number(float(one['sigma'][0]))}, larger than {one['wider_than_captions']:.0%} of the "
            f"captions have; in its {one['level']:.0%} region lie {one['captions_inside']:.0%} of the captions' means "
            f"and {one['images_inside']:.0%} of the images'"
        )


def groups(results: dict) -> list[dict]:
    """Numbers and mean σ of every group."""
    rows = []
    for name in results["groups"]:
        row: dict = {"group": name}
        for side in SIDES:
            sigma = [float(s) for s, of in zip(results[side]["sigma"], results[side]["groups"]) if of == name]
            row[side] = {"n": len(sigma), "sigma": number(sum(sigma) / len(sigma)) if sigma else ""}
        rows.append(row)
    return rows


def write_report(file: Path, results: dict, generator: str) -> None:
    """Write the page with both figures."""
    charts = [(title, draw(side, results)) for side, title in SIDES.items()]
    write_page(
        file, Path(__file__).with_name("ellipses.html"), generator, results=results, config=results["config"],
        charts=charts, rows=groups(results), sides=SIDES,
    )  # fmt: skip


def draw(side: str, results: dict) -> Chart:
    """Every item's ellipse in the colour of its group, and the generic caption's."""
    of = results[side]
    chart = Chart(f"ellipses-of-{side}", x_label="first direction", y_label="second direction")
    shapes = list(zip(of["centre"].tolist(), of["radii"].tolist(), of["angle"].tolist(), of["labels"], of["groups"]))
    for name, colour in zip(results["groups"], PALETTE):
        rows = [
            (*centre, *radii, angle, f"{name}: {label[:120]}") for centre, radii, angle, label, g in shapes if g == name
        ]
        if rows:
            chart.ellipses(rows, name[:24], colour)
    if one := results["generic"]:
        centre, radii, angle = (one[key].tolist()[0] for key in ("centre", "radii", "angle"))
        chart.ellipses([(*centre, *radii, angle, one["text"][:120])], "generic caption, 99 %", RED, wide=True)
    return chart
