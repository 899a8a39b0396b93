"""Results as blocks that the console prints and one template draws.

A page needs no other files: figures are inline SVG, pictures small JPEGs. Names, captions and paths are untrusted: they
reach the page only through the template, which escapes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from probemb.data.failures import BadSample
from probemb.reports.figures import Chart
from probemb.reports.pages import thumbnail, write_page
from probemb.reports.text import printable

WIDTH = 140  # columns without a terminal
COLOURS = {"up": "green", "down": "red", "oracle": "dim"}
ABOUT_U = (
    "u measures ambiguity within the training domain: how many things, of the kind that the model was trained on, an "
    "input could match. It does not tell whether the model knows an input: an unknown word, an empty text or an image "
    "with nothing in it can have a small u. Nor is it always the best predictor of a wrong answer: before you reject "
    "by it, compare it with scores that need no variance: the confidence, or the distance and the lead of the closest "
    "item."
)


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


Block = str | Table | Figure | list[Figure] | list[Card]


class Page(NamedTuple):
    """A report: sections (title, blocks), those without blocks left out; tiles (value, title, unit)."""

    title: str
    lead: str
    sections: Sequence[tuple[str, Sequence[Block]]]
    tiles: Sequence[tuple[str, str, str]] = ()


def print_blocks(blocks: Sequence[Block]) -> None:
    """Print those that are tables and paragraphs."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    for block in blocks:
        if isinstance(block, str):
            print(printable(block))
        if not isinstance(block, Table):
            continue
        table = RichTable(title=Text(block.title))
        for i, heading in enumerate(block.headings):
            table.add_column(heading, justify="left" if i < block.left else "right")
        for row in block.rows:
            if not row:
                table.add_section()
                continue
            cells = [Cell(one) if isinstance(one, str) else one for one in row]
            table.add_row(*(Text(printable(text), COLOURS.get(kind, "")) for text, kind in cells))
        console.print(table)


def write_report(file: Path, page: Page, generator: str) -> None:
    """Write the page, and its figures as PDF and PNG beside it. Raises OSError."""
    sections = [(title, [block for block in blocks if block]) for title, blocks in page.sections]
    shown = page._replace(sections=[(title, blocks) for title, blocks in sections if blocks])
    write_page(file, Path(__file__).with_name("report.html"), generator, page=shown)


def picture_of(images, index: int, note: str, kind: str = "", side: int | None = None) -> list[Picture]:
    """An image of a data set in a list, which is empty if its file has changed since it was read."""
    try:
        return [Picture(thumbnail(images.open(index), side), note, kind)]
    except BadSample:
        return []


def verdict(right) -> str:
    """ "right" or "wrong", the mark of an answer."""
    return "right" if bool(right) else "wrong"


def plus_minus(estimate: dict | None, scale: float = 100, digits: int = 2, signed: bool = False) -> str:
    """{"value", "se"} as "51.20 ± 0.43"; "" for None."""
    if not estimate:
        return ""
    form = f"{'+' if signed else ''}.{digits}f"
    se = "" if estimate["se"] is None else f" ± {scale * estimate['se']:.{digits}f}"
    return f"{scale * estimate['value']:{form}}{se}"


def correlations(bins: dict) -> str:
    """Both correlations of `probemb.metrics.Bins`, as a dict."""
    pearson, spearman = ("undefined" if x is None else f"{x:+.2f}" for x in (bins["pearson"], bins["spearman"]))
    return f"Pearson {pearson} over bins; Spearman {spearman} over single items."
