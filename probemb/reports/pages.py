"""Results as blocks that the console prints and one HTML template draws.

Names of classes, files and models, and captions, are untrusted: they reach a page only through its template, which
escapes them.
"""

import base64
import io
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text
from torch import Tensor

from probemb.data.failures import BadSample
from probemb.data.image_loader import Images
from probemb.files import replace_file, replace_text
from probemb.reports.figures import GREY, PALETTE, Chart
from probemb.reports.results import FIGURES, provenance
from probemb.reports.text import correlations, number, percent, printable

TEMPLATES = Path(__file__).with_name("templates")
THUMBNAIL = 104  # pixels of the longer side
WIDTH = 140  # columns without a terminal
COLOURS = {"up": "green", "down": "red", "oracle": "dim"}


class Cell(NamedTuple):
    """A text with a mark: "up", "down", "oracle", "few-shot", "right", "wrong" or ""."""

    text: str
    kind: str = ""


class Table(NamedTuple):
    """Rows of texts or cells; an empty row is a line between groups. The first `left` columns hold text."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    title: str = ""
    left: int = 1
    kind = "table"


class Figure(NamedTuple):
    """A chart with its title and a note; a list of figures stands side by side."""

    chart: Chart
    title: str = ""
    note: str = ""
    kind = "figure"


def line_figure(name: str, x_label: str, y_label: str, lines: Mapping[str, Sequence], title: str = "") -> Figure:
    """Lines by their names: x, y of every point and, if given, half the length of its error bar."""
    chart = Chart(name, x_label=x_label, y_label=y_label)
    for (label, (xs, ys, *spread)), colour in zip(lines.items(), PALETTE):
        chart.line(xs, ys, label, colour, points=True, spread=spread[0] if spread else None)
    return Figure(chart, title)


def bin_figure(name: str, bins: dict | None, things: str, x_label: str, y_label: str, title: str = "") -> list[Figure]:
    """A result of `uncertainty_bins`, in percent with a standard error; nothing without bins."""
    if bins is None:
        return []
    ys = [100 * y for y in bins["accuracy"]]
    errors = [math.nan if se is None else 100 * se for se in bins["accuracy_se"]]
    notes = [
        f"{count} {things}, mean uncertainty {number(x)}: {y:.2f}{'' if math.isnan(se) else f' ± {se:.2f}'} %"
        for count, x, y, se in zip(bins["counts"], bins["uncertainty"], ys, errors)
    ]
    chart = Chart(name, x_label=x_label, y_label=y_label)
    chart.line(bins["uncertainty"], ys, points=True, spread=errors, notes=notes)
    return [Figure(chart, title, correlations(bins))]


def rejection_figure(name: str, curves: Mapping[str, dict], y_label: str, title: str) -> list[Figure]:
    """Results of `rejection_curve`."""
    if not curves:
        return []
    chart = Chart(name, x_label="least certain refused, %", y_label=y_label)
    for (by, curve), colour in zip(curves.items(), PALETTE):
        chart.line(*([100 * x for x in curve[key]] for key in ("refused", "score")), by, colour)
    chart.level(100 * curve["random"], "at random")
    areas = ", ".join(f"{by} {percent(curve['area'])}" for by, curve in curves.items())
    return [Figure(chart, title, f"Mean over all shares: {areas}.")]


def reliability_figure(
    name: str, curves: Mapping[str, dict | None], x_label: str, y_label: str, title: str
) -> list[Figure]:
    """Results of `reliability`."""
    chart = Chart(name, x_label=x_label, y_label=y_label).line([0, 100], [0, 100], "calibrated", GREY, dashed=True)
    for (of, curve), colour in zip(curves.items(), PALETTE):
        if curve:
            chart.line(*([100 * x for x in curve[key]] for key in ("predicted", "observed")), of, colour, points=True)
    return [Figure(chart, title)]


class Picture(NamedTuple):
    """A data URI, or "" for what shows nothing, and a note under the pointer. kind: "right", "wrong" or ""."""

    src: str
    note: str
    kind: str = ""


class Card(NamedTuple):
    """Pictures with a title and lines of text, the `folded` ones on demand; a list of cards is a grid."""

    title: str
    pictures: Sequence[Picture]
    lines: Sequence[Cell] = ()
    folded: Sequence[Cell] = ()
    kind = "card"


Block = str | Table | list[Figure] | list[Card]


class Page(NamedTuple):
    """A report: sections (title, blocks), those without blocks left out."""

    title: str
    lead: str
    sections: Sequence[tuple[str, Sequence[Block]]]


def print_page(page: Page) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    for block in (block for _, blocks in page.sections for block in blocks):
        if isinstance(block, str) and block:
            print(printable(block))
        if not isinstance(block, Table):
            continue
        table = RichTable(title=Text(printable(block.title)))
        for i, heading in enumerate(block.headings):
            table.add_column(Text(printable(heading)), justify="left" if i < block.left else "right", overflow="fold")
        for row in block.rows:
            cells = (Cell(one) if isinstance(one, str) else one for one in row)
            if row:
                table.add_row(*(Text(printable(text), COLOURS.get(kind, "")) for text, kind in cells))
            else:
                table.add_section()
        console.print(table)


def write_page(file: Path, page: Page, generator: str) -> None:
    """Write the page, and each of its figures as PDF and PNG to FIGURES beside it. Raises OSError."""
    folder, shown = file.with_name(FIGURES), {}

    def draw(chart: Chart) -> Markup:
        shown[chart.name] = chart
        return Markup(chart.svg())

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined,
        finalize=lambda value: printable(value) if type(value) is str else value, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    sections = [(title, [block for block in blocks if block]) for title, blocks in page.sections if any(blocks)]
    page = page._replace(sections=sections)
    template = environment.get_template("report.html")
    text = template.render(page=page, generator=generator, draw=draw, written=provenance(), folder=folder.name)
    if file.exists():  # figures that an earlier page of the same name links to
        for name in re.findall(r'href="[\w.-]+/([\w-]+\.(?:pdf|png))"', file.read_text(encoding="utf-8")):
            (folder / name).unlink(missing_ok=True)
    replace_text(file, text)
    for chart in shown.values():
        for kind in ("pdf", "png"):
            replace_file(folder / f"{chart.name}.{kind}", lambda aside: chart.save(aside, kind, generator))  # noqa: B023


def thumbnail(picture: Image.Image | Tensor, side: int | None = None) -> str:
    """A small copy of an image, at most `side` pixels, as a data URI; empty for regions, which show nothing."""
    if not hasattr(picture, "thumbnail"):
        return ""
    picture.thumbnail((side, side) if side else (THUMBNAIL * 2, THUMBNAIL))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=82)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def picture_of(
    images: Images, index: int, note: str, kind: str = "", box: Sequence[float] | None = None
) -> list[Picture]:
    """An image of a data set, or its part in a box, in a list; empty if the file has changed since it was read."""
    try:
        return [Picture(thumbnail(images.part(index, box)), note, kind)]
    except BadSample:
        return []


def verdict(right) -> str:
    return "right" if bool(right) else "wrong"
